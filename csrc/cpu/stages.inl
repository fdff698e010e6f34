// Body of the elementwise stages. Included once per instruction set, inside a namespace of its own and with
// OCNN_FUSED_VECTOR_BYTES set; standard headers are included before, so that none of their inline functions is
// compiled for an instruction set the machine may lack.

template <typename T>
struct Vector {
  typedef T type __attribute__((vector_size(OCNN_FUSED_VECTOR_BYTES), aligned(alignof(T)), may_alias));
  static constexpr int64_t width = OCNN_FUSED_VECTOR_BYTES / sizeof(T);
  static constexpr int64_t count = kLanes / width;  // vectors per lane block
};

// out[r][lane] = sum_c matrix[r][c] * in[c][lane]: the one arithmetic of evaluate, mix and gather.
template <typename T, int kRows>
inline void combine_rows(const T* matrix, int64_t columns, const T* const* in, T* const* out) {
  using V = typename Vector<T>::type;
  constexpr int64_t width = Vector<T>::width, count = Vector<T>::count;
  // Enough independent accumulators to hide the latency of a multiply-add, few enough to stay in registers.
  constexpr int64_t step = std::min(count, kRows > 3 ? int64_t{2} : int64_t{4});
  for (int64_t first = 0; first < count; first += step) {
    V sum[kRows][step] = {};
    for (int64_t c = 0; c < columns; ++c) {
      const V* x = reinterpret_cast<const V*>(in[c] + first * width);
      for (int64_t r = 0; r < kRows; ++r) {
        const T factor = matrix[r * columns + c];
        for (int64_t v = 0; v < step; ++v) sum[r][v] += x[v] * factor;
      }
    }
    for (int64_t r = 0; r < kRows; ++r) {
      V* y = reinterpret_cast<V*>(out[r] + first * width);
      for (int64_t v = 0; v < step; ++v) y[v] = sum[r][v];
    }
  }
}

template <typename T>
inline void combine(const T* matrix, int64_t rows, int64_t columns, const T* const* in, T* const* out) {
  // Even pieces of at most six rows: a last piece of one row would take as long as a whole one.
  for (int64_t pieces = (rows + 5) / 6; pieces > 0; --pieces) {
    const int64_t some = (rows + pieces - 1) / pieces;
    switch (some) {
      case 6:
        combine_rows<T, 6>(matrix, columns, in, out);
        break;
      case 5:
        combine_rows<T, 5>(matrix, columns, in, out);
        break;
      case 4:
        combine_rows<T, 4>(matrix, columns, in, out);
        break;
      case 3:
        combine_rows<T, 3>(matrix, columns, in, out);
        break;
      case 2:
        combine_rows<T, 2>(matrix, columns, in, out);
        break;
      default:
        combine_rows<T, 1>(matrix, columns, in, out);
    }
    rows -= some;
    matrix += some * columns;
    out += some;
  }
}

template <typename T>
inline void combine_strip(const T* matrix, int64_t rows, int64_t columns, const T** in, T** out, int64_t lanes) {
  for (int64_t done = 0; done < lanes; done += kLanes) {
    combine(matrix, rows, columns, in, out);
    for (int64_t c = 0; c < columns; ++c) in[c] += kLanes;
    for (int64_t r = 0; r < rows; ++r) out[r] += kLanes;
  }
}

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
template <typename T, int64_t kStep = Vector<T>::width / 2>
inline void transpose(typename Vector<T>::type* rows) {
  using V = typename Vector<T>::type;
  constexpr auto lanes = std::make_index_sequence<Vector<T>::width>();
  for (int64_t r = 0; r < Vector<T>::width; ++r) {
    if (r & kStep) continue;
    const V low = lower_half<kStep>(rows[r], rows[r + kStep], lanes);
    rows[r + kStep] = upper_half<kStep>(rows[r], rows[r + kStep], lanes);
    rows[r] = low;
  }
  if constexpr (kStep > 1) transpose<T, kStep / 2>(rows);
}

// First taps of the vector-wide squares that cover `taps`; the last one overlaps its neighbour.
template <typename T, typename F>
inline void each_square(int64_t taps, const F& visit) {
  constexpr int64_t width = Vector<T>::width;
  for (int64_t u = 0; u < taps; u += width) visit(std::min(u, taps - width));
}

