#include "fourier.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <type_traits>

#include "targets.h"
#include "tensors.h"
#include "threads.h"

namespace ocnn_fused::cpu {
namespace {

// Elements that are evaluated together: as many as fill vectors with frequencies of the last axis, or nearly so. With
// one axis alone they share what is read of its table.
int64_t batch_of(int64_t last_taps, bool alone, int64_t elements, int64_t width) {
  int64_t batch = alone ? 8 : 1;
  const auto idle = [&] { return (width - batch * last_taps % width) % width; };
  while (batch < width && 16 * idle() > batch * last_taps) batch *= 2;
  return std::min(batch, elements);
}

// What is subtracted from the diagonals, see FourierJob.
template <typename S, typename T>
std::vector<T> diagonal_of(const GroupTargets<S, T>& targets, const WeightView<const S>& weight, int64_t problems,
                           int64_t side, int64_t channels) {
  std::vector<T> diagonal;
  diagonal.reserve(problems * side);
  for (int64_t problem = 0; problem < problems; ++problem) {
    const Target<T> target = targets.view().at(problem);
    for (int64_t s = 0; s < side; ++s) {
      // Without its diagonal lag 0 is the same at all frequencies: the filter's squared length less.
      const int64_t row = problem * side + s;
      diagonal.push_back(target.ignored ? static_cast<T>(GroupTargets<S, T>::square_of(weight, row, channels))
                                        : target.value);
    }
  }
  return diagonal;
}

}  // namespace

FourierTaps::FourierTaps(const FourierPlan& plan, const Layout& weights) : sources{0} {
  // Sources grow axis by axis, in the order of the plan's axes.
  for (const FourierPlanAxis& axis : plan.axes) {
    const auto inner = weights.sizes.begin() + 3 + axis.axis;
    const int64_t flat = std::accumulate(inner, weights.sizes.end(), int64_t{1}, std::multiplies<>());
    std::vector<int64_t> next;
    for (size_t begin = 0; begin < sources.size(); begin += taps) {
      for (int64_t residue = 0; residue < std::min(axis.step, axis.taps); ++residue) {
        for (int64_t m = 0; m < taps; ++m) {
          for (int64_t u = residue; u < residue + axis.class_taps() * axis.step; u += axis.step) {
            const int64_t outer = sources[begin + m];
            next.push_back(outer < 0 || u >= axis.taps ? -1 : outer + u * flat);
          }
        }
      }
    }
    sources = std::move(next);
    taps *= axis.class_taps();
    points *= 2 * axis.class_taps() - 1;
  }
  residues = static_cast<int64_t>(sources.size()) / taps;
  std::vector<int64_t> order(sources.size());
  std::iota(order.begin(), order.end(), 0);
  in_order = residues == 1 && sources == order;
}

template <typename S, typename T>
FourierJob<S, T>::FourierJob(const FourierPlan& plan, const FourierPiece& piece, const T* constants,
                             const WeightView<const S>& weight, const WeightView<S>& grad, const FourierTaps& classes,
                             int64_t channels, int64_t width)
    : weight(weight),
      grad(grad),
      column(plan.column),
      width(width),
      adds(grad.adds || piece.begin > 0),
      cosine(constants + plan.cosine),
      sine(constants + plan.sine),
      cosine_back(constants + plan.cosine_back),
      sine_back(constants + plan.sine_back),
      classes(classes),
      taps(classes.taps),
      residues(classes.residues),
      rows(weight.rows / plan.groups) {
  for (const FourierPlanAxis& axis : plan.axes) {
    if (&axis == &plan.axes.back()) {
      last_taps = axis.class_taps();
    } else if (axis.class_taps() > 1) {
      const bool cut = axes.empty();
      const int64_t begin = cut ? piece.begin : 0, end = cut ? piece.end : axis.class_taps();
      const int64_t points = 2 * (end - begin) - (end == axis.class_taps() ? 1 : 0);  // zero has no mirror image
      axes.push_back({axis.class_taps(), points, constants + axis.cosine + begin, constants + axis.sine + begin});
      frequencies *= points;
    }
  }
  frequencies *= last_taps;
  columns = channels * residues;
  side = column ? columns : rows;
  length = column ? rows : columns;
  batch = batch_of(last_taps, axes.empty(), elements(), width);
  tiles = (frequencies + width - 1) / width;
  row_stride = columns * 2 * width;
  // What is read together must not lie a power of two apart.
  if (columns % 2 == 0) row_stride += 2 * width;
  tile_stride = rows * row_stride;
  side_stride = column ? 2 * width : row_stride;
  length_stride = column ? row_stride : 2 * width;
  counts.reserve(tiles * width);
  for (int64_t lane = 0; lane < tiles * width; ++lane) {
    counts.push_back(lane >= frequencies ? T(0) : lane % last_taps == 0 ? T(1) : T(2));
  }
}

namespace {

// Pieces that keep the memory of a problem at what its self-convolution and residual would take, and the weight, or at
// little. Those of half precision are not cut: their gradients could not be added up without loss.
template <typename S, typename T>
std::vector<FourierPiece> pieces_of(const FourierPlan& plan, int64_t rows, int64_t channels,
                                    const FourierTaps& classes) {
  constexpr int64_t little = int64_t{1} << 20, size = sizeof(T);
  int64_t cut = 1;  // frequencies of the axis that is cut, up to the middle
  for (const FourierPlanAxis& axis : plan.axes) {
    if (cut == 1 && &axis != &plan.axes.back()) cut = axis.class_taps();
  }
  const int64_t needed = rows * channels * classes.residues * (classes.points + 1) * size;
  const int64_t allowed =
      std::max(little, (2 * classes.points * rows * rows + rows * channels * classes.residues * classes.taps) * size);
  const int64_t pieces = std::is_same_v<S, T> ? std::min(cut, (needed + allowed - 1) / allowed) : 1;
  std::vector<FourierPiece> result;
  for (int64_t p = 0; p < pieces; ++p) result.push_back({p * cut / pieces, (p + 1) * cut / pieces});
  return result;
}

// Whether problems are not divided, but stay in the caches of one thread from the first stage to the last: many, or
// small ones.
bool undivided(int64_t problems, int64_t work, int64_t threads) {
  const bool is_long = static_cast<double>(work) > kElementwiseRate * kLongestPiece;
  return !is_long && (problems >= 2 * threads || problems * work < kThreadWork);
}

// One piece of the frequencies of all problems.
template <typename S, typename T>
class FourierWork {
 public:
  FourierWork(const FourierJob<S, T>& job, int64_t problems)
      : job_(job),
        problems_(problems),
        tile_work_(6 * job.side * job.side * job.length * fourier_stages<S, T>().width),
        batch_work_(4 * job.batch * job.taps * job.last_taps),
        work_(job.tiles * tile_work_ + 2 * job.batches() * batch_work_),
        threads_(threads_for(static_cast<double>(problems) * static_cast<double>(work_) / kElementwiseRate)),
        undivided_(undivided(problems, work_, threads_)) {}

