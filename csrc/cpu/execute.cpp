// Executes plans on the CPU: on panels, through the pipeline, of small groups, and by Fourier.
#include "execute.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <utility>
#include <variant>
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

// How a stage is cut into pieces: by all of its items, into more pieces, or also where slices end.
enum class Cut { kEven, kFiner, kSlices };

// Calls visit(cut, items, stage) for the stages of a job, where stage(begin, end) does some of the items. Mix writes a
// loss for each pair of panels of each problem.
template <typename S, typename T, typename F>
void each_stage(const PanelJob<S, T>& job, double* losses, const F& visit) {
  const PanelStages<S, T>& stages = panel_stages<S, T>();
  visit(Cut::kEven, job.problems * job.panels, [&](int64_t begin, int64_t end) { stages.load(job, begin, end); });
  visit(Cut::kSlices, job.problems * job.gram_items, [&](int64_t begin, int64_t end) { stages.gram(job, begin, end); });
  visit(Cut::kFiner, job.problems * job.panels * (job.panels + 1) / 2,
        [&, losses](int64_t begin, int64_t end) { stages.mix(job, begin, end, losses); });
  if (!job.with_grad()) return;
  visit(Cut::kFiner, job.problems * job.length, [&](int64_t begin, int64_t end) { stages.apply(job, begin, end); });
}

template <typename S, typename T, typename F>
void each_stage(const FlatJob<S, T>& job, double* losses, const F& visit) {
  const FlatStages<S, T>& stages = flat_stages<S, T>();
  for (int64_t step = 0; step < job.length; step += job.chunk) {
    visit(Cut::kEven, job.problems * job.panels,
          [&, step](int64_t begin, int64_t end) { stages.load(job, step, begin, end); });
    visit(Cut::kEven, job.problems * ((job.panels + 1) / 2),
          [&, step](int64_t begin, int64_t end) { stages.gram(job, step, begin, end); });
  }
  visit(Cut::kFiner, job.problems * job.panels * (job.panels + 1) / 2,
        [&, losses](int64_t begin, int64_t end) { stages.mix(job, begin, end, losses); });
  if (!job.with_grad()) return;
  visit(Cut::kFiner, job.problems * job.length, [&](int64_t begin, int64_t end) { stages.apply(job, begin, end); });
}

// Where the slices of all problems end, because every piece makes the planes of the slices that it has part in.
template <typename S, typename T>
std::vector<int64_t> slice_ends(const PanelJob<S, T>& job) {
  std::vector<int64_t> ends;
  for (int64_t problem = 0; problem < job.problems; ++problem) {
    for (const Slice& slice : job.plan.slices) {
      ends.push_back((ends.empty() ? 0 : ends.back()) + slice.items(job.panels));
    }
  }
  return ends;
}

template <typename S, typename T>
std::vector<int64_t> slice_ends(const FlatJob<S, T>&) {
  return {};
}

// A phase of items [0, items), cut into so many even pieces and at other places too.
template <typename Stage>
Phase cut_phase(int64_t items, int64_t least, std::vector<int64_t> cuts, const Stage& stage) {
  for (int64_t piece = 0; piece <= least; ++piece) cuts.push_back(piece * items / least);
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  const int64_t pieces = static_cast<int64_t>(cuts.size()) - 1;
  return {pieces, [stage, cuts = std::move(cuts)](int64_t piece, int64_t) { stage(cuts[piece], cuts[piece + 1]); }};
}

// The stages of a job for threads to share, each in at least so many pieces.
template <typename Job>
void add_phases(std::vector<Phase>& phases, const Job& job, int64_t least, int64_t finer, double* losses) {
  each_stage(job, losses, [&](Cut cut, int64_t items, const auto& stage) {
    if (cut == Cut::kSlices && least > 1) {
      phases.push_back(cut_phase(items, least, slice_ends(job), stage));
    } else {
      phases.push_back(even_phase(items, cut == Cut::kFiner ? finer : least, stage));
    }
  });
}

