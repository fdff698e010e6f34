// The node of autograd's graph for plain tensors: the fast path of the policy in ocnn_fused/autograd.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace ocnn_fused {

// The problems of a list of weights, as the ops take them: see ocnn_fused/problem.py.
struct Geometry {
  std::vector<int64_t> strides, dilations, paddings, groups;
  std::vector<double> targets;
};

// The losses as functions of the weights: backward multiplies `grads` by what comes in. Where a graph of the backward
// itself is wanted, the op ocnn_fused::orth_grad makes the gradients differentiable.
std::vector<at::Tensor> attach(const std::vector<at::Tensor>& weights, std::vector<at::Tensor> losses,
                               std::vector<at::Tensor> grads, Geometry geometry);

}  // namespace ocnn_fused
