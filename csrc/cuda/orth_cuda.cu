// A CUDA GPU as a device of the pipeline. Everything runs on one stream, nothing waits for it.
#include <algorithm>
#include <climits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "../cpu/switches.h"
#include "../pipeline.h"
#include "blas.h"
#include "execute.h"
#include "kernels.cuh"

#ifndef OCNN_FUSED_LAUNCH
#define OCNN_FUSED_LAUNCH(kernel, blocks, threads, shared_bytes, stream, arguments) \
  kernel<<<blocks, threads, shared_bytes, stream>>>(arguments...)
#endif

namespace ocnn_fused::cuda {
namespace {

void require(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument(what);
}

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}

// Some weights of a call, as many as a launch takes, and where they are worked on.
struct Batch {
  const Call& call;
  const Queue& queue;
  int64_t begin, count;

  const Layout& layout() const { return call.bucket.weights; }
  const int64_t* tables() const { return call.bucket.tables; }
  cudaStream_t stream() const { return reinterpret_cast<cudaStream_t>(queue.stream); }
  template <typename S>
  Tensors<const S> read() const {
    return call.read<S>().slice(begin, count);
  }
  template <typename S>
  Tensors<S> written() const {
    return call.with_grad() ? call.written<S>().slice(begin, count) : call.written<S>();
  }
  void copy_places(int (&places)[kMaxWeights]) const {
    for (int64_t w = 0; w < count; ++w) places[w] = static_cast<int>(call.bucket.places[begin + w]);
  }

  template <typename... Parameters, typename... Arguments>
  void launch(const Launch& geometry, void (*kernel)(Parameters...), const Arguments&... arguments) const {
    require(geometry.thread_blocks <= INT_MAX,
            "a weight is too large: " + std::to_string(geometry.thread_blocks) + " thread blocks");
    OCNN_FUSED_LAUNCH(kernel, static_cast<unsigned>(geometry.thread_blocks), geometry.threads, geometry.shared_bytes,
                      stream(), arguments);
    check(cudaGetLastError());
  }
};

template <typename S>
WeightView<S> view_of(const Tensors<S>& tensors, bool adds = false) {
  WeightView<S> view{};
  view.adds = adds;
  const Layout& layout = tensors.layout;
  for (int64_t w = 0; w < tensors.count(); ++w) view.data[w] = tensors[w];
  view.rows = layout.rows();
  view.row_stride = layout.strides[0];
  view.channel_stride = layout.strides[1];
  view.taps = 1;
  view.axes = 1;
  view.axis_taps[0] = 1;
  view.axis_stride[0] = 1;
  for (int64_t axis = 2; axis < layout.dimensions(); ++axis) {
    const int64_t taps = layout.sizes[axis], stride = layout.strides[axis];
    if (taps == 1) continue;
    const bool follows = view.axis_stride[view.axes - 1] == taps * stride;
    if (view.taps > 1 && !follows) {
      require(view.axes < kMaxAxes, "weight must have at most " + std::to_string(kMaxAxes) + " spatial axes");
      ++view.axes;
      view.axis_taps[view.axes - 1] = 1;
    }
    view.axis_taps[view.axes - 1] *= taps;
    view.axis_stride[view.axes - 1] = stride;
    view.taps *= taps;
  }
  return view;
}

// For weights of `groups` each.
template <typename T>
PlacedFactors<T> factors_of(const Batch& batch, int64_t groups) {
  const Epilogue& epilogue = batch.call.epilogue;
  PlacedFactors<T> factors{{epilogue.factors, groups, epilogue.per_target}, epilogue.factor, 0, {}};
  batch.copy_places(factors.place);
  return factors;
}

// Adds up `each` partial losses of every weight, and `offset` of all its groups, which have these targets.
template <typename T>
void store_losses(const Batch& batch, const double* partials, int64_t each, int64_t offset, const Targets<T>& targets,
                  int64_t groups) {
  Losses losses{batch.call.losses, batch.call.wide, {}};
  batch.copy_places(losses.place);
  batch.launch(loss_launch(batch.count), loss_kernel<T>, partials, each,
               static_cast<double>(offset) / static_cast<double>(groups), targets, groups, losses);
}

// The pipeline's device for one batch.
template <typename S, typename T>
class Device {
 public:
  // Large enough to keep a GPU busy, small beside its memory.
  static constexpr int64_t kPlaneBytes = int64_t{128} << 20;
  static constexpr int64_t kNarrowestChunk = 512;
  static constexpr int64_t kChunkMultiple = kWarp;
  // Copying as much as this four times, to planes and back from gradients, takes no longer than the launches it saves.
  static constexpr int64_t kCopiedBytes = int64_t{1} << 20;

