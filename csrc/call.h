// A call for any list of weights: which plan serves which of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "autograd.h"
#include "plan_object.h"

namespace ocnn_fused {

// Weights of one plan, type and memory layout, by their places in the list: one execution serves them all.
struct Bucket {
  std::vector<int64_t> members;
  Plan plan;
  bool with_grad;
};

// What becomes of the gradients of all weights, see Epilogue.
struct Scaling {
  std::optional<at::Tensor> factors;
  double factor = 1;
  bool per_target = false;
  std::vector<at::Tensor> targets;
};

struct Call {
  // One loss per weight and one gradient per weight, empty where none is wanted; without a graph. With targets, the
  // gradients are added to them, and none is returned.
  LossesAndGrads losses_and_grads(const std::vector<at::Tensor>& weights, const Scaling& scaling) const;
  // One loss per weight, differentiable where a gradient is wanted.
  std::vector<at::Tensor> attached(const std::vector<at::Tensor>& weights) const;
  // The sum over all weights of factor * factors[w] * (loss - least), differentiable where a gradient is wanted, and
  // the losses as one tensor without a graph. `factors` and `least` are float64, where the weights are.
  std::tuple<at::Tensor, at::Tensor> total(const std::vector<at::Tensor>& weights, const at::Tensor& factors,
                                           double factor, const std::optional<at::Tensor>& least) const;

  std::vector<Bucket> buckets;
  Geometry geometry;

 private:
  bool with_grad() const;
};

}  // namespace ocnn_fused
