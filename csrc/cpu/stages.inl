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
  constexpr int64_t step = count < 8 / kRows ? count : 8 / kRows;
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
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) combine_rows<T, 4>(matrix + r * columns, columns, in, out + r);
  for (; r < rows; ++r) combine_rows<T, 1>(matrix + r * columns, columns, in, out + r);
}

template <typename S, typename T>
void evaluate(const WeightView<const S>& weight, const BlockView<T>* blocks, int64_t block_count, const Window& window,
              int64_t begin, int64_t end) {
  const int64_t lane_blocks = window.lane_blocks(), channels = window.channels();
  int64_t most_planes = 0, most_taps = 0;
  for (int64_t b = 0; b < block_count; ++b) {
    most_planes = std::max(most_planes, blocks[b].planes);
    most_taps = std::max(most_taps, blocks[b].taps);
  }
  // The last row stays zero: taps that a short phase lacks point there.
  std::vector<T> taps((weight.taps + 1) * kLanes, T(0)), tail(most_planes * kLanes);
  std::vector<const T*> in(most_taps);
  std::vector<T*> out(most_planes);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t i = item / lane_blocks, c = item % lane_blocks * kLanes;
    const int64_t lanes = std::min(kLanes, channels - c);
    const S* source = weight.data + (window.row_begin + i) * weight.row_stride +
                      (window.channel_begin + c) * weight.channel_stride;
    for (int64_t l = 0; l < lanes; ++l) {
      const S* element = source + l * weight.channel_stride;
      for (int64_t u = 0; u < weight.taps; ++u) taps[u * kLanes + l] = static_cast<T>(element[weight.tap_offsets[u]]);
    }
    for (int64_t b = 0; b < block_count; ++b) {
      const BlockView<T>& block = blocks[b];
      for (int64_t r = 0; r < block.residues; ++r) {
        for (int64_t m = 0; m < block.taps; ++m) {
          const int64_t u = block.sources[r * block.taps + m];
          in[m] = taps.data() + (u < 0 ? weight.taps : u) * kLanes;
        }
        T* target = block.data + i * block.row_stride + r * channels + c;
        for (int64_t p = 0; p < block.planes; ++p) {
          out[p] = lanes == kLanes ? target + p * block.plane_stride : tail.data() + p * kLanes;
        }
        combine(block.evaluation, block.planes, block.taps, in.data(), out.data());
        if (lanes == kLanes) continue;
        for (int64_t p = 0; p < block.planes; ++p) {
          std::copy_n(out[p], lanes, target + p * block.plane_stride);
        }
      }
    }
  }
}

template <typename S, typename T>
void gather(const WeightView<S>& grad, const BlockView<T>* blocks, int64_t block_count, const Window& window,
            int64_t begin, int64_t end) {
  const int64_t lane_blocks = window.lane_blocks(), channels = window.channels();
  int64_t most_planes = 0, most_taps = 0;
  for (int64_t b = 0; b < block_count; ++b) {
    most_planes = std::max(most_planes, blocks[b].planes);
    most_taps = std::max(most_taps, blocks[b].taps);
  }
  // The last row takes what belongs to no tap.
  std::vector<T> taps((grad.taps + 1) * kLanes), tail(most_planes * kLanes, T(0));
  std::vector<const T*> in(most_planes);
  std::vector<T*> out(most_taps);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t i = item / lane_blocks, c = item % lane_blocks * kLanes;
    const int64_t lanes = std::min(kLanes, channels - c);
    for (int64_t b = 0; b < block_count; ++b) {
      const BlockView<T>& block = blocks[b];
      for (int64_t r = 0; r < block.residues; ++r) {
        const T* source = block.data + i * block.row_stride + r * channels + c;
        for (int64_t p = 0; p < block.planes; ++p) {
          in[p] = source + p * block.plane_stride;
          if (lanes == kLanes) continue;
          std::copy_n(in[p], lanes, tail.data() + p * kLanes);
          in[p] = tail.data() + p * kLanes;
        }
        for (int64_t m = 0; m < block.taps; ++m) {
          const int64_t u = block.sources[r * block.taps + m];
          out[m] = taps.data() + (u < 0 ? grad.taps : u) * kLanes;
        }
        combine(block.evaluation_t, block.taps, block.planes, in.data(), out.data());
      }
    }
    S* target = grad.data + (window.row_begin + i) * grad.row_stride + (window.channel_begin + c) * grad.channel_stride;
    for (int64_t l = 0; l < lanes; ++l) {
      S* element = target + l * grad.channel_stride;
      for (int64_t u = 0; u < grad.taps; ++u) element[grad.tap_offsets[u]] = static_cast<S>(taps[u * kLanes + l]);
    }
  }
}