  Device(const BilinearPlan& plan, const Batch& batch)
      : plan_(plan),
        batch_(batch),
        weight_(view_of(batch.read<S>())),
        grad_(view_of(batch.written<S>(), batch.call.epilogue.adds)),
        factors_(factors_of<T>(batch, plan.groups)),
        rows_(weight_.rows / plan.groups),
        channels_(batch.layout().channels()),
        side_(plan.column ? channels_ * plan.pools[0].residues : rows_),
        targets_{plan.target, nullptr} {
    require(plan.blocks.size() <= kMaxBlocks, "a plan must have at most " + std::to_string(kMaxBlocks) +
                                                  " blocks, got " + std::to_string(plan.blocks.size()));
    const T* values = static_cast<const T*>(batch.call.bucket.constants);
    const int64_t* numbers = batch.tables();
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
    require(tile_ > 0, "a plan with " + std::to_string(plan.outputs) + " outputs and " + std::to_string(plan.lags) +
                           " lags does not fit into shared memory");
  }

  // Takes what lives as long as the batch.
  void lay_out(Arena& arena) {
    partials_ = arena.take<double>(all_groups() * partials_per_group());
    if (!targets_.are_free()) return;
    squares_ = arena.take<double>(all_groups() * squares_partials(group_elements()));
    free_targets_ = arena.take<T>(all_groups());
  }

  // One reduction over the weights, in two launches.
  void find_targets() {
    if (!targets_.are_free()) return;
    batch_.launch(squares_launch(all_groups(), group_elements()), squares_kernel<S, T>, weight_, rows_, channels_,
                  squares_);
    batch_.launch(targets_launch(all_groups()), targets_kernel<T>, squares_, squares_partials(group_elements()), rows_,
                  free_targets_);
    targets_.of_groups = free_targets_;
  }

  void zero(T* data, int64_t elements) { check(cudaMemsetAsync(data, 0, elements * sizeof(T), batch_.stream())); }

  void multiply(const Matrices<T>& out, const Matrices<T>& left, const Matrices<T>& right, bool add) {
    multiply_by_blas(batch_.queue.blas, out, left, right, add);
  }

  void evaluate(const std::vector<Planes<T>>& planes, const Window& window) {
    batch_.launch(taps_launch<S, T>(window, weight_.taps), evaluate_kernel<S, T>, weight_, with(planes), window);
  }

  void gather(const std::vector<Planes<T>>& planes, const Window& window) {
    batch_.launch(taps_launch<S, T>(window, grad_.taps), gather_kernel<S, T>, grad_, with(planes), window);
  }

  void mix(const Outputs<T>& x, bool with_grad) {
    double* partials = partials_ + x.first_group * partials_per_group();
    const Targets<T> targets = targets_.from(x.first_group);
    const PlacedFactors<T> factors = factors_.from(x.first_group);
    if (plan_.diagonal()) {
      batch_.launch(mix_diagonal_launch(plan_.outputs, x.groups, x.side), mix_diagonal_kernel<T>, x.data, plan_.outputs,
                    targets, factors, x.groups, x.side, with_grad, partials);
    } else {
      batch_.launch(mix_launch<T>(plan_.lags, plan_.outputs, x.groups, x.side, tile_), mix_kernel_for<T>(tile_), x.data,
                    mix_, targets, factors, x.groups, x.side, with_grad, partials);
    }
  }

  void store_losses() const {
    cuda::store_losses(batch_, partials_, plan_.groups * partials_per_group(), plan_.offset, targets_, plan_.groups);
  }

 private:
  int64_t all_groups() const { return batch_.count * plan_.groups; }
  int64_t group_elements() const { return rows_ * channels_ * weight_.taps; }
  int64_t partials_per_group() const {
    return plan_.diagonal() ? diagonal_partials(plan_.outputs, side_) : mix_pairs(side_, tile_);
  }

