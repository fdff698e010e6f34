// The one arithmetic of evaluate, mix and gather: factors along the axes of a grid of rows, see Factor.
#pragma once

#include <algorithm>
#include <vector>

#include "vectors.h"

OCNN_FUSED_BEGIN_TARGET
namespace ocnn_fused::cpu::OCNN_FUSED_TARGET {

// On one vector of each row. Rows are kStep apart in both arrays, which stay in registers.
// out[point] = sum over span of matrix[point][span] in[span]
template <int64_t kPoints, int64_t kSpan, int64_t kStep, typename T, typename V>
__attribute__((always_inline)) inline void registers_to_points(const Factor<T>& factor, const V* in, V* out) {
  constexpr int64_t evens = (kSpan + 1) / 2, odds = kSpan / 2;
  V sum[evens], difference[odds];
  OCNN_FUSED_UNROLL
  for (int64_t q = 0; q < odds; ++q) {
    sum[q] = in[q * kStep] + in[(kSpan - 1 - q) * kStep];
    difference[q] = in[q * kStep] - in[(kSpan - 1 - q) * kStep];
  }
  if constexpr (evens > odds) sum[odds] = in[odds * kStep];
  OCNN_FUSED_UNROLL
  for (int64_t p = 0; p <= kPoints / 2; ++p) {
    V even = sum[0] * factor.even[p * evens];
    OCNN_FUSED_UNROLL
    for (int64_t q = 1; q < evens; ++q) even += sum[q] * factor.even[p * evens + q];
    if (p == 0) {
      out[0] = even;
      continue;
    }
    V odd = difference[0] * factor.odd[(p - 1) * odds];
    OCNN_FUSED_UNROLL
    for (int64_t q = 1; q < odds; ++q) odd += difference[q] * factor.odd[(p - 1) * odds + q];
    out[(2 * p - 1) * kStep] = even + odd;
    if (2 * p < kPoints) out[2 * p * kStep] = even - odd;
  }
}

// The transpose: out[span] = sum over points of matrix[point][span] in[point]
template <int64_t kPoints, int64_t kSpan, int64_t kStep, typename T, typename V>
__attribute__((always_inline)) inline void registers_from_points(const Factor<T>& factor, const V* in, V* out) {
  constexpr int64_t pairs = kPoints / 2, evens = (kSpan + 1) / 2, odds = kSpan / 2;
  V sum[pairs], difference[pairs];
  OCNN_FUSED_UNROLL
  for (int64_t p = 0; p < pairs; ++p) {
    const V second = 2 * p + 2 < kPoints ? in[(2 * p + 2) * kStep] : V{};
    sum[p] = in[(2 * p + 1) * kStep] + second;
    difference[p] = in[(2 * p + 1) * kStep] - second;
  }
  const V own = in[0];
  OCNN_FUSED_UNROLL
  for (int64_t q = 0; q < evens; ++q) {
    V even = own * factor.even[q];
    OCNN_FUSED_UNROLL
    for (int64_t p = 0; p < pairs; ++p) even += sum[p] * factor.even[(p + 1) * evens + q];
    if (q == odds) {
      out[q * kStep] = even;
      continue;
    }
    V odd = difference[0] * factor.odd[q];
    OCNN_FUSED_UNROLL
    for (int64_t p = 1; p < pairs; ++p) odd += difference[p] * factor.odd[p * odds + q];
    out[q * kStep] = even + odd;
    out[(kSpan - 1 - q) * kStep] = even - odd;
  }
}

template <bool kToPoints, int64_t kPoints, int64_t kSpan, int64_t kStep, typename T, typename V>
__attribute__((always_inline)) inline void transform_registers(const Factor<T>& factor, const V* in, V* out) {
  if constexpr (kToPoints) {
    registers_to_points<kPoints, kSpan, kStep>(factor, in, out);
  } else {
    registers_from_points<kPoints, kSpan, kStep>(factor, in, out);
  }
}

// The same along rows of `lanes` numbers, a whole number of vectors.
template <bool kToPoints, typename T, int64_t kPoints, int64_t kSpan>
void transform_fixed(const Factor<T>& factor, const T* const* in, T* const* out, int64_t lanes) {
  using V = typename Vector<T>::type;
  constexpr int64_t from = kToPoints ? kSpan : kPoints, to = kToPoints ? kPoints : kSpan;
  for (int64_t at = 0; at < lanes; at += Vector<T>::width) {
    V before[from], after[to];
    OCNN_FUSED_UNROLL
    for (int64_t r = 0; r < from; ++r) before[r] = load(in[r] + at);
    transform_registers<kToPoints, kPoints, kSpan, 1>(factor, before, after);
    OCNN_FUSED_UNROLL
    for (int64_t r = 0; r < to; ++r) store(after[r], out[r] + at);
  }
}

// Two axes at once. Where they are short, everything stays in registers; else what lies between them is in memory.
template <bool kToPoints, int64_t kPoints0, int64_t kSpan0, int64_t kPoints1, int64_t kSpan1, typename T>
void transform_two(const Factor<T>& first, const Factor<T>& second, const T* const* in, T* const* out, int64_t lanes) {
  using V = typename Vector<T>::type;
  constexpr int64_t from0 = kToPoints ? kSpan0 : kPoints0, to0 = kToPoints ? kPoints0 : kSpan0,
                    from1 = kToPoints ? kSpan1 : kPoints1, to1 = kToPoints ? kPoints1 : kSpan1;
  constexpr bool unrolled = kPoints0 <= 5 && kPoints1 <= 5;
  for (int64_t at = 0; at < lanes; at += Vector<T>::width) {
    V middle[to0 * from1];
    const auto along_first = [&](int64_t j) __attribute__((always_inline)) {
      V column[from0 * from1];
      OCNN_FUSED_UNROLL
      for (int64_t i = 0; i < from0; ++i) column[i * from1] = load(in[i * from1 + j] + at);
      transform_registers<kToPoints, kPoints0, kSpan0, from1>(first, column, middle + j);
    };
    const auto along_second = [&](int64_t i) __attribute__((always_inline)) {
      V row[to1];
      transform_registers<kToPoints, kPoints1, kSpan1, 1>(second, middle + i * from1, row);
      OCNN_FUSED_UNROLL
      for (int64_t j = 0; j < to1; ++j) store(row[j], out[i * to1 + j] + at);
    };
    if constexpr (unrolled) {
      OCNN_FUSED_UNROLL
      for (int64_t j = 0; j < from1; ++j) along_first(j);
      OCNN_FUSED_UNROLL
      for (int64_t i = 0; i < to0; ++i) along_second(i);
    } else {
      for (int64_t j = 0; j < from1; ++j) along_first(j);
      for (int64_t i = 0; i < to0; ++i) along_second(i);
    }
  }
}

constexpr int64_t kMostTaps = 5;  // of the longest class
// A class of n taps has 2n - 1 lags and as many points; one of four or five taps has a product more.
constexpr int64_t points_of(int64_t taps) { return taps > 3 ? 2 * taps : 2 * taps - 1; }
// Whether a factor's span are the lags, of which there is an odd number, and not the taps.
constexpr bool spans_lags(int64_t points, int64_t span) { return span == ((points - 1) | 1); }

// Calls f.operator()<points, span>() for a factor.
template <int64_t kTaps = 2, typename T, typename F>
inline void by_factor(const Factor<T>& factor, const F& f) {
  constexpr int64_t points = points_of(kTaps), lags = 2 * kTaps - 1;
  if (factor.points == points) {
    factor.span == lags ? f.template operator()<points, lags>() : f.template operator()<points, kTaps>();
  } else if constexpr (kTaps < kMostTaps) {
    by_factor<kTaps + 1>(factor, f);
  }
}

template <bool kToPoints, typename T>
inline void transform(const Factor<T>& factor, const T* const* in, T* const* out, int64_t lanes) {
  by_factor(factor, [&]<int64_t kPoints, int64_t kSpan>() {
    transform_fixed<kToPoints, T, kPoints, kSpan>(factor, in, out, lanes);
  });
}

// Two axes at once if they are short or alike; false if nothing was done.
template <bool kToPoints, typename T>
inline bool transform_pair(const Factor<T>& first, const Factor<T>& second, const T* const* in, T* const* out,
                           int64_t lanes) {
  bool done = false;
  if (first.is_identity() || second.is_identity()) return done;
  by_factor(first, [&]<int64_t kPoints0, int64_t kSpan0>() {
    by_factor(second, [&]<int64_t kPoints1, int64_t kSpan1>() {
      constexpr bool same_kind = spans_lags(kPoints0, kSpan0) == spans_lags(kPoints1, kSpan1);
      if constexpr (same_kind && (kPoints0 == kPoints1 || std::max(kPoints0, kPoints1) <= 5)) {
        transform_two<kToPoints, kPoints0, kSpan0, kPoints1, kSpan1>(first, second, in, out, lanes);
        done = true;
      }
    });
  });
  return done;
}

// Applies one factor per axis to a grid of rows; between axes the grid lies in two buffers of its own.
template <typename T>
class Grid {
 public:
  static int64_t elements(int64_t rows, int64_t strip) { return 2 * rows * strip; }
  static int64_t pointers(int64_t rows) { return 2 * rows; }

