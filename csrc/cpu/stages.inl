// Body of the elementwise stages. Included once per instruction set, inside a namespace of its own and with
// OCNN_FUSED_VECTOR_BYTES set; standard headers are included before, so that none of their inline functions is
// compiled for an instruction set the machine may lack.

template <typename T, int64_t kBytes = OCNN_FUSED_VECTOR_BYTES>
struct Vector {
  typedef T type __attribute__((vector_size(kBytes), aligned(alignof(T)), may_alias));
  static constexpr int64_t width = kBytes / sizeof(T);
  static constexpr int64_t count = kLanes / width;  // vectors per lane block
};

template <typename T>
inline typename Vector<T>::type load(const T* from) {
  return *reinterpret_cast<const typename Vector<T>::type*>(from);
}
template <typename T>
inline void store(const typename Vector<T>::type& value, T* to) {
  *reinterpret_cast<typename Vector<T>::type*>(to) = value;
}

// The one arithmetic of evaluate, mix and gather: a factor along its axis, on one vector of each row. Rows are kStep
// apart in both arrays, which stay in registers.
#define OCNN_FUSED_UNROLL _Pragma("GCC unroll 16")

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

// The same along rows of `lanes` numbers, a whole number of vectors.
template <bool kToPoints, typename T, int64_t kPoints, int64_t kSpan>
void transform_fixed(const Factor<T>& factor, const T* const* in, T* const* out, int64_t lanes) {
  using V = typename Vector<T>::type;
  constexpr int64_t from = kToPoints ? kSpan : kPoints, to = kToPoints ? kPoints : kSpan;
  for (int64_t at = 0; at < lanes; at += Vector<T>::width) {
    V before[from], after[to];
    OCNN_FUSED_UNROLL
    for (int64_t r = 0; r < from; ++r) before[r] = load(in[r] + at);
    if constexpr (kToPoints) {
      registers_to_points<kPoints, kSpan, 1>(factor, before, after);
    } else {
      registers_from_points<kPoints, kSpan, 1>(factor, before, after);
    }
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
      if constexpr (kToPoints) {
        registers_to_points<kPoints0, kSpan0, from1>(first, column, middle + j);
      } else {
        registers_from_points<kPoints0, kSpan0, from1>(first, column, middle + j);
      }
    };
    const auto along_second = [&](int64_t i) __attribute__((always_inline)) {
      V row[to1];
      if constexpr (kToPoints) {
        registers_to_points<kPoints1, kSpan1, 1>(second, middle + i * from1, row);
      } else {
        registers_from_points<kPoints1, kSpan1, 1>(second, middle + i * from1, row);
      }
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

// Memory of this thread that stages use for what fits a cache, aligned to a cache line; grows on demand, contents are
// undefined.
template <typename T>
inline T* scratch(int64_t elements) {
  constexpr int64_t line = 64;
  thread_local std::vector<T> memory;
  const int64_t size = elements + line / static_cast<int64_t>(sizeof(T));
  if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
  if (fills_undefined_memory()) std::memset(memory.data(), kUndefinedByte, memory.size() * sizeof(T));
  return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory.data()) + line - 1) / line * line);
}

// Pointers to `count` rows, `stride` apart.
template <typename T>
inline std::vector<T*> rows_at(T* first, int64_t count, int64_t stride) {
  std::vector<T*> rows(count);
  for (int64_t r = 0; r < count; ++r) rows[r] = first + r * stride;
  return rows;
}

// Applies one factor per axis to a grid of rows; between axes the grid lies in two buffers of its own.
template <typename T>
class Grid {
 public:
  // Rows of the largest grid on the way, as spans on all axes, points on all axes, or in between.
  static int64_t rows(const std::vector<Factor<T>>& factors) {
    int64_t total = 1;
    for (const Factor<T>& factor : factors) total *= std::max(factor.points, factor.span);
    return total;
  }
  static int64_t elements(int64_t rows, int64_t strip) { return 2 * rows * strip; }

