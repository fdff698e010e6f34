// A lowered plan that was read once, for all calls that execute it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/custom_class.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "lowered.h"

namespace ocnn_fused {

using LossesAndGrads = std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>>;

struct PlanObject : torch::CustomClassHolder {
  // `layout` is on the CPU; `tables` are the same numbers where the weights are. A plan for groups too small for matrix
  // products has no constants, a Fourier plan no tables.
  PlanObject(const at::Tensor& layout, std::optional<at::Tensor> its_tables, std::optional<at::Tensor> its_constants) {
    TORCH_CHECK_VALUE(layout.device().is_cpu() && layout.scalar_type() == at::kLong && layout.is_contiguous(),
                      "layout must be a contiguous int64 tensor on the CPU");
    const LayoutReader reader(layout.const_data_ptr<int64_t>(), layout.numel());
    TORCH_CHECK_VALUE(its_tables || its_constants, "a plan must have tables or constants");
    if (its_tables) tables = *std::move(its_tables);
    if (its_constants) constants = *std::move(its_constants);
    if (!its_tables) {
      fourier = read_fourier_plan(reader);
    } else if (its_constants) {
      lowered = read_plan(reader);
    } else {
      small = read_small_plan(reader);
    }
  }

  // One of them is there.
  std::optional<LoweredPlan> lowered;
  std::optional<SmallPlan> small;
  std::optional<FourierPlan> fourier;
  at::Tensor tables, constants;
};

using Plan = c10::intrusive_ptr<PlanObject>;

// Writes a number into a float64 or float32 tensor on the CPU.
inline void store_number(const at::Tensor& tensor, int64_t place, double value) {
  if (tensor.scalar_type() == at::kDouble) {
    tensor.mutable_data_ptr<double>()[place] = value;
  } else {
    tensor.mutable_data_ptr<float>()[place] = static_cast<float>(value);
  }
}

// What becomes of the gradients of some weights.
struct Epilogue {
  const std::optional<at::Tensor>& factors;  // float64, where the weights are: what they are multiplied by; none: one
  at::IntArrayRef places;                    // of the weights in `factors`
  double factor = 1;                         // of all of them
  bool per_target = false;                   // divided by the free target of each group
  at::TensorList targets;                    // what they are added to, alike in memory; none: they are returned
};

// Whether gradients of weights of one plan can be added to these tensors: they are alike, and like the weights.
inline bool are_targets(at::TensorList targets, at::TensorList weights) {
  if (targets.size() != weights.size()) return false;
  for (size_t w = 0; w < weights.size(); ++w) {
    const at::Tensor &target = targets[w], &weight = weights[w];
    if (target.sizes() != weight.sizes() || target.scalar_type() != weight.scalar_type() ||
        target.device() != weight.device() || target.strides() != targets[0].strides() ||
        !target.is_non_overlapping_and_dense()) {
      return false;
    }
  }
  return true;
}

// Makes the type known to the dispatcher, once. Every file that implements the op calls it first, because nobody knows
// whose static objects are initialised first.
void register_plan_type();

}  // namespace ocnn_fused
