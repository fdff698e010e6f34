// Plans with one product per output, in chunks that stay in the caches: load the taps, evaluate and gram as one, mix,
// and evaluate, apply and gather as one. Nothing but the taps and the outputs is kept between them.
//
// Matrices lie in panels as wide as a vector, so that products read all operands in order and need no copy of them:
// entry (s, n) of a plane, s along the Gram side, is element n * width + s % width of panel s / width.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "stages.h"

namespace ocnn_fused::cpu {

// Elements of planes in the chunk that a thread works on: 768 KB, which a core's own cache holds beside what they are
// multiplied with. Large layers take more, which the cores' common cache holds.
template <typename T>
constexpr int64_t kChunkElements = (int64_t{3} << 18) / sizeof(T);

// Output `out` is the product of planes left and right of a slice; its own transpose if they are one.
struct SliceProduct {
  int64_t left, right, out;
  bool is_symmetric() const { return left == right; }
  // Gram's work on it, in panels of rows: of a symmetric one only a triangle is computed.
  int64_t items(int64_t panels) const { return is_symmetric() ? (panels + 1) / 2 : panels; }
};

// Planes of a block that are made and multiplied together: all at one point of its first axis and at the mirror image.
struct Slice {
  int64_t block;
  int64_t orbit, points;  // the factor's row 0, or rows 2 * orbit - 1 and, of two points, 2 * orbit
  int64_t planes;
  std::vector<SliceProduct> products;
  int64_t items(int64_t panels) const {
    int64_t sum = 0;
    for (const SliceProduct& product : products) sum += product.items(panels);
    return sum;
  }
};

// The slices of all blocks.
template <typename T>
std::vector<Slice> slices_of(const std::vector<BlockView<T>>& blocks) {
  std::vector<Slice> slices;
  for (size_t b = 0; b < blocks.size(); ++b) {
    const BlockView<T>& view = blocks[b];
    int64_t points = 1;  // of the first axis that has more than one
    for (const PlanAxis& axis : view.block->axes) {
      if (points == 1) points = axis.planes;
    }
    const int64_t others = view.block->planes / points;
    // The short slice of point 0 comes between others, because there two threads divide the work.
    std::vector<int64_t> orbits(points / 2 + 1);
    std::iota(orbits.begin(), orbits.end(), 0);
    std::rotate(orbits.begin(), orbits.begin() + 1, orbits.begin() + static_cast<int64_t>(orbits.size() + 1) / 2);
    for (const int64_t orbit : orbits) {
      const int64_t first = orbit == 0 ? 0 : 2 * orbit - 1, last = std::min(2 * orbit + 1, points);
      Slice slice{static_cast<int64_t>(b), orbit, last - first, (last - first) * others, {}};
      const int64_t* const out = view.output_of + first * others;
      for (int64_t g = 0; g < slice.planes; ++g) {
        const OutputKind kind = view.kind_of(first * others + g);
        if (kind == OutputKind::kSymmetric) slice.products.push_back({g, g, out[g]});
        for (int64_t h = 0; kind == OutputKind::kStored && h < slice.planes; ++h) {
          if (h != g && out[h] == out[g]) slice.products.push_back({g, h, out[g]});
        }
      }
      slices.push_back(std::move(slice));
    }
  }
  return slices;
}

// Distances between matrices and panels are odd multiples of a line: what is read together must not evict each other.
inline int64_t spread(int64_t elements) { return ((elements + kLanes - 1) / kLanes | 1) * kLanes; }

// The axes of a block that have more than one tap.
template <typename T>
struct SliceAxes {
  explicit SliceAxes(const BlockView<T>& view) : taps(view.block->taps) {
    for (const Factor<T>& factor : view.evaluation) {
      if (factor.points == 1) continue;
      if (first.points == 0) {
        first = factor;
      } else {
        others.push_back(factor);
      }
    }
  }
  // One axis, or two with as many taps: then everything stays in registers.
  bool is_square() const { return others.empty() || (others.size() == 1 && others[0].span == first.span); }
  const Factor<T>* second() const { return others.empty() ? nullptr : others.data(); }

