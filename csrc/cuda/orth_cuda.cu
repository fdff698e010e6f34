// A CUDA GPU as a device of the pipeline, and its ops. Everything runs on the current stream, nothing waits for it.
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "../pipeline.h"
#include "kernels.cuh"

namespace ocnn_fused::cuda {
namespace {

template <typename... Parameters, typename... Arguments>
void launch(const Launch& geometry, void (*kernel)(Parameters...), const Arguments&... arguments) {
  TORCH_CHECK(geometry.thread_blocks <= INT32_MAX, "a weight is too large: ", geometry.thread_blocks, " thread blocks");
  kernel<<<static_cast<unsigned>(geometry.thread_blocks), geometry.threads, geometry.shared_bytes,
           at::cuda::getCurrentCUDAStream()>>>(arguments...);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <typename S>
WeightView<S> view_of(at::TensorList weights, bool adds = false) {
  WeightView<S> view{};
  view.adds = adds;
  if (weights.empty()) return view;
  const at::Tensor& first = weights[0];
  for (size_t w = 0; w < weights.size(); ++w) view.data[w] = data_of<S>(weights[w]);
  view.rows = first.size(0);
  view.row_stride = first.stride(0);
  view.channel_stride = first.stride(1);
  view.taps = 1;
  view.axes = 1;
  view.axis_taps[0] = 1;
  view.axis_stride[0] = 1;
  for (int64_t axis = 2; axis < first.dim(); ++axis) {
    const int64_t taps = first.size(axis), stride = first.stride(axis);
    if (taps == 1) continue;
    const bool follows = view.axis_stride[view.axes - 1] == taps * stride;
    if (view.taps > 1 && !follows) {
      TORCH_CHECK_VALUE(view.axes < kMaxAxes, "weight must have at most ", kMaxAxes, " spatial axes");
      ++view.axes;
      view.axis_taps[view.axes - 1] = 1;
    }
    view.axis_taps[view.axes - 1] *= taps;
    view.axis_stride[view.axes - 1] = stride;
    view.taps *= taps;
  }
  return view;
}

// Of weights with so many groups each.
template <typename T>
PlacedFactors<T> factors_of(const Epilogue& epilogue, int64_t groups) {
  PlacedFactors<T> factors{{nullptr, groups, epilogue.per_target}, epilogue.factor, 0, {}};
  if (!epilogue.factors) return factors;
  factors.all.of_weights = epilogue.factors->const_data_ptr<double>();
  for (size_t w = 0; w < epilogue.places.size(); ++w) factors.place[w] = static_cast<int>(epilogue.places[w]);
  return factors;
}

// Partial losses of some weights, and their sums.
template <typename T>
class PartialLosses {
 public:
  explicit PartialLosses(at::TensorList weights) : weights_(weights) {}

  // Room for so many numbers per weight; the same every time.
  double* of_each(int64_t count) {
    if (!partials_.defined()) {
      count_ = count;
      partials_ = at::empty({static_cast<int64_t>(weights_.size()) * count}, weights_[0].options().dtype(at::kDouble));
    }
    return partials_.mutable_data_ptr<double>();
  }

  // `offset` of all groups, which have these targets.
  void append_to(std::vector<at::Tensor>& losses, int64_t offset, const Targets<T>& targets_of, int64_t groups) const {
    Losses<T> targets{};
    for (size_t w = 0; w < weights_.size(); ++w) {
      losses.push_back(at::empty({}, weights_[w].options().dtype(c10::CppTypeToScalarType<T>::value)));
      targets.data[w] = losses.back().template mutable_data_ptr<T>();
    }
    launch(loss_launch(static_cast<int64_t>(weights_.size())), loss_kernel<T>, partials_.const_data_ptr<double>(),
           count_, static_cast<double>(offset) / static_cast<double>(groups), targets_of, groups, targets);
  }

 private:
  const at::TensorList weights_;
  at::Tensor partials_;
  int64_t count_ = 0;
};

template <typename S, typename T>
class Device {
 public:
  // Large enough to keep a GPU busy, small beside its memory.
  static constexpr int64_t kPlaneBytes = int64_t{128} << 20;
  static constexpr int64_t kNarrowestChunk = 512;
  static constexpr int64_t kChunkMultiple = kWarp;
  // Copying so much four times, to planes and back from gradients, takes no longer than the launches it saves.
  static constexpr int64_t kCopiedBytes = int64_t{1} << 20;

  Device(const LoweredPlan& plan, at::TensorList weights, at::TensorList grads, const at::Tensor& tables,
         const at::Tensor& constants, const Epilogue& epilogue)
      : plan_(plan),
        options_(weights[0].options()),
        weight_(view_of<const S>(weights)),
        grad_(view_of<S>(grads, !epilogue.targets.empty())),
        factors_(factors_of<T>(epilogue, plan.groups)),
        losses_(weights),
        targets_{plan.target, nullptr} {
    if (targets_.are_free()) find_targets(weights);
    TORCH_CHECK_VALUE(plan.blocks.size() <= kMaxBlocks, "a plan must have at most ", kMaxBlocks, " blocks, got ",
                      plan.blocks.size());
    const T* values = constants.const_data_ptr<T>();
    const int64_t* numbers = tables.const_data_ptr<int64_t>();
    blocks_.count = static_cast<int>(plan.blocks.size());
    for (int b = 0; b < blocks_.count; ++b) {
      const PlanBlock& block = plan.blocks[b];
      blocks_.block[b] = {plan.diagonal() ? nullptr : values + block.evaluation,
                          numbers + block.plane_of,
                          numbers + block.sources,
                          static_cast<int>(block.planes),
                          static_cast<int>(block.taps),
                          static_cast<int>(block.residues),
                          {}};
    }
    if (plan.diagonal()) return;
    mix_ = {values + plan.symmetric,       values + plan.antisymmetric, values + plan.symmetric_t,
            values + plan.antisymmetric_t, static_cast<int>(plan.lags), static_cast<int>(plan.outputs)};
    tile_ = mix_tile<T>(plan.lags, plan.outputs);
    TORCH_CHECK_VALUE(tile_ > 0, "a plan with ", plan.outputs, " outputs and ", plan.lags,
                      " lags does not fit into shared memory");
  }

  at::Tensor workspace(int64_t bytes) { return at::empty({bytes}, options_.dtype(at::kByte)); }

  void zero(T* data, int64_t elements) {
    C10_CUDA_CHECK(cudaMemsetAsync(data, 0, elements * sizeof(T), at::cuda::getCurrentCUDAStream()));
  }

  void evaluate(const std::vector<Planes<T>>& planes, const Window& window) {
    launch(taps_launch<S, T>(window, weight_.taps), evaluate_kernel<S, T>, weight_, with(planes), window);
  }

  void gather(const std::vector<Planes<T>>& planes, const Window& window) {
    launch(taps_launch<S, T>(window, grad_.taps), gather_kernel<S, T>, grad_, with(planes), window);
  }

  void mix(const Outputs<T>& x, bool with_grad) {
    const int64_t per_group = plan_.diagonal() ? diagonal_partials(plan_.outputs, x.side) : mix_pairs(x.side, tile_);
    double* partials = losses_.of_each(plan_.groups * per_group) + x.first_group * per_group;
    const Targets<T> targets = targets_.from(x.first_group);
    const PlacedFactors<T> factors = factors_.from(x.first_group);
    if (plan_.diagonal()) {
      launch(mix_diagonal_launch(plan_.outputs, x.groups, x.side), mix_diagonal_kernel<T>, x.data, plan_.outputs,
             targets, factors, x.groups, x.side, with_grad, partials);
    } else {
      launch(mix_launch<T>(plan_.lags, plan_.outputs, x.groups, x.side, tile_), mix_kernel_for<T>(tile_), x.data, mix_,
             targets, factors, x.groups, x.side, with_grad, partials);
    }
  }

  void append_losses(std::vector<at::Tensor>& losses) const {
    losses_.append_to(losses, plan_.offset, targets_, plan_.groups);
  }

 private:
  // One reduction over the weights, in two launches.
  void find_targets(at::TensorList weights) {
    const int64_t groups = static_cast<int64_t>(weights.size()) * plan_.groups, rows = weight_.rows / plan_.groups;
    const int64_t channels = weights[0].size(1), elements = rows * channels * weight_.taps;
    const int64_t each = squares_partials(elements);
    const at::Tensor partials = at::empty({groups * each}, options_.dtype(at::kDouble));
    free_targets_ = at::empty({groups}, options_.dtype(c10::CppTypeToScalarType<T>::value));
    launch(squares_launch(groups, elements), squares_kernel<S, T>, weight_, rows, channels,
           partials.mutable_data_ptr<double>());
    launch(targets_launch(groups), targets_kernel<T>, partials.const_data_ptr<double>(), each, rows,
           free_targets_.template mutable_data_ptr<T>());
    targets_.of_groups = free_targets_.template const_data_ptr<T>();
  }

  BlockViews<T> with(const std::vector<Planes<T>>& planes) const {
    BlockViews<T> views = blocks_;
    for (int b = 0; b < views.count; ++b) views.block[b].memory = planes[plan_.blocks[b].pool];
    return views;
  }

  const LoweredPlan& plan_;
  const at::TensorOptions options_;
  const WeightView<const S> weight_;
  const WeightView<S> grad_;
  const PlacedFactors<T> factors_;
  PartialLosses<T> losses_;
  Targets<T> targets_;
  at::Tensor free_targets_;
  BlockViews<T> blocks_{};
  MixView<T> mix_{};
  int tile_ = 0;
};

// Calls f.operator()<S, T>(weights, grads, epilogue) for as many weights at once as a launch takes.
template <typename F>
void each_batch(at::TensorList weights, at::TensorList grads, const Epilogue& epilogue, const F& f) {
  const c10::cuda::CUDAGuard guard(weights[0].device());
  dispatch(weights[0], [&]<typename S, typename T>() {
    for (size_t begin = 0; begin < weights.size(); begin += kMaxWeights) {
      const size_t count = std::min<size_t>(kMaxWeights, weights.size() - begin);
      Epilogue own = epilogue;
      own.places = epilogue.factors ? epilogue.places.slice(begin, count) : epilogue.places;
      f.template operator()<S, T>(weights.slice(begin, count), grads.empty() ? grads : grads.slice(begin, count), own);
    }
  });
}

void check_tables(const at::Tensor& tables, const at::Tensor& weight) {
  TORCH_CHECK_VALUE(tables.device() == weight.device(), "the plan's tables must be on ", weight.device(), ", got ",
                    tables.device());
}

LossesAndGrads execute_plan(at::TensorList weights, const LoweredPlan& plan, const at::Tensor& tables,
                            const at::Tensor& constants, bool with_grad, const Epilogue& epilogue) {
  std::vector<at::Tensor> losses, grads = check_and_allocate(weights, plan.groups, with_grad, epilogue);
  check_tables(constants, weights[0]);
  each_batch(weights, grads, epilogue,
             [&]<typename S, typename T>(at::TensorList some, at::TensorList some_grads, const Epilogue& own) {
               Device<S, T> device(plan, some, some_grads, tables, constants, own);
               Pipeline<S, T, Device<S, T>>(device, plan, some, some_grads, !own.targets.empty()).execute();
               device.append_losses(losses);
             });
  if (!epilogue.targets.empty()) grads.clear();
  return {std::move(losses), std::move(grads)};
}

LossesAndGrads execute_small(at::TensorList weights, const SmallPlan& plan, const at::Tensor& tables, bool with_grad,
                             const Epilogue& epilogue) {
  std::vector<at::Tensor> losses, grads = check_and_allocate(weights, plan.groups, with_grad, epilogue);
  const int64_t* numbers = tables.const_data_ptr<int64_t>();
  const TapPairs pairs{numbers + plan.left, numbers + plan.right, numbers + plan.lag_begin, numbers + plan.terms,
                       numbers + plan.tap_begin};
  const auto run = [&]<typename S, typename T>(at::TensorList some, at::TensorList some_grads, const Epilogue& own) {
    const int64_t rows = some[0].size(0) / plan.groups, channels = some[0].size(1);
    const SmallShape shape = small_shape<T>(plan.groups, rows, channels, plan.taps, plan.lags);
    TORCH_CHECK_VALUE(shape.groups_at_once > 0, "a group of ", rows, " x ", channels, " filters of ", plan.taps,
                      " taps does not fit into shared memory");
    PartialLosses<T> partials(some);
    const Targets<T> targets{plan.target, nullptr};
    launch(small_launch<T>(shape, static_cast<int64_t>(some.size())), small_kernel<S, T>, view_of<const S>(some),
           view_of<S>(some_grads, !own.targets.empty()), pairs, targets, factors_of<T>(own, plan.groups), shape,
           partials.of_each(shape.thread_blocks()));
    partials.append_to(losses, 0, targets, plan.groups);
  };
  each_batch(weights, grads, epilogue, run);
  if (!epilogue.targets.empty()) grads.clear();
  return {std::move(losses), std::move(grads)};
}

LossesAndGrads execute(at::TensorList weights, const Plan& plan, bool with_grad,
                       const std::optional<at::Tensor>& factors, at::IntArrayRef places, double factor, bool per_target,
                       at::TensorList targets) {
  TORCH_CHECK_VALUE(!weights.empty(), "weights must not be empty");
  check_tables(plan->tables, weights[0]);
  const Epilogue epilogue{factors, places, factor, per_target, targets};
  return plan->small ? execute_small(weights, *plan->small, plan->tables, with_grad, epilogue)
                     : execute_plan(weights, *plan->lowered, plan->tables, plan->constants, with_grad, epilogue);
}

}  // namespace

TORCH_LIBRARY_IMPL(ocnn_fused, CUDA, m) {
  register_plan_type();
  m.impl("execute", execute);
}

}  // namespace ocnn_fused::cuda