  // `pointers`: memory for those to the buffers' rows.
  Grid(T* memory, T** pointers, int64_t rows, int64_t strip) : buffers_{pointers, pointers + rows} {
    for (int64_t r = 0; r < 2 * rows; ++r) pointers[r] = memory + r * strip;
  }

  template <bool kToPoints>
  void transform_all(const std::vector<Factor<T>>& factors, const T* const* in, T* const* out, int64_t lanes) {
    const int64_t rank = static_cast<int64_t>(factors.size());
    if (rank == 2 && transform_pair<kToPoints>(factors[0], factors[1], in, out, lanes)) return;
    const auto before = [&](int64_t axis) { return kToPoints ? factors[axis].span : factors[axis].points; };
    const auto after = [&](int64_t axis) { return kToPoints ? factors[axis].points : factors[axis].span; };
    int64_t outer = 1, inner = 1, last = -1;
    for (int64_t axis = 0; axis < rank; ++axis) {
      inner *= before(axis);
      if (!factors[axis].is_identity()) last = axis;
    }
    if (last < 0) {
      for (int64_t r = 0; r < inner; ++r) std::copy_n(in[r], lanes, out[r]);
      return;
    }
    int64_t buffer = 0;
    for (int64_t axis = 0; axis <= last; ++axis) {
      const int64_t from = before(axis), to = after(axis);
      inner /= from;
      if (!factors[axis].is_identity()) {
        T* const* target = axis == last ? out : buffers_[buffer];
        for (int64_t o = 0; o < outer; ++o) {
          for (int64_t i = 0; i < inner; ++i) {
            const T* sources[kMostRows];
            T* results[kMostRows];
            for (int64_t r = 0; r < from; ++r) sources[r] = in[(o * from + r) * inner + i];
            for (int64_t r = 0; r < to; ++r) results[r] = target[(o * to + r) * inner + i];
            transform<kToPoints>(factors[axis], sources, results, lanes);
          }
        }
        in = target;
        buffer ^= 1;
      }
      outer *= to;
    }
  }

 private:
  static constexpr int64_t kMostRows = points_of(kMostTaps);
  T* const* buffers_[2];
};

}  // namespace ocnn_fused::cpu::OCNN_FUSED_TARGET
OCNN_FUSED_END_TARGET
