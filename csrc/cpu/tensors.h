// A call as the stages want it: weights as views, a plan's tables as blocks.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "../call.h"
#include "stages.h"

namespace ocnn_fused::cpu {

// What stages are told about tensors: read if S is const.
template <typename S>
WeightView<S> view_of(const Tensors<S>& tensors, bool adds = false) {
  if (tensors.empty()) return {};
  const Layout& layout = tensors.layout;
  const std::vector<int64_t>& offsets = layout.tap_offsets;
  const int64_t taps = static_cast<int64_t>(offsets.size());
  bool dense = true;
  for (int64_t u = 0; u < taps; ++u) dense = dense && offsets[u] == u;
  return {
      tensors.addresses.data(), layout.rows(), layout.strides[0], layout.strides[1], offsets.data(), taps, dense, adds};
}

// The same for tensors that are matrices, one row per filter.
template <typename S>
WeightView<S> flat_view_of(const Tensors<S>& tensors, bool adds = false) {
  if (tensors.empty()) return {};
  const Layout& layout = tensors.layout;
  return {tensors.addresses.data(),
          layout.rows(),
          layout.strides[0],
          *layout.entry_stride,
          layout.tap_offsets.data(),
          1,
          true,
          adds};
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