  Grid(T* memory, int64_t rows, int64_t strip)
      : buffers_{rows_at(memory, rows, strip), rows_at(memory + rows * strip, rows, strip)} {}

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
        T* const* target = axis == last ? out : buffers_[buffer].data();
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
  std::vector<T*> buffers_[2];
};

// Lanes of a and b for one butterfly of a transposition: those without and those with the bit kStep.
template <int64_t kStep, typename V, size_t... l>
inline V lower_half(const V& a, const V& b, std::index_sequence<l...>) {
  return __builtin_shufflevector(a, b, ((l & kStep) ? sizeof...(l) + l - kStep : l)...);
}
template <int64_t kStep, typename V, size_t... l>
inline V upper_half(const V& a, const V& b, std::index_sequence<l...>) {
  return __builtin_shufflevector(a, b, ((l & kStep) ? sizeof...(l) + l : l + kStep)...);
}

// Transposes a square of vectors in registers.
template <int64_t kWidth, int64_t kStep = kWidth / 2, typename V>
inline void transpose(V* rows) {
  constexpr auto lanes = std::make_index_sequence<kWidth>();
  for (int64_t r = 0; r < kWidth; ++r) {
    if (r & kStep) continue;
    const V low = lower_half<kStep>(rows[r], rows[r + kStep], lanes);
    rows[r + kStep] = upper_half<kStep>(rows[r], rows[r + kStep], lanes);
    rows[r] = low;
  }
  if constexpr (kStep > 1) transpose<kWidth, kStep / 2>(rows);
}

// For squares of taps, of which there are often few: eight float32 at most.
template <typename T>
using Short = Vector<T, std::min(32, OCNN_FUSED_VECTOR_BYTES)>;

// First taps of the vector-wide squares that cover `taps`; the last one overlaps its neighbour.
template <typename T, typename F>
inline void each_square(int64_t taps, const F& visit) {
  constexpr int64_t width = Short<T>::width;
  for (int64_t u = 0; u < taps; u += width) visit(std::min(u, taps - width));
}

// Taps of `lanes` channels into rows, one per tap: row(u) is where lane 0 of tap u goes.
template <typename T, typename S, typename Row>
inline void load_taps(const WeightView<const S>& weight, const S* first, int64_t lanes, const Row& row) {
  using V = typename Short<T>::type;
  constexpr int64_t width = Short<T>::width;
  if (weight.channel_stride == 1) {
    for (int64_t u = 0; u < weight.taps; ++u) {
      const S* source = first + weight.tap_offsets[u];
      T* const target = row(u);
      for (int64_t l = 0; l < lanes; ++l) target[l] = static_cast<T>(source[l]);
    }
    return;
  }
  int64_t l = 0;
  if constexpr (std::is_same_v<S, T>) {
    for (; weight.dense && weight.taps >= width && l + width <= lanes; l += width) {
      each_square<T>(weight.taps, [&](int64_t u) {
        V rows[width];
        for (int64_t r = 0; r < width; ++r) {
          rows[r] = *reinterpret_cast<const V*>(first + (l + r) * weight.channel_stride + u);
        }
        transpose<width>(rows);
        for (int64_t r = 0; r < width; ++r) *reinterpret_cast<V*>(row(u + r) + l) = rows[r];
      });
    }
  }
  for (; l < lanes; ++l) {
    const S* source = first + l * weight.channel_stride;
    for (int64_t u = 0; u < weight.taps; ++u) row(u)[l] = static_cast<T>(source[weight.tap_offsets[u]]);
  }
}