// Taps of `lanes` channels into a buffer with one row of kStrip lanes per tap.
template <typename S, typename T>
inline void load_taps(const WeightView<const S>& weight, const S* first, int64_t lanes, T* buffer) {
  using V = typename Vector<T>::type;
  constexpr int64_t width = Vector<T>::width;
  if (weight.channel_stride == 1) {
    for (int64_t u = 0; u < weight.taps; ++u) {
      const S* source = first + weight.tap_offsets[u];
      for (int64_t l = 0; l < lanes; ++l) buffer[u * kStrip + l] = static_cast<T>(source[l]);
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
        transpose<T>(rows);
        for (int64_t r = 0; r < width; ++r) *reinterpret_cast<V*>(buffer + (u + r) * kStrip + l) = rows[r];
      });
    }
  }
  for (; l < lanes; ++l) {
    const S* source = first + l * weight.channel_stride;
    for (int64_t u = 0; u < weight.taps; ++u) buffer[u * kStrip + l] = static_cast<T>(source[weight.tap_offsets[u]]);
  }
}

// The way back.
template <typename S, typename T>
inline void store_taps(const T* buffer, int64_t lanes, const WeightView<S>& weight, S* first) {
  using V = typename Vector<T>::type;
  constexpr int64_t width = Vector<T>::width;
  if (weight.channel_stride == 1) {
    for (int64_t u = 0; u < weight.taps; ++u) {
      S* target = first + weight.tap_offsets[u];
      for (int64_t l = 0; l < lanes; ++l) target[l] = static_cast<S>(buffer[u * kStrip + l]);
    }
    return;
  }
  int64_t l = 0;
  if constexpr (std::is_same_v<S, T>) {
    for (; weight.dense && weight.taps >= width && l + width <= lanes; l += width) {
      each_square<T>(weight.taps, [&](int64_t u) {
        V rows[width];
        for (int64_t r = 0; r < width; ++r) rows[r] = *reinterpret_cast<const V*>(buffer + (u + r) * kStrip + l);
        transpose<T>(rows);
        for (int64_t r = 0; r < width; ++r) {
          *reinterpret_cast<V*>(first + (l + r) * weight.channel_stride + u) = rows[r];
        }
      });
    }
  }
  for (; l < lanes; ++l) {
    S* target = first + l * weight.channel_stride;
    for (int64_t u = 0; u < weight.taps; ++u) target[weight.tap_offsets[u]] = static_cast<S>(buffer[u * kStrip + l]);
  }
}

// Buffers of evaluate and gather for one strip: taps on one end of the evaluation matrix, planes on the other.
template <typename T>
struct Strip {
  std::vector<T> taps, planes;
  std::vector<const T*> in;
  std::vector<T*> out;
  Strip(const BlockView<T>* blocks, int64_t block_count, int64_t weight_taps) {
    int64_t most_planes = 0, most_taps = 0;
    for (int64_t b = 0; b < block_count; ++b) {
      most_planes = std::max(most_planes, blocks[b].planes);
      most_taps = std::max(most_taps, blocks[b].taps);
    }
    // One row more than there are taps: it stays zero for evaluate and takes what belongs to no tap from gather.
    taps.assign((weight_taps + 1) * kStrip, T(0));
    planes.assign(most_planes * kStrip, T(0));
    in.resize(std::max(most_planes, most_taps));
    out.resize(std::max(most_planes, most_taps));
  }
  T* tap_row(const BlockView<T>& block, int64_t residue, int64_t m, int64_t weight_taps) {
    const int64_t u = block.sources[residue * block.taps + m];
    return taps.data() + (u < 0 ? weight_taps : u) * kStrip;
  }
  T* plane_row(int64_t p) { return planes.data() + p * kStrip; }
};

template <typename S, typename T>
void evaluate(const WeightView<const S>& weight, const BlockView<T>* blocks, int64_t block_count, const Window& window,
              int64_t begin, int64_t end) {
  const int64_t strips = window.strips(), channels = window.channels();
  Strip<T> strip(blocks, block_count, weight.taps);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t i = item / strips, c = item % strips * kStrip;
    const int64_t lanes = std::min(kStrip, channels - c);
    const S* source =
        weight.data + (window.row_begin + i) * weight.row_stride + (window.channel_begin + c) * weight.channel_stride;
    load_taps(weight, source, lanes, strip.taps.data());
    for (int64_t b = 0; b < block_count; ++b) {
      const BlockView<T>& block = blocks[b];
      for (int64_t r = 0; r < block.residues; ++r) {
        for (int64_t m = 0; m < block.taps; ++m) strip.in[m] = strip.tap_row(block, r, m, weight.taps);
        T* target = block.data + i * block.row_stride + r * channels + c;
        const bool whole = lanes % kLanes == 0;
        for (int64_t p = 0; p < block.planes; ++p) {
          strip.out[p] = whole ? target + p * block.plane_stride : strip.plane_row(p);
        }
        combine_strip(block.evaluation, block.planes, block.taps, strip.in.data(), strip.out.data(), lanes);
        for (int64_t p = 0; !whole && p < block.planes; ++p) {
          std::copy_n(strip.plane_row(p), lanes, target + p * block.plane_stride);
        }
      }
    }
  }
}