  int64_t taps;
  Factor<T> first{};  // no points: there is none
  std::vector<Factor<T>> others;
};

// What depends on a plan alone.
template <typename T>
struct PanelPlan {
  PanelPlan(const BilinearPlan& plan, const std::vector<BlockView<T>>& blocks)
      : blocks(blocks),
        outputs(grid_outputs(blocks)),
        axes(blocks.begin(), blocks.end()),
        slices(slices_of(blocks)),
        groups(plan.groups),
        all_lags(2 * plan.lags - 1),
        column(plan.column),
        stored(plan.outputs),
        transpose_of(plan.outputs) {
    for (const Slice& slice : slices) {
      most_planes = std::max(most_planes, slice.planes);
      for (const SliceProduct& product : slice.products) {
        if (!product.is_symmetric()) transpose_of[product.out] = transposes++;
      }
    }
    for (size_t b = 0; b < blocks.size(); ++b) {
      const PlanBlock& block = *blocks[b].block;
      slice_rows = std::max({slice_rows, block.taps, block.planes, 2 * grid_rows(axes[b].others)});
    }
  }

  const std::vector<BlockView<T>>& blocks;
  const std::vector<GridOutput> outputs;
  const std::vector<SliceAxes<T>> axes;  // of the blocks
  const std::vector<Slice> slices;
  const int64_t groups, all_lags;
  const bool column;
  const int64_t stored;               // outputs
  std::vector<int64_t> transpose_of;  // those that differ from their transposes: which of all transposes it is
  int64_t transposes = 0;
  int64_t most_planes = 1;  // of a slice
  int64_t slice_rows = 1;   // of the largest grid of a slice
};

// Problems, each a group of a weight, that are worked on together, and their memory.
template <typename S, typename T>
struct PanelJob {
  PanelJob(const PanelPlan<T>& plan, const WeightView<const S>& weight, const WeightView<S>& grad,
           const Targets<T>& targets, const Factors<T>& factors, int64_t channels, int64_t width)
      : plan(plan),
        weight(weight),
        grad(grad),
        targets(targets),
        factors(factors),
        column(plan.column),
        rows(weight.rows / plan.groups),
        side(plan.column ? channels : rows),
        length(plan.column ? rows : channels),
        panels((side + width - 1) / width),
        padded_side(panels * width),
        tap_stride(spread(padded_side * length)),
        output_stride(spread(padded_side * padded_side)),
        outputs(weight.taps * tap_stride),
        transposes(outputs + plan.stored * output_stride),
        elements(transposes + (with_grad() ? plan.transposes : 0) * output_stride) {
    for (const Slice& slice : plan.slices) gram_items += slice.items(panels);
  }

  bool with_grad() const { return grad.data != nullptr; }
  T* tap(int64_t problem, int64_t u) const { return memory + problem * elements + u * tap_stride; }
  T* output(int64_t problem, int64_t o) const { return memory + problem * elements + outputs + o * output_stride; }
  T* transposed(int64_t problem, int64_t o) const {
    return memory + problem * elements + transposes + plan.transpose_of[o] * output_stride;
  }

  const PanelPlan<T>& plan;
  const WeightView<const S> weight;
  const WeightView<S> grad;  // no data: no gradient is wanted
  const Targets<T> targets;
  const Factors<T> factors;
  const bool column;
  const int64_t rows, side, length;  // of a problem's weight, of the Gram matrices, of the contraction for one residue
  const int64_t panels, padded_side;
  // Per problem: the weight's taps, the outputs X or Y and, for the gradient, the transposes of those that differ.
  const int64_t tap_stride, output_stride, outputs, transposes;
  const int64_t elements;  // in all
  int64_t gram_items = 0;  // of all slices
  int64_t first_problem = 0, problems = 1;
  T* memory = nullptr;
};

// Work is given as ranges of items, for callers to split over threads: those of all problems, one after the other.
template <typename S, typename T>
struct PanelStages {
  int64_t width;  // of a panel
  // The weight's taps in panels; items: panels.
  void (*load)(const PanelJob<S, T>&, int64_t begin, int64_t end);
  // Planes V and X of all products; items: see SliceProduct.
  void (*gram)(const PanelJob<S, T>&, int64_t begin, int64_t end);
  // Y in place of X, and its transpose; items: pairs of panels. Writes one loss per item.
  void (*mix)(const PanelJob<S, T>&, int64_t begin, int64_t end, double* losses);
  // Planes V, their gradients G and dK; items: steps of the contraction, for one residue.
  void (*apply)(const PanelJob<S, T>&, int64_t begin, int64_t end);
};

template <typename S, typename T>
const PanelStages<S, T>& panel_stages();

// Whether a plan can be executed by these stages.
inline bool suits_panels(const BilinearPlan& plan) {
  if (plan.diagonal() || plan.flat) return false;
  if (plan.column && plan.pools[0].residues > 1) return false;  // lanes would be of several residues
  return std::all_of(plan.blocks.begin(), plan.blocks.end(),
                     [](const PlanBlock& block) { return block.outputs == block.planes; });
}

}  // namespace ocnn_fused::cpu
