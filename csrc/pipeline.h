// Executes a lowered plan on any device: evaluate | gram | mix | apply | gather. Matrix products go to ATen's BLAS; the
// other stages, and memory, come from the device.
#pragma once

#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "plan_object.h"
#include "views.h"

namespace ocnn_fused {

// Hands out cache-line aligned parts of a workspace; with no memory it only measures.
class Arena {
 public:
  explicit Arena(char* memory = nullptr) : memory_(memory) {}
  template <typename T>
  T* take(int64_t elements) {
    char* part = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += (elements * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return reinterpret_cast<T*>(part);
  }
  int64_t used() const { return used_; }

 private:
  char* memory_;
  int64_t used_ = 0;
};

// One plan and the weights it is for, all of one shape, strides and type: they are stacked as if they were more groups.
// S is the weights' type, T the type of everything computed. A Device has
//   kPlaneBytes, kNarrowestChunk, kChunkMultiple                         how much is worked on at once
//   kCopiedBytes                                                         see flat_
//   at::Tensor workspace(int64_t bytes)                                  memory with undefined contents
//   void zero(T*, int64_t elements)
//   void evaluate(const std::vector<Planes<T>>&, const Window&)          V = E K, one entry per pool
//   void mix(const Outputs<T>&, bool with_grad)                          loss per group; Y, times its factor, in place
//                                                                        of X
//   void gather(const std::vector<Planes<T>>&, const Window&)            dK = E^T G, stored or added
template <typename S, typename T, typename Device>
class Pipeline {
 public:
  // `adds`: to what `grads` hold, which may be the weights themselves.
  Pipeline(Device& device, const LoweredPlan& plan, at::TensorList weights, at::TensorList grads, bool adds)
      : device_(device),
        plan_(plan),
        weights_(weights),
        grads_(grads),
        rows_(weights[0].size(0) / plan.groups),
        channels_(weights[0].size(1)),
        groups_(static_cast<int64_t>(weights.size()) * plan.groups),
        side_(plan.column ? channels_ * plan.pools[0].residues : rows_),
        flat_(plan.flat && std::is_same_v<S, T> && weights[0].is_contiguous() &&
              (grads.empty() || (grads[0].is_contiguous() && !are_same(weights, grads))) &&
              (weights.size() == 1 || static_cast<int64_t>(weights[0].nbytes()) > Device::kCopiedBytes)),
        adds_(adds),
        planes_(plan.pools.size()),
        gradients_(plan.pools.size()) {
    int64_t products = 0;
    for (const PlanRun& run : plan.runs) {
      products += run.count;
      sums_ = sums_ || run.summed;
    }
    accumulates_ = products > plan.outputs;
    // Summed runs are one contraction over neighbouring planes: on the row side those must lie next to each other.
    interleaved_ = sums_ && !plan.column;
  }

  // As many groups at once as memory allows; a single one may also be cut along the contraction axis.
  void execute() {
    choose_chunks();
    Arena measure;
    lay_out(measure);
    const at::Tensor memory = device_.workspace(measure.used());
    Arena arena(static_cast<char*>(memory.data_ptr()));
    lay_out(arena);
    for (group_ = 0; group_ < groups_; group_ += groups_now_) {
      // Where the planes are the weight itself, groups of the next weight must wait.
      groups_now_ = std::min(groups_at_once_, flat_ ? plan_.groups - group_ % plan_.groups : groups_ - group_);
      for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
        select(chunk);
        evaluate();
        gram(chunk > 0);
      }
      mix();
      if (!with_grad()) continue;
      for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
        select(chunk);
        if (chunks_ > 1) evaluate();
        apply();
        gather();
      }
    }
  }

 private:
  bool with_grad() const { return !grads_.empty(); }