// The way back.
template <typename T, typename S, typename Row>
inline void store_taps(const Row& row, int64_t lanes, const WeightView<S>& weight, S* first) {
  using V = typename Short<T>::type;
  constexpr int64_t width = Short<T>::width;
  if (weight.channel_stride == 1) {
    for (int64_t u = 0; u < weight.taps; ++u) {
      S* target = first + weight.tap_offsets[u];
      const T* const source = row(u);
      for (int64_t l = 0; l < lanes; ++l) target[l] = static_cast<S>(source[l]);
    }
    return;
  }
  int64_t l = 0;
  if constexpr (std::is_same_v<S, T>) {
    for (; weight.dense && weight.taps >= width && l + width <= lanes; l += width) {
      each_square<T>(weight.taps, [&](int64_t u) {
        V rows[width];
        for (int64_t r = 0; r < width; ++r) rows[r] = *reinterpret_cast<const V*>(row(u + r) + l);
        transpose<width>(rows);
        for (int64_t r = 0; r < width; ++r) {
          *reinterpret_cast<V*>(first + (l + r) * weight.channel_stride + u) = rows[r];
        }
      });
    }
  }
  for (; l < lanes; ++l) {
    S* target = first + l * weight.channel_stride;
    for (int64_t u = 0; u < weight.taps; ++u) target[weight.tap_offsets[u]] = static_cast<S>(row(u)[l]);
  }
}

// Copies `lanes` numbers; inline, because a few of them are often all there is.
template <typename T>
inline void copy_lanes(const T* from, int64_t lanes, T* to) {
  constexpr int64_t width = Vector<T>::width;
  int64_t l = 0;
  for (; l + width <= lanes; l += width) store(load(from + l), to + l);
  for (; l < lanes; ++l) to[l] = from[l];
}

// One strip after the other, and the buffers for it: taps on one end of the evaluation matrix, planes on the other.
// Lanes are the channels of its rows, one row after the other; where residues are folded, those of all residues.
template <typename T>
class StripWorker {
 public:
  StripWorker(const std::vector<BlockView<T>>& blocks, int64_t weight_taps, const Window& window)
      : window_(window), strips_(window, most_residues(blocks)), weight_taps_(weight_taps), grid_(memory_for(blocks)) {}

  void select(int64_t item) {
    row_ = item / strips_.across * strips_.rows;
    rows_ = std::min(strips_.rows, window_.rows() - row_);
    channel_ = item % strips_.across * kStrip;
    per_row_ = std::min(kStrip, window_.channels() - channel_);
  }

  void select(const BlockView<T>& view) {
    view_ = &view;
    folded_ = strips_.folded && view.block->residues > 1;
    run_ = folded_ ? view.block->residues * per_row_ : per_row_;
    padded_ = (rows_ * run_ + kLanes - 1) / kLanes * kLanes;
  }

  // Of the block: all residues in one, or one by one.
  int64_t passes() const { return folded_ ? 1 : view_->block->residues; }

  // Calls visit(pointer to the first channel in the weight, first lane, lanes) for every row, or for all of them at
  // once if their channels are equally far apart, too.
  template <typename S, typename F>
  void each_row(const WeightView<S>& weight, const F& visit) const {
    const int64_t first = window_.row_begin + row_;
    const bool even = weight.row_stride == per_row_ * weight.channel_stride &&
                      first / weight.rows == (first + rows_ - 1) / weight.rows;
    const int64_t together = even ? rows_ : 1;
    for (int64_t q = 0; q < rows_; q += together) {
      visit(weight.row(first + q) + (window_.channel_begin + channel_) * weight.channel_stride, q * per_row_,
            together * per_row_);
    }
  }

  // Rows with the block's taps in the lanes of this pass.
  void collect_taps(int64_t pass) {
    for (int64_t m = 0; m < view_->block->taps; ++m) in[m] = class_row(pass, m);
    each_fold([&](int64_t m, T* taps, int64_t lane) { copy_lanes(taps, per_row_, class_row(0, m) + lane); });
  }

  // The way back, in two steps: before and after they are written.
  void aim_at_taps(int64_t pass) {
    for (int64_t m = 0; m < view_->block->taps; ++m) out[m] = class_row(pass, m);
  }
  void scatter_taps() {
    each_fold([&](int64_t m, T* taps, int64_t lane) { copy_lanes(class_row(0, m) + lane, per_row_, taps); });
  }

  // Where lane 0 of this pass lies in plane 0.
  T* in_pool(const Planes<T>& pool, int64_t pass) const {
    return pool.data + row_ * pool.row_stride + pass * window_.channels() + channel_;
  }

