// A call as the stages want it: weights as views, a plan's tables as blocks.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "../call.h"
#include "stages.h"

namespace ocnn_fused::cpu {

inline std::vector<int64_t> tap_offsets(const Layout& layout) {
  std::vector<int64_t> offsets{0};
  for (int64_t axis = 2; axis < layout.dimensions(); ++axis) {
    std::vector<int64_t> next;
    next.reserve(offsets.size() * layout.sizes[axis]);
    for (const int64_t offset : offsets) {
      for (int64_t u = 0; u < layout.sizes[axis]; ++u) next.push_back(offset + u * layout.strides[axis]);
    }
    offsets = std::move(next);
  }
  return offsets;
}

// Pointers into tensors, and what a view of them needs.
template <typename S>
class Stacked {
 public:
  explicit Stacked(const Tensors<S>& tensors, bool adds = false) {
    if (tensors.empty()) return;
    const Layout& layout = tensors.layout;
    offsets_ = tap_offsets(layout);
    for (int64_t w = 0; w < tensors.count(); ++w) data_.push_back(tensors[w]);
    const int64_t taps = static_cast<int64_t>(offsets_.size());
    bool dense = true;
    for (int64_t u = 0; u < taps; ++u) dense = dense && offsets_[u] == u;
    view_ = {data_.data(), layout.rows(), layout.strides[0], layout.strides[1], offsets_.data(), taps, dense, adds};
  }
  const WeightView<S>& view() const { return view_; }

 private:
  std::vector<S*> data_;
  std::vector<int64_t> offsets_;
  WeightView<S> view_{};
};

// The filters' axes, but those of one entry, by how far apart their entries are.
inline std::vector<int64_t> filter_axes(const Layout& layout) {
  std::vector<int64_t> axes;
  for (int64_t axis = 1; axis < layout.dimensions(); ++axis) {
    if (layout.sizes[axis] > 1) axes.push_back(axis);
  }
  std::sort(axes.begin(), axes.end(), [&](int64_t a, int64_t b) { return layout.strides[a] < layout.strides[b]; });
  return axes;
}

// Whether the entries of a filter, axis by axis, are equally far apart: the weight is then a matrix.
inline bool is_matrix(const Layout& layout) {
  const std::vector<int64_t> axes = filter_axes(layout);
  for (size_t a = 1; a < axes.size(); ++a) {
    if (layout.strides[axes[a]] != layout.strides[axes[a - 1]] * layout.sizes[axes[a - 1]]) return false;
  }
  return true;
}

// The view of such a weight, one row per filter.
template <typename S>
WeightView<S> flattened(WeightView<S> view, const Layout& layout) {
  const std::vector<int64_t> axes = filter_axes(layout);
  view.channel_stride = axes.empty() ? 1 : layout.strides[axes[0]];
  view.taps = 1;
  view.dense = true;
  return view;
}

// What the gradients of weights of one plan, with so many groups each, are multiplied by.
template <typename T>
class GroupFactors {
 public:
  GroupFactors(const Epilogue& epilogue, const std::vector<int64_t>& places, int64_t groups)
      : groups_(groups), per_target_(epilogue.per_target) {
    for (const int64_t place : places) {
      if (epilogue.scales()) of_weights_.push_back((epilogue.factors ? epilogue.factors[place] : 1) * epilogue.factor);
    }
  }
  Factors<T> view() const { return {of_weights_.empty() ? nullptr : of_weights_.data(), groups_, per_target_}; }

 private:
  std::vector<double> of_weights_;
  const int64_t groups_;
  const bool per_target_;
};

// The blocks of a plan with their matrices and maps.
template <typename T>
std::vector<BlockView<T>> blocks_of(const BilinearPlan& plan, const Bucket& bucket) {
  const int64_t* numbers = bucket.tables;
  const T* values = static_cast<const T*>(bucket.constants);
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

}  // namespace ocnn_fused::cpu
