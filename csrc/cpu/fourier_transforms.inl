// Discrete Fourier transforms of short axes as products with small matrices. Taps and frequencies are counted from the
// middle of their axis, which changes A by a factor of length 1 only: then sums and differences of elements at equal
// distance from both ends need half of the products.

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
  const int64_t taps = axis.taps, count = kForward ? taps : axis.points(), outputs = kForward ? axis.points() : taps;
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
  const int64_t count = kForward ? axis.taps : axis.points(), outputs = kForward ? axis.points() : axis.taps;
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

// A product whose right operand and output have lanes, rounded up to whole vectors.
template <typename T>
inline void lane_product(const T* left, int64_t left_stride, int64_t rows, int64_t depth, const T* right,
                         int64_t right_stride, T* out, int64_t out_stride, int64_t lanes) {
  constexpr int64_t width = Vector<T>::width, many = OCNN_FUSED_VECTOR_BYTES == 64 ? 4 : 2;
  int64_t lane = 0;
  for (; lane + many * width <= lanes; lane += many * width) {
    lane_rows<many>(left, left_stride, rows, depth, right + lane, right_stride, out + lane, out_stride);
  }
  for (; lane < lanes; lane += width) {
    lane_rows<1>(left, left_stride, rows, depth, right + lane, right_stride, out + lane, out_stride);
  }
}

// Elements between taps and frequencies, a batch of them at once, in memory of this thread.
//
// Axes are transformed from the last to the first. In between, data are rows, one for each element and each tap of the
// axes that are still to come; the lanes of a row are the frequencies of the others, real parts first.
template <typename S, typename T>
class FourierWorker {
 public:
  explicit FourierWorker(const FourierJob<S, T>& job)
      : job_(job),
        half_((job.last_taps + 1) / 2),
        padded_half_((half_ + kLanes - 1) / kLanes * kLanes),
        padded_taps_((job.last_taps + kLanes - 1) / kLanes * kLanes),
        padded_(whole_vectors<T>(job.frequencies)) {
    constexpr int64_t width = Vector<T>::width;
    int64_t outer = job.batch * job.taps / job.last_taps, lanes = job.last_taps, most_taps = 1;
    int64_t most = outer * row_of(lanes), turned = 0;
    const int64_t folded = outer * std::max(job.last_taps, padded_half_) * 2 + width;
    for (auto axis = job.axes.rbegin(); axis != job.axes.rend(); ++axis) {
      turned = std::max(turned, axis->points() * 2 * whole_vectors<T>(lanes));
      outer /= axis->taps;
      lanes *= axis->points();
      most = std::max(most, outer * row_of(lanes));
      most_taps = std::max(most_taps, axis->taps);
    }
    most = (most + kLanes + width) / kLanes * kLanes;
    T* const memory = scratch<T>(2 * most + turned + folded + job.batch * job.taps + 4 * most_taps * width + 4 * kLanes);
    folds_ = reinterpret_cast<Folded<T>*>(memory);
    rows_ = memory + 4 * most_taps * width;
    other_rows_ = rows_ + most;
    turned_ = other_rows_ + most;
    sums_ = turned_ + turned;
    taps_ = sums_ + folded;
  }

  // Taps of `count` elements, one after the other: written here before evaluate, read after gather.
  T* taps() { return taps_; }

  // Frequencies of one element, see real().
  void evaluate(int64_t count) {
    const int64_t last = job_.last_taps;
    int64_t outer = count * job_.taps / last, lanes = last;
    T* const differences = sums_ + outer * half_;
    for (int64_t r = 0; r < outer; ++r) {
      const T* const row = taps_ + r * last;
      T *const sum = sums_ + r * half_, *const difference = differences + r * half_;
      for (int64_t q = 0; q < last / 2; ++q) {
        sum[q] = row[q] + row[last - 1 - q];
        difference[q] = row[q] - row[last - 1 - q];
      }
      if (last % 2) sum[half_ - 1] = row[half_ - 1];
    }
    const int64_t stride = row_of(lanes);
    lane_product(sums_, half_, outer, half_, job_.cosine, padded_taps_, rows_, stride, lanes);
    lane_product(differences, half_, outer, last / 2, job_.sine, padded_taps_, rows_ + stride / 2, stride, lanes);
    for (auto axis = job_.axes.rbegin(); axis != job_.axes.rend(); ++axis) {
      const int64_t before = row_of(lanes), apart = before / 2, wide = lanes * axis->points(), after = row_of(wide);
      outer /= axis->taps;
      for (int64_t r = 0; r < outer; ++r) {
        turn<true>(*axis, ComplexRows<const T>{rows_ + r * axis->taps * before, before, apart},
                   ComplexRows<T>{turned_, before, apart}, lanes, folds_);
        pack(turned_, before, axis->points(), lanes, other_rows_ + r * after);
        pack(turned_ + apart, before, axis->points(), lanes, other_rows_ + r * after + after / 2);
      }
      std::swap(rows_, other_rows_);
      lanes = wide;
    }
  }

  // Back: taps of frequencies.
  void gather(int64_t count) {
    int64_t outer = count, lanes = job_.frequencies;
    for (const FourierAxis<T>& axis : job_.axes) {
      const int64_t before = row_of(lanes), narrow = lanes / axis.points(), after = row_of(narrow);
      for (int64_t r = 0; r < outer; ++r) {
        // A row of taps to come has its frequencies side by side, so that its last vector may reach into the next.
        turn<false>(axis, ComplexRows<const T>{rows_ + r * before, narrow, before / 2},
                    ComplexRows<T>{other_rows_ + r * axis.taps * after, after, after / 2}, narrow, folds_);
      }
      std::swap(rows_, other_rows_);
      outer *= axis.taps;
      lanes = narrow;
    }
    const int64_t last = job_.last_taps, stride = row_of(lanes);
    T* const differences = sums_ + outer * padded_half_;
    lane_product(rows_, stride, outer, last, job_.cosine_back, padded_half_, sums_, padded_half_, half_);
    lane_product(rows_ + stride / 2, stride, outer, last, job_.sine_back, padded_half_, differences, padded_half_,
                 half_);
    for (int64_t r = 0; r < outer; ++r) {
      T* const row = taps_ + r * last;
      const T *const sum = sums_ + r * padded_half_, *const difference = differences + r * padded_half_;
      for (int64_t q = 0; q < half_; ++q) {
        row[last - 1 - q] = sum[q] - difference[q];
        row[q] = sum[q] + difference[q];
      }
    }
  }

  // Frequencies of an element of the batch, whole vectors of them.
  T* real(int64_t element) { return rows_ + element * 2 * padded_; }
  T* imaginary(int64_t element) { return real(element) + padded_; }

 private:
  static int64_t row_of(int64_t lanes) { return 2 * whole_vectors<T>(lanes); }

  // Rows of `lanes` one right behind the other: each is written in whole vectors, whose end the next one overwrites.
  static void pack(const T* from, int64_t stride, int64_t rows, int64_t lanes, T* to) {
    constexpr int64_t width = Vector<T>::width;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t lane = 0; lane < lanes; lane += width) {
        store(load(from + r * stride + lane), to + r * lanes + lane);
      }
    }
    std::fill(to + rows * lanes, to + whole_vectors<T>(rows * lanes), T(0));
  }

  const FourierJob<S, T>& job_;
  const int64_t half_, padded_half_, padded_taps_;  // of the last axis' taps: up to the middle
  const int64_t padded_;                            // frequencies, whole vectors
  Folded<T>* folds_;
  T *rows_, *other_rows_, *turned_, *sums_, *taps_;
};