  // Whether all lanes lie side by side in the planes, and fill whole vectors there.
  bool is_whole(const Planes<T>& pool) const { return rows_ * run_ == padded_ && is_dense(pool); }

  void to_pool(const T* row, const Planes<T>& pool, T* target) const {
    each_run(pool, [&](int64_t lane, int64_t lanes, int64_t at) { copy_lanes(row + lane, lanes, target + at); });
  }

  void from_pool(const Planes<T>& pool, const T* source, T* row) const {
    each_run(pool, [&](int64_t lane, int64_t lanes, int64_t at) { copy_lanes(source + at, lanes, row + lane); });
  }

  template <bool kToPoints>
  void transform() {
    grid_.template transform_all<kToPoints>(view_->evaluation, in.data(), out.data(), padded_);
  }

  // One row more than there are taps: it is zero for evaluate and takes what belongs to no tap from gather.
  T* tap_row(int64_t source) { return memory_ + (source < 0 ? weight_taps_ : source) * kStrip; }
  T* plane_row(int64_t plane) { return tap_row(weight_taps_ + 1 + plane); }

  std::vector<const T*> in;
  std::vector<T*> out;

 private:
  T* class_row(int64_t pass, int64_t tap) {
    const PlanBlock& block = *view_->block;
    return folded_ ? plane_row(block.planes + tap) : tap_row(view_->sources[pass * block.taps + tap]);
  }

  // Calls visit(tap of the block, its channels in one row and residue, their first lane), unless nothing is folded.
  template <typename F>
  void each_fold(const F& visit) {
    const int64_t taps = view_->block->taps, residues = folded_ ? view_->block->residues : 0;
    for (int64_t r = 0; r < residues; ++r) {
      for (int64_t m = 0; m < taps; ++m) {
        T* const channels = tap_row(view_->sources[r * taps + m]);
        for (int64_t q = 0; q < rows_; ++q) visit(m, channels + q * per_row_, (q * residues + r) * per_row_);
      }
    }
  }

  bool is_dense(const Planes<T>& pool) const { return rows_ == 1 || pool.row_stride == run_; }

  // Calls visit(first lane, lanes, where they lie in the planes) for lanes that lie side by side.
  template <typename F>
  void each_run(const Planes<T>& pool, const F& visit) const {
    if (is_dense(pool)) return visit(0, rows_ * run_, 0);
    for (int64_t q = 0; q < rows_; ++q) visit(q * run_, run_, q * pool.row_stride);
  }

  Grid<T> memory_for(const std::vector<BlockView<T>>& blocks) {
    int64_t rows = 1, most = 1;
    for (const BlockView<T>& view : blocks) {
      rows = std::max(rows, Grid<T>::rows(view.evaluation));
      most = std::max(most, view.block->planes + view.block->taps);
    }
    memory_ = scratch<T>((weight_taps_ + 1 + most) * kStrip + Grid<T>::elements(rows, kStrip));
    in.resize(rows);
    out.resize(rows);
    return Grid<T>(plane_row(most), rows, kStrip);
  }

  const Window& window_;
  const Strips strips_;
  const int64_t weight_taps_;
  T* memory_ = nullptr;
  Grid<T> grid_;
  // The strip.
  int64_t row_ = 0, rows_ = 0, channel_ = 0, per_row_ = 0;
  // The block; run_: lanes that lie side by side in the planes.
  const BlockView<T>* view_ = nullptr;
  bool folded_ = false;
  int64_t run_ = 0, padded_ = 0;
};