template <typename S, typename T>
void gather(const WeightView<S>& grad, const BlockView<T>* blocks, int64_t block_count, const Window& window,
            int64_t begin, int64_t end) {
  const int64_t strips = window.strips(), channels = window.channels();
  Strip<T> strip(blocks, block_count, grad.taps);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t i = item / strips, c = item % strips * kStrip;
    const int64_t lanes = std::min(kStrip, channels - c);
    for (int64_t b = 0; b < block_count; ++b) {
      const BlockView<T>& block = blocks[b];
      for (int64_t r = 0; r < block.residues; ++r) {
        const T* source = block.data + i * block.row_stride + r * channels + c;
        // Copied, because planes lie powers of two apart and would evict each other while they are read again.
        for (int64_t p = 0; p < block.planes; ++p) {
          std::copy_n(source + p * block.plane_stride, lanes, strip.plane_row(p));
          strip.in[p] = strip.plane_row(p);
        }
        for (int64_t m = 0; m < block.taps; ++m) strip.out[m] = strip.tap_row(block, r, m, grad.taps);
        combine_strip(block.evaluation_t, block.taps, block.planes, strip.in.data(), strip.out.data(), lanes);
      }
    }
    S* target = grad.data + (window.row_begin + i) * grad.row_stride + (window.channel_begin + c) * grad.channel_stride;
    store_taps(strip.taps.data(), lanes, grad, target);
  }
}

// A square of a matrix with row stride `stride`; what lies outside is read as zero and not written.
template <typename T>
struct Tile {
  T* data;
  int64_t stride, rows, columns;
  bool whole() const { return rows == kTile && columns == kTile; }
};

template <typename T>
inline void copy_tile(const Tile<T>& from, const Tile<T>& to) {
  for (int64_t i = 0; i < from.rows; ++i)
    std::copy_n(from.data + i * from.stride, from.columns, to.data + i * to.stride);
}

// sum = X + Y^T and difference = X - Y^T of a tile X and its mirror image Y.
template <typename T>
void split_tile(const Tile<T>& x, const Tile<T>& y, T* sum, T* difference) {
  using V = typename Vector<T>::type;
  constexpr int64_t width = Vector<T>::width;
  if (!x.whole() || !y.whole()) {
    T here[kTile * kTile] = {}, there[kTile * kTile] = {};
    const Tile<T> padded_x{here, kTile, kTile, kTile}, padded_y{there, kTile, kTile, kTile};
    copy_tile(x, padded_x);
    copy_tile(y, padded_y);
    return split_tile(padded_x, padded_y, sum, difference);
  }
  for (int64_t i = 0; i < kTile; i += width) {
    for (int64_t j = 0; j < kTile; j += width) {
      V mirror[width];
      for (int64_t r = 0; r < width; ++r) mirror[r] = *reinterpret_cast<const V*>(y.data + (j + r) * y.stride + i);
      transpose<T>(mirror);
      for (int64_t r = 0; r < width; ++r) {
        const V here = *reinterpret_cast<const V*>(x.data + (i + r) * x.stride + j);
        *reinterpret_cast<V*>(sum + (i + r) * kTile + j) = here + mirror[r];
        *reinterpret_cast<V*>(difference + (i + r) * kTile + j) = here - mirror[r];
      }
    }
  }
}

