#include "fourier.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "targets.h"
#include "tensors.h"
#include "threads.h"

namespace ocnn_fused::cpu {
namespace {

// Elements of one axis alone that are evaluated together: they share what is read of its table.
constexpr int64_t kBatch = 8;

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
      diagonal.push_back(target.ignored
                             ? static_cast<T>(GroupTargets<S, T>::square_of(weight, row, channels))
                             : target.value);
    }
  }
  return diagonal;
}

}  // namespace

template <typename S, typename T>
FourierJob<S, T>::FourierJob(const FourierPlan& plan, const T* constants, const WeightView<const S>& weight,
                             const WeightView<S>& grad, const std::vector<int64_t>& kernel, int64_t channels,
                             int64_t width)
    : weight(weight),
      grad(grad),
      column(plan.column),
      width(width),
      cosine(constants + plan.cosine),
      sine(constants + plan.sine),
      cosine_back(constants + plan.cosine_back),
      sine_back(constants + plan.sine_back),
      sources(sources_of(plan, kernel)),
      rows(weight.rows / plan.groups) {
  for (const FourierPlanAxis& axis : plan.axes) {
    taps *= axis.class_taps();
    points *= 2 * axis.class_taps() - 1;
    if (&axis == &plan.axes.back()) {
      last_taps = axis.class_taps();
    } else if (axis.class_taps() > 1) {
      axes.push_back({axis.class_taps(), constants + axis.cosine, constants + axis.sine});
      frequencies *= axes.back().points();
    }
  }
  frequencies *= last_taps;
  columns = channels * static_cast<int64_t>(sources.size()) / taps;
  side = column ? columns : rows;
  length = column ? rows : columns;
  batch = axes.empty() ? kBatch : 1;
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

template <typename S, typename T>
std::vector<double> execute(const FourierPlan& plan, const at::Tensor& constants, at::TensorList weights,
                            at::TensorList grads) {
  const FourierStages<S, T>& stages = fourier_stages<S, T>();
  const Stacked<const S> stacked(weights);
  const Stacked<S> stacked_grads(grads);
  const int64_t count = static_cast<int64_t>(weights.size()), channels = weights[0].size(1);
  const int64_t problems = count * plan.groups;
  const GroupTargets<S, T> targets(plan.target, stacked.view(), count, plan.groups, channels);
  FourierJob<S, T> job(plan, constants.const_data_ptr<T>(), stacked.view(), stacked_grads.view(),
                       weights[0].sizes().slice(2).vec(), channels, stages.width);
  job.diagonal = diagonal_of<S, T>(targets, stacked.view(), problems, job.side, channels);

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
  std::vector<double> partial(problems * job.tiles);
  const auto parallel = [](const char* name, int64_t items, int64_t grain, const auto& stage) {
    RECORD_FUNCTION(name, {});
    at::parallel_for(0, items, grain, stage);
  };
  if (undivided) {
    parallel("ocnn_fused::evaluate+gram+apply+gather", problems, grain(work), [&](int64_t begin, int64_t end) {
      T* const own = memory + at::get_thread_num() * job.memory();
      for (int64_t problem = begin; problem < end; ++problem) {
        stages.evaluate(job, problem, own, 0, job.batches());
        stages.multiply(job, problem, own, 0, job.tiles, partial.data() + problem * job.tiles);
        if (job.with_grad()) stages.gather(job, problem, own, 0, job.batches());
      }
    });
  }
  for (int64_t problem = 0; !undivided && problem < problems; ++problem) {
    parallel("ocnn_fused::evaluate", job.batches(), grain(batch_work), [&](int64_t begin, int64_t end) {
      stages.evaluate(job, problem, memory, begin, end);
    });
    parallel("ocnn_fused::gram+apply", job.tiles, grain(tile_work), [&](int64_t begin, int64_t end) {
      stages.multiply(job, problem, memory, begin, end, partial.data() + problem * job.tiles);
    });
    if (!job.with_grad()) continue;
    parallel("ocnn_fused::gather", job.batches(), grain(batch_work), [&](int64_t begin, int64_t end) {
      stages.gather(job, problem, memory, begin, end);
    });
  }
  std::vector<double> losses;
  for (int64_t w = 0; w < count; ++w) {
    const auto first = partial.begin() + w * plan.groups * job.tiles;
    const double sum = std::accumulate(first, first + plan.groups * job.tiles, 0.0);
    losses.push_back(sum / static_cast<double>(job.points) + targets.constant(w, plan.offset));
  }
  return losses;
}

}  // namespace

LossesAndGrads execute_fourier(at::TensorList weights, const FourierPlan& plan, const at::Tensor& constants,
                               bool with_grad) {
  std::vector<at::Tensor> losses, grads = check_and_allocate(weights, plan.groups, with_grad);
  dispatch(weights[0], [&]<typename S, typename T>() {
    const std::vector<double> values = execute<S, T>(plan, constants, weights, grads);
    for (size_t w = 0; w < weights.size(); ++w) losses.push_back(loss_tensor(values[w], weights[w]));
  });
  return {std::move(losses), std::move(grads)};
}

}  // namespace ocnn_fused::cpu