template <typename S, typename T>
void evaluate(const WeightView<const S>& weight, const std::vector<BlockView<T>>& blocks,
              const std::vector<Planes<T>>& planes, const Window& window, int64_t begin, int64_t end) {
  StripWorker<T> strip(blocks, weight.taps, window);
  std::fill_n(strip.tap_row(-1), kStrip, T(0));
  for (int64_t item = begin; item < end; ++item) {
    strip.select(item);
    strip.each_row(weight, [&](const S* source, int64_t lane, int64_t lanes) {
      load_taps<T>(weight, source, lanes, [&](int64_t u) { return strip.tap_row(u) + lane; });
    });
    for (const BlockView<T>& view : blocks) {
      strip.select(view);
      const Planes<T>& pool = planes[view.block->pool];
      const bool whole = strip.is_whole(pool);
      for (int64_t pass = 0; pass < strip.passes(); ++pass) {
        T* target = strip.in_pool(pool, pass);
        for (int64_t g = 0; g < view.block->planes; ++g) {
          strip.out[g] = whole ? target + view.plane_of[g] * pool.plane_stride : strip.plane_row(g);
        }
        strip.collect_taps(pass);
        strip.template transform<true>();
        for (int64_t g = 0; !whole && g < view.block->planes; ++g) {
          strip.to_pool(strip.out[g], pool, target + view.plane_of[g] * pool.plane_stride);
        }
      }
    }
  }
}

template <typename S, typename T>
void gather(const WeightView<S>& grad, const std::vector<BlockView<T>>& blocks, const std::vector<Planes<T>>& planes,
            const Window& window, int64_t begin, int64_t end) {
  StripWorker<T> strip(blocks, grad.taps, window);
  for (int64_t item = begin; item < end; ++item) {
    strip.select(item);
    for (const BlockView<T>& view : blocks) {
      strip.select(view);
      const Planes<T>& pool = planes[view.block->pool];
      for (int64_t pass = 0; pass < strip.passes(); ++pass) {
        const T* source = strip.in_pool(pool, pass);
        // Copied, because planes lie powers of two apart and would evict each other while they are read again.
        for (int64_t g = 0; g < view.block->planes; ++g) {
          strip.from_pool(pool, source + view.plane_of[g] * pool.plane_stride, strip.plane_row(g));
          strip.in[g] = strip.plane_row(g);
        }
        strip.aim_at_taps(pass);
        strip.template transform<false>();
        strip.scatter_taps();
      }
    }
    strip.each_row(grad, [&](S* target, int64_t lane, int64_t lanes) {
      store_taps<T>([&](int64_t u) { return strip.tap_row(u) + lane; }, lanes, grad, target);
    });
  }
}

constexpr int64_t kTileArea = kTile * kTile;

// A square of a matrix with row stride `stride`; what lies outside of the matrix is read as zero and not written.
template <typename T>
struct Tile {
  T* data;
  int64_t stride, rows, columns;
  bool whole() const { return rows == kTile && columns == kTile; }
};

template <typename T>
inline void copy_tile(const Tile<T>& from, const Tile<T>& to) {
  for (int64_t i = 0; i < from.rows; ++i)
    copy_lanes(from.data + i * from.stride, from.columns, to.data + i * to.stride);
}

// Of whole tiles.
template <typename T>
inline void transpose_tile(const Tile<T>& from, const Tile<T>& to) {
  constexpr int64_t width = Vector<T>::width;
  for (int64_t i = 0; i < kTile; i += width) {
    for (int64_t j = 0; j < kTile; j += width) {
      typename Vector<T>::type square[width];
      for (int64_t r = 0; r < width; ++r) square[r] = load(from.data + (j + r) * from.stride + i);
      transpose<width>(square);
      for (int64_t r = 0; r < width; ++r) store(square[r], to.data + (i + r) * to.stride + j);
    }
  }
}

template <typename T>
void load_tile(const Tile<T>& from, bool transposed, T* to) {
  const Tile<T> target{to, kTile, kTile, kTile};
  T padded[kTileArea];
  Tile<T> source = from;
  if (!from.whole()) {
    std::fill_n(padded, kTileArea, T(0));
    source = {padded, kTile, kTile, kTile};
    copy_tile(from, source);
  }
  transposed ? transpose_tile(source, target) : copy_tile(source, target);
}

