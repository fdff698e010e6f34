// The CPU as a device of the pipeline: elementwise stages on threads, products by the BLAS.
#pragma once

#include <numeric>
#include <vector>

#include "targets.h"
#include "tensors.h"
#include "threads.h"

namespace ocnn_fused::cpu {

template <typename S, typename T>
class Device {
 public:
  // Planes V and their gradients G of one chunk: always allowed this much, and as much as the self-convolution and its
  // residual would take, unless one narrow chunk needs more.
  static constexpr int64_t kPlaneBytes = int64_t{8} << 20;
  static constexpr int64_t kNarrowestChunk = 128;
  static constexpr int64_t kChunkMultiple = kLanes;
  static constexpr int64_t kCopiedBytes = 0;  // a call of the BLAS costs less than a copy

  Device(const LoweredPlan& plan, at::TensorList weights, at::TensorList grads, const at::Tensor& tables,
         const at::Tensor& constants, const Epilogue& epilogue)
      : plan_(plan),
        weights_(weights),
        grads_(grads, !epilogue.targets.empty()),
        targets_(plan.target, weights_.view(), static_cast<int64_t>(weights.size()), plan.groups, weights[0].size(1)),
        factors_(epilogue, plan.groups),
        blocks_(blocks_of<T>(plan, tables, constants)),
        losses_(weights.size(), 0.0) {}

  at::Tensor workspace(int64_t bytes) { return workspace_of_thread(bytes); }

  void zero(T* data, int64_t elements) { std::fill_n(data, elements, T(0)); }

  void evaluate(const std::vector<Planes<T>>& planes, const Window& window) {
    each_strip(window, [&](int64_t begin, int64_t end) {
      weight_stages<S, T>().evaluate(weights_.view(), blocks_, planes, window, begin, end);
    });
  }

  void gather(const std::vector<Planes<T>>& planes, const Window& window) {
    each_strip(window, [&](int64_t begin, int64_t end) {
      weight_stages<S, T>().gather(grads_.view(), blocks_, planes, window, begin, end);
    });
  }

  void mix(const Outputs<T>& x, bool with_grad) {
    const MixStage<T>& stage = mix_stage<T>();
    const int64_t tiles = (x.side + kTile - 1) / kTile, pairs = tiles * (tiles + 1) / 2;
    for (int64_t group = 0; group < x.groups; ++group) {
      double& loss = losses_[(x.first_group + group) / plan_.groups];
      const Target<T> target = targets_.view().at(x.first_group + group);
      const Wanted<T> wanted{with_grad, factors_.view().at(x.first_group + group, target)};
      if (plan_.diagonal()) {
        loss += ordered_sum(plan_.outputs * x.side, grain(2 * x.side), [&](int64_t item) {
          const int64_t output = item / x.side;
          T* matrix = x.data + (output * x.groups + group) * x.side * x.side;
          return stage.diagonal_row(matrix, x.side, output, item % x.side, target, wanted);
        });
        continue;
      }
      std::vector<double> partial(pairs);
      share_items(pairs, grain(mix_work()), [&](int64_t begin, int64_t end) {
        stage.tiles(x, blocks_, 2 * plan_.lags - 1, group, target, wanted, begin, end, partial.data());
      });
      loss += std::accumulate(partial.begin(), partial.end(), 0.0);
    }
  }

  // Of each weight; that of the rows, whichever side was worked on.
  std::vector<double> losses() const {
    std::vector<double> result = losses_;
    for (size_t w = 0; w < result.size(); ++w) result[w] += targets_.constant(static_cast<int64_t>(w), plan_.offset);
    return result;
  }

 private:
  // Multiply-adds along all axes of a grid, per lane.
  static int64_t grid_work(const std::vector<Factor<T>>& factors) {
    int64_t total = 0, outer = 1;
    for (const Factor<T>& factor : factors) outer *= factor.span;
    for (const Factor<T>& factor : factors) {
      outer = outer / factor.span * factor.points;
      total += outer * factor.span;
    }
    return total;
  }

  int64_t mix_work() const {
    int64_t total = 0;
    for (const BlockView<T>& view : blocks_) total += 2 * kTile * kTile * grid_work(view.mix);
    return total;
  }

  template <typename F>
  void each_strip(const Window& window, const F& stage) const {
    int64_t work = 0;
    for (const BlockView<T>& view : blocks_) work += view.block->residues * grid_work(view.evaluation);
    const Strips strips(window, most_residues(blocks_));
    work *= std::min(kStrip, (strips.rows * window.channels() + kLanes - 1) / kLanes * kLanes);  // idle lanes cost too
    share_items(strips.count(window), grain(work), stage);
  }

  const LoweredPlan& plan_;
  const Stacked<const S> weights_;
  const Stacked<S> grads_;
  const GroupTargets<S, T> targets_;
  const GroupFactors<T> factors_;
  const std::vector<BlockView<T>> blocks_;
  std::vector<double> losses_;
};

}  // namespace ocnn_fused::cpu