  // Whether gradients go where the weights are read. Stages do so chunk by chunk: what a chunk's gather writes, no
  // other chunk evaluates. But products whose operand is the weight itself would read what they have written.
  static bool are_same(at::TensorList weights, at::TensorList grads) {
    for (size_t w = 0; w < weights.size(); ++w) {
      if (weights[w].is_alias_of(grads[w])) return true;
    }
    return false;
  }

  void choose_chunks() {
    constexpr int64_t size = sizeof(T);
    int64_t plane_bytes = 0;
    for (const PlanPool& pool : plan_.pools) {
      plane_bytes += 2 * size * pool.planes * pool.residues * rows_ * channels_;  // without gradient too: the same bits
    }
    const int64_t allowed = std::max(Device::kPlaneBytes, 2 * size * (2 * plan_.lags - 1) * rows_ * rows_);
    groups_at_once_ = std::clamp<int64_t>(allowed / (plane_bytes + size * plan_.outputs * side_ * side_), 1, groups_);
    // Several planes of one group are one contraction only if no other group lies between them.
    if (sums_ && plan_.column) groups_at_once_ = 1;
    const int64_t length = plan_.column ? rows_ : channels_;
    chunk_ = length;
    if (groups_at_once_ == 1 && !flat_ && plane_bytes > allowed) {
      const int64_t wanted = (plane_bytes + allowed - 1) / allowed;
      chunk_ = std::max((length + wanted - 1) / wanted, std::min(length, Device::kNarrowestChunk));
      chunk_ = (chunk_ + Device::kChunkMultiple - 1) / Device::kChunkMultiple * Device::kChunkMultiple;
    }
    chunks_ = (length + chunk_ - 1) / chunk_;
  }

  void lay_out(Arena& arena) {
    outputs_ = arena.template take<T>(plan_.outputs * groups_at_once_ * side_ * side_);
    const int64_t area = plan_.column ? std::min(chunk_, rows_) * channels_ : rows_ * std::min(chunk_, channels_);
    for (size_t p = 0; p < planes_.size(); ++p) {
      const int64_t elements = flat_ ? 0 : plan_.pools[p].planes * plan_.pools[p].residues * groups_at_once_ * area;
      planes_[p].data = arena.template take<T>(elements);
      gradients_[p].data = arena.template take<T>(with_grad() ? elements : 0);
    }
  }

  // Planes that are the weight and its gradient themselves.
  void point_at_weight() {
    if constexpr (std::is_same_v<S, T>) {
      const int64_t weight = group_ / plan_.groups, offset = group_ % plan_.groups * rows_ * weights_[0].stride(0);
      planes_[0].data = const_cast<T*>(weights_[weight].template const_data_ptr<T>()) + offset;  // only read
      if (with_grad()) gradients_[0].data = grads_[weight].template mutable_data_ptr<T>() + offset;
    }
  }

  // Sets the window of this chunk and the strides of the planes for it.
  void select(int64_t chunk) {
    if (flat_) point_at_weight();
    const int64_t begin = chunk * chunk_, row = group_ * rows_;
    window_ = plan_.column ? Window{row + begin, row + std::min(begin + chunk_, rows_), 0, channels_}
                           : Window{row, row + groups_now_ * rows_, begin, std::min(begin + chunk_, channels_)};
    if (plan_.column && chunks_ == 1) window_.row_end = row + groups_now_ * rows_;
    for (size_t p = 0; p < planes_.size(); ++p) {
      const int64_t width = plan_.pools[p].residues * window_.channels();
      for (Planes<T>* planes : {&planes_[p], &gradients_[p]}) {
        planes->plane_stride = interleaved_ ? width : window_.rows() * width;
        planes->row_stride = interleaved_ ? plan_.pools[p].planes * width : width;
      }
    }
  }

  void evaluate() {
    if (flat_) return;
    RECORD_FUNCTION("ocnn_fused::evaluate", {});
    device_.evaluate(planes_, window_);
  }

  void mix() {
    RECORD_FUNCTION("ocnn_fused::mix", {});
    device_.mix(Outputs<T>{outputs_, groups_now_, side_, group_}, with_grad());
  }