template <typename T>
void store_tile(T* from, bool transposed, const Tile<T>& to) {
  Tile<T> source{from, kTile, kTile, kTile};
  T turned[kTileArea];
  if (transposed && to.whole()) return transpose_tile(source, to);
  if (transposed) {
    transpose_tile(source, Tile<T>{turned, kTile, kTile, kTile});
    source.data = turned;
  }
  source.rows = to.rows;
  source.columns = to.columns;
  copy_tile(source, to);
}

// Which entries of a piece lie on the diagonal: the piece begins at entry `begin` of a tile `width` wide, and the tile
// has `count` of them.
struct Diagonal {
  int64_t begin, width, count;
};

// Mixes a piece of a tile at a time, at most kStrip entries, so that everything on the way stays in the nearest cache.
template <typename T>
class Mixer {
 public:
  // `extra`: elements that the caller wants for itself.
  Mixer(const std::vector<BlockView<T>>& blocks, int64_t all_lags, int64_t extra)
      : blocks_(blocks), all_lags_(all_lags), rows_(most_rows(blocks)), grid_(memory_for(extra), rows_, kStrip) {
    int64_t outputs = 0;
    for (const BlockView<T>& view : blocks) outputs += view.block->outputs;
    x.resize(outputs);
    y.resize(outputs);
    in_.resize(rows_);
    out_.resize(rows_);
  }

  T* extra() { return extra_; }

  // Entries of the outputs, one row for each, block by block in the order of the grids, and where Y goes: there or
  // elsewhere, but on no row of x that comes later.
  std::vector<const T*> x;
  std::vector<T*> y;

  // Returns the sum of squares of the residual.
  double mix(int64_t lanes, const Diagonal& diagonal, bool with_grad) {
    const T* const* next = x.data();
    for (const BlockView<T>& view : blocks_) {
      const bool first = &view == blocks_.data();  // it has all lags, the others add to them
      for (int64_t g = 0; g < view.block->lags; ++g) out_[g] = first ? lag_row(view.lag_of[g]) : added(g);
      grid_.template transform_all<false>(view.mix, next, out_.data(), lanes);
      for (int64_t g = 0; !first && g < view.block->lags; ++g) {
        T* row = lag_row(view.lag_of[g]);
        for (int64_t l = 0; l < lanes; ++l) row[l] += out_[g][l];
      }
      next += view.block->outputs;
    }
    for (int64_t d = 0; d < diagonal.count; ++d) {
      const int64_t entry = d * (diagonal.width + 1) - diagonal.begin;
      if (0 <= entry && entry < lanes) lag_row(all_lags_ / 2)[entry] -= T(1);
    }
    const double loss = square_residual(lanes, with_grad);
    if (!with_grad) return loss;
    std::fill_n(lag_row(-1), lanes, T(0));
    T* const* target = y.data();
    for (const BlockView<T>& view : blocks_) {
      for (int64_t g = 0; g < view.block->lags; ++g) in_[g] = lag_row(view.lag_of[g]);
      grid_.template transform_all<true>(view.mix, in_.data(), target, lanes);
      target += view.block->outputs;
    }
    return loss;
  }

 private:
  // With a gradient: scales the residual by 4 on the way, as the adjoint wants it.
  double square_residual(int64_t lanes, bool with_grad) {
    using V = typename Vector<T>::type;
    constexpr int64_t width = Vector<T>::width;
    V squares{};
    for (int64_t t = 0; t < all_lags_; ++t) {
      T* row = lag_row(t);
      for (int64_t l = 0; l < lanes; l += width) {
        const V value = load(row + l);
        squares += value * value;
        if (with_grad) store(value * T(4), row + l);
      }
    }
    double loss = 0;
    for (int64_t l = 0; l < width; ++l) loss += squares[l];
    return loss;
  }

  // One row more than there are lags: lags that are dropped are zero, or written there.
  T* lag_row(int64_t lag) { return residual_ + (lag < 0 ? all_lags_ : lag) * kStrip; }
  T* added(int64_t lag) { return residual_ + (all_lags_ + 1 + lag) * kStrip; }

