// Compiles the stages of Fourier plans for every supported instruction set.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "fourier.h"

namespace ocnn_fused::cpu {

#define OCNN_FUSED_STAGES "fourier_stages.inl"
#include "instruction_sets.inl"

template <typename S, typename T>
const FourierStages<S, T>& fourier_stages() {
  return OCNN_FUSED_CHOOSE(kFourierStages, S, T);
}

template const FourierStages<float, float>& fourier_stages<float, float>();
template const FourierStages<double, double>& fourier_stages<double, double>();
template const FourierStages<c10::BFloat16, float>& fourier_stages<c10::BFloat16, float>();
template const FourierStages<c10::Half, float>& fourier_stages<c10::Half, float>();

}  // namespace ocnn_fused::cpu
