// The stages of bilinear and small plans; compiled once per instruction set, see target.h.
#include "stages.h"

#include "mix.h"
#include "panel_apply.h"
#include "panel_flat.h"
#include "panel_gram.h"
#include "panel_mix.h"
#include "small.h"
#include "strided.h"
#include "strips.h"

OCNN_FUSED_BEGIN_TARGET
namespace ocnn_fused::cpu::OCNN_FUSED_TARGET {

template <typename S, typename T>
const Stages<S, T>& stages() {
  static constexpr Stages<S, T> table{Vector<T>::width, evaluate<S, T>,     gather<S, T>, mix_tiles<T>,
                                      mix_row<T>,       multiply_strips<T>, small<S, T>};
  return table;
}

template <typename S, typename T>
const PanelStages<S, T>& panel_stages() {
  static constexpr PanelStages<S, T> table{Vector<T>::width, panel_load<S, T>, panel_gram<S, T>, panel_mix<S, T>,
                                           panel_apply<S, T>};
  return table;
}

template <typename S, typename T>
const FlatStages<S, T>& flat_stages() {
  static constexpr FlatStages<S, T> table{Vector<T>::width, kDepth,         flat_load<S, T>,
                                          flat_gram<S, T>,  flat_mix<S, T>, flat_apply<S, T>};
  return table;
}

#define OCNN_FUSED_INSTANTIATE(S, T)                \
  template const Stages<S, T>& stages();            \
  template const PanelStages<S, T>& panel_stages(); \
  template const FlatStages<S, T>& flat_stages();
OCNN_FUSED_INSTANTIATE(double, double)
OCNN_FUSED_INSTANTIATE(float, float)
OCNN_FUSED_INSTANTIATE(BFloat16, float)
OCNN_FUSED_INSTANTIATE(Half, float)

}  // namespace ocnn_fused::cpu::OCNN_FUSED_TARGET
OCNN_FUSED_END_TARGET
