// gram on panels, which evaluates what it multiplies.
#pragma once

#include <algorithm>

#include "panel_slices.h"
#include "products.h"

OCNN_FUSED_BEGIN_TARGET
namespace ocnn_fused::cpu::OCNN_FUSED_TARGET {

// Calls visit(block's residue, its first n, how many, n before it) for the parts of [begin, end) of a contraction that
// goes through all residues.
template <typename F>
inline void each_residue(int64_t length, int64_t begin, int64_t end, const F& visit) {
  for (int64_t n = begin; n < end;) {
    const int64_t count = std::min(end - n, length - n % length);
    visit(n / length, n % length, count, n - begin);
    n += count;
  }
}

// Items [low, high) of the product of a plane and its own transpose, see SliceProduct, added to what is there if `add`.
// Mix reads the upper triangle alone: an item is a row of panels and the row as far from the other end. A few are taken
// at once, whatever that adds below the diagonal.
template <typename T>
inline void multiply_triangle(const T* plane, int64_t apart, int64_t panels, int64_t depth, T* out, bool add,
                              int64_t low, int64_t high) {
  constexpr int64_t width = Vector<T>::width;
  const int64_t side = panels * width, few = std::max<int64_t>(1, panels / 16);
  // Rows of panels [p, last), from column panel p on.
  const auto rows = [&](int64_t p, int64_t last) {
    if (p >= last) return;
    multiply<Left::kTransposed>(plane + p * apart, apart, (last - p) * width, depth, plane + p * apart, apart,
                                panels - p, out + (p * side + p * width) * width, side * width, add, plane);
  };
  for (int64_t p = low; p < high; p += few) {
    const int64_t last = std::min(p + few, high);
    rows(p, last);
    rows(std::max(panels - last, last), panels - p);
  }
}

template <typename S, typename T>
void panel_gram(const PanelJob<S, T>& job, int64_t begin, int64_t end) {
  constexpr int64_t width = Vector<T>::width;
  const int64_t panels = job.panels, side = job.padded_side;
  SliceWorker<T> worker(job.plan);
  int64_t first = 0;  // item of the slice
  for (int64_t problem = 0; problem < job.problems; ++problem) {
    for (const Slice& slice : job.plan.slices) {
      const int64_t items = slice.items(panels);
      const int64_t from = std::max(begin - first, int64_t{0}), to = std::min(end - first, items);
      first += items;
      if (from >= to) continue;
      const BlockView<T>& view = job.plan.blocks[slice.block];
      const int64_t length = view.block->residues * job.length;
      int64_t chunk = std::min(length, std::max(kDepth, kChunkElements<T> / (slice.planes * side)));
      const int64_t chunks = (length + chunk - 1) / chunk;
      chunk = (length + chunks - 1) / chunks;
      const int64_t apart = spread(chunk * width), stride = spread(panels * apart);
      T* const planes = scratch<T>(slice.planes * stride + worker.elements());
      worker.use(planes + slice.planes * stride);
      for (int64_t n = 0; n < length; n += chunk) {
        const int64_t count = std::min(chunk, length - n);
        for (int64_t panel = 0; panel < panels; ++panel) {
          each_residue(job.length, n, n + count, [&](int64_t residue, int64_t at, int64_t some, int64_t before) {
            const int64_t* sources = view.sources + residue * view.block->taps;
            worker.evaluate(
                slice, some * width,
                [&](int64_t m) { return job.tap(problem, sources[m]) + (panel * job.length + at) * width; },
                [&](int64_t g) { return planes + g * stride + panel * apart + before * width; });
          });
        }
        int64_t passed = 0;  // items of the products before
        for (const SliceProduct& product : slice.products) {
          const int64_t low = std::max(from - passed, int64_t{0});
          const int64_t high = std::min(to - passed, product.items(panels));
          passed += product.items(panels);
          const T *const left = planes + product.left * stride, *const right = planes + product.right * stride;
          T* const out = job.output(problem, product.out);
          if (product.is_symmetric()) {
            multiply_triangle(left, apart, panels, count, out, n > 0, low, high);
          } else if (low < high) {
            multiply<Left::kTransposed>(left + low * apart, apart, (high - low) * width, count, right, apart, panels,
                                        out + low * width * width, side * width, n > 0, right);
          }
        }
      }
    }
  }
}

}  // namespace ocnn_fused::cpu::OCNN_FUSED_TARGET
OCNN_FUSED_END_TARGET