// The part of a tile that lies inside the matrix; the rest is read as zero and never written.
struct Tile {
  int64_t row, column, rows, columns;
  Tile(int64_t side, int64_t tile_i, int64_t tile_j)
      : row(tile_i * kTile),
        column(tile_j * kTile),
        rows(std::min(kTile, side - row)),
        columns(std::min(kTile, side - column)) {}
};

template <typename T>
double tile_pair(T* x, const MixView<T>& mix, int64_t groups, int64_t side, int64_t group, int64_t tile_i,
                 int64_t tile_j, bool with_grad, T* scratch) {
  constexpr int64_t area = kTile * kTile;
  const Tile tile(side, tile_i, tile_j);
  const bool on_diagonal = tile_i == tile_j;
  T* sum = scratch;                        // x + y, then the symmetric part of Y; (outputs, area)
  T* difference = sum + mix.outputs * area;  // x - y, then the antisymmetric part of Y
  T* symmetric = difference + mix.outputs * area;  // of the residual; (lags, area)
  T* antisymmetric = symmetric + mix.lags * area;
  const auto output = [&](int64_t o) { return x + (o * groups + group) * side * side; };

  T mirror[area];
  for (int64_t o = 0; o < mix.outputs; ++o) {
    const T* here = output(o) + tile.row * side + tile.column;
    const T* there = output(o) + tile.column * side + tile.row;
    T *s = sum + o * area, *d = difference + o * area;
    if (tile.rows < kTile || tile.columns < kTile) {
      std::fill_n(mirror, area, T(0));
      std::fill_n(s, area, T(0));
      std::fill_n(d, area, T(0));
    }
    for (int64_t j = 0; j < tile.columns; ++j) {
      for (int64_t i = 0; i < tile.rows; ++i) mirror[i * kTile + j] = there[j * side + i];
    }
    for (int64_t i = 0; i < tile.rows; ++i) {
      for (int64_t j = 0; j < tile.columns; ++j) {
        const T a = here[i * side + j], b = mirror[i * kTile + j];
        s[i * kTile + j] = a + b;
        d[i * kTile + j] = a - b;
      }
    }
  }

  // Lane pointers of one tile row; advanced row by row.
  const int64_t most = std::max(mix.outputs, mix.lags);
  std::vector<const T*> in(most);
  std::vector<T*> out(most);
  const auto apply_matrix = [&](const T* matrix, const T* source, int64_t columns, T* target, int64_t rows) {
    for (int64_t i = 0; i < tile.rows; ++i) {
      for (int64_t c = 0; c < columns; ++c) in[c] = source + c * area + i * kTile;
      for (int64_t r = 0; r < rows; ++r) out[r] = target + r * area + i * kTile;
      combine(matrix, rows, columns, in.data(), out.data());
    }
  };
  apply_matrix(mix.symmetric, sum, mix.outputs, symmetric, mix.lags);
  apply_matrix(mix.antisymmetric, difference, mix.outputs, antisymmetric, mix.lags - 1);

  if (on_diagonal) {
    for (int64_t i = 0; i < tile.rows; ++i) symmetric[i * kTile + i] -= T(1);
  }
  // One entry stands for (i, j) and (j, i): weight 2 for lag 0 and 4 for a lag and its negative. A tile on the diagonal
  // holds both already.
  double loss = 0;
  for (int64_t t = 0; t < mix.lags; ++t) {
    T squares[kTile] = {};
    for (int64_t i = 0; i < tile.rows; ++i) {
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
  for (int64_t o = 0; o < mix.outputs; ++o) {
    T* here = output(o) + tile.row * side + tile.column;
    T* there = output(o) + tile.column * side + tile.row;
    const T *s = sum + o * area, *d = difference + o * area;
    for (int64_t i = 0; i < tile.rows; ++i) {
      for (int64_t j = 0; j < tile.columns; ++j) here[i * side + j] = s[i * kTile + j] + d[i * kTile + j];
    }
    if (on_diagonal) continue;
    for (int64_t i = 0; i < tile.rows; ++i) {
      for (int64_t j = 0; j < tile.columns; ++j) mirror[i * kTile + j] = s[i * kTile + j] - d[i * kTile + j];
    }
    for (int64_t j = 0; j < tile.columns; ++j) {
      for (int64_t i = 0; i < tile.rows; ++i) there[j * side + i] = mirror[i * kTile + j];
    }
  }
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
