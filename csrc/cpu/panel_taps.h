// Taps of a weight into panels, and gradients back: into them if the weight is const, as in taps.h.
#pragma once

#include <algorithm>
#include <type_traits>

#include "flat.h"
#include "taps.h"

OCNN_FUSED_BEGIN_TARGET
namespace ocnn_fused::cpu::OCNN_FUSED_TARGET {

// Steps [begin, begin + count) of one panel, where row(n, u) is the vector of step begin + n and tap u.
template <typename T, typename S, typename Job, typename Row>
inline void move_panel(const Job& job, const WeightView<S>& weight, int64_t problem, int64_t panel, int64_t begin,
                       int64_t count, const Row& row) {
  constexpr int64_t width = Vector<T>::width;
  const int64_t taps = weight.taps, entries = count * taps, s = panel * width, lanes = std::min(width, job.side - s);
  // Pointer to lane l of step begin + n in the weight.
  const auto entry = [&](int64_t l, int64_t n) {
    const int64_t r = (job.first_problem + problem) * job.rows + (job.column ? begin + n : s + l);
    return weight.row(r) + (job.column ? s + l : begin + n) * weight.channel_stride;
  };
  const int64_t lane_stride = job.column ? weight.channel_stride : weight.row_stride,
                step_stride = job.column ? weight.row_stride : weight.channel_stride;
  // Whether the taps of all steps lie one after the other, for every lane.
  const bool is_transposable = weight.dense && step_stride == taps;
  if (is_transposable && entries >= width) {
    S* rows[width] = {};
    for (int64_t l = 0; l < lanes; ++l) rows[l] = entry(l, 0);
    const auto move_squares = [&](auto lanes_now) {
      return each_square<width>(entries, weight.adds, [&](int64_t q, auto adds) {
        int64_t n = q / taps, u = q % taps;
        const auto next_row = [&](int64_t) {
          T* const here = row(n, u);
          if (++u == taps) u = 0, ++n;
          return here;
        };
        move_square<Vector<T>, T, std::is_const_v<S>, adds>(
            lanes_now, [&](int64_t l) { return rows[l] + q; }, next_row);
      });
    };
    const int64_t done = lanes == width ? move_squares(std::integral_constant<int64_t, width>()) : move_squares(lanes);
    for (int64_t q = done; q < entries; ++q) {
      for (int64_t l = 0; l < lanes; ++l) move_lane(rows[l][q], row(q / taps, q % taps)[l], true);
    }
    return;
  }
  if (taps == 1 && lane_stride == 1) {
    for (int64_t n = 0; n < count; ++n) {
      if (std::is_const_v<S> && lanes < width) store(typename Vector<T>::type{}, row(n, 0));
      move_lanes(entry(0, n), row(n, 0), lanes, weight.adds);
    }
    return;
  }
  for (int64_t n = 0; n < count; ++n) {
    if (job.column) move_taps<T>(weight, entry(0, n), lanes, [&](int64_t u) { return row(n, u); });
    for (int64_t l = 0; !job.column && l < lanes; ++l) {
      S* const own = entry(l, n);
      for (int64_t u = 0; u < taps; ++u) move_lane(own[weight.tap_offsets[u]], row(n, u)[l], weight.adds);
    }
    for (int64_t u = 0; std::is_const_v<S> && lanes < width && u < taps; ++u) {
      std::fill(row(n, u) + lanes, row(n, u) + width, T(0));
    }
  }
}

template <typename S, typename T>
void panel_load(const PanelJob<S, T>& job, int64_t begin, int64_t end) {
  for (int64_t item = begin; item < end; ++item) {
    const int64_t problem = item / job.panels, panel = item % job.panels;
    move_panel<T>(job, job.weight, problem, panel, 0, job.length, [&](int64_t n, int64_t u) {
      return job.tap(problem, u) + (panel * job.length + n) * Vector<T>::width;
    });
  }
}

// Gradients of the taps of steps [begin, begin + count), in panels so far apart, into the weight's gradient.
template <typename S, typename T, typename Tap>
void store_gradient(const PanelJob<S, T>& job, int64_t problem, int64_t begin, int64_t count, int64_t apart,
                    const Tap& tap) {
  for (int64_t panel = 0; panel < job.panels; ++panel) {
    move_panel<T>(job, job.grad, problem, panel, begin, count,
                  [&](int64_t n, int64_t u) { return tap(u) + panel * apart + n * Vector<T>::width; });
  }
}

}  // namespace ocnn_fused::cpu::OCNN_FUSED_TARGET
OCNN_FUSED_END_TARGET
