// Compiles the stages for every supported instruction set and picks one as ATen does.
#include "stages.h"

#include <ATen/Context.h>
#include <ATen/Version.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "panels.h"

namespace ocnn_fused::cpu {

bool fills_undefined_memory() {
  const auto& context = at::globalContext();
  return context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory();
}

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
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,fma,f16c")
#endif
namespace avx512 {
#define OCNN_FUSED_VECTOR_BYTES 64
#include "stages.inl"
#undef OCNN_FUSED_VECTOR_BYTES
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

namespace {

// ATen's own answer, so that ATEN_CPU_CAPABILITY=default reaches us too.
int64_t vector_bytes() {
  static const int64_t answer = [] {
    const std::string capability = at::get_cpu_capability();
    return capability.rfind("AVX512", 0) == 0 ? 64 : capability == "AVX2" ? 32 : 16;
  }();
  return answer;
}

}  // namespace

#if defined(__x86_64__)
#define OCNN_FUSED_CHOOSE(table, ...)                  \
  (vector_bytes() == 64   ? avx512::table<__VA_ARGS__> \
   : vector_bytes() == 32 ? avx2::table<__VA_ARGS__>   \
                          : baseline::table<__VA_ARGS__>)
#else
#define OCNN_FUSED_CHOOSE(table, ...) baseline::table<__VA_ARGS__>
#endif

template <typename S, typename T>
const WeightStages<S, T>& weight_stages() {
  return OCNN_FUSED_CHOOSE(kWeightStages, S, T);
}

template <typename T>
const MixStage<T>& mix_stage() {
  return OCNN_FUSED_CHOOSE(kMixStage, T);
}

template <typename S, typename T>
const PanelStages<S, T>& panel_stages() {
#if defined(__x86_64__)
  if (vector_bytes() == 64) return avx512::kPanelStages<S, T>;
  if (vector_bytes() == 32) return avx2::kPanelStages<S, T>;
#endif
  static constexpr PanelStages<S, T> none;
  return none;
}

template const WeightStages<float, float>& weight_stages<float, float>();
template const WeightStages<double, double>& weight_stages<double, double>();
template const WeightStages<c10::BFloat16, float>& weight_stages<c10::BFloat16, float>();
template const WeightStages<c10::Half, float>& weight_stages<c10::Half, float>();
template const PanelStages<float, float>& panel_stages<float, float>();
template const PanelStages<double, double>& panel_stages<double, double>();
template const PanelStages<c10::BFloat16, float>& panel_stages<c10::BFloat16, float>();
template const PanelStages<c10::Half, float>& panel_stages<c10::Half, float>();
template const MixStage<float>& mix_stage<float>();
template const MixStage<double>& mix_stage<double>();

}  // namespace ocnn_fused::cpu
