// Discrete Fourier transforms of short axes as products with small matrices. Taps and frequencies are counted from the
// middle of their axis, which changes A by a factor of length 1 only: then sums and differences of elements at equal
// distance from both ends need half of the products.
#pragma once

#include <algorithm>
#include <utility>

#include "fourier.h"
#include "vectors.h"

OCNN_FUSED_BEGIN_TARGET
namespace ocnn_fused::cpu::OCNN_FUSED_TARGET {

template <typename T>
inline int64_t whole_vectors(int64_t lanes) {
  return (lanes + Vector<T>::width - 1) / Vector<T>::width * Vector<T>::width;
}

// Rows of complex lanes: the imaginary parts of a row lie `apart` behind the real ones.
template <typename T>
struct ComplexRows {
  T* data;
  int64_t stride, apart;
  T* real(int64_t row) const { return data + row * stride; }
  T* imaginary(int64_t row) const { return data + row * stride + apart; }
};

// Sums and differences of two rows, one vector of each.
template <typename T>
struct Folded {
  typename Vector<T>::type sum_real, sum_imaginary, difference_real, difference_imaginary;
};

// Rows `first` to first + kOutputs, and their mirror images, of one vector of lanes.
template <bool kForward, int64_t kOutputs, typename T>
inline void turn_rows(const FourierAxis<T>& axis, const Folded<T>* folds, int64_t first, const ComplexRows<T>& out,
                      int64_t lane) {
  using V = typename Vector<T>::type;
  const int64_t taps = axis.taps, count = kForward ? taps : axis.points, outputs = kForward ? axis.points : taps;
  const int64_t step = kForward ? taps : 1, other = kForward ? 1 : taps;  // of the tables
  const T *cosine = axis.cosine + first * other, *sine = axis.sine + first * other;
  V even_real[kOutputs] = {}, even_imaginary[kOutputs] = {}, odd_real[kOutputs] = {}, odd_imaginary[kOutputs] = {};
  for (int64_t j = 0; j < (count + 1) / 2; ++j, cosine += step, sine += step) {
    const Folded<T> fold = folds[j];
    OCNN_FUSED_UNROLL
    for (int64_t o = 0; o < kOutputs; ++o) {
      even_real[o] += fold.sum_real * cosine[o * other];
      even_imaginary[o] += fold.sum_imaginary * cosine[o * other];
      odd_real[o] += fold.difference_real * sine[o * other];
      odd_imaginary[o] += fold.difference_imaginary * sine[o * other];
    }
  }
  OCNN_FUSED_UNROLL
  for (int64_t o = 0; o < kOutputs; ++o) {
    // Forward by exp(i angle), back by its conjugate, which is what the mirror image has.
    const int64_t row = kForward ? first + o : outputs - 1 - first - o, mirror = outputs - 1 - row;
    store(even_real[o] - odd_imaginary[o], out.real(row) + lane);
    store(even_imaginary[o] + odd_real[o], out.imaginary(row) + lane);
    store(even_real[o] + odd_imaginary[o], out.real(mirror) + lane);
    store(even_imaginary[o] - odd_real[o], out.imaginary(mirror) + lane);
  }
}

// Along an axis that is not the last, taps to frequencies or back. Lanes are rounded up to whole vectors.
template <bool kForward, typename T>
inline void turn(const FourierAxis<T>& axis, const ComplexRows<const T>& in, const ComplexRows<T>& out, int64_t lanes,
                 Folded<T>* folds) {
  using V = typename Vector<T>::type;
  constexpr int64_t at_once = OCNN_FUSED_VECTOR_BYTES == 64 ? 4 : 2;
  const int64_t count = kForward ? axis.taps : axis.points, outputs = kForward ? axis.points : axis.taps;
  for (int64_t lane = 0; lane < lanes; lane += Vector<T>::width) {
    for (int64_t j = 0; j < count / 2; ++j) {
      const int64_t mirror = count - 1 - j;
      const V real = load(in.real(j) + lane), imaginary = load(in.imaginary(j) + lane);
      const V other_real = load(in.real(mirror) + lane), other_imaginary = load(in.imaginary(mirror) + lane);
      folds[j] = {real + other_real, imaginary + other_imaginary, real - other_real, imaginary - other_imaginary};
    }
    if (count % 2) folds[count / 2] = {load(in.real(count / 2) + lane), load(in.imaginary(count / 2) + lane), V{}, V{}};
    int64_t o = 0;
    for (; o + at_once <= (outputs + 1) / 2; o += at_once) turn_rows<kForward, at_once>(axis, folds, o, out, lane);
    for (; o < (outputs + 1) / 2; ++o) turn_rows<kForward, 1>(axis, folds, o, out, lane);
  }
}

// out(row, lane) = sum over k < depth of left(row, k) right(k, lane), a block that stays in registers.
template <int64_t kRows, int64_t kVectors, typename T>
inline void lane_block(const T* left, int64_t left_stride, int64_t depth, const T* right, int64_t right_stride, T* out,
                       int64_t out_stride) {
  using V = typename Vector<T>::type;
  constexpr int64_t width = Vector<T>::width;
  V sum[kRows][kVectors] = {};
  for (int64_t k = 0; k < depth; ++k, right += right_stride) {
    V row[kVectors];
    OCNN_FUSED_UNROLL
    for (int64_t v = 0; v < kVectors; ++v) row[v] = load(right + v * width);
    OCNN_FUSED_UNROLL
    for (int64_t r = 0; r < kRows; ++r) {
      OCNN_FUSED_UNROLL
      for (int64_t v = 0; v < kVectors; ++v) sum[r][v] += left[r * left_stride + k] * row[v];
    }
  }
  OCNN_FUSED_UNROLL
  for (int64_t r = 0; r < kRows; ++r) {
    OCNN_FUSED_UNROLL
    for (int64_t v = 0; v < kVectors; ++v) store(sum[r][v], out + r * out_stride + v * width);
  }
}

template <int64_t kVectors, typename T>
inline void lane_rows(const T* left, int64_t left_stride, int64_t rows, int64_t depth, const T* right,
                      int64_t right_stride, T* out, int64_t out_stride) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    lane_block<4, kVectors>(left + r * left_stride, left_stride, depth, right, right_stride, out + r * out_stride,
                            out_stride);
  }
  for (; r < rows; ++r) {
    lane_block<1, kVectors>(left + r * left_stride, left_stride, depth, right, right_stride, out + r * out_stride,
                            out_stride);
  }
}

