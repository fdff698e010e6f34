// mix: outputs to lags, loss, and back, tile by tile.
#pragma once

#include <algorithm>
#include <vector>

#include "transforms.h"

OCNN_FUSED_BEGIN_TARGET
namespace ocnn_fused::cpu::OCNN_FUSED_TARGET {

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

// Both tiles are whole.
template <typename T>
inline void transpose_tile(const Tile<T>& from, const Tile<T>& to) {
  constexpr int64_t width = Vector<T>::width;
  for (int64_t i = 0; i < kTile; i += width) {
    for (int64_t j = 0; j < kTile; j += width) {
      transpose_square<Vector<T>>([&](int64_t r) { return from.data + (j + r) * from.stride + i; },
                                  [&](int64_t r) { return to.data + (i + r) * to.stride + j; });
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
  T transposed_tile[kTileArea];
  if (transposed && to.whole()) return transpose_tile(source, to);
  if (transposed) {
    transpose_tile(source, Tile<T>{transposed_tile, kTile, kTile, kTile});
    source.data = transposed_tile;
  }
  source.rows = to.rows;
  source.columns = to.columns;
  copy_tile(source, to);
}

// Which entries of a strip lie on the diagonal: the strip begins at entry `begin` of a tile `width` wide, and the tile
// has `count` of them.
struct Diagonal {
  int64_t begin, width, count;
};

// Mixes a strip of a tile at a time, so that everything on the way stays in the nearest cache.
template <typename T>
class Mixer {
 public:
  // `area`: of a tile, of which the caller wants a copy for every one of the blocks' outputs.
  Mixer(const std::vector<BlockView<T>>& blocks, const std::vector<GridOutput>& outputs, int64_t all_lags, int64_t area)
      : outputs(outputs),
        blocks_(blocks),
        all_lags_(all_lags),
        rows_(most_rows(blocks)),
        area_(area),
        grid_(take_memory()) {}

  int64_t count() const { return static_cast<int64_t>(outputs.size()); }

  T* copy(int64_t g) { return copies_ + g * area_; }

  // Outputs block by block in the order of the grids, a row of entries for each, and where Y goes: there or elsewhere,
  // but on no row of x that comes later.
  const std::vector<GridOutput>& outputs;
  T **x = nullptr, **y = nullptr;

  // Returns the sum of squares of the residual.
  double mix(int64_t lanes, const Diagonal& diagonal, const Target<T>& target, const Wanted<T>& wanted) {
    const T* const* next = x;
    for (const BlockView<T>& view : blocks_) {
      const bool first = &view == blocks_.data();  // it has all lags, the others add to them
      for (int64_t g = 0; g < view.block->lags; ++g) out_[g] = first ? lag_row(view.lag_of[g]) : added(g);
      grid_.template transform_all<false>(view.mix, next, out_, lanes);
      for (int64_t g = 0; !first && g < view.block->lags; ++g) {
        T* row = lag_row(view.lag_of[g]);
        for (int64_t l = 0; l < lanes; ++l) row[l] += out_[g][l];
      }
      next += view.block->outputs;
    }
    for (int64_t d = 0; d < diagonal.count; ++d) {
      const int64_t entry = d * (diagonal.width + 1) - diagonal.begin;
      if (entry < 0 || entry >= lanes) continue;
      T& of_lag_0 = lag_row(all_lags_ / 2)[entry];
      of_lag_0 = target.residual(of_lag_0);
    }
    const double loss = square_residual(lanes, wanted);
    if (!wanted.grad) return loss;
    std::fill_n(lag_row(-1), lanes, T(0));
    T* const* next_y = y;
    for (const BlockView<T>& view : blocks_) {
      for (int64_t g = 0; g < view.block->lags; ++g) in_[g] = lag_row(view.lag_of[g]);
      grid_.template transform_all<true>(view.mix, in_, next_y, lanes);
      next_y += view.block->outputs;
    }
    return loss;
  }

 private:
  // With a gradient: scales the residual by 4 on the way, as the adjoint wants it, and by what is asked for.
  double square_residual(int64_t lanes, const Wanted<T>& wanted) {
    using V = typename Vector<T>::type;
    constexpr int64_t width = Vector<T>::width;
    V squares{};
    const T factor = 4 * wanted.factor;
    for (int64_t t = 0; t < all_lags_; ++t) {
      T* row = lag_row(t);
      for (int64_t l = 0; l < lanes; l += width) {
        const V value = load(row + l);
        squares += value * value;
        if (wanted.grad) store(value * factor, row + l);
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
    for (const BlockView<T>& view : blocks) rows = std::max(rows, grid_rows(view.mix));
    return rows;
  }

  Grid<T> take_memory() {
    x = scratch<T*>(2 * count() + 2 * rows_ + Grid<T>::pointers(rows_));
    y = x + count();
    in_ = y + count();
    out_ = in_ + rows_;
    const int64_t copies = count() * area_;
    copies_ = scratch<T>(copies + (all_lags_ + 1 + rows_) * kStrip + Grid<T>::elements(rows_, kStrip));
    residual_ = copies_ + copies;
    return Grid<T>(added(rows_), out_ + rows_, rows_, kStrip);
  }

  const std::vector<BlockView<T>>& blocks_;
  const int64_t all_lags_, rows_, area_;
  T *copies_ = nullptr, *residual_ = nullptr;
  T **in_ = nullptr, **out_ = nullptr;
  Grid<T> grid_;
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
               const Target<T>& target, const Wanted<T>& wanted, int64_t begin, int64_t end, double* losses) {
  const std::vector<GridOutput> outputs = grid_outputs(blocks);
  Mixer<T> mixer(blocks, outputs, all_lags, kTileArea);
  const int64_t count = mixer.count();
  const int64_t side = x.side, tiles = (side + kTile - 1) / kTile;
  each_tile_pair(tiles, begin, end, [&](int64_t item, int64_t tile_i, int64_t tile_j) {
    const int64_t i = tile_i * kTile, j = tile_j * kTile;
    const int64_t height = std::min(kTile, side - i), width = std::min(kTile, side - j);
    const bool on_diagonal = tile_i == tile_j;
    const auto matrix = [&](int64_t o) { return x.data + (o * x.groups + group) * side * side; };
    const auto tile = [&](int64_t o) { return Tile<T>{matrix(o) + i * side + j, side, height, width}; };
    const auto mirror = [&](int64_t o) { return Tile<T>{matrix(o) + j * side + i, side, width, height}; };

    for (int64_t g = 0; g < count; ++g) {
      const auto [o, kind] = mixer.outputs[g];
      const bool transposed = kind == OutputKind::kTransposed;
      load_tile(transposed ? mirror(o) : tile(o), transposed, mixer.copy(g));
    }
    double loss = 0;
    for (int64_t strip = 0; strip < kTileArea; strip += kStrip) {
      for (int64_t g = 0; g < count; ++g) mixer.x[g] = mixer.y[g] = mixer.copy(g) + strip;
      loss += mixer.mix(kStrip, {strip, kTile, on_diagonal ? height : 0}, target, wanted);
    }
    // A tile stands for its mirror image too, where lag t is what lag -t is here.
    losses[item] = (on_diagonal ? 1 : 2) * loss;

    for (int64_t g = 0; wanted.grad && g < count; ++g) {
      const auto [o, kind] = mixer.outputs[g];
      if (kind != OutputKind::kTransposed) store_tile(mixer.copy(g), false, tile(o));
      if (kind != OutputKind::kStored && !on_diagonal) store_tile(mixer.copy(g), true, mirror(o));
    }
  });
}

template <typename T>
double mix_row(T* x, int64_t side, int64_t output, int64_t row, const Target<T>& target, const Wanted<T>& wanted) {
  T* r = x + row * side;
  if (output == 0) r[row] = target.residual(r[row]);
  T squares[kLanes] = {};
  int64_t j = 0;
  for (; j + kLanes <= side; j += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) squares[l] += r[j + l] * r[j + l];
  }
  double loss = 0;
  for (; j < side; ++j) loss += static_cast<double>(r[j]) * r[j];
  for (int64_t l = 0; l < kLanes; ++l) loss += squares[l];
  if (wanted.grad) {
    const T factor = 4 * wanted.factor;
    for (j = 0; j < side; ++j) r[j] *= factor;
  }
  return output == 0 ? loss : 2 * loss;
}

}  // namespace ocnn_fused::cpu::OCNN_FUSED_TARGET
OCNN_FUSED_END_TARGET