  BlockViews<T> with(const std::vector<Planes<T>>& planes) const {
    BlockViews<T> views = blocks_;
    for (int b = 0; b < views.count; ++b) views.block[b].memory = planes[plan_.blocks[b].pool];
    return views;
  }

  const BilinearPlan& plan_;
  const Batch& batch_;
  const WeightView<const S> weight_;
  const WeightView<S> grad_;
  const PlacedFactors<T> factors_;
  const int64_t rows_, channels_, side_;  // of a group
  Targets<T> targets_;
  BlockViews<T> blocks_{};
  MixView<T> mix_{};
  int tile_ = 0;
  double *partials_ = nullptr, *squares_ = nullptr;  // of losses, of free targets
  T* free_targets_ = nullptr;
};

// Both count the bytes that a batch needs, and if there is memory execute it.

template <typename S, typename T>
int64_t execute(const BilinearPlan& plan, const Batch& batch, char* memory) {
  Device<S, T> device(plan, batch);
  Pipeline<S, T, Device<S, T>> pipeline(device, plan, batch.read<S>(), batch.written<S>(), batch.call.epilogue.adds);
  Arena arena(memory);
  device.lay_out(arena);
  if (memory != nullptr) {
    device.find_targets();
    pipeline.execute(memory + arena.used());
    device.store_losses();
  }
  return arena.used() + pipeline.workspace_bytes();
}

template <typename S, typename T>
int64_t execute(const SmallPlan& plan, const Batch& batch, char* memory) {
  const int64_t* numbers = batch.tables();
  const TapPairs pairs{numbers + plan.left, numbers + plan.right, numbers + plan.lag_begin, numbers + plan.terms,
                       numbers + plan.tap_begin};
  const int64_t rows = batch.layout().rows() / plan.groups, channels = batch.layout().channels();
  const SmallShape shape = small_shape<T>(plan.groups, rows, channels, plan.taps, plan.lags);
  require(shape.groups_at_once > 0, "a group of " + std::to_string(rows) + " x " + std::to_string(channels) +
                                        " filters of " + std::to_string(plan.taps) +
                                        " taps does not fit into shared memory");
  Arena arena(memory);
  double* partials = arena.take<double>(batch.count * shape.thread_blocks());
  if (memory != nullptr) {
    const Targets<T> targets{plan.target, nullptr};
    batch.launch(small_launch<T>(shape, batch.count), small_kernel<S, T>, view_of(batch.read<S>()),
                 view_of(batch.written<S>(), batch.call.epilogue.adds), pairs, targets,
                 factors_of<T>(batch, plan.groups), shape, partials);
    store_losses(batch, partials, shape.thread_blocks(), 0, targets, plan.groups);
  }
  return arena.used();
}

template <typename S, typename T>
int64_t execute(const FourierPlan&, const Batch&, char*) {
  throw std::invalid_argument("Fourier plans run on the CPU only");
}

// Batches come one after the other, so that all of them can use the same memory. Returns how much the largest needs.
int64_t execute_batches(const Call& call, const Queue& queue, char* memory) {
  int64_t most = 0;
  dispatch(call.bucket.type, [&]<typename S, typename T>() {
    for (int64_t begin = 0; begin < call.count(); begin += kMaxWeights) {
      const Batch batch{call, queue, begin, std::min<int64_t>(kMaxWeights, call.count() - begin)};
      most = std::max(
          most, std::visit([&](const auto& plan) { return execute<S, T>(plan, batch, memory); }, call.bucket.plan));
    }
  });
  return most;
}

}  // namespace

int64_t workspace_bytes(const Bucket& bucket, bool with_grad) {
  const std::vector<Address> weights(bucket.places.size(), 0), grads(with_grad ? weights.size() : 0, 1);
  return execute_batches(Call{bucket, weights, grads, {}, nullptr, false, {}}, {}, nullptr);
}

void execute(const Call& call, const Queue& queue) {
  char* memory = call.workspace.take(execute_batches(call, queue, nullptr));
  if (cpu::poisons) {
    const cudaStream_t stream = reinterpret_cast<cudaStream_t>(queue.stream);
    check(cudaMemsetAsync(memory, cpu::kPoison, call.workspace.bytes, stream));
  }
  execute_batches(call, queue, memory);
}

}  // namespace ocnn_fused::cuda
