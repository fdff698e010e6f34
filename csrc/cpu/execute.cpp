// The ops of the CPU: plans on panels, through the pipeline, and of small groups.
#include <ATen/record_function.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>

#include "device.h"
#include "fourier.h"
#include "panels.h"

namespace ocnn_fused::cpu {
namespace {

// Problems on panels are worked on together up to this much memory: it should fit the cores' own caches.
constexpr int64_t kProblemBytes = int64_t{2} << 20;

// One loss per weight.
template <typename S, typename T>
std::vector<double> execute_panels(const LoweredPlan& plan, at::TensorList weights, at::TensorList grads,
                                   const std::vector<BlockView<T>>& blocks) {
  const PanelStages<S, T>& stages = panel_stages<S, T>();
  const Stacked<const S> stacked(weights);
  const Stacked<S> stacked_grads(grads);
  const int64_t count = static_cast<int64_t>(weights.size()), channels = weights[0].size(1);
  const GroupTargets<S, T> targets(plan.target, stacked.view(), count, plan.groups, channels);
  PanelJob<S, T> job(plan, blocks, stacked.view(), stacked_grads.view(), targets.view(), channels, stages.width);
  const int64_t problems = count * plan.groups, bytes = job.elements * sizeof(T);
  const int64_t at_once = std::clamp<int64_t>(kProblemBytes / bytes, 1, problems);
  const at::Tensor memory = workspace_of_thread(at_once * bytes);
  job.memory = static_cast<T*>(memory.data_ptr());
  std::vector<double> losses(weights.size(), 0.0), partial;
  const int64_t pairs = job.panels * (job.panels + 1) / 2;
  for (job.first_problem = 0; job.first_problem < problems; job.first_problem += at_once) {
    job.problems = std::min(at_once, problems - job.first_problem);
    const bool alone = job.problems * job.gram_items * stages.width * job.side * job.length < kThreadWork;
    const auto parallel = [&](const char* name, int64_t items, const auto& stage, auto... more) {
      RECORD_FUNCTION(name, {});
      const int64_t all = job.problems * items;
      at::parallel_for(0, all, alone ? all : 1, [&](int64_t begin, int64_t end) { stage(job, begin, end, more...); });
    };
    partial.assign(job.problems * pairs, 0.0);
    parallel("ocnn_fused::load", job.panels, stages.load);
    parallel("ocnn_fused::evaluate+gram", job.gram_items, stages.gram);
    parallel("ocnn_fused::mix", pairs, stages.mix, partial.data());
    for (int64_t p = 0; p < job.problems; ++p) {
      losses[(job.first_problem + p) / plan.groups] +=
          std::accumulate(partial.begin() + p * pairs, partial.begin() + (p + 1) * pairs, 0.0);
    }
    if (job.with_grad()) parallel("ocnn_fused::evaluate+apply+gather", job.length, stages.apply);
  }
  for (int64_t w = 0; w < count; ++w) losses[w] += targets.constant(w, plan.offset);
  return losses;
}

LossesAndGrads execute_plan(at::TensorList weights, const LoweredPlan& plan, const at::Tensor& tables,
                            const at::Tensor& constants, bool with_grad) {
  std::vector<at::Tensor> losses, grads = check_and_allocate(weights, plan.groups, with_grad);
  dispatch(weights[0], [&]<typename S, typename T>() {
    std::vector<double> values;
    const int64_t rows = weights[0].size(0) / plan.groups, channels = weights[0].size(1);
    if (fits_panels(panel_stages<S, T>(), plan, rows, channels, at::get_num_threads())) {
      values = execute_panels<S, T>(plan, weights, grads, blocks_of<T>(plan, tables, constants));
    } else {
      Device<S, T> device(plan, weights, grads, tables, constants);
      Pipeline<S, T, Device<S, T>>(device, plan, weights, grads).execute();
      values = device.losses();
    }
    for (size_t w = 0; w < weights.size(); ++w) losses.push_back(loss_tensor(values[w], weights[w]));
  });
  return {std::move(losses), std::move(grads)};
}

LossesAndGrads execute_small(at::TensorList weights, const SmallPlan& plan, const at::Tensor& tables, bool with_grad) {
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
      const GroupTargets<S, T> targets(plan.target, weight.view(), 1, groups, channels);
      const double loss = ordered_sum((groups + kLanes - 1) / kLanes, grain(work), [&](int64_t item) {
        return weight_stages<S, T>().small(weight.view(), grad.view(), pairs, targets.view(), groups, rows, channels,
                                           item);
      });
      losses.push_back(loss_tensor(loss, weights[w]));
    }
  });
  return {std::move(losses), std::move(grads)};
}

LossesAndGrads execute(at::TensorList weights, const Plan& plan, bool with_grad) {
  if (plan->fourier) return execute_fourier(weights, *plan->fourier, plan->constants, with_grad);
  return plan->small ? execute_small(weights, *plan->small, plan->tables, with_grad)
                     : execute_plan(weights, *plan->lowered, plan->tables, plan->constants, with_grad);
}

}  // namespace

TORCH_LIBRARY_IMPL(ocnn_fused, CPU, m) {
  register_plan_type();
  m.impl("execute", execute);
}

}  // namespace ocnn_fused::cpu
