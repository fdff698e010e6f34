// Tensors as the stages want them: weights as views, a plan's tables as blocks, and losses back.
#pragma once

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "stages.h"

namespace ocnn_fused::cpu {

inline std::vector<int64_t> tap_offsets(const at::Tensor& weight) {
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
  explicit Stacked(at::TensorList weights, bool adds = false) {
    if (weights.empty()) return;
    const at::Tensor& first = weights[0];
    offsets_ = tap_offsets(first);
    for (const at::Tensor& weight : weights) data_.push_back(data_of<S>(weight));
    const int64_t taps = static_cast<int64_t>(offsets_.size());
    bool dense = true;
    for (int64_t u = 0; u < taps; ++u) dense = dense && offsets_[u] == u;
    view_ = {data_.data(), first.size(0), first.stride(0), first.stride(1), offsets_.data(), taps, dense, adds};
  }
  const WeightView<S>& view() const { return view_; }

 private:
  std::vector<S*> data_;
  std::vector<int64_t> offsets_;
  WeightView<S> view_{};
};

// The filters' axes, but those of one entry, by how far apart their entries are.
inline std::vector<int64_t> filter_axes(const at::Tensor& weight) {
  std::vector<int64_t> axes;
  for (int64_t axis = 1; axis < weight.dim(); ++axis) {
    if (weight.size(axis) > 1) axes.push_back(axis);
  }
  std::sort(axes.begin(), axes.end(), [&](int64_t a, int64_t b) { return weight.stride(a) < weight.stride(b); });
  return axes;
}

// Whether the entries of a filter, axis by axis, are equally far apart: the weight is then a matrix.
inline bool is_matrix(const at::Tensor& weight, const std::vector<int64_t>& axes) {
  for (size_t a = 1; a < axes.size(); ++a) {
    if (weight.stride(axes[a]) != weight.stride(axes[a - 1]) * weight.size(axes[a - 1])) return false;
  }
  return true;
}

// The view of such a weight, one row per filter.
template <typename S>
WeightView<S> flattened(WeightView<S> view, const at::Tensor& weight) {
  const std::vector<int64_t> axes = filter_axes(weight);
  view.channel_stride = axes.empty() ? 1 : weight.stride(axes[0]);
  view.taps = 1;
  view.dense = true;
  return view;
}

// What the gradients of weights of one plan, with so many groups each, are multiplied by.
template <typename T>
class GroupFactors {
 public:
  GroupFactors(const Epilogue& epilogue, int64_t groups) : groups_(groups), per_target_(epilogue.per_target) {
    if (!epilogue.factors) return;
    const double* factors = epilogue.factors->const_data_ptr<double>();
    for (const int64_t place : epilogue.places) of_weights_.push_back(factors[place] * epilogue.factor);
  }
  Factors<T> view() const { return {of_weights_.empty() ? nullptr : of_weights_.data(), groups_, per_target_}; }

 private:
  std::vector<double> of_weights_;
  const int64_t groups_;
  const bool per_target_;
};

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
                      numbers + block.output_kind,
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

// The loss is a sum of squares: what rounding leaves below zero is zero (and NaN stays NaN).
inline at::Tensor loss_tensor(double loss, const at::Tensor& like) {
  const bool wide = like.scalar_type() == at::kDouble;
  at::Tensor result = at::empty({}, like.options().dtype(wide ? at::kDouble : at::kFloat));
  store_number(result, 0, loss < 0 ? 0.0 : loss);
  return result;
}

}  // namespace ocnn_fused::cpu
