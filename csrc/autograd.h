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

// The sum over the weights of factor * factors[w] * loss as a function of the weights, one node for all of them.
// `grads` have these factors in them; where what comes in is one, backward only hands them on.
at::Tensor attach_total(const std::vector<at::Tensor>& weights, at::Tensor total, std::vector<at::Tensor> grads,
                        Geometry geometry, at::Tensor factors, double factor);

// Within a backward: adds gradients to those of leaves when it is done, all of them in one go, instead of one by one in
// the nodes that collect what comes for each leaf. Returns for which weights; the others are left to these nodes,
// because somebody could tell the difference: not all gradients are asked for, hooks wait for one, it is no leaf.
std::vector<bool> add_at_the_end(const std::vector<at::Tensor>& weights, const std::vector<at::Tensor>& grads);

}  // namespace ocnn_fused
