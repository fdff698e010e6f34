// mix on panels.
#pragma once

#include <algorithm>

#include "mix.h"
#include "panels.h"

OCNN_FUSED_BEGIN_TARGET
namespace ocnn_fused::cpu::OCNN_FUSED_TARGET {

template <typename T>
inline void transpose_panel_tile(const T* from, T* to) {
  transpose_square<Vector<T>>([&](int64_t r) { return from + r * Vector<T>::width; },
                              [&](int64_t r) { return to + r * Vector<T>::width; });
}

template <typename S, typename T>
void panel_mix(const PanelJob<S, T>& job, int64_t begin, int64_t end, double* losses) {
  constexpr int64_t width = Vector<T>::width, area = width * width, lanes = std::min(kStrip, area);
  const int64_t panels = job.panels, pairs = panels * (panels + 1) / 2;
  Mixer<T> mixer(job.plan.blocks, job.plan.outputs, job.plan.all_lags, area);
  const int64_t count = mixer.count();
  for (int64_t problem = begin / pairs; problem * pairs < end; ++problem) {
    const int64_t first = problem * pairs;
    const Target<T> target = job.targets.at(job.first_problem + problem);
    const Wanted<T> wanted{job.with_grad(), job.factors.at(job.first_problem + problem, target)};
    const auto mix_pair = [&](int64_t item, int64_t i, int64_t j) {
      const int64_t here = (j * panels + i) * area, there = (i * panels + j) * area;
      const bool on_diagonal = i == j;
      for (int64_t g = 0; g < count; ++g) {
        const auto [o, kind] = mixer.outputs[g];
        if (kind == OutputKind::kTransposed) transpose_panel_tile(job.output(problem, o) + there, mixer.copy(g));
      }
      double loss = 0;
      for (int64_t strip = 0; strip < area; strip += lanes) {
        for (int64_t g = 0; g < count; ++g) {
          const auto [o, kind] = mixer.outputs[g];
          T* const tile = job.output(problem, o) + here + strip;
          const bool is_transposed = kind == OutputKind::kTransposed;
          mixer.x[g] = is_transposed ? mixer.copy(g) + strip : tile;
          mixer.y[g] = is_transposed && job.with_grad() ? job.transposed(problem, o) + here + strip : tile;
        }
        const Diagonal diagonal{strip, width, on_diagonal ? std::min(width, job.side - i * width) : 0};
        loss += mixer.mix(lanes, diagonal, target, wanted);
      }
      losses[first + item] = (on_diagonal ? 1 : 2) * loss;
      for (int64_t g = 0; job.with_grad() && !on_diagonal && g < count; ++g) {
        const auto [o, kind] = mixer.outputs[g];
        T *const y = job.output(problem, o), *const transposed = job.transposed(problem, o);
        if (kind == OutputKind::kStored) transpose_panel_tile(y + here, transposed + there);
        if (kind == OutputKind::kTransposed) transpose_panel_tile(transposed + here, y + there);
        if (kind == OutputKind::kSymmetric) transpose_panel_tile(y + here, y + there);
      }
    };
    each_tile_pair(panels, std::max(begin - first, int64_t{0}), std::min(end - first, pairs), mix_pair);
  }
}

}  // namespace ocnn_fused::cpu::OCNN_FUSED_TARGET
OCNN_FUSED_END_TARGET
