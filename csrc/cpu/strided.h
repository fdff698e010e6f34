// Products of matrices that lie anywhere in memory: those of the pipeline.
#pragma once

#include <algorithm>

#include "products.h"

OCNN_FUSED_BEGIN_TARGET
namespace ocnn_fused::cpu::OCNN_FUSED_TARGET {

// A matrix of one batch.
template <typename T>
struct Strided {
  T* data;
  int64_t rows, columns, row_stride, column_stride;
  Strided(const Matrices<T>& all, int64_t index)
      : data(all.data + index * all.batch_stride),
        rows(all.rows),
        columns(all.columns),
        row_stride(all.row_stride),
        column_stride(all.column_stride) {}
  T* at(int64_t row, int64_t column) const { return data + row * row_stride + column * column_stride; }
};

// Sums over k of left(i, k) right(k, j) on a block where both operands have neighbouring k side by side: lanes are k.
template <int64_t kRows, int64_t kColumns, typename T>
void dot_block(const Strided<T>& left, const Strided<T>& right, const Strided<T>& out, int64_t i, int64_t j, bool add) {
  using V = typename Vector<T>::type;
  constexpr int64_t width = Vector<T>::width;
  const T *const a = left.at(i, 0), *const b = right.at(0, j);
  V sum[kRows][kColumns] = {};
  const auto add_products = [&](const auto& load_from) __attribute__((always_inline)) {
    V row[kRows];
    OCNN_FUSED_UNROLL
    for (int64_t p = 0; p < kRows; ++p) row[p] = load_from(a + p * left.row_stride);
    OCNN_FUSED_UNROLL
    for (int64_t q = 0; q < kColumns; ++q) {
      const V column = load_from(b + q * right.column_stride);
      OCNN_FUSED_UNROLL
      for (int64_t p = 0; p < kRows; ++p) sum[p][q] += row[p] * column;
    }
  };
  int64_t k = 0;
  for (; k + width <= left.columns; k += width) add_products([&](const T* from) { return load(from + k); });
  const Lanes<T> rest(left.columns - k);
  if (k < left.columns) add_products([&](const T* from) { return rest.load(from + k); });
  OCNN_FUSED_UNROLL
  for (int64_t p = 0; p < kRows; ++p) {
    OCNN_FUSED_UNROLL
    for (int64_t q = 0; q < kColumns; ++q) {
      T total = 0;
      for (int64_t l = 0; l < width; ++l) total += sum[p][q][l];
      T* const to = out.at(i + p, j + q);
      *to = add ? *to + total : total;
    }
  }
}

// Calls visit.operator()<n>() for the number n <= kMost.
template <int64_t kMost, typename F>
inline void with_count(int64_t n, const F& visit) {
  if constexpr (kMost > 1) {
    if (n < kMost) return with_count<kMost - 1>(n, visit);
  }
  visit.template operator()<kMost>();
}

constexpr int64_t kDotBlock = OCNN_FUSED_VECTOR_BYTES == 64 ? 4 : 3;

template <typename T>
void multiply_by_dots(const Strided<T>& left, const Strided<T>& right, const Strided<T>& out, bool add) {
  for (int64_t i = 0; i < out.rows; i += kDotBlock) {
    for (int64_t j = 0; j < out.columns; j += kDotBlock) {
      with_count<kDotBlock>(out.rows - i, [&]<int64_t kRows>() {
        with_count<kDotBlock>(out.columns - j,
                              [&]<int64_t kColumns>() { dot_block<kRows, kColumns>(left, right, out, i, j, add); });
      });
    }
  }
}

// kRows rows of the product with kVectors vectors of columns, of the last of which only `last` are there: of a right
// operand that is not packed, too.
template <int64_t kRows, int64_t kVectors, typename T>
__attribute__((noinline)) void strided_patch(const T* left, int64_t left_row, int64_t left_step, int64_t depth,
                                             const T* right, int64_t right_stride, T* out, int64_t out_stride,
                                             const Lanes<T>& last, bool add) {
  using V = typename Vector<T>::type;
  constexpr int64_t width = Vector<T>::width;
  const Lanes<T> some = last;  // in a register
  V sum[kRows][kVectors] = {};
  for (int64_t k = 0; k < depth; ++k, left += left_step, right += right_stride) {
    V row[kVectors];
    OCNN_FUSED_UNROLL
    for (int64_t v = 0; v < kVectors; ++v) {
      const bool whole = v + 1 < kVectors || !Lanes<T>::is_fast;
      row[v] = whole ? load(right + v * width) : some.load(right + v * width);
    }
    OCNN_FUSED_UNROLL
    for (int64_t r = 0; r < kRows; ++r) {
      const T value = left[r * left_row];
      OCNN_FUSED_UNROLL
      for (int64_t v = 0; v < kVectors; ++v) sum[r][v] += value * row[v];
    }
  }
  OCNN_FUSED_UNROLL
  for (int64_t r = 0; r < kRows; ++r) {
    OCNN_FUSED_UNROLL
    for (int64_t v = 0; v < kVectors; ++v) {
      T* const to = out + r * out_stride + v * width;
      if (v + 1 < kVectors) {
        store(add ? sum[r][v] + load(to) : sum[r][v], to);
      } else {
        some.store(add ? sum[r][v] + some.load(to) : sum[r][v], to);
      }
    }
  }
}

// Rows [begin, begin + depth) and columns [first, last) of a matrix, in rows of whole vectors, the end of which is
// zero.
template <typename T>
void pack(const Strided<T>& from, int64_t begin, int64_t depth, int64_t first, int64_t last, T* to, int64_t stride) {
  constexpr int64_t width = Vector<T>::width;
  if (from.column_stride == 1) {
    const int64_t whole = stride - width;
    const Lanes<T> rest(last - first - whole);
    for (int64_t k = 0; k < depth; ++k) {
      const T* const row = from.at(begin + k, first);
      for (int64_t n = 0; n < whole; n += width) store(load(row + n), to + k * stride + n);
      store(rest.load(row + whole), to + k * stride + whole);
    }
    return;
  }
  for (int64_t n = 0; n < stride; n += width) {
    const int64_t lanes = std::min(width, last - first - n);
    int64_t k = 0;
    for (; lanes == width && k + width <= depth; k += width) {
      transpose_square<Vector<T>>([&](int64_t r) { return from.at(begin + k, first + n + r); },
                                  [&](int64_t r) { return to + (k + r) * stride + n; });
    }
    for (; k < depth; ++k) {
      for (int64_t l = 0; l < width; ++l)
        to[k * stride + n + l] = l < lanes ? *from.at(begin + k, first + n + l) : T(0);
    }
  }
}

// Columns [first, last) of a product, at most kStripVectors vectors of them.
template <typename T>
void multiply_strip(const Strided<T>& left, const Strided<T>& right, const Strided<T>& out, bool add, int64_t first,
                    int64_t last) {
  constexpr int64_t width = Vector<T>::width;
  const int64_t vectors = (last - first + width - 1) / width, lanes = last - first - (vectors - 1) * width;
  // Few rows read the right operand where it lies.
  const bool packs = right.column_stride != 1 || (lanes < width && !Lanes<T>::is_fast) || out.rows > 2 * kPatchRows<T>;
  const Lanes<T> rest(lanes);
  const int64_t chunk = packs ? kDepth : left.columns, stride = packs ? vectors * width : right.row_stride;
  T* const packed = packs ? scratch<T>(std::min(chunk, left.columns) * stride) : nullptr;
  for (int64_t k = 0; k < left.columns; k += chunk) {
    const int64_t depth = std::min(chunk, left.columns - k);
    if (packs) pack(right, k, depth, first, last, packed, stride);
    const T* const operand = packs ? packed : right.at(k, first);
    for (int64_t row = 0; row < out.rows; row += kPatchRows<T>) {
      with_count<kPatchRows<T>>(out.rows - row, [&]<int64_t kRows>() {
        with_count<kStripVectors>(vectors, [&]<int64_t kVectors>() {
          strided_patch<kRows, kVectors>(left.at(row, k), left.row_stride, left.column_stride, depth, operand, stride,
                                         out.at(row, first), out.row_stride, rest, add || k > 0);
        });
      });
    }
  }
}

// Columns of the output lie side by side.
template <typename T>
void multiply_strips(const Matrices<T>& out, const Matrices<T>& left, const Matrices<T>& right, bool add, int64_t begin,
                     int64_t end) {
  constexpr int64_t width = Vector<T>::width, strip = kStripVectors * width;
  const int64_t strips = product_strips(out.columns, width);
  const bool by_dots = out.columns < width && left.column_stride == 1 && right.row_stride == 1 && left.columns >= width;
  for (int64_t item = begin; item < end; ++item) {
    const Strided<T> a(left, item / strips), b(right, item / strips), c(out, item / strips);
    const int64_t first = item % strips * strip;
    by_dots ? multiply_by_dots(a, b, c, add)
            : multiply_strip(a, b, c, add, first, std::min(first + strip, out.columns));
  }
}

}  // namespace ocnn_fused::cpu::OCNN_FUSED_TARGET
OCNN_FUSED_END_TARGET