// A product whose right operand and output have lanes, rounded up to whole vectors. Rows of the output may lie as close
// as their lanes allow: of every row the end, which reaches into the next, is written before the beginning of any.
template <typename T>
inline void lane_product(const T* left, int64_t left_stride, int64_t rows, int64_t depth, const T* right,
                         int64_t right_stride, T* out, int64_t out_stride, int64_t lanes) {
  constexpr int64_t width = Vector<T>::width, many = OCNN_FUSED_VECTOR_BYTES == 64 ? 4 : 2;
  const int64_t whole = lanes / (many * width) * many * width;
  for (int64_t lane = whole_vectors<T>(lanes) - width; lane >= whole; lane -= width) {
    lane_rows<1>(left, left_stride, rows, depth, right + lane, right_stride, out + lane, out_stride);
  }
  for (int64_t lane = whole - many * width; lane >= 0; lane -= many * width) {
    lane_rows<many>(left, left_stride, rows, depth, right + lane, right_stride, out + lane, out_stride);
  }
}

// A batch of elements between taps and frequencies, in memory of this thread.
//
// Axes are transformed from the last to the first. In between, data are rows, one for each tap of the axes that are
// still to come, real parts first. The lanes of a row are the frequencies of the other axes; those of the last axis lie
// innermost, one element of the batch after the other.
template <typename S, typename T>
class FourierWorker {
 public:
  explicit FourierWorker(const FourierJob<S, T>& job)
      : job_(job),
        last_(job.last_taps),
        half_((last_ + 1) / 2),
        padded_half_((half_ + kLanes - 1) / kLanes * kLanes),
        padded_taps_((last_ + kLanes - 1) / kLanes * kLanes),
        lanes_(whole_vectors<T>(job.batch * last_)),
        padded_(job.tiles * Vector<T>::width) {
    constexpr int64_t width = Vector<T>::width;
    int64_t outer = job.taps / last_, lanes = lanes_, most_taps = 1;
    const int64_t folded = 2 * outer * job.batch * std::max(half_, padded_half_);
    int64_t most = outer * 2 * lanes;
    for (auto axis = job.axes.rbegin(); axis != job.axes.rend(); ++axis) {
      outer /= axis->taps;
      lanes *= axis->points;
      most = std::max(most, outer * 2 * lanes);
      most_taps = std::max(most_taps, axis->taps);
    }
    most += width;  // whole vectors at the end of a row
    const int64_t dense = 2 * padded_ * job.batch + width;
    T* const memory = scratch<T>(4 * most_taps * width + 2 * most + dense + folded + job.batch * job.taps + width);
    folds_ = reinterpret_cast<Folded<T>*>(memory);
    rows_ = memory + 4 * most_taps * width;
    other_rows_ = rows_ + most;
    dense_ = other_rows_ + most;
    sums_ = dense_ + dense;
    taps_ = sums_ + folded;
  }

  // Taps of an element: written before evaluate, read after gather.
  T* taps(int64_t element) { return taps_ + element * job_.taps; }
  // Its frequencies, whole vectors of them: read after evaluate, written before gather.
  T* real(int64_t element) { return dense_ + element * 2 * padded_; }
  T* imaginary(int64_t element) { return real(element) + padded_; }

