// What the stages of a plan work on, and the table of their functions, which are compiled once per instruction set and
// chosen at run time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "../numbers.h"
#include "../plan.h"
#include "../views.h"
#include "switches.h"

namespace ocnn_fused::cpu {

// Rows of numbers are worked on in multiples of this: one cache line of float32.
constexpr int64_t kLanes = 16;
// Lanes that a transform takes at once: long enough a stretch of each plane for the memory system to stream.
constexpr int64_t kStrip = 4 * kLanes;
// Side of the square tiles that mix reads together with their mirror image.
constexpr int64_t kTile = kLanes;

// Weights K[row, channel, tap] of any strides, stacked: rows count on through all of them. tap_offsets maps a flat tap
// index to an element offset.
template <typename S>
struct WeightView {
  const std::uintptr_t* data;  // addresses of the weights
  int64_t rows;                // of one weight
  int64_t row_stride;
  int64_t channel_stride;
  const int64_t* tap_offsets;
  int64_t taps;
  bool dense;  // tap_offsets[u] == u
  bool adds;   // what is written is added to what is there
  S* row(int64_t i) const { return reinterpret_cast<S*>(data[i / rows]) + i % rows * row_stride; }
  WeightView from(int64_t weight) const {
    WeightView view = *this;
    if (data != nullptr) view.data += weight;
    return view;
  }
};

// A (points, span) matrix along one axis, whose rows 1, 2 | 3, 4 | ... are mirror images of each other, as the points
// p:q and q:p are; row 0 is its own, and of an even number of rows the last stands alone. Stored by symmetry: even (1 +
// pairs, ceil(span / 2)) acts on sums of elements at equal distance from both ends, odd (pairs, floor(span / 2)) on
// their differences. Identity: both null.
template <typename T>
struct Factor {
  int64_t points, span;
  const T* even;
  const T* odd;
  bool is_identity() const { return even == nullptr; }
};

// One block with its matrices and maps, see PlanBlock.
template <typename T>
struct BlockView {
  const PlanBlock* block;
  std::vector<Factor<T>> evaluation, mix;
  const int64_t *plane_of, *output_of, *output_kind, *lag_of, *sources;
  OutputKind kind_of(int64_t g) const { return static_cast<OutputKind>(output_kind[g]); }
};

// Rows of the largest grid on the way between spans on all axes and points on all axes.
template <typename T>
int64_t grid_rows(const std::vector<Factor<T>>& factors) {
  int64_t total = 1;
  for (const Factor<T>& factor : factors) total *= std::max(factor.points, factor.span);
  return total;
}

// One output of a block's grid.
struct GridOutput {
  int64_t output;
  OutputKind kind;
};

// The outputs of all blocks, one after the other.
template <typename T>
std::vector<GridOutput> grid_outputs(const std::vector<BlockView<T>>& blocks) {
  std::vector<GridOutput> all;
  for (const BlockView<T>& view : blocks) {
    for (int64_t g = 0; g < view.block->outputs; ++g) all.push_back({view.output_of[g], view.kind_of(g)});
  }
  return all;
}

// Whether a gradient is wanted, and what it is multiplied by.
template <typename T>
struct Wanted {
  bool grad;
  T factor;
};

// Tap pairs of a small plan, sorted by lag; lag 0 comes first.
struct TapPairs {
  const int64_t* left;
  const int64_t* right;
  const int64_t* lag_begin;  // (lags + 1)
  int64_t lags;
};

// A strip is what evaluate and gather work on at once: up to kStrip channels of one row, or several rows of few
// channels. If one row of the planes, all residues side by side, is short too, then they are worked on together.
struct Strips {
  Strips(const Window& window, int64_t residues)
      : folded(residues > 1 && residues * window.channels() <= kStrip),
        rows(rows_of(folded ? residues * window.channels() : window.channels())),
        across((window.channels() + kStrip - 1) / kStrip) {}
  int64_t count(const Window& window) const { return (window.rows() + rows - 1) / rows * across; }
  const bool folded;
  const int64_t rows, across;  // per strip, strips per row

 private:
  // As many as fit, and fill whole vectors if they can.
  static int64_t rows_of(int64_t width) {
    const int64_t most = std::max<int64_t>(1, kStrip / width), whole = kLanes / std::gcd(kLanes, width);
    return most < whole ? most : most / whole * whole;
  }
};

// The largest number of residues of a block.
template <typename T>
int64_t most_residues(const std::vector<BlockView<T>>& blocks) {
  int64_t most = 1;
  for (const BlockView<T>& view : blocks) most = std::max(most, view.block->residues);
  return most;
}

// Columns of a product that are an item of its work: so many vectors, which fit the nearest cache for kDepth rows.
constexpr int64_t kStripVectors = 3;
inline int64_t product_strips(int64_t columns, int64_t width) {
  return (columns + kStripVectors * width - 1) / (kStripVectors * width);
}

// The stages of the pipeline, and of small plans. Ranges of work items let the caller split them over threads.
template <typename S, typename T>
struct Stages {
  int64_t width;  // of a vector
  // V = E K on strips [begin, end).
  void (*evaluate)(const WeightView<const S>&, const std::vector<BlockView<T>>&, const std::vector<Planes<T>>&,
                   const Window&, int64_t begin, int64_t end);
  // dK = E^T G on strips [begin, end).
  void (*gather)(const WeightView<S>&, const std::vector<BlockView<T>>&, const std::vector<Planes<T>>&, const Window&,
                 int64_t begin, int64_t end);
  // R = mix(X) - a I and, in place of X, Y = 4 f mix^T(R), on tiles [begin, end) of one group's upper triangle of tiles
  // and their mirror images; writes one loss per tile.
  void (*mix)(const Outputs<T>&, const std::vector<BlockView<T>>&, int64_t all_lags, int64_t group, const Target<T>&,
              const Wanted<T>&, int64_t begin, int64_t end, double* losses);
  // The same where outputs are lags: row `row` of output `output`. Returns its loss.
  double (*mix_row)(T* x, int64_t side, int64_t output, int64_t row, const Target<T>&, const Wanted<T>&);
  // out = left right, or added to it, on items [begin, end): strips of columns, see
  // product_strips, of all matrices.
  void (*multiply)(const Matrices<T>& out, const Matrices<T>& left, const Matrices<T>& right, bool add, int64_t begin,
                   int64_t end);
  // The whole pass for kLanes groups at once: the `item`-th of them; returns their loss; writes dK if grad.data is set.
  // `factors`: of the groups' gradients.
  double (*small)(const WeightView<const S>&, const WeightView<S>& grad, const TapPairs&, const Targets<T>&,
                  const Factors<T>& factors, int64_t groups, int64_t rows, int64_t channels, int64_t item);
};

template <typename S, typename T>
const Stages<S, T>& stages();

}  // namespace ocnn_fused::cpu
