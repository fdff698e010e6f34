// The bodies of all stages. Included once per instruction set, inside a namespace of its own and with
// OCNN_FUSED_VECTOR_BYTES set; standard headers are included before, so that none of their inline functions is
// compiled for an instruction set the machine may lack.

// clang-format off: each file uses those before it.
#include "vectors.inl"
#include "transforms.inl"
#include "taps.inl"
#include "strips.inl"
#include "mix.inl"
#include "small.inl"

template <typename S, typename T>
constexpr WeightStages<S, T> kWeightStages{evaluate<S, T>, gather<S, T>, small<S, T>};
template <typename T>
constexpr MixStage<T> kMixStage{mix_tiles<T>, diagonal_row<T>};

#if OCNN_FUSED_VECTOR_BYTES > 16
#include "products.inl"
#include "panel_slices.inl"
#include "panel_taps.inl"
#include "panel_gram.inl"
#include "panel_mix.inl"
#include "panel_apply.inl"
#include "panel_flat.inl"
// clang-format on

template <typename S, typename T>
constexpr PanelStages<S, T> kPanelStages{Vector<T>::width, panel_load<S, T>, panel_gram<S, T>, panel_mix<S, T>,
                                         panel_apply<S, T>};
template <typename S, typename T>
constexpr FlatStages<S, T> kFlatStages{Vector<T>::width, kDepth,         flat_load<S, T>,
                                       flat_gram<S, T>,  flat_mix<S, T>, flat_apply<S, T>};
#else  // vectors are too short for panels
template <typename S, typename T>
constexpr PanelStages<S, T> kPanelStages{};
template <typename S, typename T>
constexpr FlatStages<S, T> kFlatStages{};
#endif
