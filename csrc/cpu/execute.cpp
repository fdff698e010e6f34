// The CPU as a device of the pipeline, and its ops: elementwise stages on ATen's threads.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cstring>
#include <numeric>
#include <tuple>

#include "../pipeline.h"
#include "panels.h"
#include "stages.h"

namespace ocnn_fused::cpu {
namespace {

// Workspace kept by a thread between calls: fresh memory costs more than the stages that write it.
constexpr int64_t kKeptBytes = int64_t{128} << 20;
// Problems on panels are worked on together up to this much memory: it should fit the cores' own caches.
constexpr int64_t kSpanBytes = int64_t{2} << 20;
// Multiply-adds below which another thread does not pay.
constexpr int64_t kThreadWork = int64_t{1} << 18;

int64_t grain(int64_t work_per_item) { return std::max<int64_t>(1, kThreadWork / std::max<int64_t>(1, work_per_item)); }

std::vector<int64_t> tap_offsets(const at::Tensor& weight) {
  std::vector<int64_t> offsets{0};
  for (int64_t axis = 2; axis < weight.dim(); ++axis) {
    std::vector<int64_t> next;
    next.reserve(offsets.size() * weight.size(axis));
    for (const int64_t offset : offsets) {
      for (int64_t u = 0; u < weight.size(axis); ++u) next.push_back(offset + u * weight.stride(axis));
    }
    offsets = std::move(next);
  }
  return offsets;
}

// Pointers into weights of one shape and strides, and what a view of them needs.
template <typename S>
class Stacked {
 public:
  explicit Stacked(at::TensorList weights) {
    if (weights.empty()) return;
    const at::Tensor& first = weights[0];
    offsets_ = tap_offsets(first);
    for (const at::Tensor& weight : weights) data_.push_back(data_of<S>(weight));
    const int64_t taps = static_cast<int64_t>(offsets_.size());
    bool dense = true;
    for (int64_t u = 0; u < taps; ++u) dense = dense && offsets_[u] == u;
    view_ = {data_.data(), first.size(0), first.stride(0), first.stride(1), offsets_.data(), taps, dense};
  }
  const WeightView<S>& view() const { return view_; }

 private:
  std::vector<S*> data_;
  std::vector<int64_t> offsets_;
  WeightView<S> view_{};
};

// Runs item(i) for all items on ATen's threads and adds up the results in order, whatever thread computed them.
template <typename F>
double ordered_sum(int64_t items, int64_t grain, const F& item) {
  std::vector<double> partial(items);
  at::parallel_for(0, items, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) partial[i] = item(i);
  });
  return std::accumulate(partial.begin(), partial.end(), 0.0);
}

// The loss is a sum of squares: what rounding leaves below zero is zero (and NaN stays NaN).
at::Tensor loss_tensor(double loss, const at::Tensor& like) {
  const double value = loss < 0 ? 0.0 : loss;
  const bool wide = like.scalar_type() == at::kDouble;
  at::Tensor result = at::empty({}, like.options().dtype(wide ? at::kDouble : at::kFloat));
  if (wide) {
    *result.mutable_data_ptr<double>() = value;
  } else {
    *result.mutable_data_ptr<float>() = static_cast<float>(value);
  }
  return result;
}

// The blocks of a plan with their matrices and maps.
template <typename T>
std::vector<BlockView<T>> blocks_of(const LoweredPlan& plan, const at::Tensor& tables, const at::Tensor& constants) {
  const int64_t* numbers = tables.const_data_ptr<int64_t>();
  const T* values = constants.const_data_ptr<T>();
  const auto factor = [&](int64_t points, int64_t span, Position at) -> Factor<T> {
    if (at < 0) return {points, span, nullptr, nullptr};
    return {points, span, values + at, values + at + (points / 2 + 1) * ((span + 1) / 2)};
  };
  std::vector<BlockView<T>> blocks;
  for (const PlanBlock& block : plan.blocks) {
    BlockView<T> view{&block,
                      {},
                      {},
                      numbers + block.plane_of,
                      numbers + block.output_of,
                      numbers + block.lag_of,
                      numbers + block.sources};
    for (const PlanAxis& axis : block.axes) {
      view.evaluation.push_back(factor(axis.planes, axis.taps, axis.evaluation));
      view.mix.push_back(factor(axis.outputs, axis.lags(), axis.mix));
    }
    blocks.push_back(std::move(view));
  }
  return blocks;
}

// Memory of this thread, grown on demand and reused; its contents are undefined.
at::Tensor workspace_of_thread(int64_t bytes) {
  thread_local at::Tensor kept;
  at::Tensor memory = kept;
  if (!memory.defined() || memory.nbytes() < static_cast<size_t>(bytes)) {
    kept.reset();
    memory = at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
    if (bytes <= kKeptBytes) kept = memory;
  }
  if (fills_undefined_memory()) std::memset(memory.data_ptr(), kUndefinedByte, memory.nbytes());
  return memory;
}

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
         const at::Tensor& constants)
      : plan_(plan),
        weights_(weights),
        grads_(grads),
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
      if (plan_.diagonal()) {
        loss += ordered_sum(plan_.outputs * x.side, grain(2 * x.side), [&](int64_t item) {
          const int64_t output = item / x.side;
          T* matrix = x.data + (output * x.groups + group) * x.side * x.side;
          return stage.diagonal_row(matrix, x.side, output, item % x.side, with_grad);
        });
        continue;
      }
      std::vector<double> partial(pairs);
      at::parallel_for(0, pairs, grain(mix_work()), [&](int64_t begin, int64_t end) {
        stage.tiles(x, blocks_, 2 * plan_.lags - 1, group, with_grad, begin, end, partial.data());
      });
      loss += std::accumulate(partial.begin(), partial.end(), 0.0);
    }
  }

  const std::vector<double>& losses() const { return losses_; }

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
    at::parallel_for(0, strips.count(window), grain(work), stage);
  }

  const LoweredPlan& plan_;
  const Stacked<const S> weights_;
  const Stacked<S> grads_;
  const std::vector<BlockView<T>> blocks_;
  std::vector<double> losses_;
};

