// gram and apply of Fourier plans: complex matrices whose entries are vectors, one lane per frequency.
#pragma once

#include <algorithm>
#include <cstring>

#include "vectors.h"

OCNN_FUSED_BEGIN_TARGET
namespace ocnn_fused::cpu::OCNN_FUSED_TARGET {

constexpr int64_t kComplexBlock = OCNN_FUSED_VECTOR_BYTES == 64 ? 3 : 2;
// Entries of a matrix, each a pair of vectors, that a core's second cache holds beside as many of another, and terms of
// a sum for which a block's rows stay in its first.
constexpr int64_t kCachedEntries = int64_t{3} << 10, kCachedTerms = 64;

// A matrix of pairs of vectors, real part first.
template <typename T>
struct ComplexMatrix {
  T* data;
  int64_t row_stride, column_stride;
  T* at(int64_t row, int64_t column) const { return data + row * row_stride + column * column_stride; }
};

// R(i, j) = sum over n in [begin, end) of A(i, n) conj A(j, n) on a block of R, added to what is there if `add`.
template <int64_t kRows, int64_t kColumns, typename T>
inline void gram_block(const ComplexMatrix<T>& a, int64_t i, int64_t j, int64_t begin, int64_t end,
                       const ComplexMatrix<T>& r, bool add) {
  using V = typename Vector<T>::type;
  constexpr int64_t width = Vector<T>::width;
  V real[kRows][kColumns] = {}, imaginary[kRows][kColumns] = {};
  const T *left = a.at(i, begin), *right = a.at(j, begin);
  for (int64_t n = begin; n < end; ++n, left += a.column_stride, right += a.column_stride) {
    V left_real[kRows], left_imaginary[kRows];
    OCNN_FUSED_UNROLL
    for (int64_t p = 0; p < kRows; ++p) {
      left_real[p] = load(left + p * a.row_stride);
      left_imaginary[p] = load(left + p * a.row_stride + width);
    }
    OCNN_FUSED_UNROLL
    for (int64_t q = 0; q < kColumns; ++q) {
      const V right_real = load(right + q * a.row_stride), right_imaginary = load(right + q * a.row_stride + width);
      OCNN_FUSED_UNROLL
      for (int64_t p = 0; p < kRows; ++p) {
        real[p][q] += left_real[p] * right_real;
        imaginary[p][q] += left_imaginary[p] * right_real;
        real[p][q] += left_imaginary[p] * right_imaginary;
        imaginary[p][q] -= left_real[p] * right_imaginary;
      }
    }
  }
  OCNN_FUSED_UNROLL
  for (int64_t p = 0; p < kRows; ++p) {
    OCNN_FUSED_UNROLL
    for (int64_t q = 0; q < kColumns; ++q) {
      T* const to = r.at(i + p, j + q);
      store(add ? real[p][q] + load(to) : real[p][q], to);
      store(add ? imaginary[p][q] + load(to + width) : imaginary[p][q], to + width);
    }
  }
}

// G(i, n) = sum over j in [begin, end) of R(i, j) A(j, n) on a block of G, added to what is there if `add`.
template <int64_t kRows, int64_t kColumns, typename T>
inline void apply_block(const ComplexMatrix<T>& r, const ComplexMatrix<T>& a, int64_t i, int64_t n, int64_t begin,
                        int64_t end, T* g, int64_t g_stride, bool add) {
  using V = typename Vector<T>::type;
  constexpr int64_t width = Vector<T>::width;
  V real[kRows][kColumns] = {}, imaginary[kRows][kColumns] = {};
  const T *left = r.at(i, begin), *right = a.at(begin, n);
  for (int64_t j = begin; j < end; ++j, left += r.column_stride, right += a.row_stride) {
    V left_real[kRows], left_imaginary[kRows];
    OCNN_FUSED_UNROLL
    for (int64_t p = 0; p < kRows; ++p) {
      left_real[p] = load(left + p * r.row_stride);
      left_imaginary[p] = load(left + p * r.row_stride + width);
    }
    OCNN_FUSED_UNROLL
    for (int64_t q = 0; q < kColumns; ++q) {
      const T* const entry = right + q * a.column_stride;
      const V right_real = load(entry), right_imaginary = load(entry + width);
      OCNN_FUSED_UNROLL
      for (int64_t p = 0; p < kRows; ++p) {
        real[p][q] += left_real[p] * right_real;
        imaginary[p][q] += left_imaginary[p] * right_real;
        real[p][q] -= left_imaginary[p] * right_imaginary;
        imaginary[p][q] += left_real[p] * right_imaginary;
      }
    }
  }
  OCNN_FUSED_UNROLL
  for (int64_t p = 0; p < kRows; ++p) {
    OCNN_FUSED_UNROLL
    for (int64_t q = 0; q < kColumns; ++q) {
      T* const to = g + p * g_stride + q * 2 * width;
      store(add ? real[p][q] + load(to) : real[p][q], to);
      store(add ? imaginary[p][q] + load(to + width) : imaginary[p][q], to + width);
    }
  }
}

// Calls visit.operator()<rows, columns>() for a block of at most kComplexBlock rows and columns.
template <int64_t kRows = kComplexBlock, int64_t kColumns = kComplexBlock, typename F>
inline void with_block(int64_t rows, int64_t columns, const F& visit) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return with_block<kRows - 1, kColumns>(rows, columns, visit);
  }
  if constexpr (kColumns > 1) {
    if (columns < kColumns) return with_block<kRows, kColumns - 1>(rows, columns, visit);
  }
  visit.template operator()<kRows, kColumns>();
}

