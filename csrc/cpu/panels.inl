// Body of the stages on panels, see panels.h. Included by stages.inl, once per instruction set with long vectors.

// Lanes that evaluate and gather take at once: the rows on the way stay in the nearest cache.
constexpr int64_t kPanelStrip = 128;
// Elements of planes that a thread works on at once: 768 KB, which a core's own cache holds beside what it is
// multiplied with. Large layers take more, which the cores' common cache holds.
template <typename T>
constexpr int64_t kPieceElements = (int64_t{3} << 18) / sizeof(T);

// Longer sides are left to the BLAS: with vectors of 64 bytes it is not known who is faster there.
constexpr int64_t kWidestSide = OCNN_FUSED_VECTOR_BYTES == 64 ? kMiddlingSide : std::numeric_limits<int64_t>::max();

// A product's tile of rows times panels, kept in registers.
constexpr int64_t kTileRows = OCNN_FUSED_VECTOR_BYTES == 64 ? 8 : 4;
constexpr int64_t kTilePanels = 3;
// Terms of the sums that are added up at once: for as many, a tile's panels stay in the nearest cache while all rows
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
// tile.
template <Left kLeft, int64_t kRows, int64_t kPanels, bool kAhead, typename T>
__attribute__((noinline)) void multiply_tile(const T* left, int64_t left_panel, int64_t depth, const T* right,
                                             int64_t right_panel, T* out, int64_t out_panel, bool add, const T* ahead) {
  using V = typename Vector<T>::type;
  constexpr int64_t width = Vector<T>::width;
  // Of the left operand: steps that lie at equal distances, that distance, and the rows'.
  constexpr bool transposed = kLeft == Left::kTransposed;
  const int64_t run = transposed ? depth : width;
  constexpr int64_t step = transposed ? width : 1, row_step = transposed ? 1 : width;
  V sum[kRows][kPanels] = {};
  for (int64_t k = 0; k < depth; k += run, left += left_panel) {
    // As far as it takes for the loop's own instructions not to count, no further: instructions are cached too.
    _Pragma("GCC unroll 4") for (int64_t q = 0; q < run; ++q, right += width) {
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
template <Left kLeft, int64_t kPanels, int64_t kRows = kTileRows, typename T>
inline void multiply_rows(const T* left, int64_t left_panel, int64_t row, int64_t rows, int64_t depth, const T* right,
                          int64_t right_panel, T* out, int64_t out_panel, bool add, const T* next) {
  for (; row + kRows <= rows; row += kRows) {
    const T* const from = left_entry<kLeft>(left, left_panel, row, 0);
    T* const to = out + row * Vector<T>::width;
    // The panels that come next, one with each of the first tiles; for the others a read ahead is a read too many.
    if (row < kTilePanels * kRows) {
      multiply_tile<kLeft, kRows, kPanels, true>(from, left_panel, depth, right, right_panel, to, out_panel, add,
                                                 next + row / kRows * right_panel);
    } else {
      multiply_tile<kLeft, kRows, kPanels, false>(from, left_panel, depth, right, right_panel, to, out_panel, add,
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
template <Left kLeft, int64_t kPanels = kTilePanels, typename T>
inline void multiply_panels(const T* left, int64_t left_panel, int64_t rows, int64_t depth, const T* right,
                            int64_t right_panel, int64_t panels, T* out, int64_t out_panel, bool add, const T* next) {
  // Four panels are better two and two than three and one.
  for (; panels >= kPanels && (kPanels < 3 || panels != 4); panels -= kPanels) {
    multiply_rows<kLeft, kPanels>(left, left_panel, 0, rows, depth, right, right_panel, out, out_panel, add,
                                  panels > kPanels ? right + kPanels * right_panel : next);
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

// Rows of planes of a slice from those of taps: one orbit of the first axis (kPoints of them, see Slice) and all points
// of the second, which may have one tap only.
template <int64_t kPoints, int64_t kTaps0, int64_t kTaps1, typename T>
void taps_to_slice(const Factor<T>& first, int64_t orbit, const Factor<T>* second, const T* const* in, T* const* out,
                   int64_t lanes) {
  using V = typename Vector<T>::type;
  constexpr int64_t evens = (kTaps0 + 1) / 2, odds = kTaps0 / 2, points = points_of(kTaps1);
  const T *even_row = first.even + orbit * evens, *odd_row = orbit > 0 ? first.odd + (orbit - 1) * odds : nullptr;
  for (int64_t at = 0; at < lanes; at += Vector<T>::width) {
    V middle[kPoints * kTaps1];
    OCNN_FUSED_UNROLL
    for (int64_t j = 0; j < kTaps1; ++j) {
      V even{}, odd{};
      OCNN_FUSED_UNROLL
      for (int64_t q = 0; q < odds; ++q) {
        const V one = load(in[q * kTaps1 + j] + at), other = load(in[(kTaps0 - 1 - q) * kTaps1 + j] + at);
        even += (one + other) * even_row[q];
        if (orbit > 0) odd += (one - other) * odd_row[q];
      }
      if constexpr (evens > odds) even += load(in[odds * kTaps1 + j] + at) * even_row[odds];
      middle[j] = even + odd;
      if constexpr (kPoints > 1) middle[kTaps1 + j] = even - odd;
    }
    OCNN_FUSED_UNROLL
    for (int64_t a = 0; a < kPoints; ++a) {
      if constexpr (kTaps1 == 1) {
        store(middle[a], out[a] + at);
      } else {
        V row[points];
        registers_to_points<points, kTaps1, 1>(*second, middle + a * kTaps1, row);
        OCNN_FUSED_UNROLL
        for (int64_t g = 0; g < points; ++g) store(row[g], out[a * points + g] + at);
      }
    }
  }
}

// The transpose: rows of taps from those of planes, added to what is there if `add`.
template <int64_t kPoints, int64_t kTaps0, int64_t kTaps1, typename T>
void slice_to_taps(const Factor<T>& first, int64_t orbit, const Factor<T>* second, const T* const* in, T* const* out,
                   int64_t lanes, bool add) {
  using V = typename Vector<T>::type;
  constexpr int64_t evens = (kTaps0 + 1) / 2, odds = kTaps0 / 2, points = points_of(kTaps1);
  const T *even_row = first.even + orbit * evens, *odd_row = orbit > 0 ? first.odd + (orbit - 1) * odds : nullptr;
  for (int64_t at = 0; at < lanes; at += Vector<T>::width) {
    V middle[kPoints * kTaps1];
    OCNN_FUSED_UNROLL
    for (int64_t a = 0; a < kPoints; ++a) {
      if constexpr (kTaps1 == 1) {
        middle[a] = load(in[a] + at);
      } else {
        V row[points];
        OCNN_FUSED_UNROLL
        for (int64_t g = 0; g < points; ++g) row[g] = load(in[a * points + g] + at);
        registers_from_points<points, kTaps1, 1>(*second, row, middle + a * kTaps1);
      }
    }
    OCNN_FUSED_UNROLL
    for (int64_t j = 0; j < kTaps1; ++j) {
      const V other = kPoints > 1 ? middle[(kPoints - 1) * kTaps1 + j] : V{};
      const V sum = middle[j] + other, difference = middle[j] - other;
      OCNN_FUSED_UNROLL
      for (int64_t q = 0; q < odds; ++q) {
        const V even = sum * even_row[q], odd = orbit > 0 ? difference * odd_row[q] : V{};
        T *const target = out[q * kTaps1 + j] + at, *const mirror = out[(kTaps0 - 1 - q) * kTaps1 + j] + at;
        store(add ? load(target) + (even + odd) : even + odd, target);
        store(add ? load(mirror) + (even - odd) : even - odd, mirror);
      }
      if constexpr (evens > odds) {
        T* const target = out[odds * kTaps1 + j] + at;
        store(add ? load(target) + sum * even_row[odds] : sum * even_row[odds], target);
      }
    }
  }
}

// Planes of a slice, from the weight's taps and back to them, a strip at a time.
template <typename T>
class SliceWorker {
 public:
  SliceWorker(const std::vector<BlockView<T>>& blocks) {
    for (const BlockView<T>& view : blocks) {
      std::vector<Factor<T>> factors;
      for (const Factor<T>& factor : view.evaluation) {
        if (factor.points > 1) factors.push_back(factor);
      }
      Axes axes{view.block->taps, {}, {}};
      if (!factors.empty()) axes.first = factors[0];
      if (!factors.empty()) axes.others.assign(factors.begin() + 1, factors.end());
      rows_ = std::max({rows_, view.block->taps, view.block->planes, 2 * Grid<T>::rows(axes.others)});
      axes_.push_back(std::move(axes));
    }
    in_.resize(rows_);
    out_.resize(rows_);
  }

  // Of the strip's buffers, which the caller supplies.
  int64_t elements() const { return rows_ * kPanelStrip + Grid<T>::elements(rows_, kPanelStrip); }
  void use(T* memory) {
    middle_ = memory;
    grid_.emplace(memory + rows_ * kPanelStrip, rows_, kPanelStrip);
  }

  // plane(g) = sum over m of evaluation[g][m] tap(m), for all planes of the slice.
  template <typename Tap, typename Plane>
  void evaluate(const Slice& slice, int64_t lanes, const Tap& tap, const Plane& plane) {
    const Axes& axes = axes_[slice.block];
    if (axes.first.points == 0) {
      std::copy_n(tap(0), lanes, plane(0));
    } else if (axes.is_square()) {
      for (int64_t m = 0; m < axes.taps; ++m) in_[m] = tap(m);
      for (int64_t g = 0; g < slice.planes; ++g) out_[g] = plane(g);
      by_shape(slice, axes, [&]<int64_t kPoints, int64_t kTaps0, int64_t kTaps1>() {
        taps_to_slice<kPoints, kTaps0, kTaps1>(axes.first, slice.orbit, axes.others.data(), in_.data(), out_.data(),
                                               lanes);
      });
    } else {
      evaluate_by_strips(slice, axes, lanes, tap, plane);
    }
  }

  // tap(m) = sum over the slice's planes of evaluation[g][m] plane(g), added to what is there if `add`.
  template <typename Tap, typename Plane>
  void gather(const Slice& slice, int64_t lanes, const Tap& tap, const Plane& plane, bool add) {
    const Axes& axes = axes_[slice.block];
    if (axes.first.points == 0) {
      std::copy_n(plane(0), lanes, tap(0));
    } else if (axes.is_square()) {
      for (int64_t g = 0; g < slice.planes; ++g) in_[g] = plane(g);
      for (int64_t m = 0; m < axes.taps; ++m) out_[m] = tap(m);
      by_shape(slice, axes, [&]<int64_t kPoints, int64_t kTaps0, int64_t kTaps1>() {
        slice_to_taps<kPoints, kTaps0, kTaps1>(axes.first, slice.orbit, axes.others.data(), in_.data(), out_.data(),
                                               lanes, add);
      });
    } else {
      gather_by_strips(slice, axes, lanes, tap, plane, add);
    }
  }

 private:
  // Of a block: those with more than one tap.
  struct Axes {
    int64_t taps;
    Factor<T> first;
    std::vector<Factor<T>> others;
    // One axis, or two with as many taps: then everything stays in registers.
    bool is_square() const { return others.empty() || (others.size() == 1 && others[0].span == first.span); }
  };

  template <int64_t kTaps = 2, typename F>
  static void by_taps(int64_t taps, const F& f) {
    if (taps == kTaps) {
      f.template operator()<kTaps>();
    } else if constexpr (kTaps < kMostTaps) {
      by_taps<kTaps + 1>(taps, f);
    }
  }

  template <typename F>
  static void by_shape(const Slice& slice, const Axes& axes, const F& f) {
    by_taps(axes.first.span, [&]<int64_t kTaps>() {
      if (axes.others.empty()) {
        slice.points > 1 ? f.template operator()<2, kTaps, 1>() : f.template operator()<1, kTaps, 1>();
      } else {
        slice.points > 1 ? f.template operator()<2, kTaps, kTaps>() : f.template operator()<1, kTaps, kTaps>();
      }
    });
  }

  template <typename Tap, typename Plane>
  void evaluate_by_strips(const Slice& slice, const Axes& axes, int64_t lanes, const Tap& tap, const Plane& plane) {
    const int64_t inner = axes.taps / axes.first.span, rest = slice.planes / slice.points;
    for (int64_t at = 0; at < lanes; at += kPanelStrip) {
      const int64_t now = std::min(kPanelStrip, lanes - at);
      for (int64_t j = 0; j < inner; ++j) {
        for (int64_t u = 0; u < axes.first.span; ++u) in_[u] = tap(u * inner + j) + at;
        for (int64_t a = 0; a < slice.points; ++a) out_[a] = middle(a * inner + j);
        by_shape(slice, {0, axes.first, {}}, [&]<int64_t kPoints, int64_t kTaps0, int64_t kTaps1>() {
          taps_to_slice<kPoints, kTaps0, kTaps1, T>(axes.first, slice.orbit, nullptr, in_.data(), out_.data(), now);
        });
      }
      for (int64_t a = 0; a < slice.points; ++a) {
        for (int64_t j = 0; j < inner; ++j) in_[j] = middle(a * inner + j);
        for (int64_t g = 0; g < rest; ++g) out_[g] = plane(a * rest + g) + at;
        grid_->template transform_all<true>(axes.others, in_.data(), out_.data(), now);
      }
    }
  }

  template <typename Tap, typename Plane>
  void gather_by_strips(const Slice& slice, const Axes& axes, int64_t lanes, const Tap& tap, const Plane& plane,
                        bool add) {
    const int64_t inner = axes.taps / axes.first.span, rest = slice.planes / slice.points;
    for (int64_t at = 0; at < lanes; at += kPanelStrip) {
      const int64_t now = std::min(kPanelStrip, lanes - at);
      for (int64_t a = 0; a < slice.points; ++a) {
        for (int64_t g = 0; g < rest; ++g) in_[g] = plane(a * rest + g) + at;
        for (int64_t j = 0; j < inner; ++j) out_[j] = middle(a * inner + j);
        grid_->template transform_all<false>(axes.others, in_.data(), out_.data(), now);
      }
      for (int64_t j = 0; j < inner; ++j) {
        for (int64_t a = 0; a < slice.points; ++a) in_[a] = middle(a * inner + j);
        for (int64_t u = 0; u < axes.first.span; ++u) out_[u] = tap(u * inner + j) + at;
        by_shape(slice, {0, axes.first, {}}, [&]<int64_t kPoints, int64_t kTaps0, int64_t kTaps1>() {
          slice_to_taps<kPoints, kTaps0, kTaps1, T>(axes.first, slice.orbit, nullptr, in_.data(), out_.data(), now,
                                                    add);
        });
      }
    }
  }

  T* middle(int64_t row) { return middle_ + row * kPanelStrip; }

  std::vector<Axes> axes_;  // per block
  int64_t rows_ = 1;        // of the largest grid
  T* middle_ = nullptr;
  std::optional<Grid<T>> grid_;
  std::vector<const T*> in_;
  std::vector<T*> out_;
};

// Pointer to entry (s, n) of a problem in its weight.
template <typename S, typename Job>
inline S* weight_entry(const Job& job, const WeightView<S>& weight, int64_t problem, int64_t s, int64_t n) {
  const int64_t row = (job.first_problem + problem) * job.rows + (job.column ? n : s);
  return weight.row(row) + (job.column ? s : n) * weight.channel_stride;
}

// Whether the taps of all n lie one after the other, for every s.
template <typename S, typename T, typename Job>
inline bool is_transposable(const Job& job, const WeightView<S>& weight) {
  return std::is_same_v<std::remove_const_t<S>, T> && !job.column && weight.dense &&
         weight.channel_stride == weight.taps;
}

// Calls visit(first) for squares of width that cover `count`, the last of which may overlap its neighbour.
template <int64_t kWidth, typename F>
inline void each_cover(int64_t count, const F& visit) {
  for (int64_t q = 0; q < count; q += kWidth) visit(std::min(q, count - kWidth));
}

template <typename S, typename T>
void panel_load(const PanelJob<S, T>& job, int64_t begin, int64_t end) {
  using V = typename Vector<T>::type;
  constexpr int64_t width = Vector<T>::width;
  const WeightView<const S>& weight = job.weight;
  const int64_t taps = weight.taps, entries = job.length * taps;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t problem = item / job.panels, panel = item % job.panels, s = panel * width;
    const int64_t lanes = std::min(width, job.side - s);
    const auto target = [&](int64_t n, int64_t u) { return job.tap(problem, u) + (panel * job.length + n) * width; };
    if constexpr (std::is_same_v<S, T>) {
      if (is_transposable<const S, T>(job, weight) && lanes == width && entries >= width) {
        const T* rows[width];
        for (int64_t l = 0; l < width; ++l) rows[l] = weight_entry(job, weight, problem, s + l, 0);
        each_cover<width>(entries, [&](int64_t q) {
          V square[width];
          for (int64_t l = 0; l < width; ++l) square[l] = load(rows[l] + q);
          transpose<width>(square);
          int64_t n = q / taps, u = q % taps;
          for (int64_t l = 0; l < width; ++l) {
            store(square[l], target(n, u));
            if (++u == taps) u = 0, ++n;
          }
        });
        continue;
      }
    }
    for (int64_t n = 0; n < job.length; ++n) {
      const auto row = [&](int64_t u) { return target(n, u); };
      if (job.column) load_taps<T>(weight, weight_entry(job, weight, problem, s, n), lanes, row);
      for (int64_t l = job.column ? lanes : 0; l < width; ++l) {
        const S* const entry = l < lanes ? weight_entry(job, weight, problem, s + l, n) : nullptr;
        for (int64_t u = 0; u < taps; ++u) row(u)[l] = entry ? static_cast<T>(entry[weight.tap_offsets[u]]) : T(0);
      }
    }
  }
}

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

template <typename S, typename T>
void panel_gram(const PanelJob<S, T>& job, int64_t begin, int64_t end) {
  constexpr int64_t width = Vector<T>::width;
  const int64_t panels = job.panels, side = job.padded_side;
  SliceWorker<T> worker(job.blocks);
  int64_t first = 0;  // item of the slice
  for (int64_t problem = 0; problem < job.problems; ++problem) {
    for (const Slice& slice : job.slices) {
      const int64_t items = slice.items(panels);
      const int64_t from = std::max(begin - first, int64_t{0}), to = std::min(end - first, items);
      first += items;
      if (from >= to) continue;
      const BlockView<T>& view = job.blocks[slice.block];
      const int64_t length = view.block->residues * job.length;
      int64_t chunk = std::min(length, std::max(kDepth, kPieceElements<T> / (slice.planes * side)));
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
          // Rows of panels [p, last), from column panel j on.
          const auto rows = [&](int64_t p, int64_t last, int64_t j) {
            if (p >= last) return;
            multiply<Left::kTransposed>(left + p * apart, apart, (last - p) * width, count, right + j * apart, apart,
                                        panels - j, out + (j * side + p * width) * width, side * width, n > 0, right);
          };
          if (!product.is_symmetric()) {
            rows(low, high, 0);
            continue;
          }
          // Mix reads the upper triangle alone: an item is a row of panels and the row as far from the other end. A few
          // are taken at once, whatever that adds below the diagonal.
          const int64_t few = std::max<int64_t>(1, panels / 16);
          for (int64_t p = low; p < high; p += few) {
            const int64_t last = std::min(p + few, high), mirror = std::max(panels - last, last);
            rows(p, last, p);
            rows(mirror, panels - p, mirror);
          }
        }
      }
    }
  }
}

template <typename T>
inline void transpose_panel_tile(const T* from, T* to) {
  constexpr int64_t width = Vector<T>::width;
  typename Vector<T>::type square[width];
  for (int64_t r = 0; r < width; ++r) square[r] = load(from + r * width);
  transpose<width>(square);
  for (int64_t r = 0; r < width; ++r) store(square[r], to + r * width);
}

template <typename S, typename T>
void panel_mix(const PanelJob<S, T>& job, int64_t begin, int64_t end, double* losses) {
  constexpr int64_t width = Vector<T>::width, area = width * width, lanes = std::min(kStrip, area);
  const int64_t panels = job.panels, pairs = panels * (panels + 1) / 2;
  std::vector<int64_t> all;  // see mix_tiles
  for (const BlockView<T>& view : job.blocks) {
    all.insert(all.end(), view.output_of, view.output_of + view.block->outputs);
  }
  const int64_t count = static_cast<int64_t>(all.size());
  Mixer<T> mixer(job.blocks, job.all_lags, count * area);
  T* const copies = mixer.extra();  // of transposed tiles

  for (int64_t problem = begin / pairs; problem * pairs < end; ++problem) {
    const int64_t first = problem * pairs;
    each_tile_pair(
        panels, std::max(begin - first, int64_t{0}), std::min(end - first, pairs),
        [&](int64_t item, int64_t i, int64_t j) {
          const int64_t here = (j * panels + i) * area, there = (i * panels + j) * area;
          for (int64_t g = 0; g < count; ++g) {
            if (all[g] % 3 == 1) transpose_panel_tile(job.output(problem, all[g] / 3) + there, copies + g * area);
          }
          double loss = 0;
          for (int64_t piece = 0; piece < area; piece += lanes) {
            for (int64_t g = 0; g < count; ++g) {
              const int64_t o = all[g] / 3;
              T* const tile = job.output(problem, o) + here + piece;
              const bool is_transposed = all[g] % 3 == 1;
              mixer.x[g] = is_transposed ? copies + g * area + piece : tile;
              mixer.y[g] = is_transposed && job.with_grad() ? job.transposed(problem, o) + here + piece : tile;
            }
            loss +=
                mixer.mix(lanes, {piece, width, i == j ? std::min(width, job.side - i * width) : 0}, job.with_grad());
          }
          losses[first + item] = (i == j ? 1 : 2) * loss;
          for (int64_t g = 0; job.with_grad() && i != j && g < count; ++g) {
            T *const y = job.output(problem, all[g] / 3), *const transposed = job.transposed(problem, all[g] / 3);
            if (all[g] % 3 == 0) transpose_panel_tile(y + here, transposed + there);
            if (all[g] % 3 == 1) transpose_panel_tile(transposed + here, y + there);
            if (all[g] % 3 == 2) transpose_panel_tile(y + here, y + there);
          }
        });
  }
}

// Gradients of the taps of steps [begin, begin + count), in panels so far apart, into the weight's gradient.
template <typename S, typename T, typename Tap>
void store_gradient(const PanelJob<S, T>& job, int64_t problem, int64_t begin, int64_t count, int64_t apart,
                    const Tap& tap) {
  using V = typename Vector<T>::type;
  constexpr int64_t width = Vector<T>::width;
  const WeightView<S>& grad = job.grad;
  const int64_t taps = grad.taps, entries = count * taps;
  for (int64_t panel = 0; panel < job.panels; ++panel) {
    const int64_t s = panel * width, lanes = std::min(width, job.side - s);
    const auto source = [&](int64_t n, int64_t u) { return tap(u) + panel * apart + n * width; };
    if constexpr (std::is_same_v<S, T>) {
      if (is_transposable<S, T>(job, grad) && lanes == width && entries >= width) {
        T* rows[width];
        for (int64_t l = 0; l < width; ++l) rows[l] = weight_entry(job, grad, problem, s + l, begin);
        each_cover<width>(entries, [&](int64_t q) {
          V square[width];
          int64_t n = q / taps, u = q % taps;
          for (int64_t l = 0; l < width; ++l) {
            square[l] = load(source(n, u));
            if (++u == taps) u = 0, ++n;
          }
          transpose<width>(square);
          for (int64_t l = 0; l < width; ++l) store(square[l], rows[l] + q);
        });
        continue;
      }
    }
    for (int64_t n = 0; n < count; ++n) {
      const auto row = [&](int64_t u) { return source(n, u); };
      if (job.column) store_taps<T>(row, lanes, grad, weight_entry(job, grad, problem, s, begin + n));
      for (int64_t l = 0; !job.column && l < lanes; ++l) {
        S* const entry = weight_entry(job, grad, problem, s + l, begin + n);
        for (int64_t u = 0; u < taps; ++u) entry[grad.tap_offsets[u]] = static_cast<S>(row(u)[l]);
      }
    }
  }
}

// What the right plane of a product is multiplied with: Y^T, or Y where it is its own transpose.
template <typename S, typename T>
inline const T* first_operand(const PanelJob<S, T>& job, int64_t problem, const SliceProduct& product) {
  return product.is_symmetric() ? job.output(problem, product.out) : job.transposed(problem, product.out);
}

template <typename S, typename T>
void panel_apply(const PanelJob<S, T>& job, int64_t begin, int64_t end) {
  constexpr int64_t width = Vector<T>::width;
  const int64_t panels = job.panels, side = job.padded_side, taps = job.weight.taps;
  SliceWorker<T> worker(job.blocks);
  int64_t most = 0;
  for (const Slice& slice : job.slices) most = std::max(most, slice.planes);
  for (int64_t item = begin; item < end;) {
    const int64_t problem = item / job.length, n = item % job.length;
    const int64_t all = std::min(end - item, job.length - n);
    // Less than in gram, because all of Y passes through the cache too; but the larger it is, the more must it pay to
    // read it.
    const int64_t fits =
        std::max(std::clamp<int64_t>(side / 5, 24, 64), kPieceElements<T> / 3 / ((2 * most + taps) * side));
    const int64_t chunks = (all + fits - 1) / fits, even = (all + chunks - 1) / chunks;
    const int64_t count = std::min(all, (even + kTileRows - 1) / kTileRows * kTileRows);
    item += count;
    const int64_t apart = spread(count * width), stride = spread(panels * apart);
    T* const memory = scratch<T>((2 * most + taps) * stride + worker.elements());
    T *const planes = memory, *const gradients = memory + most * stride, *const gathered = gradients + most * stride;
    worker.use(gathered + taps * stride);
    const auto tap = [&](int64_t u) { return gathered + u * stride; };
    for (const Slice& slice : job.slices) {
      const BlockView<T>& view = job.blocks[slice.block];
      const bool is_first = &slice == job.slices.data() || (&slice - 1)->block != slice.block;
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

template <typename S, typename T>
constexpr PanelStages<S, T> kPanelStages{Vector<T>::width, kWidestSide,     panel_load<S, T>,
                                         panel_gram<S, T>, panel_mix<S, T>, panel_apply<S, T>};
