// The CPU as a device of the pipeline: all stages on threads.
#pragma once

#include <numeric>
#include <vector>

#include "../pipeline.h"
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
  static constexpr int64_t kCopiedBytes = 0;  // another product costs less than a copy

  Device(const BilinearPlan& plan, const std::vector<BlockView<T>>& blocks, const Call& call)
      : plan_(plan), operands_(call, plan.target, plan.groups), blocks_(blocks), losses_(operands_.count, 0.0) {}

  void zero(T* data, int64_t elements) { std::fill_n(data, elements, T(0)); }

  void evaluate(const std::vector<Planes<T>>& planes, const Window& window) {
    each_strip(window, [&](int64_t begin, int64_t end) {
      stages<S, T>().evaluate(operands_.weight, blocks_, planes, window, begin, end);
    });
  }

  void gather(const std::vector<Planes<T>>& planes, const Window& window) {
    each_strip(window, [&](int64_t begin, int64_t end) {
      stages<S, T>().gather(operands_.grad, blocks_, planes, window, begin, end);
    });
  }

  void multiply(const Matrices<T>& out, const Matrices<T>& left, const Matrices<T>& right, bool add) {
    const int64_t strips = product_strips(out.columns, stages<S, T>().width);
    const double work = static_cast<double>(out.rows) * static_cast<double>(left.columns) *
                        static_cast<double>(out.columns) / static_cast<double>(strips);
    const int64_t elementwise = static_cast<int64_t>(work * (kElementwiseRate / kProductRate));
    share_items(out.batch * strips, elementwise,
                [&](int64_t begin, int64_t end) { stages<S, T>().multiply(out, left, right, add, begin, end); });
  }

  void mix(const Outputs<T>& x, bool with_grad) {
    const int64_t tiles = (x.side + kTile - 1) / kTile, pairs = tiles * (tiles + 1) / 2;
    for (int64_t group = 0; group < x.groups; ++group) {
      double& loss = losses_[(x.first_group + group) / plan_.groups];
      const Target<T> target = operands_.targets.view().at(x.first_group + group);
      const Wanted<T> wanted{with_grad, operands_.factors.view().at(x.first_group + group, target)};
      if (plan_.diagonal()) {
        const std::vector<double> partial = each_item(plan_.outputs * x.side, 2 * x.side, [&](int64_t item) {
          const int64_t output = item / x.side;
          T* matrix = x.data + (output * x.groups + group) * x.side * x.side;
          return stages<S, T>().mix_row(matrix, x.side, output, item % x.side, target, wanted);
        });
        loss += std::accumulate(partial.begin(), partial.end(), 0.0);  // in order, whatever thread computed them
        continue;
      }
      std::vector<double> partial(pairs);
      share_items(pairs, mix_work(), [&](int64_t begin, int64_t end) {
        stages<S, T>().mix(x, blocks_, 2 * plan_.lags - 1, group, target, wanted, begin, end, partial.data());
      });
      loss += std::accumulate(partial.begin(), partial.end(), 0.0);
    }
  }

  // Those of the rows, whichever side was worked on.
  void store_losses(const Call& call) const {
    for (int64_t w = 0; w < operands_.count; ++w) {
      call.store_loss(w, losses_[w] + operands_.targets.constant(w, plan_.offset));
    }
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
    share_items(strips.count(window), work, stage);
  }

  const BilinearPlan& plan_;
  const Operands<S, T> operands_;
  const std::vector<BlockView<T>>& blocks_;
  std::vector<double> losses_;
};

}  // namespace ocnn_fused::cpu