  static int64_t most_rows(const std::vector<BlockView<T>>& blocks) {
    int64_t rows = 1;
    for (const BlockView<T>& view : blocks) rows = std::max(rows, Grid<T>::rows(view.mix));
    return rows;
  }

  T* memory_for(int64_t extra) {
    extra_ = scratch<T>(extra + (all_lags_ + 1 + rows_) * kStrip + Grid<T>::elements(rows_, kStrip));
    residual_ = extra_ + extra;
    return added(rows_);
  }

  const std::vector<BlockView<T>>& blocks_;
  const int64_t all_lags_, rows_;
  T *extra_ = nullptr, *residual_ = nullptr;
  Grid<T> grid_;
  std::vector<const T*> in_;
  std::vector<T*> out_;
};

// Calls visit(item, i, j) for items [begin, end) of the upper triangle of `side` tiles, row by row.
template <typename F>
inline void each_tile_pair(int64_t side, int64_t begin, int64_t end, const F& visit) {
  int64_t i = 0, place = begin;
  for (; place >= side - i; ++i) place -= side - i;
  int64_t j = i + place;
  for (int64_t item = begin; item < end; ++item) {
    visit(item, i, j);
    if (++j == side) j = ++i;
  }
}

template <typename T>
void mix_tiles(const Outputs<T>& x, const std::vector<BlockView<T>>& blocks, int64_t all_lags, int64_t group,
               bool with_grad, int64_t begin, int64_t end, double* losses) {
  // Outputs by the block's grid: 3 * output + kind, see PlanBlock.
  std::vector<int64_t> all;
  for (const BlockView<T>& view : blocks) all.insert(all.end(), view.output_of, view.output_of + view.block->outputs);
  const int64_t count = static_cast<int64_t>(all.size());
  Mixer<T> mixer(blocks, all_lags, count * kTileArea);
  T* const copies = mixer.extra();

  const int64_t side = x.side, tiles = (side + kTile - 1) / kTile;
  each_tile_pair(tiles, begin, end, [&](int64_t item, int64_t tile_i, int64_t tile_j) {
    const int64_t i = tile_i * kTile, j = tile_j * kTile;
    const int64_t height = std::min(kTile, side - i), width = std::min(kTile, side - j);
    const bool on_diagonal = tile_i == tile_j;
    const auto matrix = [&](int64_t o) { return x.data + (o * x.groups + group) * side * side; };
    const auto tile = [&](int64_t o) { return Tile<T>{matrix(o) + i * side + j, side, height, width}; };
    const auto mirror = [&](int64_t o) { return Tile<T>{matrix(o) + j * side + i, side, width, height}; };

    for (int64_t g = 0; g < count; ++g) {
      const bool transposed = all[g] % 3 == 1;
      load_tile(transposed ? mirror(all[g] / 3) : tile(all[g] / 3), transposed, copies + g * kTileArea);
    }
    double loss = 0;
    for (int64_t piece = 0; piece < kTileArea; piece += kStrip) {
      for (int64_t g = 0; g < count; ++g) mixer.x[g] = mixer.y[g] = copies + g * kTileArea + piece;
      loss += mixer.mix(kStrip, {piece, kTile, on_diagonal ? height : 0}, with_grad);
    }
    // A tile stands for its mirror image too, where lag t is what lag -t is here.
    losses[item] = (on_diagonal ? 1 : 2) * loss;

    for (int64_t g = 0; with_grad && g < count; ++g) {
      const int64_t o = all[g] / 3, kind = all[g] % 3;
      if (kind != 1) store_tile(copies + g * kTileArea, false, tile(o));
      if (kind != 0 && !on_diagonal) store_tile(copies + g * kTileArea, true, mirror(o));
    }
  });
}

template <typename T>
double diagonal_row(T* x, int64_t side, int64_t output, int64_t row, bool with_grad) {
  T* r = x + row * side;
  if (output == 0) r[row] -= T(1);
  T squares[kLanes] = {};
  int64_t j = 0;
  for (; j + kLanes <= side; j += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) squares[l] += r[j + l] * r[j + l];
  }
  double loss = 0;
  for (; j < side; ++j) loss += static_cast<double>(r[j]) * r[j];
  for (int64_t l = 0; l < kLanes; ++l) loss += squares[l];
  if (with_grad) {
    for (j = 0; j < side; ++j) r[j] *= T(4);
  }
  return output == 0 ? loss : 2 * loss;
}