  void gather() {
    if (flat_) return;
    RECORD_FUNCTION("ocnn_fused::gather", {});
    device_.gather(gradients_, window_);
  }

  at::Tensor wrap(T* data, at::IntArrayRef sizes, at::IntArrayRef strides) const {
    const auto options = weights_[0].options().dtype(c10::CppTypeToScalarType<T>::value);
    return at::for_blob(data, sizes)
        .strides(strides)
        .options(options)
        .target_device(weights_[0].device())
        .make_tensor();
  }

  // As many planes as the run has, from `plane` on, as one batch of matrices, oriented (gram side, contraction).
  at::Tensor matrices(const PlanRun& run, const std::vector<Planes<T>>& all, int64_t plane) const {
    const Planes<T>& planes = all[run.pool];
    T* first = planes.data + plane * planes.plane_stride;
    const int64_t width = plan_.pools[run.pool].residues * window_.channels(), rows = window_.rows() / groups_now_;
    if (plan_.column) {
      const int64_t batch = run.summed ? groups_now_ : run.count * groups_now_;
      const int64_t length = run.summed ? run.count * rows : rows;
      return wrap(first, {batch, width, length}, {length * width, 1, width});
    }
    if (interleaved_) {
      return wrap(first, {groups_now_, rows, run.count * width}, {rows * planes.row_stride, planes.row_stride, 1});
    }
    return wrap(first, {run.count * groups_now_, rows, width}, {rows * width, width, 1});
  }

  at::Tensor outputs(const PlanRun& run) const {
    const int64_t area = side_ * side_, count = run.summed ? 1 : run.count;
    return wrap(outputs_ + run.out * groups_now_ * area, {count * groups_now_, side_, side_}, {area, side_, 1});
  }

  static void multiply(at::Tensor out, const at::Tensor& left, const at::Tensor& right, bool add) {
    if (add) {
      out.baddbmm_(left, right);
    } else {
      at::bmm_out(out, left, right);
    }
  }

  // Calls f for every run of products that can be issued at once.
  template <typename F>
  void each_run(const F& f) const {
    for (const PlanRun& run : plan_.runs) {
      if (interleaved_ && !run.summed) {
        for (int64_t j = 0; j < run.count; ++j) {
          f(PlanRun{run.pool, run.left + j, run.right + j, run.out + j, 1, false});
        }
      } else {
        f(run);
      }
    }
  }

  void gram(bool add) {
    RECORD_FUNCTION("ocnn_fused::gram", {});
    if (accumulates_ && !add) {
      device_.zero(outputs_, plan_.outputs * groups_now_ * side_ * side_);
      add = true;
    }
    each_run([&](const PlanRun& run) {
      multiply(outputs(run), matrices(run, planes_, run.left), matrices(run, planes_, run.right).transpose(1, 2), add);
    });
  }

  // G = Y V, or the transpose of it where the planes lie transposed.
  void multiply_planes(const at::Tensor& gradients, const at::Tensor& y, const at::Tensor& planes) const {
    const bool add = accumulates_ || (flat_ && adds_);
    if (plan_.column) {
      multiply(gradients.transpose(1, 2), planes.transpose(1, 2), y.transpose(1, 2), add);
    } else {
      multiply(gradients, y, planes, add);
    }
  }

  void apply() {
    RECORD_FUNCTION("ocnn_fused::apply", {});
    for (size_t p = 0; accumulates_ && p < gradients_.size(); ++p) {
      const PlanPool& pool = plan_.pools[p];
      device_.zero(gradients_[p].data, pool.planes * pool.residues * window_.rows() * window_.channels());
    }
    each_run([&](const PlanRun& run) {
      const at::Tensor y = outputs(run);
      multiply_planes(matrices(run, gradients_, run.left), y, matrices(run, planes_, run.right));
      if (run.left == run.right) return;  // the output is its own transpose
      multiply_planes(matrices(run, gradients_, run.right), y.transpose(1, 2), matrices(run, planes_, run.left));
    });
  }

