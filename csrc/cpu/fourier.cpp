#include "fourier.h"

#include <ATen/record_function.h>

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

// For every residue, flat tap indices in the order of the plan's axes, -1 where a short class has no tap.
std::vector<int64_t> sources_of(const FourierPlan& plan, const std::vector<int64_t>& kernel) {
  std::vector<int64_t> sources{0};  // grows axis by axis: (residues, taps)
  int64_t taps = 1;
  for (const FourierPlanAxis& axis : plan.axes) {
    const int64_t flat = std::accumulate(kernel.begin() + axis.axis + 1, kernel.end(), int64_t{1}, std::multiplies<>());
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
  }
  return sources;
}

// What is subtracted from the diagonals, see FourierJob.
template <typename S, typename T>
std::vector<T> diagonal_of(const GroupTargets<S, T>& targets, const WeightView<const S>& weight, int64_t problems,
                           int64_t side, int64_t channels) {
  std::vector<T> diagonal;
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

template <typename S, typename T>
FourierJob<S, T>::FourierJob(const FourierPlan& plan, const FourierPiece& piece, const T* constants,
                             const WeightView<const S>& weight, const WeightView<S>& grad,
                             const std::vector<int64_t>& sources, int64_t channels, int64_t width)
    : weight(weight),
      grad(grad),
      column(plan.column),
      width(width),
      adds(grad.adds || piece.begin > 0),
      cosine(constants + plan.cosine),
      sine(constants + plan.sine),
      cosine_back(constants + plan.cosine_back),
      sine_back(constants + plan.sine_back),
      sources(sources),
      rows(weight.rows / plan.groups) {
  for (const FourierPlanAxis& axis : plan.axes) {
    taps *= axis.class_taps();
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
  columns = channels * static_cast<int64_t>(sources.size()) / taps;
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
  for (int64_t lane = 0; lane < tiles * width; ++lane) {
    counts.push_back(lane >= frequencies ? T(0) : lane % last_taps == 0 ? T(1) : T(2));
  }
}

namespace {

// Pieces that keep the memory of a problem at what its self-convolution and residual would take, and the weight, or at
// little. Those of half precision are not cut: their gradients could not be added up without loss.
template <typename S, typename T>
std::vector<FourierPiece> pieces_of(const FourierPlan& plan, int64_t rows, int64_t channels, int64_t points,
                                    int64_t taps, int64_t residues) {
  constexpr int64_t little = int64_t{1} << 20, size = sizeof(T);
  int64_t cut = 1;  // frequencies of the axis that is cut, up to the middle
  for (const FourierPlanAxis& axis : plan.axes) {
    if (cut == 1 && &axis != &plan.axes.back()) cut = axis.class_taps();
  }
  const int64_t needed = rows * channels * residues * (points + 1) * size;
  const int64_t allowed = std::max(little, (2 * points * rows * rows + rows * channels * residues * taps) * size);
  const int64_t pieces = std::is_same_v<S, T> ? std::min(cut, (needed + allowed - 1) / allowed) : 1;
  std::vector<FourierPiece> result;
  for (int64_t p = 0; p < pieces; ++p) result.push_back({p * cut / pieces, (p + 1) * cut / pieces});
  return result;
}

// One loss per tile of every problem, times the number of points.
template <typename S, typename T>
std::vector<double> execute_piece(const FourierJob<S, T>& job, int64_t problems) {
  const FourierStages<S, T>& stages = fourier_stages<S, T>();
  const int64_t tile_work = 6 * job.side * job.side * job.length * stages.width;
  const int64_t batch_work = 4 * job.batch * job.taps * job.last_taps;
  const int64_t work = job.tiles * tile_work + 2 * job.batches() * batch_work;
  const int64_t threads = at::get_num_threads();
  // Many problems, or small ones, are not divided: each stays in the caches of one thread, from the first stage to the
  // last.
  const bool undivided = problems >= 2 * threads || problems * work < kThreadWork;
  const int64_t slots = undivided ? std::min(threads, problems) : 1;
  const at::Tensor workspace = workspace_of_thread(slots * job.memory() * static_cast<int64_t>(sizeof(T)));
  T* const memory = static_cast<T*>(workspace.data_ptr());
  std::vector<double> losses(problems * job.tiles);
  const auto parallel = [](const char* name, int64_t items, int64_t grain, const auto& stage) {
    RECORD_FUNCTION(name, {});
    at::parallel_for(0, items, grain, stage);
  };
  if (undivided) {
    parallel("ocnn_fused::evaluate+gram+apply+gather", problems, grain(work), [&](int64_t begin, int64_t end) {
      T* const own = memory + at::get_thread_num() * job.memory();
      for (int64_t problem = begin; problem < end; ++problem) {
        stages.evaluate(job, problem, own, 0, job.batches());
        stages.multiply(job, problem, own, 0, job.tiles, losses.data() + problem * job.tiles);
        if (job.with_grad()) stages.gather(job, problem, own, 0, job.batches());
      }
    });
    return losses;
  }
  for (int64_t problem = 0; problem < problems; ++problem) {
    parallel("ocnn_fused::evaluate", job.batches(), grain(batch_work),
             [&](int64_t begin, int64_t end) { stages.evaluate(job, problem, memory, begin, end); });
    parallel("ocnn_fused::gram+apply", job.tiles, grain(tile_work), [&](int64_t begin, int64_t end) {
      stages.multiply(job, problem, memory, begin, end, losses.data() + problem * job.tiles);
    });
    if (!job.with_grad()) continue;
    parallel("ocnn_fused::gather", job.batches(), grain(batch_work),
             [&](int64_t begin, int64_t end) { stages.gather(job, problem, memory, begin, end); });
  }
  return losses;
}

// One loss per weight.
template <typename S, typename T>
std::vector<double> execute(const FourierPlan& plan, const at::Tensor& constants, at::TensorList weights,
                            at::TensorList grads, const Epilogue& epilogue) {
  const Stacked<const S> stacked(weights);
  const Stacked<S> stacked_grads(grads, !epilogue.targets.empty());
  const int64_t count = static_cast<int64_t>(weights.size()), channels = weights[0].size(1);
  const int64_t rows = weights[0].size(0) / plan.groups, problems = count * plan.groups;
  const std::vector<int64_t> sources = sources_of(plan, weights[0].sizes().slice(2).vec());
  int64_t points = 1, taps = 1;
  for (const FourierPlanAxis& axis : plan.axes) {
    taps *= axis.class_taps();
    points *= 2 * axis.class_taps() - 1;
  }
  const int64_t residues = static_cast<int64_t>(sources.size()) / taps;
  const GroupTargets<S, T> targets(plan.target, stacked.view(), count, plan.groups, channels);
  const std::vector<T> diagonal =
      diagonal_of<S, T>(targets, stacked.view(), problems, plan.column ? channels * residues : rows, channels);
  const GroupFactors<T> of_groups(epilogue, plan.groups);
  std::vector<T> factors;
  for (int64_t p = 0; p < problems; ++p) factors.push_back(of_groups.view().at(p, targets.view().at(p)));
  std::vector<FourierPiece> pieces = pieces_of<S, T>(plan, rows, channels, points, taps, residues);
  // Where gradients go into the weights themselves, a second piece would read what the first has written.
  for (size_t w = 0; w < grads.size(); ++w) {
    if (weights[w].is_alias_of(grads[w])) pieces = {FourierPiece{0, pieces.back().end}};
  }
  std::vector<double> losses(count, 0.0);
  for (const FourierPiece& piece : pieces) {
    FourierJob<S, T> job(plan, piece, constants.const_data_ptr<T>(), stacked.view(), stacked_grads.view(), sources,
                         channels, fourier_stages<S, T>().width);
    job.factors = factors.data();
    job.diagonal = diagonal.data();
    const std::vector<double> partial = execute_piece(job, problems);
    for (int64_t w = 0; w < count; ++w) {
      const auto first = partial.begin() + w * plan.groups * job.tiles;
      losses[w] += std::accumulate(first, first + plan.groups * job.tiles, 0.0);
    }
  }
  for (int64_t w = 0; w < count; ++w) {
    losses[w] = losses[w] / static_cast<double>(points) + targets.constant(w, plan.offset);
  }
  return losses;
}

}  // namespace

LossesAndGrads execute_fourier(at::TensorList weights, const FourierPlan& plan, const at::Tensor& constants,
                               bool with_grad, const Epilogue& epilogue) {
  std::vector<at::Tensor> losses, grads = check_and_allocate(weights, plan.groups, with_grad, epilogue);
  dispatch(weights[0], [&]<typename S, typename T>() {
    const std::vector<double> values = execute<S, T>(plan, constants, weights, grads, epilogue);
    for (size_t w = 0; w < weights.size(); ++w) losses.push_back(loss_tensor(values[w], weights[w]));
  });
  if (!epilogue.targets.empty()) grads.clear();
  return {std::move(losses), std::move(grads)};
}

}  // namespace ocnn_fused::cpu
