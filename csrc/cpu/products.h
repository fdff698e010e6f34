// Matrix products of operands in panels, see panels.h.
#pragma once

#include <algorithm>
#include <utility>

#include "vectors.h"

OCNN_FUSED_BEGIN_TARGET
namespace ocnn_fused::cpu::OCNN_FUSED_TARGET {

// A product's patch of rows times panels, kept in registers.
template <typename T>
constexpr int64_t kPatchRows = OCNN_FUSED_VECTOR_BYTES == 64 ? 8 : std::min<int64_t>(4, Vector<T>::width);
constexpr int64_t kPatchPanels = 3;
// Terms of the sums that are added up at once: for as many, a patch's panels stay in the nearest cache while all rows
// are multiplied with them.
constexpr int64_t kDepth = 128;

// Whether the left operand of a product is a matrix in panels or, as in gram, the transpose of one.
enum class Left { kAsItLies, kTransposed };

// Pointer to entry (row, k) of a left operand whose panels are `panel` apart.
template <Left kLeft, typename T>
inline const T* left_entry(const T* left, int64_t panel, int64_t row, int64_t k) {
  constexpr int64_t width = Vector<T>::width;
  if constexpr (kLeft == Left::kTransposed) std::swap(row, k);
  return left + k / width * panel + row * width + k % width;
}

// out(row, panel) = sum over k < depth of left(row, k) right(k, panel), added to what is there if `add`; with kAhead it
// reads `ahead` into the caches on the way. Not inline: what its callers keep in registers would take the place of the
// patch.
template <Left kLeft, int64_t kRows, int64_t kPanels, bool kAhead, typename T>
__attribute__((noinline)) void multiply_patch(const T* left, int64_t left_panel, int64_t depth, const T* right,
                                              int64_t right_panel, T* out, int64_t out_panel, bool add,
                                              const T* ahead) {
  using V = typename Vector<T>::type;
  constexpr int64_t width = Vector<T>::width;
  // Of the left operand: a stretch of steps at equal distances, that distance, and the rows'.
  constexpr bool transposed = kLeft == Left::kTransposed;
  const int64_t stretch = transposed ? depth : width;
  constexpr int64_t step = transposed ? width : 1, row_step = transposed ? 1 : width;
  V sum[kRows][kPanels] = {};
  for (int64_t k = 0; k < depth; k += stretch, left += left_panel) {
    // As far as it takes for the loop's own instructions not to count, no further: instructions are cached too.
    _Pragma("GCC unroll 4") for (int64_t q = 0; q < stretch; ++q, right += width) {
      if constexpr (kAhead) {
        __builtin_prefetch(ahead, 0, 2);
        ahead += width;
      }
      V row[kPanels];
      OCNN_FUSED_UNROLL
      for (int64_t p = 0; p < kPanels; ++p) row[p] = load(right + p * right_panel);
      OCNN_FUSED_UNROLL
      for (int64_t r = 0; r < kRows; ++r) {
        const T value = left[r * row_step + q * step];
        OCNN_FUSED_UNROLL
        for (int64_t p = 0; p < kPanels; ++p) sum[r][p] += value * row[p];
      }
    }
  }
  // Unrolled as well: an array that is looped over would lie in memory.
  OCNN_FUSED_UNROLL
  for (int64_t r = 0; r < kRows; ++r) {
    OCNN_FUSED_UNROLL
    for (int64_t p = 0; p < kPanels; ++p) {
      T* const target = out + p * out_panel + r * width;
      store(add ? sum[r][p] + load(target) : sum[r][p], target);
    }
  }
}

// Rows [row, rows) of kPanels panels of a product. `next` is the right operand of what follows.
template <Left kLeft, int64_t kPanels, int64_t kRows, typename T>
inline void multiply_rows(const T* left, int64_t left_panel, int64_t row, int64_t rows, int64_t depth, const T* right,
                          int64_t right_panel, T* out, int64_t out_panel, bool add, const T* next) {
  for (; row + kRows <= rows; row += kRows) {
    const T* const from = left_entry<kLeft>(left, left_panel, row, 0);
    T* const to = out + row * Vector<T>::width;
    // The panels that come next, one with each of the first patches; for the others a read ahead is a read too many.
    if (row < kPatchPanels * kRows) {
      multiply_patch<kLeft, kRows, kPanels, true>(from, left_panel, depth, right, right_panel, to, out_panel, add,
                                                  next + row / kRows * right_panel);
    } else {
      multiply_patch<kLeft, kRows, kPanels, false>(from, left_panel, depth, right, right_panel, to, out_panel, add,
                                                   next);
    }
  }
  if constexpr (kRows > 1) {
    if (row < rows) {
      multiply_rows<kLeft, kPanels, kRows / 2>(left, left_panel, row, rows, depth, right, right_panel, out, out_panel,
                                               add, next);
    }
  }
}

// All panels of a product whose sums have at most kDepth terms.
template <Left kLeft, int64_t kPanels = kPatchPanels, typename T>
inline void multiply_panels(const T* left, int64_t left_panel, int64_t rows, int64_t depth, const T* right,
                            int64_t right_panel, int64_t panels, T* out, int64_t out_panel, bool add, const T* next) {
  // Four panels are better two and two than three and one.
  for (; panels >= kPanels && (kPanels < 3 || panels != 4); panels -= kPanels) {
    multiply_rows<kLeft, kPanels, kPatchRows<T>>(left, left_panel, 0, rows, depth, right, right_panel, out, out_panel,
                                                 add, panels > kPanels ? right + kPanels * right_panel : next);
    right += kPanels * right_panel;
    out += kPanels * out_panel;
  }
  if constexpr (kPanels > 1) {
    if (panels > 0) {
      multiply_panels<kLeft, kPanels - 1>(left, left_panel, rows, depth, right, right_panel, panels, out, out_panel,
                                          add, next);
    }
  }
}

// A whole product. Rows of a transposed left operand are whole panels.
template <Left kLeft, typename T>
inline void multiply(const T* left, int64_t left_panel, int64_t rows, int64_t depth, const T* right,
                     int64_t right_panel, int64_t panels, T* out, int64_t out_panel, bool add, const T* next) {
  for (int64_t k = 0; k < depth; k += kDepth) {
    const T *const here = right + k * Vector<T>::width, *const there = here + kDepth * Vector<T>::width;
    multiply_panels<kLeft>(left_entry<kLeft>(left, left_panel, 0, k), left_panel, rows, std::min(kDepth, depth - k),
                           here, right_panel, panels, out, out_panel, add || k > 0, k + kDepth < depth ? there : next);
  }
}

}  // namespace ocnn_fused::cpu::OCNN_FUSED_TARGET
OCNN_FUSED_END_TARGET