  int64_t workspace_bytes() const {
    return (undivided_ ? std::min(threads_, problems_) : 1) * job_.memory() * static_cast<int64_t>(sizeof(T));
  }

  // One loss per tile of every problem, times the number of points.
  std::vector<double> execute(char* workspace) const {
    const FourierStages<S, T>& stages = fourier_stages<S, T>();
    T* const memory = reinterpret_cast<T*>(workspace);
    std::vector<double> losses(problems_ * job_.tiles);
    if (undivided_) {
      const int64_t each = grain(work_), pieces = (problems_ + each - 1) / each;
      const auto run = [&](int64_t piece, int64_t thread) {
        T* const own = memory + thread * job_.memory();
        for (int64_t problem = piece * each; problem < std::min((piece + 1) * each, problems_); ++problem) {
          stages.evaluate(job_, problem, own, 0, job_.batches());
          stages.multiply(job_, problem, own, 0, job_.tiles, losses.data() + problem * job_.tiles);
          if (job_.with_grad()) stages.gather(job_, problem, own, 0, job_.batches());
        }
      };
      share({{pieces, run}}, std::min(threads_, pieces));
      return losses;
    }
    for (int64_t problem = 0; problem < problems_; ++problem) {
      share_items(job_.batches(), batch_work_,
                  [&](int64_t begin, int64_t end) { stages.evaluate(job_, problem, memory, begin, end); });
      share_items(job_.tiles, tile_work_, [&](int64_t begin, int64_t end) {
        stages.multiply(job_, problem, memory, begin, end, losses.data() + problem * job_.tiles);
      });
      if (!job_.with_grad()) continue;
      share_items(job_.batches(), batch_work_,
                  [&](int64_t begin, int64_t end) { stages.gather(job_, problem, memory, begin, end); });
    }
    return losses;
  }

