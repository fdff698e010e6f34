// The ops of the CPU: plans on panels, through the pipeline, of small groups, and by Fourier.
#include <torch/library.h>

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "device.h"
#include "flat.h"
#include "fourier.h"
#include "panels.h"

namespace ocnn_fused::cpu {
namespace {

// Problems on panels are worked on together up to this much memory: it should fit the cores' own caches.
constexpr int64_t kProblemBytes = int64_t{2} << 20;
// Multiply-adds of gram per lane of a vector below which another thread does not pay.
constexpr int64_t kLaneProducts = int64_t{1} << 17;
// The same for lag 0 alone, where threads also hand the weight's panels to each other.
constexpr int64_t kFlatLaneProducts = int64_t{1} << 19;
// Steps of a contraction from which on it pays to cut a thread's share of apply into pieces.
constexpr int64_t kApplySteps = 64;

// Pieces in which threads share out apply, and what comes before it.
int64_t apply_pieces(int64_t length, int64_t threads) {
  return threads == 1 ? 1 : threads * std::clamp<int64_t>(length / (threads * kApplySteps), 1, 4);
}

// Cut evenly and where slices end, because every piece makes the planes of the slices that it has part in.
template <typename S, typename T>
Phase gram_phase(const PanelJob<S, T>& job, int64_t threads) {
  const int64_t items = job.problems * job.gram_items;
  std::vector<int64_t> cuts{0};
  for (int64_t problem = 0; threads > 1 && problem < job.problems; ++problem) {
    for (const Slice& slice : job.slices) cuts.push_back(cuts.back() + slice.items(job.panels));
  }
  for (int64_t thread = 0; thread < threads; ++thread) cuts.push_back((thread + 1) * items / threads);
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  const int64_t pieces = static_cast<int64_t>(cuts.size()) - 1;
  return {"ocnn_fused::evaluate+gram", pieces, [&job, cuts = std::move(cuts)](int64_t piece, int64_t) {
            panel_stages<S, T>().gram(job, cuts[piece], cuts[piece + 1]);
          }};
}

// The stages of a job, for so many threads; mix writes a loss for each pair of panels of each problem.
template <typename S, typename T>
void add_phases(std::vector<Phase>& phases, const PanelJob<S, T>& job, int64_t threads, double* losses) {
  const PanelStages<S, T>& stages = panel_stages<S, T>();
  const int64_t finer = apply_pieces(job.length, threads), pairs = job.panels * (job.panels + 1) / 2;
  phases.push_back(even_phase("ocnn_fused::load", job.problems * job.panels, threads,
                              [&](int64_t begin, int64_t end) { stages.load(job, begin, end); }));
  phases.push_back(gram_phase(job, threads));
  phases.push_back(even_phase("ocnn_fused::mix", job.problems * pairs, finer,
                              [&, losses](int64_t begin, int64_t end) { stages.mix(job, begin, end, losses); }));
  if (!job.with_grad()) return;
  phases.push_back(even_phase("ocnn_fused::evaluate+apply+gather", job.problems * job.length, finer,
                              [&](int64_t begin, int64_t end) { stages.apply(job, begin, end); }));
}

template <typename S, typename T>
void add_phases(std::vector<Phase>& phases, const FlatJob<S, T>& job, int64_t threads, double* losses) {
  const FlatStages<S, T>& stages = flat_stages<S, T>();
  const int64_t finer = apply_pieces(job.length, threads), pairs = job.panels * (job.panels + 1) / 2;
  for (int64_t step = 0; step < job.length; step += job.chunk) {
    phases.push_back(even_phase("ocnn_fused::load", job.problems * job.panels, threads,
                                [&, step](int64_t begin, int64_t end) { stages.load(job, step, begin, end); }));
    phases.push_back(even_phase("ocnn_fused::gram, panels", job.problems * ((job.panels + 1) / 2), threads,
                                [&, step](int64_t begin, int64_t end) { stages.gram(job, step, begin, end); }));
  }
  phases.push_back(even_phase("ocnn_fused::mix", job.problems * pairs, finer,
                              [&, losses](int64_t begin, int64_t end) { stages.mix(job, begin, end, losses); }));
  if (!job.with_grad()) return;
  phases.push_back(even_phase("ocnn_fused::apply, panels", job.problems * job.length, finer,
                              [&](int64_t begin, int64_t end) { stages.apply(job, begin, end); }));
}

// All stages of some problems on panels, for as many threads as there are jobs. Job: PanelJob or FlatJob.
template <typename Job>
class PanelWork {
 public:
  PanelWork(const Job& job, int64_t problems, int64_t threads)
      : threads_(threads),
        bytes_(job.elements * static_cast<int64_t>(sizeof(*job.memory))),
        pairs_(job.panels * (job.panels + 1) / 2),
        partial_(problems * pairs_) {
    // Small problems stay whole, each on one thread, and every thread gets equally many. All threads share the others.
    const int64_t whole = threads == 1 || threads * bytes_ <= kProblemBytes ? problems / threads * threads : 0;
    const int64_t rest = problems - whole,
                  at_once = std::clamp<int64_t>(kProblemBytes / bytes_, 1, std::max<int64_t>(1, rest));
    const int64_t shared = (rest + at_once - 1) / at_once;
    memory_ = workspace_of_thread(std::max(whole > 0 ? threads : 0, rest > 0 ? at_once : 0) * bytes_);
    jobs_.reserve(threads + shared);
    for (int64_t thread = 0; whole > 0 && thread < threads; ++thread) add_job(job, 0, 1, thread);
    if (whole > 0) {
      phases_.push_back({nullptr, whole, [this](int64_t problem, int64_t thread) {
                           Job& own = jobs_[thread];
                           own.first_problem = problem;
                           std::vector<Phase> phases;
                           add_phases(phases, own, 1, losses_of(own));
                           share(phases, 1);
                         }});
    }
    for (int64_t first = whole; first < problems; first += at_once) {
      const Job& one = add_job(job, first, std::min(at_once, problems - first), 0);
      add_phases(phases_, one, threads, losses_of(one));
    }
  }

