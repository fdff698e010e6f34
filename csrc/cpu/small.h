// The whole pass for groups too small for matrix products.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "taps.h"

OCNN_FUSED_BEGIN_TARGET
namespace ocnn_fused::cpu::OCNN_FUSED_TARGET {

template <typename S, typename T>
double small(const WeightView<const S>& weight, const WeightView<S>& grad, const TapPairs& pairs,
             const Targets<T>& targets, const Factors<T>& factors, int64_t groups, int64_t rows, int64_t channels,
             int64_t item) {
  using V = typename Vector<T>::type;
  constexpr int64_t count = Vector<T>::count;
  const int64_t taps = weight.taps, filter = channels * taps, first = item * kLanes;
  const int64_t lanes = std::min(kLanes, groups - first);
  const bool with_grad = grad.data != nullptr;
  std::vector<T> k(rows * filter * kLanes, T(0)), dk(with_grad ? k.size() : 0, T(0));
  const auto each_element = [&](const auto& view, auto&& visit) {
    for (int64_t l = 0; l < lanes; ++l) {
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t c = 0; c < channels; ++c) {
          auto* element = view.row((first + l) * rows + i) + c * view.channel_stride;
          for (int64_t u = 0; u < taps; ++u) {
            visit(element[view.tap_offsets[u]], ((i * channels + c) * taps + u) * kLanes + l);
          }
        }
      }
    }
  };
  each_element(weight, [&](const S& value, int64_t index) { k[index] = static_cast<T>(value); });

  T factor[kLanes];
  for (int64_t l = 0; l < kLanes; ++l) {
    const int64_t group = std::min(first + l, groups - 1);
    factor[l] = with_grad ? factors.at(group, targets.at(group)) : T(1);
  }
  double loss = 0;
  for (int64_t t = 0; t < pairs.lags; ++t) {
    const T weight_of_lag = t == 0 ? 1 : 2;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < rows; ++j) {
        V residual[count] = {};
        for (int64_t c = 0; c < channels; ++c) {
          for (int64_t n = pairs.lag_begin[t]; n < pairs.lag_begin[t + 1]; ++n) {
            const V* a = reinterpret_cast<const V*>(&k[(i * filter + c * taps + pairs.left[n]) * kLanes]);
            const V* b = reinterpret_cast<const V*>(&k[(j * filter + c * taps + pairs.right[n]) * kLanes]);
            for (int64_t v = 0; v < count; ++v) residual[v] += a[v] * b[v];
          }
        }
        T values[kLanes];
        std::memcpy(values, residual, sizeof(values));
        for (int64_t l = 0; l < kLanes; ++l) {
          if (t == 0 && i == j && l < lanes) values[l] = targets.at(first + l).residual(values[l]);
          if (l < lanes) loss += static_cast<double>(weight_of_lag) * values[l] * values[l];
          values[l] *= 2 * weight_of_lag * factor[l];
        }
        if (!with_grad) continue;
        std::memcpy(residual, values, sizeof(values));
        for (int64_t c = 0; c < channels; ++c) {
          for (int64_t n = pairs.lag_begin[t]; n < pairs.lag_begin[t + 1]; ++n) {
            const int64_t left = (i * filter + c * taps + pairs.left[n]) * kLanes;
            const int64_t right = (j * filter + c * taps + pairs.right[n]) * kLanes;
            const V *a = reinterpret_cast<const V*>(&k[left]), *b = reinterpret_cast<const V*>(&k[right]);
            V *da = reinterpret_cast<V*>(&dk[left]), *db = reinterpret_cast<V*>(&dk[right]);
            // Not fused into one loop: left and right may be the same element.
            for (int64_t v = 0; v < count; ++v) da[v] += residual[v] * b[v];
            for (int64_t v = 0; v < count; ++v) db[v] += residual[v] * a[v];
          }
        }
      }
    }
  }
  if (with_grad) each_element(grad, [&](S& value, int64_t index) { move_lane(value, dk[index], grad.adds); });
  return loss;
}

}  // namespace ocnn_fused::cpu::OCNN_FUSED_TARGET
OCNN_FUSED_END_TARGET
