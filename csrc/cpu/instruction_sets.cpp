// Chooses one of the instruction sets that the stages were compiled for.
#include <algorithm>
#include <cstdint>
#include <string>

#include "execute.h"
#include "flat.h"
#include "fourier.h"
#include "panels.h"

namespace ocnn_fused::cpu {

#define OCNN_FUSED_DECLARE(target)             \
  namespace target {                           \
  template <typename S, typename T>            \
  const Stages<S, T>& stages();                \
  template <typename S, typename T>            \
  const PanelStages<S, T>& panel_stages();     \
  template <typename S, typename T>            \
  const FlatStages<S, T>& flat_stages();       \
  template <typename S, typename T>            \
  const FourierStages<S, T>& fourier_stages(); \
  }
OCNN_FUSED_DECLARE(baseline)
#if defined(__x86_64__)
OCNN_FUSED_DECLARE(avx2)
OCNN_FUSED_DECLARE(avx512)
#endif

namespace {
int vector_bytes = 16;
}

void choose_instruction_set(const std::string& capability) {
  vector_bytes = 16;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (capability.starts_with("AVX512") && avx512) {
    vector_bytes = 64;
  } else if (capability.starts_with("AVX") && avx2) {
    vector_bytes = 32;
  }
#endif
}

#if defined(__x86_64__)
#define OCNN_FUSED_CHOOSE(table) \
  (vector_bytes == 64 ? avx512::table<S, T>() : vector_bytes == 32 ? avx2::table<S, T>() : baseline::table<S, T>())
#else
#define OCNN_FUSED_CHOOSE(table) baseline::table<S, T>()
#endif

template <typename S, typename T>
const Stages<S, T>& stages() {
  return OCNN_FUSED_CHOOSE(stages);
}

template <typename S, typename T>
const PanelStages<S, T>& panel_stages() {
  return OCNN_FUSED_CHOOSE(panel_stages);
}

template <typename S, typename T>
const FlatStages<S, T>& flat_stages() {
  return OCNN_FUSED_CHOOSE(flat_stages);
}

template <typename S, typename T>
const FourierStages<S, T>& fourier_stages() {
  return OCNN_FUSED_CHOOSE(fourier_stages);
}

#define OCNN_FUSED_INSTANTIATE(S, T)                \
  template const Stages<S, T>& stages();            \
  template const PanelStages<S, T>& panel_stages(); \
  template const FlatStages<S, T>& flat_stages();   \
  template const FourierStages<S, T>& fourier_stages();
OCNN_FUSED_INSTANTIATE(double, double)
OCNN_FUSED_INSTANTIATE(float, float)
OCNN_FUSED_INSTANTIATE(BFloat16, float)
OCNN_FUSED_INSTANTIATE(Half, float)

}  // namespace ocnn_fused::cpu
