// All stages on panels of plans of lag 0 alone, see flat.h.
#pragma once

#include <algorithm>

#include "panel_gram.h"
#include "panel_mix.h"
#include "panel_taps.h"

OCNN_FUSED_BEGIN_TARGET
namespace ocnn_fused::cpu::OCNN_FUSED_TARGET {

template <typename S, typename T>
void flat_load(const FlatJob<S, T>& job, int64_t step, int64_t begin, int64_t end) {
  const int64_t count = std::min(job.chunk, job.length - step);
  for (int64_t item = begin; item < end; ++item) {
    T* const panel = job.chunk_panel(item / job.panels, item % job.panels);
    move_panel<T>(job, job.weight, item / job.panels, item % job.panels, step, count,
                  [&](int64_t n, int64_t) { return panel + n * Vector<T>::width; });
  }
}

template <typename S, typename T>
void flat_gram(const FlatJob<S, T>& job, int64_t step, int64_t begin, int64_t end) {
  const int64_t items = (job.panels + 1) / 2, count = std::min(job.chunk, job.length - step);
  for (int64_t problem = begin / items; problem * items < end; ++problem) {
    multiply_triangle(job.chunk_panel(problem, 0), job.apart, job.panels, count, job.output(problem), step > 0,
                      std::max(begin - problem * items, int64_t{0}), std::min(end - problem * items, items));
  }
}

template <typename S, typename T>
void flat_mix(const FlatJob<S, T>& job, int64_t begin, int64_t end, double* losses) {
  using V = typename Vector<T>::type;
  constexpr int64_t width = Vector<T>::width, area = width * width;
  const int64_t panels = job.panels, pairs = panels * (panels + 1) / 2;
  for (int64_t problem = begin / pairs; problem * pairs < end; ++problem) {
    const int64_t first = problem * pairs;
    const Target<T> target = job.targets.at(job.first_problem + problem);
    const T factor = job.with_grad() ? 4 * job.factors.at(job.first_problem + problem, target) : T(1);
    const auto mix_pair = [&](int64_t item, int64_t i, int64_t j) {
      T* const tile = job.output(problem) + (j * panels + i) * area;
      for (int64_t d = i * width; i == j && d < std::min(job.side, (i + 1) * width); ++d) {
        T& entry = tile[d % width * (width + 1)];
        entry = target.residual(entry);
      }
      V squares{};
      for (int64_t at = 0; at < area; at += width) {
        const V value = load(tile + at);
        squares += value * value;
        if (job.with_grad()) store(value * factor, tile + at);
      }
      double loss = 0;
      for (int64_t l = 0; l < width; ++l) loss += squares[l];
      losses[first + item] = (i == j ? 1 : 2) * loss;
      if (job.with_grad() && i != j) transpose_panel_tile(tile, job.output(problem) + (i * panels + j) * area);
    };
    each_tile_pair(panels, std::max(begin - first, int64_t{0}), std::min(end - first, pairs), mix_pair);
  }
}

// Steps that apply takes at once: each time all of Y passes through the cache.
constexpr int64_t kFlatSteps = 96;

template <typename S, typename T>
void flat_apply(const FlatJob<S, T>& job, int64_t begin, int64_t end) {
  constexpr int64_t width = Vector<T>::width;
  const int64_t panels = job.panels, side = job.padded_side;
  for (int64_t item = begin; item < end;) {
    const int64_t problem = item / job.length, n = item % job.length;
    const int64_t all = std::min(end - item, job.length - n);
    const int64_t pieces = (all + kFlatSteps - 1) / kFlatSteps, even = (all + pieces - 1) / pieces;
    const int64_t count = std::min(all, (even + kPatchRows<T> - 1) / kPatchRows<T> * kPatchRows<T>);
    item += count;
    const int64_t apart = spread(count * width);
    T *const planes = scratch<T>(2 * panels * apart), *const gradients = planes + panels * apart;
    const bool is_loaded = job.chunk == job.length;
    for (int64_t panel = 0; !is_loaded && panel < panels; ++panel) {
      move_panel<T>(job, job.weight, problem, panel, n, count,
                    [&](int64_t m, int64_t) { return planes + panel * apart + m * width; });
    }
    multiply<Left::kAsItLies>(is_loaded ? job.chunk_panel(problem, 0) + n * width : planes,
                              is_loaded ? job.apart : apart, count, side, job.output(problem), side * width, panels,
                              gradients, apart, false, job.output(problem));
    for (int64_t panel = 0; panel < panels; ++panel) {
      move_panel<T>(job, job.grad, problem, panel, n, count,
                    [&](int64_t m, int64_t) { return gradients + panel * apart + m * width; });
    }
  }
}

}  // namespace ocnn_fused::cpu::OCNN_FUSED_TARGET
OCNN_FUSED_END_TARGET
