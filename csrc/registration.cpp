// What Python sees of the compiled code: one op, which every device implements, and the calls that use it.
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "call.h"
#include "cpu/panel_switch.h"
#include "plan_object.h"

void ocnn_fused::register_plan_type() {
  static const auto type =
      torch::class_<PlanObject>("ocnn_fused", "Plan")
          .def(torch::init<const at::Tensor&, std::optional<at::Tensor>, std::optional<at::Tensor>>());
}

TORCH_LIBRARY_FRAGMENT(ocnn_fused, m) {
  ocnn_fused::register_plan_type();
  // Executes a plan for weights of one shape, strides and type: one loss per weight and, if asked for, one gradient per
  // weight (else an empty list). What follows with_grad is an Epilogue, see plan_object.h: with targets, gradients are
  // added to them and not returned.
  m.def(
      "execute(Tensor[] weights, __torch__.torch.classes.ocnn_fused.Plan plan, bool with_grad, Tensor? factors, "
      "int[] places, float factor, bool per_target, Tensor(a!)[] targets) -> (Tensor[], Tensor[])");
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace ocnn_fused;
  m.doc() = "Compiled backends of ocnn_fused; importing it registers their op.";
  // Plain tensors go this way, because the dispatcher's way through Python costs as much as a small layer.
  pybind11::class_<Call>(m, "Call")
      .def(pybind11::init([](const std::vector<std::tuple<std::vector<int64_t>, at::Tensor, std::optional<at::Tensor>,
                                                          std::optional<at::Tensor>, bool>>& buckets,
                             std::vector<int64_t> strides, std::vector<int64_t> dilations,
                             std::vector<int64_t> paddings, std::vector<int64_t> groups, std::vector<double> targets) {
        Call call{
            {}, {std::move(strides), std::move(dilations), std::move(paddings), std::move(groups), std::move(targets)}};
        for (const auto& [members, layout, tables, constants, with_grad] : buckets) {
          call.buckets.push_back({members, c10::make_intrusive<PlanObject>(layout, tables, constants), with_grad});
        }
        return call;
      }))
      .def(
          "__call__",
          // The second is an Epilogue of ocnn_fused/backends/job.py.
          [](const Call& call, const std::vector<at::Tensor>& weights,
             const std::optional<std::tuple<at::Tensor, double, std::vector<at::Tensor>, bool>>& epilogue) {
            if (!epilogue) return call.losses_and_grads(weights, {});
            const auto& [factors, factor, targets, per_target] = *epilogue;
            return call.losses_and_grads(weights, {factors, factor, per_target, targets});
          },
          pybind11::arg("weights"), pybind11::arg("epilogue") = std::nullopt,
          pybind11::call_guard<pybind11::gil_scoped_release>())
      .def("attached", &Call::attached, pybind11::call_guard<pybind11::gil_scoped_release>())
      .def("total", &Call::total, pybind11::call_guard<pybind11::gil_scoped_release>());
  // For the node of ocnn_fused/autograd.py, see there and autograd.h.
  m.def("add_at_the_end", &add_at_the_end, pybind11::call_guard<pybind11::gil_scoped_release>());
  // Returns what was set before, see cpu/panel_switch.h.
  m.def("use_panels", [](bool allowed) { return cpu::panels_allowed.exchange(allowed); });
}