 private:
  const FourierJob<S, T>& job_;
  const int64_t problems_, tile_work_, batch_work_, work_, threads_;
  const bool undivided_;
};

template <typename S, typename T>
void execute(const FourierPlan& plan, const Call& call) {
  const Operands<S, T> operands(call, plan.target, plan.groups);
  const int64_t count = operands.count, channels = operands.channels, rows = operands.rows;
  const int64_t problems = count * plan.groups;
  const FourierTaps& classes = call.bucket.prepared.get<FourierTaps>(plan, call.bucket.weights);
  const std::vector<T> diagonal = diagonal_of<S, T>(operands.targets, operands.weight, problems,
                                                    plan.column ? channels * classes.residues : rows, channels);
  std::vector<T> factors;
  factors.reserve(problems);
  for (int64_t p = 0; p < problems; ++p) {
    factors.push_back(operands.factors.view().at(p, operands.targets.view().at(p)));
  }
  std::vector<FourierPiece> pieces = pieces_of<S, T>(plan, rows, channels, classes);
  // Where gradients go into the weights themselves, a second piece would read what the first has written.
  if (overlap(call.weights, call.grads)) pieces = {FourierPiece{0, pieces.back().end}};
  std::vector<FourierJob<S, T>> jobs;
  for (const FourierPiece& piece : pieces) {
    FourierJob<S, T>& job =
        jobs.emplace_back(plan, piece, static_cast<const T*>(call.bucket.constants), operands.weight, operands.grad,
                          classes, channels, fourier_stages<S, T>().width);
    job.factors = factors.data();
    job.diagonal = diagonal.data();
  }
  std::vector<FourierWork<S, T>> works;
  int64_t bytes = 0;
  for (const FourierJob<S, T>& job : jobs) bytes = std::max(bytes, works.emplace_back(job, problems).workspace_bytes());
  char* const workspace = call.workspace.take(bytes);
  std::vector<double> losses(count, 0.0);
  for (size_t p = 0; p < works.size(); ++p) {
    const std::vector<double> partial = works[p].execute(workspace);
    const int64_t each = plan.groups * jobs[p].tiles;
    for (int64_t w = 0; w < count; ++w) {
      losses[w] += std::accumulate(partial.begin() + w * each, partial.begin() + (w + 1) * each, 0.0);
    }
  }
  for (int64_t w = 0; w < count; ++w) {
    call.store_loss(w, losses[w] / static_cast<double>(classes.points) + operands.targets.constant(w, plan.offset));
  }
}

}  // namespace

void execute_fourier(const FourierPlan& plan, const Call& call) {
  dispatch(call.bucket.type, [&]<typename S, typename T>() { execute<S, T>(plan, call); });
}

}  // namespace ocnn_fused::cpu