// The way back: X = sum + difference and, unless it is the same tile, Y^T = sum - difference.
template <typename T>
void join_tile(const T* sum, const T* difference, const Tile<T>& x, const Tile<T>& y) {
  using V = typename Vector<T>::type;
  constexpr int64_t width = Vector<T>::width;
  if (!x.whole() || !y.whole()) {
    T here[kTile * kTile], there[kTile * kTile];
    join_tile(sum, difference, Tile<T>{here, kTile, kTile, kTile}, Tile<T>{there, kTile, kTile, kTile});
    copy_tile(Tile<T>{here, kTile, x.rows, x.columns}, x);
    if (y.data != x.data) copy_tile(Tile<T>{there, kTile, y.rows, y.columns}, y);
    return;
  }
  for (int64_t i = 0; i < kTile; i += width) {
    for (int64_t j = 0; j < kTile; j += width) {
      V mirror[width];
      for (int64_t r = 0; r < width; ++r) {
        const V s = *reinterpret_cast<const V*>(sum + (i + r) * kTile + j);
        const V d = *reinterpret_cast<const V*>(difference + (i + r) * kTile + j);
        *reinterpret_cast<V*>(x.data + (i + r) * x.stride + j) = s + d;
        mirror[r] = s - d;
      }
      if (y.data == x.data) continue;
      transpose<T>(mirror);
      for (int64_t r = 0; r < width; ++r) *reinterpret_cast<V*>(y.data + (j + r) * y.stride + i) = mirror[r];
    }
  }
}

template <typename T>
double tile_pair(T* x, const MixView<T>& mix, int64_t groups, int64_t side, int64_t group, int64_t tile_i,
                 int64_t tile_j, bool with_grad, T* scratch) {
  constexpr int64_t area = kTile * kTile;
  const int64_t row = tile_i * kTile, column = tile_j * kTile;
  const int64_t rows = std::min(kTile, side - row), columns = std::min(kTile, side - column);
  const bool on_diagonal = tile_i == tile_j;
  T* sum = scratch;                                // x + y, then the symmetric part of Y; (outputs, area)
  T* difference = sum + mix.outputs * area;        // x - y, then the antisymmetric part of Y
  T* symmetric = difference + mix.outputs * area;  // of the residual; (lags, area)
  T* antisymmetric = symmetric + mix.lags * area;
  const auto tile = [&](int64_t o) {
    return Tile<T>{x + (o * groups + group) * side * side + row * side + column, side, rows, columns};
  };
  const auto mirror_tile = [&](int64_t o) {
    return Tile<T>{x + (o * groups + group) * side * side + column * side + row, side, columns, rows};
  };

  for (int64_t o = 0; o < mix.outputs; ++o) split_tile(tile(o), mirror_tile(o), sum + o * area, difference + o * area);

  // Lane pointers of one tile row; advanced row by row.
  const int64_t most = std::max(mix.outputs, mix.lags);
  std::vector<const T*> in(most);
  std::vector<T*> out(most);
  const auto apply_matrix = [&](const T* matrix, const T* source, int64_t inputs, T* target, int64_t results) {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t c = 0; c < inputs; ++c) in[c] = source + c * area + i * kTile;
      for (int64_t r = 0; r < results; ++r) out[r] = target + r * area + i * kTile;
      combine(matrix, results, inputs, in.data(), out.data());
    }
  };
  apply_matrix(mix.symmetric, sum, mix.outputs, symmetric, mix.lags);
  apply_matrix(mix.antisymmetric, difference, mix.outputs, antisymmetric, mix.lags - 1);

  if (on_diagonal) {
    for (int64_t i = 0; i < rows; ++i) symmetric[i * kTile + i] -= T(1);
  }
  // One entry stands for (i, j) and (j, i): weight 2 for lag 0 and 4 for a lag and its negative. A tile on the diagonal
  // holds both already.
  double loss = 0;
  for (int64_t t = 0; t < mix.lags; ++t) {
    T squares[kTile] = {};
    for (int64_t i = 0; i < rows; ++i) {
      const T* s = symmetric + t * area + i * kTile;
      for (int64_t j = 0; j < kTile; ++j) squares[j] += s[j] * s[j];
      if (t == 0) continue;
      const T* a = antisymmetric + (t - 1) * area + i * kTile;
      for (int64_t j = 0; j < kTile; ++j) squares[j] += a[j] * a[j];
    }
    double total = 0;
    for (int64_t j = 0; j < kTile; ++j) total += squares[j];
    loss += (t == 0 ? 2 : 4) * total;
  }
  if (on_diagonal) loss /= 2;
  if (!with_grad) return loss;

  apply_matrix(mix.symmetric_t, symmetric, mix.lags, sum, mix.outputs);
  apply_matrix(mix.antisymmetric_t, antisymmetric, mix.lags - 1, difference, mix.outputs);
  for (int64_t o = 0; o < mix.outputs; ++o) join_tile(sum + o * area, difference + o * area, tile(o), mirror_tile(o));
  return loss;
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
          auto* element = view.data + ((first + l) * rows + i) * view.row_stride + c * view.channel_stride;
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
constexpr MixStage<T> kMixStage{tile_pair<T>, diagonal_row<T>};