  // Of the first `count` elements.
  void evaluate(int64_t count) {
    int64_t outer = job_.taps / last_, lanes = lanes_;
    for (int64_t r = 0; r < outer; ++r) {
      T *const sums = sums_, *const differences = sums_ + count * half_;
      for (int64_t b = 0; b < count; ++b) {
        const T* const row = taps(b) + r * last_;
        for (int64_t q = 0; q < half_; ++q) {
          sums[b * half_ + q] = row[q] + row[last_ - 1 - q];
          differences[b * half_ + q] = row[q] - row[last_ - 1 - q];
        }
        if (last_ % 2) sums[b * half_ + half_ - 1] = row[half_ - 1];
      }
      T* const to = rows_ + r * 2 * lanes;
      lane_product(sums, half_, count, half_, job_.cosine, padded_taps_, to, last_, last_);
      lane_product(differences, half_, count, last_ / 2, job_.sine, padded_taps_, to + lanes, last_, last_);
    }
    for (auto axis = job_.axes.rbegin(); axis != job_.axes.rend(); ++axis) {
      const int64_t wide = lanes * axis->points;
      outer /= axis->taps;
      for (int64_t r = 0; r < outer; ++r) {
        turn<true>(*axis, ComplexRows<const T>{rows_ + r * axis->taps * 2 * lanes, 2 * lanes, lanes},
                   ComplexRows<T>{other_rows_ + r * 2 * wide, lanes, wide}, lanes, folds_);
      }
      std::swap(rows_, other_rows_);
      lanes = wide;
    }
    // Whole vectors, whose end the next one overwrites.
    for (int64_t b = 0; b < count; ++b) {
      for (int64_t part = 0; part < 2; ++part) {
        T* const to = real(b) + part * padded_;
        copy_vectors(rows_ + part * lanes + b * last_, lanes_, to, last_, job_.frequencies / last_);
        std::fill(to + job_.frequencies, to + padded_, T(0));
      }
    }
  }

  void gather(int64_t count) {
    int64_t outer = 1, lanes = lanes_ * (job_.frequencies / last_);
    for (int64_t part = 0; part < 2; ++part) {
      T* to = rows_ + part * lanes;
      for (int64_t f = 0; f < job_.frequencies; f += last_, to += lanes_) {
        copy_vectors(dense_ + part * padded_ + f, 2 * padded_, to, last_, count);
      }
    }
    for (const FourierAxis<T>& axis : job_.axes) {
      const int64_t narrow = lanes / axis.points;
      for (int64_t r = 0; r < outer; ++r) {
        turn<false>(axis, ComplexRows<const T>{rows_ + r * 2 * lanes, narrow, lanes},
                    ComplexRows<T>{other_rows_ + r * axis.taps * 2 * narrow, 2 * narrow, narrow}, narrow, folds_);
      }
      std::swap(rows_, other_rows_);
      outer *= axis.taps;
      lanes = narrow;
    }
    for (int64_t r = 0; r < outer; ++r) {
      T *const sums = sums_, *const differences = sums_ + count * padded_half_;
      const T* const from = rows_ + r * 2 * lanes;
      lane_product(from, last_, count, last_, job_.cosine_back, padded_half_, sums, padded_half_, half_);
      lane_product(from + lanes, last_, count, last_, job_.sine_back, padded_half_, differences, padded_half_, half_);
      for (int64_t b = 0; b < count; ++b) {
        T* const row = taps(b) + r * last_;
        for (int64_t q = 0; q < half_; ++q) {
          const T sum = sums[b * padded_half_ + q], difference = differences[b * padded_half_ + q];
          row[last_ - 1 - q] = sum - difference;
          row[q] = sum + difference;
        }
      }
    }
  }

 private:
  // The frequencies of the last axis `count` times, each rounded up to whole vectors, the end of which is written
  // before the beginning of any.
  void copy_vectors(const T* from, int64_t from_stride, T* to, int64_t to_stride, int64_t count) const {
    constexpr int64_t width = Vector<T>::width;
    for (int64_t lane = whole_vectors<T>(last_) - width; lane >= 0; lane -= width) {
      for (int64_t c = 0; c < count; ++c) store(load(from + c * from_stride + lane), to + c * to_stride + lane);
    }
  }

  const FourierJob<S, T>& job_;
  const int64_t last_, half_, padded_half_, padded_taps_;  // taps of the last axis, and up to its middle
  const int64_t lanes_, padded_;                           // of a row before other axes; frequencies in whole tiles
  Folded<T>* folds_;
  T *rows_, *other_rows_, *dense_, *sums_, *taps_;
};

}  // namespace ocnn_fused::cpu::OCNN_FUSED_TARGET
OCNN_FUSED_END_TARGET
