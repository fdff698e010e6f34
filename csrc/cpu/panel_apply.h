// apply on panels, which evaluates what it multiplies and gathers the result.
#pragma once

#include <algorithm>

#include "panel_slices.h"
#include "panel_taps.h"
#include "products.h"

OCNN_FUSED_BEGIN_TARGET
namespace ocnn_fused::cpu::OCNN_FUSED_TARGET {

// What the right plane of a product is multiplied with: Y^T, or Y where it is its own transpose.
template <typename S, typename T>
inline const T* first_operand(const PanelJob<S, T>& job, int64_t problem, const SliceProduct& product) {
  return product.is_symmetric() ? job.output(problem, product.out) : job.transposed(problem, product.out);
}

template <typename S, typename T>
void panel_apply(const PanelJob<S, T>& job, int64_t begin, int64_t end) {
  constexpr int64_t width = Vector<T>::width;
  const int64_t panels = job.panels, side = job.padded_side, taps = job.weight.taps, most = job.plan.most_planes;
  SliceWorker<T> worker(job.plan);
  for (int64_t item = begin; item < end;) {
    const int64_t problem = item / job.length, n = item % job.length;
    const int64_t all = std::min(end - item, job.length - n);
    // Less than in gram, because all of Y passes through the cache too; but the larger it is, the more must it pay to
    // read it.
    const int64_t fits =
        std::max(std::clamp<int64_t>(side / 5, 24, 64), kChunkElements<T> / 3 / ((2 * most + taps) * side));
    const int64_t chunks = (all + fits - 1) / fits, even = (all + chunks - 1) / chunks;
    const int64_t count = std::min(all, (even + kPatchRows<T> - 1) / kPatchRows<T> * kPatchRows<T>);
    item += count;
    const int64_t apart = spread(count * width), stride = spread(panels * apart);
    T* const memory = scratch<T>((2 * most + taps) * stride + worker.elements());
    T *const planes = memory, *const gradients = memory + most * stride, *const gathered = gradients + most * stride;
    worker.use(gathered + taps * stride);
    const auto tap = [&](int64_t u) { return gathered + u * stride; };
    for (const Slice& slice : job.plan.slices) {
      const BlockView<T>& view = job.plan.blocks[slice.block];
      const bool is_first = &slice == job.plan.slices.data() || (&slice - 1)->block != slice.block;
      for (int64_t residue = 0; residue < view.block->residues; ++residue) {
        const int64_t* sources = view.sources + residue * view.block->taps;
        for (int64_t panel = 0; panel < panels; ++panel) {
          worker.evaluate(
              slice, count * width,
              [&](int64_t m) { return job.tap(problem, sources[m]) + (panel * job.length + n) * width; },
              [&](int64_t g) { return planes + g * stride + panel * apart; });
        }
        const auto product = [&](int64_t from, int64_t to, const T* y, const T* next) {
          multiply<Left::kAsItLies>(planes + from * stride, apart, count, side, y, side * width, panels,
                                    gradients + to * stride, apart, false, next);
        };
        for (const SliceProduct& one : slice.products) {
          const SliceProduct& following = &one == &slice.products.back() ? one : *(&one + 1);
          const T *const y = job.output(problem, one.out), *const next = first_operand(job, problem, following);
          product(one.right, one.left, first_operand(job, problem, one), one.is_symmetric() ? next : y);
          if (!one.is_symmetric()) product(one.left, one.right, y, next);
        }
        for (int64_t panel = 0; panel < panels; ++panel) {
          worker.gather(
              slice, count * width, [&](int64_t m) { return tap(sources[m]) + panel * apart; },
              [&](int64_t g) { return gradients + g * stride + panel * apart; }, !is_first);
        }
      }
    }
    store_gradient(job, problem, n, count, apart, tap);
  }
}

}  // namespace ocnn_fused::cpu::OCNN_FUSED_TARGET
OCNN_FUSED_END_TARGET
