// A plan in the form in which compiled code takes it: whole numbers in one tensor, the entries of its matrices in
// another. Written by ocnn_fused/backends/lowering.py, field by field in the order of `read_plan`.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <vector>

namespace ocnn_fused {

// Positions in the two tensors are kept, not pointers: a device may hold copies of its own. -1 stands for none.
using Position = int64_t;

// One spatial axis of a block: evaluation (planes, taps) and mix (outputs, lags); -1 where the matrix is the identity.
// Both are stored by symmetry, see Factor in cpu/stages.h.
struct PlanAxis {
  int64_t planes, taps;
  Position evaluation;
  int64_t outputs;
  Position mix;
};

// Planes of equal size that lie together, so that one batched product can serve several blocks.
struct PlanPool {
  int64_t planes, residues;
};

struct PlanBlock {
  int64_t pool;
  int64_t planes, taps, residues;
  Position evaluation;  // constants (planes, taps), rows in the order of the axes' grid: the product of its axes
  std::vector<PlanAxis> axes;
  Position plane_of;  // (planes), in the order of the axes' grid: where each plane lies in the pool
  // Outputs in the order of the axes' grid: 3 * output + (0 as stored, 1 transposed, 2 if it is its own transpose), and
  // the lag that mix puts there, counted over all lags, -1 if that is dropped.
  int64_t outputs;
  Position output_of, lag_of;
  Position sources;  // (residues, taps): flat tap index, -1 where a short phase has no tap
};

// `count` products (left + j, right + j) of a pool's planes; batched into outputs out + j, or summed into one.
struct PlanRun {
  int64_t pool, left, right, out, count;
  bool summed;
};

struct LoweredPlan {
  int64_t groups;
  bool column, flat;
  int64_t outputs;
  int64_t lags;  // zero and one of each pair t, -t: there are 2 * lags - 1 in all
  int64_t offset;
  // Whole mix matrices, see Plan.symmetric, Plan.antisymmetric and Plan.adjoint: (lags, outputs), (lags - 1, outputs),
  // (outputs, lags), (outputs, lags - 1). All -1 where the outputs are the lags themselves.
  Position symmetric, antisymmetric, symmetric_t, antisymmetric_t;
  std::vector<PlanPool> pools;
  std::vector<PlanBlock> blocks;
  std::vector<PlanRun> runs;
  bool diagonal() const { return symmetric < 0; }
};

inline LoweredPlan read_plan(const at::Tensor& layout) {
  TORCH_CHECK_VALUE(layout.device().is_cpu() && layout.scalar_type() == at::kLong && layout.is_contiguous(),
                    "layout must be a contiguous int64 tensor on the CPU");
  const int64_t* const numbers = layout.const_data_ptr<int64_t>();
  const int64_t size = layout.numel();
  int64_t at = 0;
  const auto skip = [&](int64_t count) {
    const Position here = at;
    TORCH_CHECK_VALUE(count >= 0 && count <= size - at, "layout ends early: it was lowered by another version");
    at += count;
    return here;
  };
  const auto take = [&] { return numbers[skip(1)]; };

  LoweredPlan plan;
  plan.groups = take();
  plan.column = take() != 0;
  plan.flat = take() != 0;
  plan.outputs = take();
  plan.lags = take();
  plan.offset = take();
  plan.symmetric = take();
  plan.antisymmetric = take();
  plan.symmetric_t = take();
  plan.antisymmetric_t = take();
  plan.pools.resize(take());
  for (PlanPool& pool : plan.pools) {
    pool.planes = take();
    pool.residues = take();
  }
  plan.blocks.resize(take());
  for (PlanBlock& block : plan.blocks) {
    block.pool = take();
    block.planes = take();
    block.taps = take();
    block.residues = take();
    block.evaluation = take();
    block.axes.resize(take());
    for (PlanAxis& axis : block.axes) {
      axis.planes = take();
      axis.taps = take();
      axis.evaluation = take();
      axis.outputs = take();
      axis.mix = take();
    }
    block.plane_of = skip(block.planes);
    block.outputs = take();
    block.output_of = skip(block.outputs);
    block.lag_of = skip(block.outputs);
    block.sources = skip(block.residues * block.taps);
  }
  plan.runs.resize(take());
  for (PlanRun& run : plan.runs) {
    run.pool = take();
    run.left = take();
    run.right = take();
    run.out = take();
    run.count = take();
    run.summed = take() != 0;
  }
  TORCH_CHECK_VALUE(at == size, "layout has ", size - at, " numbers too many: it was lowered by another version");
  return plan;
}

}  // namespace ocnn_fused