template <typename S, typename T>
double small(const WeightView<const S>& weight, const WeightView<S>& grad, const TapPairs& pairs, int64_t groups,
             int64_t rows, int64_t channels, int64_t item) {
  using V = typename Vector<T>::type;
  constexpr int64_t count = Vector<T>::count;
  const int64_t taps = weight.taps, filter = channels * taps, first = item * kLanes;
  const int64_t lanes = std::min(kLanes, groups - first);
  const bool with_grad = grad.data != nullptr;
  std::vector<T> k(rows * filter * kLanes, T(0)), dk(with_grad ? k.size() : 0, T(0));
  const auto each_element = [&](const auto& view, auto&& visit) {
    for (int64_t l = 0; l < lanes; ++l) {
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t c = 0; c < channels; ++c) {
          auto* element = view.row((first + l) * rows + i) + c * view.channel_stride;
          for (int64_t u = 0; u < taps; ++u) {
            visit(element[view.tap_offsets[u]], ((i * channels + c) * taps + u) * kLanes + l);
          }
        }
      }
    }
  };
  each_element(weight, [&](const S& value, int64_t index) { k[index] = static_cast<T>(value); });

  double loss = 0;
  for (int64_t t = 0; t < pairs.lags; ++t) {
    const T weight_of_lag = t == 0 ? 1 : 2;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < rows; ++j) {
        V residual[count] = {};
        for (int64_t c = 0; c < channels; ++c) {
          for (int64_t n = pairs.lag_begin[t]; n < pairs.lag_begin[t + 1]; ++n) {
            const V* a = reinterpret_cast<const V*>(&k[(i * filter + c * taps + pairs.left[n]) * kLanes]);
            const V* b = reinterpret_cast<const V*>(&k[(j * filter + c * taps + pairs.right[n]) * kLanes]);
            for (int64_t v = 0; v < count; ++v) residual[v] += a[v] * b[v];
          }
        }
        T values[kLanes];
        std::memcpy(values, residual, sizeof(values));
        for (int64_t l = 0; l < kLanes; ++l) {
          if (t == 0 && i == j) values[l] -= T(1);
          if (l < lanes) loss += static_cast<double>(weight_of_lag) * values[l] * values[l];
          values[l] *= 2 * weight_of_lag;
        }
        if (!with_grad) continue;
        std::memcpy(residual, values, sizeof(values));
        for (int64_t c = 0; c < channels; ++c) {
          for (int64_t n = pairs.lag_begin[t]; n < pairs.lag_begin[t + 1]; ++n) {
            const int64_t left = (i * filter + c * taps + pairs.left[n]) * kLanes;
            const int64_t right = (j * filter + c * taps + pairs.right[n]) * kLanes;
            const V *a = reinterpret_cast<const V*>(&k[left]), *b = reinterpret_cast<const V*>(&k[right]);
            V *da = reinterpret_cast<V*>(&dk[left]), *db = reinterpret_cast<V*>(&dk[right]);
            // Not fused into one loop: left and right may be the same element.
            for (int64_t v = 0; v < count; ++v) da[v] += residual[v] * b[v];
            for (int64_t v = 0; v < count; ++v) db[v] += residual[v] * a[v];
          }
        }
      }
    }
  }
  if (with_grad) each_element(grad, [&](S& value, int64_t index) { value = static_cast<S>(dk[index]); });
  return loss;
}

template <typename S, typename T>
constexpr WeightStages<S, T> kWeightStages{evaluate<S, T>, gather<S, T>, small<S, T>};
template <typename T>
constexpr MixStage<T> kMixStage{mix_tiles<T>, diagonal_row<T>};

#if OCNN_FUSED_VECTOR_BYTES > 16
#include "panels.inl"
#endif