  void execute() const { share(phases_, threads_); }

  double loss(int64_t problem) const {
    return std::accumulate(partial_.begin() + problem * pairs_, partial_.begin() + (problem + 1) * pairs_, 0.0);
  }

 private:
  Job& add_job(const Job& job, int64_t first_problem, int64_t problems, int64_t place) {
    Job& added = jobs_.emplace_back(job);
    added.first_problem = first_problem;
    added.problems = problems;
    added.memory = reinterpret_cast<decltype(job.memory)>(static_cast<char*>(memory_.data_ptr()) + place * bytes_);
    return added;
  }

  double* losses_of(const Job& job) { return partial_.data() + job.first_problem * pairs_; }

  const int64_t threads_, bytes_, pairs_;
  at::Tensor memory_;
  std::vector<Job> jobs_;  // of each thread, if problems stay whole, then those that all share
  std::vector<Phase> phases_;
  std::vector<double> partial_;  // losses of all problems, one per pair of panels
};

// One loss per weight, of which each has so many problems; `products`: gram's multiply-adds, and how many of them are
// too few for another thread.
template <typename Job, typename Constant>
std::vector<double> losses_on_panels(const Job& job, int64_t weights, int64_t groups, int64_t products, int64_t few,
                                     const Constant& constant) {
  const double seconds = 3 * static_cast<double>(products) / kProductRate;  // apply has twice as many
  PanelWork<Job> work(job, weights * groups, products < few ? 1 : threads_for(seconds));
  work.execute();
  std::vector<double> losses(weights, 0.0);
  for (int64_t problem = 0; problem < weights * groups; ++problem) losses[problem / groups] += work.loss(problem);
  for (int64_t w = 0; w < weights; ++w) losses[w] += constant(w);
  return losses;
}

template <typename S, typename T>
std::vector<double> execute_panels(const LoweredPlan& plan, at::TensorList weights, at::TensorList grads,
                                   const std::vector<BlockView<T>>& blocks, const Epilogue& epilogue) {
  const Stacked<const S> stacked(weights);
  const Stacked<S> stacked_grads(grads, !epilogue.targets.empty());
  const int64_t count = static_cast<int64_t>(weights.size()), channels = weights[0].size(1);
  const GroupTargets<S, T> targets(plan.target, stacked.view(), count, plan.groups, channels);
  const GroupFactors<T> factors(epilogue, plan.groups);
  const int64_t width = panel_stages<S, T>().width;
  const PanelJob<S, T> job(plan, blocks, stacked.view(), stacked_grads.view(), targets.view(), factors.view(), channels,
                           width);
  const int64_t products = count * plan.groups * job.gram_items * width * job.side * job.length;
  return losses_on_panels(job, count, plan.groups, products, kLaneProducts * width,
                          [&](int64_t weight) { return targets.constant(weight, plan.offset); });
}

template <typename S, typename T>
std::vector<double> execute_flat(const LoweredPlan& plan, at::TensorList weights, at::TensorList grads,
                                 const Epilogue& epilogue) {
  const Stacked<const S> stacked(weights);
  const Stacked<S> stacked_grads(grads, !epilogue.targets.empty());
  const int64_t count = static_cast<int64_t>(weights.size()), columns = weights[0].numel() / weights[0].size(0);
  const WeightView<const S> matrix = flattened(stacked.view(), weights[0]);
  const WeightView<S> grad = grads.empty() ? stacked_grads.view() : flattened(stacked_grads.view(), grads[0]);
  const GroupTargets<S, T> targets(plan.target, matrix, count, plan.groups, columns);
  const GroupFactors<T> factors(epilogue, plan.groups);
  const FlatStages<S, T>& stages = flat_stages<S, T>();
  const FlatJob<S, T> job(plan, matrix, grad, targets.view(), factors.view(), columns, stages.width, stages.depth);
  const int64_t products = count * plan.groups * job.side * job.side * job.length / 2;
  return losses_on_panels(job, count, plan.groups, products, kFlatLaneProducts * stages.width,
                          [&](int64_t weight) { return targets.constant(weight, plan.offset); });
}

// Whether a plan of lag 0 alone is executed on panels.
bool fits_flat(const LoweredPlan& plan, const at::Tensor& weight, at::TensorList grads, int64_t width) {
  const std::vector<int64_t> axes = filter_axes(weight);
  if (!panels_allowed || width == 0 || !is_matrix(weight, axes) || (!grads.empty() && !is_matrix(grads[0], axes))) {
    return false;
  }
  const int64_t side = plan.column ? weight.numel() / weight.size(0) : weight.size(0) / plan.groups;
  return 2 * side >= width && (side <= kMiddlingSide || at::get_num_threads() <= kFewThreads);
}

LossesAndGrads execute_plan(at::TensorList weights, const LoweredPlan& plan, const at::Tensor& tables,
                            const at::Tensor& constants, bool with_grad, const Epilogue& epilogue) {
  std::vector<at::Tensor> losses, grads = check_and_allocate(weights, plan.groups, with_grad, epilogue);
  dispatch(weights[0], [&]<typename S, typename T>() {
    std::vector<double> values;
    const int64_t rows = weights[0].size(0) / plan.groups, channels = weights[0].size(1);
    if (plan.flat && fits_flat(plan, weights[0], grads, panel_stages<S, T>().width)) {
      values = execute_flat<S, T>(plan, weights, grads, epilogue);
    } else if (fits_panels(panel_stages<S, T>(), plan, rows, channels, at::get_num_threads())) {
      values = execute_panels<S, T>(plan, weights, grads, blocks_of<T>(plan, tables, constants), epilogue);
    } else {
      Device<S, T> device(plan, weights, grads, tables, constants, epilogue);
      Pipeline<S, T, Device<S, T>>(device, plan, weights, grads, !epilogue.targets.empty()).execute();
      values = device.losses();
    }
    for (size_t w = 0; w < weights.size(); ++w) losses.push_back(loss_tensor(values[w], weights[w]));
  });
  if (!epilogue.targets.empty()) grads.clear();
  return {std::move(losses), std::move(grads)};
}

LossesAndGrads execute_small(at::TensorList weights, const SmallPlan& plan, const at::Tensor& tables, bool with_grad,
                             const Epilogue& epilogue) {
  const int64_t* numbers = tables.const_data_ptr<int64_t>();
  const TapPairs pairs{numbers + plan.left, numbers + plan.right, numbers + plan.lag_begin, plan.lags};
  const int64_t groups = plan.groups;
  std::vector<at::Tensor> losses, grads = check_and_allocate(weights, groups, with_grad, epilogue);
  const int64_t rows = weights[0].size(0) / groups, channels = weights[0].size(1);
  const int64_t work = 3 * kLanes * rows * rows * channels * plan.pairs;
  dispatch(weights[0], [&]<typename S, typename T>() {
    const GroupFactors<T> factors(epilogue, groups);
    struct Layer {
      Stacked<const S> weight;
      Stacked<S> grad;
      GroupTargets<S, T> targets;
    };
    std::vector<Layer> layers;
    for (size_t w = 0; w < weights.size(); ++w) {
      Stacked<const S> weight(weights.slice(w, 1));
      Stacked<S> grad(at::TensorList(grads).slice(with_grad ? w : 0, with_grad ? 1 : 0), !epilogue.targets.empty());
      GroupTargets<S, T> targets(plan.target, weight.view(), 1, groups, channels);
      layers.push_back({std::move(weight), std::move(grad), std::move(targets)});
    }
    const int64_t items = (groups + kLanes - 1) / kLanes, count = static_cast<int64_t>(layers.size());
    const std::vector<double> partial = each_item(count * items, grain(work), [&](int64_t i) {
      const Layer& layer = layers[i / items];
      return weight_stages<S, T>().small(layer.weight.view(), layer.grad.view(), pairs, layer.targets.view(),
                                         factors.view().from(i / items), groups, rows, channels, i % items);
    });
    for (int64_t w = 0; w < count; ++w) {
      const auto first = partial.begin() + w * items;
      losses.push_back(loss_tensor(std::accumulate(first, first + items, 0.0), weights[w]));
    }
  });
  if (!epilogue.targets.empty()) grads.clear();
  return {std::move(losses), std::move(grads)};
}

LossesAndGrads execute(at::TensorList weights, const Plan& plan, bool with_grad,
                       const std::optional<at::Tensor>& factors, at::IntArrayRef places, double factor, bool per_target,
                       at::TensorList targets) {
  const Epilogue epilogue{factors, places, factor, per_target, targets};
  if (plan->fourier) return execute_fourier(weights, *plan->fourier, plan->constants, with_grad, epilogue);
  return plan->small ? execute_small(weights, *plan->small, plan->tables, with_grad, epilogue)
                     : execute_plan(weights, *plan->lowered, plan->tables, plan->constants, with_grad, epilogue);
}

}  // namespace

TORCH_LIBRARY_IMPL(ocnn_fused, CPU, m) {
  register_plan_type();
  m.impl("execute", execute);
}

}  // namespace ocnn_fused::cpu