  Device& device_;
  const LoweredPlan& plan_;
  const at::TensorList weights_, grads_;
  const int64_t rows_, channels_, groups_;  // per group, per group, of all weights
  const int64_t side_;
  const bool flat_;  // the weight itself serves as planes, unless several are so small that a copy of all is cheaper
  const bool adds_;
  std::vector<Planes<T>> planes_, gradients_;  // of all pools
  bool sums_ = false, accumulates_ = false, interleaved_ = false;
  int64_t groups_at_once_ = 1, chunk_ = 1, chunks_ = 1;
  T* outputs_ = nullptr;
  // Where the pass is now.
  int64_t group_ = 0, groups_now_ = 1;
  Window window_{};
};

// Memory of a weight, to read it if S is const.
template <typename S>
S* data_of(const at::Tensor& weight) {
  if constexpr (std::is_const_v<S>) {
    return weight.const_data_ptr<std::remove_const_t<S>>();
  } else {
    return weight.mutable_data_ptr<S>();
  }
}

// Calls f.operator()<S, T>() for the weights' type S and the type T it is computed in.
template <typename F>
auto dispatch(const at::Tensor& weight, const F& f) {
  switch (weight.scalar_type()) {
    case at::kFloat:
      return f.template operator()<float, float>();
    case at::kDouble:
      return f.template operator()<double, double>();
    case at::kBFloat16:
      return f.template operator()<c10::BFloat16, float>();
    case at::kHalf:
      return f.template operator()<c10::Half, float>();
    default:
      TORCH_CHECK_TYPE(false, "weight must be float64, float32, bfloat16 or float16, got ", weight.scalar_type());
  }
}

// What the ops check, and where the gradients go: into the epilogue's targets or fresh memory, or nowhere.
inline std::vector<at::Tensor> check_and_allocate(at::TensorList weights, int64_t groups, bool with_grad,
                                                  const Epilogue& epilogue) {
  TORCH_CHECK_VALUE(!weights.empty(), "weights must not be empty");
  std::vector<at::Tensor> grads;
  for (const at::Tensor& weight : weights) {
    TORCH_CHECK_VALUE(weight.dim() >= 2, "weight must have at least 2 dimensions, got ", weight.dim());
    TORCH_CHECK_VALUE(weight.numel() > 0, "weight must not be empty, got shape ", weight.sizes());
    TORCH_CHECK_VALUE(groups > 0 && weight.size(0) % groups == 0,
                      "groups must divide weight.size(0) = ", weight.size(0), ", got ", groups);
    TORCH_CHECK_VALUE(weight.sizes() == weights[0].sizes() && weight.strides() == weights[0].strides() &&
                          weight.scalar_type() == weights[0].scalar_type() && weight.device() == weights[0].device(),
                      "weights of one plan must have the same shape, strides, type and device");
    if (with_grad && epilogue.targets.empty()) grads.push_back(at::empty_like(weight));
  }
  if (epilogue.factors) {
    const at::Tensor& factors = *epilogue.factors;
    TORCH_CHECK_VALUE(factors.scalar_type() == at::kDouble && factors.is_contiguous() &&
                          factors.device() == weights[0].device() && epilogue.places.size() == weights.size(),
                      "factors must be contiguous float64 numbers where the weights are, one place for each");
    for (const int64_t place : epilogue.places) {
      TORCH_CHECK_VALUE(place >= 0 && place < factors.numel(), "there are ", factors.numel(), " factors, not ", place);
    }
  }
  if (!with_grad || epilogue.targets.empty()) return grads;
  TORCH_CHECK_VALUE(are_targets(epilogue.targets, weights), "targets must be alike, and like the weights");
  return epilogue.targets.vec();
}

}  // namespace ocnn_fused
