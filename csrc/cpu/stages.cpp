// Compiles the elementwise stages for every supported instruction set and picks one as ATen does.
#include "stages.h"

#include <ATen/Version.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace ocnn_fused::cpu {

namespace baseline {
#define OCNN_FUSED_VECTOR_BYTES 16
#include "stages.inl"
#undef OCNN_FUSED_VECTOR_BYTES
}  // namespace baseline

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace avx2 {
#define OCNN_FUSED_VECTOR_BYTES 32
#include "stages.inl"
#undef OCNN_FUSED_VECTOR_BYTES
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

namespace {
// ATen's own answer, so that ATEN_CPU_CAPABILITY=default reaches us too.
bool has_avx2() {
  static const bool answer = [] {
    const std::string capability = at::get_cpu_capability();
    return capability == "AVX2" || capability.rfind("AVX512", 0) == 0;
  }();
  return answer;
}
}  // namespace

template <typename S, typename T>
const WeightStages<S, T>& weight_stages() {
#if defined(__x86_64__)
  if (has_avx2()) return avx2::kWeightStages<S, T>;
#endif
  return baseline::kWeightStages<S, T>;
}

template <typename T>
const MixStage<T>& mix_stage() {
#if defined(__x86_64__)
  if (has_avx2()) return avx2::kMixStage<T>;
#endif
  return baseline::kMixStage<T>;
}

template const WeightStages<float, float>& weight_stages<float, float>();
template const WeightStages<double, double>& weight_stages<double, double>();
template const WeightStages<c10::BFloat16, float>& weight_stages<c10::BFloat16, float>();
template const WeightStages<c10::Half, float>& weight_stages<c10::Half, float>();
template const MixStage<float>& mix_stage<float>();
template const MixStage<double>& mix_stage<double>();

}  // namespace ocnn_fused::cpu
