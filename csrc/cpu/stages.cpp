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

#include "flat.h"

namespace ocnn_fused::cpu {

bool fills_undefined_memory() {
  const auto& context = at::globalContext();
  return context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory();
}

int64_t vector_bytes() {
  static const int64_t answer = [] {
    const std::string capability = at::get_cpu_capability();
    return capability.rfind("AVX512", 0) == 0 ? 64 : capability == "AVX2" ? 32 : 16;
  }();
  return answer;
}

#define OCNN_FUSED_STAGES "stages.inl"
#include "instruction_sets.inl"

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
  return OCNN_FUSED_CHOOSE(kPanelStages, S, T);
}

template <typename S, typename T>
const FlatStages<S, T>& flat_stages() {
  return OCNN_FUSED_CHOOSE(kFlatStages, S, T);
}

template const WeightStages<float, float>& weight_stages<float, float>();
template const WeightStages<double, double>& weight_stages<double, double>();
template const WeightStages<c10::BFloat16, float>& weight_stages<c10::BFloat16, float>();
template const WeightStages<c10::Half, float>& weight_stages<c10::Half, float>();
template const PanelStages<float, float>& panel_stages<float, float>();
template const PanelStages<double, double>& panel_stages<double, double>();
template const PanelStages<c10::BFloat16, float>& panel_stages<c10::BFloat16, float>();
template const PanelStages<c10::Half, float>& panel_stages<c10::Half, float>();
template const FlatStages<float, float>& flat_stages<float, float>();
template const FlatStages<double, double>& flat_stages<double, double>();
template const FlatStages<c10::BFloat16, float>& flat_stages<c10::BFloat16, float>();
template const FlatStages<c10::Half, float>& flat_stages<c10::Half, float>();
template const MixStage<float>& mix_stage<float>();
template const MixStage<double>& mix_stage<double>();

}  // namespace ocnn_fused::cpu
