// A call for any list of weights: which plan serves which of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
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

struct Call {
  // One loss per weight and one gradient per weight, empty where none is wanted; without a graph.
  LossesAndGrads losses_and_grads(const std::vector<at::Tensor>& weights) const;
  // One loss per weight, differentiable where a gradient is wanted.
  std::vector<at::Tensor> attached(const std::vector<at::Tensor>& weights) const;

  std::vector<Bucket> buckets;
  Geometry geometry;
};

}  // namespace ocnn_fused
