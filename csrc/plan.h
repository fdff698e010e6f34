// A plan in the form in which compiled code takes it. Its index maps lie in one array of whole numbers, the entries of
// its matrices in another, both where the weights are; the structs hold positions in them. Written by
// ocnn_fused/backends/lowering.py.
#pragma once

#include <cstdint>
#include <vector>

namespace ocnn_fused {

// In one of the two arrays; -1 stands for none.
using Position = int64_t;

// One spatial axis of a block: evaluation (planes, taps) and mix (outputs, lags); -1 where the matrix is the identity.
// Both are stored by symmetry, see Factor in cpu/stages.h.
struct PlanAxis {
  int64_t planes, taps;
  Position evaluation;
  int64_t outputs;
  Position mix;
  int64_t lags() const { return 2 * taps - 1; }
};

// Planes of equal size that lie together, so that one batched product can serve several blocks.
struct PlanPool {
  int64_t planes, residues;
};

// How a block takes an output: as it is stored, transposed, or either, because it is its own transpose.
enum class OutputKind : int64_t { kStored, kTransposed, kSymmetric };

struct PlanBlock {
  int64_t pool;
  int64_t planes, taps, residues;
  Position evaluation;  // constants (planes, taps), rows in the order of the axes' grid: the product of its axes
  std::vector<PlanAxis> axes;
  Position plane_of;  // (planes), in the order of the axes' grid: where each plane lies in the pool
  // In the order of the axes' grid: which output, and how, see OutputKind.
  int64_t outputs;
  Position output_of, output_kind;
  // Lags in the order of the axes' grid, counted over all lags of the plan; -1 if one is dropped.
  int64_t lags;
  Position lag_of;
  Position sources;  // (residues, taps): flat tap index, -1 where a short phase has no tap
};

// `count` products (left + j, right + j) of a pool's planes; batched into outputs out + j, or summed into one.
struct PlanRun {
  int64_t pool, left, right, out, count;
  bool summed;
};

struct BilinearPlan {
  int64_t groups;
  bool column, flat;
  int64_t outputs;
  int64_t lags;    // zero and one of each pair t, -t: there are 2 * lags - 1 in all
  int64_t offset;  // see Plan.offset
  double target;   // see Targets in views.h
  // Whole mix matrices, see Plan.symmetric, Plan.antisymmetric and Plan.adjoint: (lags, outputs), (lags - 1, outputs),
  // (outputs, lags), (outputs, lags - 1). All -1 where the outputs are the lags themselves. The CPU backend, which
  // transforms axis by axis, gets none of them, nor the blocks' evaluation.
  Position symmetric, antisymmetric, symmetric_t, antisymmetric_t;
  std::vector<PlanPool> pools;
  std::vector<PlanBlock> blocks;
  std::vector<PlanRun> runs;
  bool diagonal() const { return symmetric < 0; }
};

// A plan for groups too small for matrix products: pairs of taps, sorted by lag, zero first.
struct SmallPlan {
  int64_t groups, taps, lags, pairs;
  double target;         // see Targets in views.h
  Position left, right;  // (pairs)
  Position lag_begin;    // (lags + 1), into the pairs
  // The same pairs sorted by tap, each once as left and once as right, for devices where a tap gathers its gradient.
  Position terms;      // (2 * pairs, 3): lag, the other tap, whether this one is the right
  Position tap_begin;  // (taps + 1), into the terms
};

// One axis of a Fourier plan. Cosine and sine (ceil(class taps / 2), class taps) are those of the angles between taps
// and frequencies, both counted from the middle, up to which they are stored; -1 for the last axis, which has lane
// tables.
struct FourierPlanAxis {
  int64_t axis;  // of the kernel
  int64_t taps, step;
  Position cosine, sine;
  int64_t class_taps() const { return (taps - 1) / step + 1; }
};

// A plan by Parseval, see FourierPlan in plan.py. Axes come shortest first; frequencies of the last are not negative.
struct FourierPlan {
  int64_t groups;
  bool column;
  int64_t offset;  // see Plan.offset
  double target;   // see Targets in views.h
  std::vector<FourierPlanAxis> axes;
  // Of the last axis, rows padded to whole vectors: (taps up to the middle, frequencies), and back, scaled by what a
  // frequency counts in the gradient, (frequencies, taps up to the middle).
  Position cosine, sine, cosine_back, sine_back;
};

}  // namespace ocnn_fused