// The pass on panels, see panels.h: one loss per weight.
template <typename S, typename T>
std::vector<double> run_panels(const LoweredPlan& plan, at::TensorList weights, at::TensorList grads,
                               const std::vector<BlockView<T>>& blocks) {
  const PanelStages<S, T>& stages = panel_stages<S, T>();
  const Stacked<const S> stacked(weights);
  const Stacked<S> stacked_grads(grads);
  PanelJob<S, T> job(plan, blocks, stacked.view(), stacked_grads.view(), weights[0].size(1), stages.width);
  const int64_t problems = static_cast<int64_t>(weights.size()) * plan.groups, bytes = job.elements * sizeof(T);
  const int64_t span = std::clamp<int64_t>(kSpanBytes / bytes, 1, problems);
  const at::Tensor memory = workspace_of_thread(span * bytes);
  job.memory = static_cast<T*>(memory.data_ptr());
  std::vector<double> losses(weights.size(), 0.0), partial;
  const int64_t pairs = job.panels * (job.panels + 1) / 2;
  for (job.first_problem = 0; job.first_problem < problems; job.first_problem += span) {
    job.problems = std::min(span, problems - job.first_problem);
    const bool alone = job.problems * job.gram_items * stages.width * job.side * job.length < kThreadWork;
    const auto parallel = [&](const char* name, int64_t items, const auto& stage) {
      RECORD_FUNCTION(name, {});
      const int64_t all = job.problems * items;
      at::parallel_for(0, all, alone ? all : 1, stage);
    };
    parallel("ocnn_fused::evaluate", job.panels, [&](int64_t begin, int64_t end) { stages.load(job, begin, end); });
    parallel("ocnn_fused::gram", job.gram_items, [&](int64_t begin, int64_t end) { stages.gram(job, begin, end); });
    partial.assign(job.problems * pairs, 0.0);
    parallel("ocnn_fused::mix", pairs,
             [&](int64_t begin, int64_t end) { stages.mix(job, begin, end, partial.data()); });
    for (int64_t p = 0; p < job.problems; ++p) {
      losses[(job.first_problem + p) / plan.groups] +=
          std::accumulate(partial.begin() + p * pairs, partial.begin() + (p + 1) * pairs, 0.0);
    }
    if (!job.with_grad()) continue;
    parallel("ocnn_fused::apply", job.length, [&](int64_t begin, int64_t end) { stages.apply(job, begin, end); });
  }
  return losses;
}

LossesAndGrads execute_plan(at::TensorList weights, const at::Tensor& layout, const at::Tensor& tables,
                            const at::Tensor& constants, bool with_grad) {
  const LoweredPlan plan = read_plan(reader_of(layout));
  std::vector<at::Tensor> losses, grads = check_and_allocate(weights, plan.groups, with_grad);
  dispatch(weights[0], [&]<typename S, typename T>() {
    std::vector<double> values;
    const int64_t rows = weights[0].size(0) / plan.groups, channels = weights[0].size(1);
    if (fits_panels(panel_stages<S, T>(), plan, rows, channels, at::get_num_threads())) {
      values = run_panels<S, T>(plan, weights, grads, blocks_of<T>(plan, tables, constants));
    } else {
      Device<S, T> device(plan, weights, grads, tables, constants);
      Pipeline<S, T, Device<S, T>>(device, plan, weights, grads).run();
      values = device.losses();
    }
    for (size_t w = 0; w < weights.size(); ++w) {
      losses.push_back(loss_tensor(values[w] + static_cast<double>(plan.offset), weights[w]));
    }
  });
  return {std::move(losses), std::move(grads)};
}

LossesAndGrads execute_small(at::TensorList weights, const at::Tensor& layout, const at::Tensor& tables,
                             bool with_grad) {
  const SmallPlan plan = read_small_plan(reader_of(layout));
  const int64_t* numbers = tables.const_data_ptr<int64_t>();
  const TapPairs pairs{numbers + plan.left, numbers + plan.right, numbers + plan.lag_begin, plan.lags};
  const int64_t groups = plan.groups;
  std::vector<at::Tensor> losses, grads = check_and_allocate(weights, groups, with_grad);
  const int64_t rows = weights[0].size(0) / groups, channels = weights[0].size(1);
  const int64_t work = 3 * kLanes * rows * rows * channels * plan.pairs;
  dispatch(weights[0], [&]<typename S, typename T>() {
    for (size_t w = 0; w < weights.size(); ++w) {
      const Stacked<const S> weight(weights.slice(w, 1));
      const Stacked<S> grad(at::TensorList(grads).slice(with_grad ? w : 0, with_grad ? 1 : 0));
      const double loss = ordered_sum((groups + kLanes - 1) / kLanes, grain(work), [&](int64_t item) {
        return weight_stages<S, T>().small(weight.view(), grad.view(), pairs, groups, rows, channels, item);
      });
      losses.push_back(loss_tensor(loss, weights[w]));
    }
  });
  return {std::move(losses), std::move(grads)};
}

}  // namespace

TORCH_LIBRARY_IMPL(ocnn_fused, CPU, m) {
  m.impl("execute_plan", execute_plan);
  m.impl("execute_small", execute_small);
}

}  // namespace ocnn_fused::cpu
