// Autograd of losses whose gradients are known already; ocnn_fused/autograd.py has the same in Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace ocnn_fused {

// What the differentiable formula needs, see ocnn_fused/ops.py.
struct Geometry {
  std::vector<int64_t> strides, dilations, paddings, groups;
};

// Gradients that autograd can differentiate again, by the reference formula; ocnn_fused/autograd.py supplies it.
using DifferentiableGrads = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&, const Geometry&)>;
void set_differentiable_grads(DifferentiableGrads formula);

// The losses as functions of the weights: backward multiplies `grads` by what comes in.
std::vector<at::Tensor> attach(const std::vector<at::Tensor>& weights, std::vector<at::Tensor> losses,
                               std::vector<at::Tensor> grads, Geometry geometry);

}  // namespace ocnn_fused
