#include "autograd.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

namespace ocnn_fused {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Passed by pointer, so that autograd does not take the tensors in it for inputs.
struct Known {
  std::vector<at::Tensor> losses, grads;
  Geometry geometry;
};

// The gradients as functions of the weights.
std::vector<at::Tensor> differentiable(const variable_list& weights, const std::vector<at::Tensor>& grads,
                                       const c10::ivalue::TupleElements& geometry) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("ocnn_fused::orth_grad", "")
          .typed<std::vector<at::Tensor>(at::TensorList, at::TensorList, at::IntArrayRef, at::IntArrayRef,
                                         at::IntArrayRef, at::IntArrayRef, at::ArrayRef<double>)>();
  return op.call(weights, grads, geometry[0].toIntVector(), geometry[1].toIntVector(), geometry[2].toIntVector(),
                 geometry[3].toIntVector(), geometry[4].toDoubleVector());
}

// Whether vmap runs this backward (is_grads_batched), with several scales in one.
bool is_batched(const at::Tensor& scale) {
  constexpr c10::DispatchKeySet batched({c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Batched});
  return scale.defined() && scale.key_set().has_any(batched);
}

// Whether the scale is known to be one, as it is where the loss itself is differentiated. Only looked up where that
// does not wait for a device, and where no tracer records the multiplication.
bool is_one(const at::Tensor& scale) {
  constexpr c10::DispatchKeySet plain({c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU,
                                       c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutocastCPU});
  if (c10::impl::TorchDispatchModeTLS::stack_len() > 0 || !scale.has_storage() || !plain.has_all(scale.key_set())) {
    return false;
  }
  if (scale.scalar_type() == at::kFloat) return *scale.const_data_ptr<float>() == 1;
  return scale.scalar_type() == at::kDouble && *scale.const_data_ptr<double>() == 1;
}

class OrthLoss : public torch::autograd::Function<OrthLoss> {
 public:
  static variable_list forward(AutogradContext* context, at::TensorList weights, Known* known) {
    auto& [strides, dilations, paddings, groups, targets] = known->geometry;
    context->set_materialize_grads(false);
    context->save_for_backward(weights.vec());
    // Our own memory, not a part of the graph: hooks do not see it.
    context->saved_data["grads"] = std::move(known->grads);
    context->saved_data["geometry"] = std::make_tuple(std::move(strides), std::move(dilations), std::move(paddings),
                                                      std::move(groups), std::move(targets));
    return std::move(known->losses);
  }

  static variable_list backward(AutogradContext* context, variable_list scales) {
    const variable_list weights = context->get_saved_variables();
    std::vector<at::Tensor> grads = context->saved_data["grads"].toTensorVector();
    bool in_place = false;
    if (at::GradMode::is_enabled()) {
      grads = differentiable(weights, grads, context->saved_data["geometry"].toTupleRef().elements());
    } else {
      // Nobody asks again: scaling in place saves a copy of every gradient.
      in_place = !torch::autograd::get_current_graph_task_keep_graph() &&
                 std::none_of(scales.begin(), scales.end(), is_batched);
      if (in_place) context->saved_data.erase("grads");
    }
    variable_list result(weights.size() + 1);  // the last for what is not a weight
    for (size_t w = 0; w < weights.size(); ++w) {
      if (!context->needs_input_grad(w) || !scales[w].defined()) continue;
      if (in_place && is_one(scales[w])) {
        result[w] = std::move(grads[w]);
      } else {  // the scales are 0-dim, so they do not promote the gradients' dtype
        result[w] = in_place ? grads[w].mul_(scales[w]) : grads[w].mul(scales[w]);
      }
    }
    return result;
  }
};

}  // namespace

std::vector<at::Tensor> attach(const std::vector<at::Tensor>& weights, std::vector<at::Tensor> losses,
                               std::vector<at::Tensor> grads, Geometry geometry) {
  Known known{std::move(losses), std::move(grads), std::move(geometry)};
  return OrthLoss::apply(at::TensorList(weights), &known);
}

}  // namespace ocnn_fused