// The stages of a job on this thread, each in so many pieces.
template <typename Job>
void run_alone(const Job& job, int64_t pieces, double* losses) {
  each_stage(job, losses, [&](Cut, int64_t items, const auto& stage) {
    for (int64_t piece = 0; piece < pieces; ++piece) {
      if (pieces > 1) poll_signals();
      const int64_t begin = piece * items / pieces, end = (piece + 1) * items / pieces;
      if (begin < end) stage(begin, end);
    }
  });
}

// All stages of the problems of a call on panels. Job: PanelJob or FlatJob.
template <typename Job>
class PanelWork {
 public:
  // Takes one thread so many `seconds`.
  PanelWork(const Job& job, const Call& call, int64_t problems, int64_t threads, double seconds)
      : threads_(threads),
        bytes_(job.elements * static_cast<int64_t>(sizeof(*job.memory))),
        pairs_(job.panels * (job.panels + 1) / 2),
        partial_(problems * pairs_) {
    // Small problems stay whole, each on one thread, and every thread gets equally many. All threads share the others.
    const int64_t whole = threads == 1 || threads * bytes_ <= kProblemBytes ? problems / threads * threads : 0;
    const int64_t rest = problems - whole,
                  at_once = std::clamp<int64_t>(kProblemBytes / bytes_, 1, std::max<int64_t>(1, rest));
    const int64_t shared = (rest + at_once - 1) / at_once;
    memory_ = call.workspace.take(std::max(whole > 0 ? threads : 0, rest > 0 ? at_once : 0) * bytes_);
    const double of_each = seconds / static_cast<double>(problems);
    jobs_.reserve(threads + shared);
    for (int64_t thread = 0; whole > 0 && thread < threads; ++thread) add_job(job, 0, 1, thread);
    if (whole > 0) {
      phases_.push_back({whole, [this, of_each](int64_t problem, int64_t thread) {
                           Job& own = jobs_[thread];
                           own.first_problem = problem;
                           run_alone(own, pieces_for(of_each, 1), losses_of(own));
                         }});
    }
    for (int64_t first = whole; first < problems; first += at_once) {
      const Job& one = add_job(job, first, std::min(at_once, problems - first), 0);
      const int64_t least = pieces_for(of_each * static_cast<double>(one.problems), threads);
      add_phases(phases_, one, least, std::max(apply_pieces(job.length, threads), least), losses_of(one));
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
    added.memory = reinterpret_cast<decltype(job.memory)>(memory_ + place * bytes_);
    return added;
  }

  double* losses_of(const Job& job) { return partial_.data() + job.first_problem * pairs_; }

  const int64_t threads_, bytes_, pairs_;
  char* memory_;
  std::vector<Job> jobs_;  // of each thread, if problems stay whole, then those that all share
  std::vector<Phase> phases_;
  std::vector<double> partial_;  // losses of all problems, one per pair of panels
};

// `products`: gram's multiply-adds, of which `few` are not worth another thread.
template <typename S, typename T, typename Job>
void execute_job(const Job& job, const BilinearPlan& plan, const Call& call, const Operands<S, T>& operands,
                 int64_t products, int64_t few) {
  const double seconds = 3 * static_cast<double>(products) / kProductRate;  // apply has twice as many
  PanelWork<Job> work(job, call, operands.count * plan.groups, products < few ? 1 : threads_for(seconds), seconds);
  work.execute();
  for (int64_t w = 0; w < operands.count; ++w) {
    double loss = 0;
    for (int64_t group = 0; group < plan.groups; ++group) loss += work.loss(w * plan.groups + group);
    call.store_loss(w, loss + operands.targets.constant(w, plan.offset));
  }
}

template <typename S, typename T>
void execute_panels(const PanelPlan<T>& panels, const BilinearPlan& plan, const Call& call) {
  const Operands<S, T> operands(call, plan.target, plan.groups);
  const int64_t width = panel_stages<S, T>().width;
  const PanelJob<S, T> job(panels, operands.weight, operands.grad, operands.targets.view(), operands.factors.view(),
                           operands.channels, width);
  const int64_t products = operands.count * plan.groups * job.gram_items * width * job.side * job.length;
  execute_job<S, T>(job, plan, call, operands, products, kLaneProducts * width);
}

template <typename S, typename T>
void execute_flat(const BilinearPlan& plan, const Call& call) {
  const Operands<S, T> operands(call, plan.target, plan.groups, true);
  const FlatStages<S, T>& stages = flat_stages<S, T>();
  const FlatJob<S, T> job(plan, operands.weight, operands.grad, operands.targets.view(), operands.factors.view(),
                          operands.channels, stages.width, stages.depth);
  const int64_t products = operands.count * plan.groups * job.side * job.side * job.length / 2;
  execute_job<S, T>(job, plan, call, operands, products, kFlatLaneProducts * stages.width);
}

// Whether the weights and their gradients are matrices, as plans of lag 0 alone on panels want them.
bool are_matrices(const Call& call) {
  return call.bucket.weights.entry_stride && (!call.with_grad() || call.bucket.grads.entry_stride);
}

// What all calls of a bucket have in common.
template <typename T>
struct Prepared {
  Prepared(const BilinearPlan& plan, const Bucket& bucket) : blocks(blocks_of<T>(plan, bucket)) {
    if (suits_panels(plan)) panels.emplace(plan, blocks);
  }
  const std::vector<BlockView<T>> blocks;
  std::optional<PanelPlan<T>> panels;  // nothing: it does not suit them
};

template <typename S, typename T>
void execute_bilinear(const BilinearPlan& plan, const Call& call) {
  const Layout& weights = call.bucket.weights;
  const auto& prepared = call.bucket.prepared.get<Prepared<T>>(plan, call.bucket);
  const int64_t channels = plan.flat ? weights.elements() / weights.rows() : weights.channels(),
                side = plan.column ? channels : weights.rows() / plan.groups;
  const bool fills_panels = 2 * side >= panel_stages<S, T>().width;  // else most lanes would be idle
  if (panels_allowed && fills_panels && plan.flat && are_matrices(call)) {
    execute_flat<S, T>(plan, call);
  } else if (panels_allowed && fills_panels && prepared.panels) {
    execute_panels<S, T>(*prepared.panels, plan, call);
  } else {
    Device<S, T> device(plan, prepared.blocks, call);
    Pipeline<S, T, Device<S, T>> pipeline(device, plan, call.read<S>(), call.written<S>(), call.epilogue.adds);
    pipeline.execute(call.workspace.take(pipeline.workspace_bytes()));
    device.store_losses(call);
  }
}

template <typename S, typename T>
void execute_small(const SmallPlan& plan, const Call& call) {
  const int64_t* numbers = call.bucket.tables;
  const TapPairs pairs{numbers + plan.left, numbers + plan.right, numbers + plan.lag_begin, plan.lags};
  const Operands<S, T> operands(call, plan.target, plan.groups);
  const int64_t rows = operands.rows, channels = operands.channels, items = (plan.groups + kLanes - 1) / kLanes;
  const int64_t work = 3 * kLanes * rows * rows * channels * plan.pairs;
  const std::vector<double> partial = each_item(operands.count * items, work, [&](int64_t i) {
    const int64_t w = i / items;
    return stages<S, T>().small(operands.weight.from(w), operands.grad.from(w), pairs,
                                operands.targets.view().from(w * plan.groups), operands.factors.view().from(w),
                                plan.groups, rows, channels, i % items);
  });
  for (int64_t w = 0; w < operands.count; ++w) {
    call.store_loss(w, std::accumulate(partial.begin() + w * items, partial.begin() + (w + 1) * items, 0.0));
  }
}

void execute(const BilinearPlan& plan, const Call& call) {
  dispatch(call.bucket.type, [&]<typename S, typename T>() { execute_bilinear<S, T>(plan, call); });
}

void execute(const SmallPlan& plan, const Call& call) {
  dispatch(call.bucket.type, [&]<typename S, typename T>() { execute_small<S, T>(plan, call); });
}

void execute(const FourierPlan& plan, const Call& call) { execute_fourier(plan, call); }

}  // namespace

void execute(const Call& call) {
  const SignalWatch watch;
  if (poisons && call.workspace.bytes > 0) std::memset(call.workspace.memory, kPoison, call.workspace.bytes);
  std::visit([&](const auto& plan) { execute(plan, call); }, call.bucket.plan);
}

}  // namespace ocnn_fused::cpu
