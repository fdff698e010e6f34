#include "autograd.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_mul.h>
#include <c10/core/Event.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
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

c10::IValue as_value(Geometry geometry) {
  auto& [strides, dilations, paddings, groups, targets] = geometry;
  return std::make_tuple(std::move(strides), std::move(dilations), std::move(paddings), std::move(groups),
                         std::move(targets));
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
    context->set_materialize_grads(false);
    context->save_for_backward(weights.vec());
    // Our own memory, not a part of the graph: hooks do not see it.
    context->saved_data["grads"] = std::move(known->grads);
    context->saved_data["geometry"] = as_value(std::move(known->geometry));
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

// Passed by pointer, as Known is.
struct KnownTotal {
  at::Tensor total;
  std::vector<at::Tensor> grads;
  Geometry geometry;
  at::Tensor factors;
  double factor;
};

class OrthTotal : public torch::autograd::Function<OrthTotal> {
 public:
  static at::Tensor forward(AutogradContext* context, at::TensorList weights, KnownTotal* known) {
    context->set_materialize_grads(false);
    context->save_for_backward(weights.vec());
    context->saved_data["grads"] = std::move(known->grads);
    context->saved_data["geometry"] = as_value(std::move(known->geometry));
    context->saved_data["factors"] = std::move(known->factors);
    context->saved_data["factor"] = known->factor;
    return std::move(known->total);
  }

  static variable_list backward(AutogradContext* context, const variable_list& scales) {
    const variable_list weights = context->get_saved_variables();
    std::vector<at::Tensor> grads = context->saved_data["grads"].toTensorVector();
    const at::Tensor& scale = scales[0];
    variable_list result(weights.size() + 1);  // the last for what is not a weight
    if (!scale.defined()) return result;
    if (at::GradMode::is_enabled()) {
      differentiate(context, weights, grads, scale, result);
      return result;
    }
    std::vector<at::Tensor> wanted, leaves;
    std::vector<size_t> places;
    for (size_t w = 0; w < weights.size(); ++w) {
      if (!context->needs_input_grad(w)) continue;
      wanted.push_back(grads[w]);
      leaves.push_back(weights[w]);
      places.push_back(w);
    }
    // Nobody asks again: scaling in place saves a copy of every gradient.
    if (is_batched(scale)) {
      for (size_t p = 0; p < places.size(); ++p) result[places[p]] = wanted[p].mul(scale);
      return result;
    }
    if (torch::autograd::get_current_graph_task_keep_graph()) {
      wanted = at::_foreach_mul(wanted, scale);
    } else {
      context->saved_data.erase("grads");
      grads.clear();
      if (!is_one(scale)) at::_foreach_mul_(wanted, scale);
    }
    const std::vector<bool> taken = add_at_the_end(leaves, wanted);
    for (size_t p = 0; p < places.size(); ++p) {
      if (!taken[p]) result[places[p]] = std::move(wanted[p]);
    }
    return result;
  }

 private:
  // A graph of this very backward: the gradients without the factors are functions of the weights.
  static void differentiate(AutogradContext* context, const variable_list& weights,
                            const std::vector<at::Tensor>& grads, const at::Tensor& scale, variable_list& result) {
    const at::Tensor factors = context->saved_data["factors"].toTensor().mul(context->saved_data["factor"].toDouble());
    const auto factor = [&](size_t w) { return factors.select(0, static_cast<int64_t>(w)); };
    std::vector<at::Tensor> plain;
    for (size_t w = 0; w < weights.size(); ++w) {
      plain.push_back(context->needs_input_grad(w) ? grads[w].div(factor(w)) : grads[w]);
    }
    plain = differentiable(weights, plain, context->saved_data["geometry"].toTupleRef().elements());
    for (size_t w = 0; w < weights.size(); ++w) {
      if (context->needs_input_grad(w)) result[w] = plain[w].mul(scale.mul(factor(w)));
    }
  }
};

// Whether a leaf's gradient is nobody's business but its own until the backward is done.
bool can_wait(const at::Tensor& leaf) {
  if (!leaf.is_leaf() || !leaf.requires_grad() || leaf.unsafeGetTensorImpl()->is_python_dispatch()) return false;
  const auto collector = torch::autograd::impl::try_get_grad_accumulator(leaf);
  return collector != nullptr && collector->pre_hooks().empty() && collector->post_hooks().empty() &&
         collector->tensor_pre_hooks().empty() && collector->tensor_post_acc_grad_hooks() == nullptr;
}

// What add_at_the_end does at the end.
void add_to_leaves(const std::vector<at::Tensor>& leaves, const std::vector<at::Tensor>& grads) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> targets, added;
  for (size_t l = 0; l < leaves.size(); ++l) {
    at::Tensor& target = leaves[l].mutable_grad();
    if (!target.defined()) {
      target = grads[l];
    } else if (target.layout() == at::kStrided && target.scalar_type() == grads[l].scalar_type()) {
      targets.push_back(target);
      added.push_back(grads[l]);
    } else {
      target = target.add(grads[l]);
    }
  }
  if (!targets.empty()) at::_foreach_add_(targets, added);
}

}  // namespace

std::vector<bool> add_at_the_end(const std::vector<at::Tensor>& all_weights, const std::vector<at::Tensor>& all_grads) {
  std::vector<bool> taken(all_weights.size(), false);
  const auto* wanted_nodes = torch::autograd::get_current_graph_task_exec_info();
  if (wanted_nodes == nullptr || !wanted_nodes->empty() || c10::impl::TorchDispatchModeTLS::stack_len() > 0) {
    return taken;
  }
  std::vector<at::Tensor> weights, grads;
  for (size_t w = 0; w < all_weights.size(); ++w) {
    taken[w] = can_wait(all_weights[w]);
    if (!taken[w]) continue;
    weights.push_back(all_weights[w]);
    grads.push_back(all_grads[w]);
  }
  if (weights.empty()) return taken;
  const at::Device device = grads[0].device();
  if (device.is_cpu()) {
    torch::autograd::Engine::get_default_engine().queue_callback([weights, grads] { add_to_leaves(weights, grads); });
    return taken;
  }
  // The end may come on another stream than this.
  const c10::impl::VirtualGuardImpl guard(device.type());
  const c10::Stream here = guard.getStream(device);
  const auto ready = std::make_shared<c10::Event>(device.type());
  ready->record(here);
  torch::autograd::Engine::get_default_engine().queue_callback([weights, grads, device, here, ready] {
    const c10::impl::VirtualGuardImpl guard(device.type());
    const c10::Stream stream = guard.getStream(device);
    if (stream != here) {
      ready->block(stream);
      for (const at::Tensor& grad : grads) guard.recordDataPtrOnStream(grad.storage().data_ptr(), stream);
    }
    add_to_leaves(weights, grads);
  });
  return taken;
}

at::Tensor attach_total(const std::vector<at::Tensor>& weights, at::Tensor total, std::vector<at::Tensor> grads,
                        Geometry geometry, at::Tensor factors, double factor) {
  KnownTotal known{std::move(total), std::move(grads), std::move(geometry), std::move(factors), factor};
  return OrthTotal::apply(at::TensorList(weights), &known);
}

std::vector<at::Tensor> attach(const std::vector<at::Tensor>& weights, std::vector<at::Tensor> losses,
                               std::vector<at::Tensor> grads, Geometry geometry) {
  Known known{std::move(losses), std::move(grads), std::move(geometry)};
  return OrthLoss::apply(at::TensorList(weights), &known);
}

}  // namespace ocnn_fused