// The lower triangle of R = A A^H, blocks on the diagonal whole.
template <typename T>
inline void fourier_gram(const ComplexMatrix<T>& a, int64_t side, int64_t length, const ComplexMatrix<T>& r) {
  const int64_t chunk = std::clamp<int64_t>(kCachedEntries / side, 8, kCachedTerms);
  for (int64_t begin = 0; begin < length; begin += chunk) {
    const int64_t end = std::min(begin + chunk, length);
    for (int64_t i = 0; i < side; i += kComplexBlock) {
      for (int64_t j = 0; j <= i; j += kComplexBlock) {
        with_block(side - i, side - j, [&]<int64_t kRows, int64_t kColumns>() {
          gram_block<kRows, kColumns>(a, i, j, begin, end, r, begin > 0);
        });
      }
    }
  }
}

// R - a I, whole; returns the sum of squares, every lane as often as it counts.
template <typename T>
inline double fourier_residual(const ComplexMatrix<T>& r, int64_t side, const T* diagonal, const T* counts) {
  using V = typename Vector<T>::type;
  constexpr int64_t width = Vector<T>::width;
  double loss = 0;
  for (int64_t i = 0; i < side; ++i) {
    const V own = load(r.at(i, i)) - diagonal[i];
    store(own, r.at(i, i));
    store(V{}, r.at(i, i) + width);
    V sum = {};
    for (int64_t j = 0; j < i; ++j) {
      const V real = load(r.at(i, j)), imaginary = load(r.at(i, j) + width);
      sum += real * real + imaginary * imaginary;
      store(real, r.at(j, i));
      store(-imaginary, r.at(j, i) + width);
    }
    sum = T(2) * sum + own * own;
    T lanes[width];
    std::memcpy(lanes, &sum, sizeof(lanes));
    for (int64_t l = 0; l < width; ++l) loss += static_cast<double>(counts[l]) * lanes[l];
  }
  return loss;
}

// G = R A in place of A. `columns` is memory for `some` columns of G.
template <typename T>
inline void fourier_apply(const ComplexMatrix<T>& r, const ComplexMatrix<T>& a, int64_t side, int64_t length,
                          T* columns, int64_t some) {
  constexpr int64_t entry = 2 * Vector<T>::width;
  for (int64_t begin = 0; begin < length; begin += some) {
    const int64_t end = std::min(begin + some, length);
    for (int64_t j = 0; j < side; j += kCachedTerms) {
      const int64_t last = std::min(j + kCachedTerms, side);
      for (int64_t i = 0; i < side; i += kComplexBlock) {
        for (int64_t n = begin; n < end; n += kComplexBlock) {
          T* const block = columns + (i * some + n - begin) * entry;
          with_block(side - i, end - n, [&]<int64_t kRows, int64_t kColumns>() {
            apply_block<kRows, kColumns>(r, a, i, n, j, last, block, some * entry, j > 0);
          });
        }
      }
    }
    for (int64_t i = 0; i < side; ++i) {
      for (int64_t n = begin; n < end; ++n) copy_lanes(columns + (i * some + n - begin) * entry, entry, a.at(i, n));
    }
  }
}

}  // namespace ocnn_fused::cpu::OCNN_FUSED_TARGET
OCNN_FUSED_END_TARGET
