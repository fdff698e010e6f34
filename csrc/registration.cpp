// Every compiled op's schema, once; implementations register themselves per device key.
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "autograd.h"
#include "buckets.h"

TORCH_LIBRARY_FRAGMENT(ocnn_fused, m) {
  // Executes a lowered plan (csrc/lowered.h) for weights of one shape, strides and type: one loss per weight and, if
  // asked for, one gradient per weight (else an empty list).
  m.def(
      "execute_plan(Tensor[] weights, Tensor layout, Tensor tables, Tensor constants, bool with_grad) -> "
      "(Tensor[], Tensor[])");
  // The same for groups too small for matrix products.
  m.def("execute_small(Tensor[] weights, Tensor layout, Tensor tables, bool with_grad) -> (Tensor[], Tensor[])");
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "Compiled backends of ocnn_fused; importing it registers their ops.";
  // Calls the ops for plain tensors, which need no way through Python.
  pybind11::class_<ocnn_fused::Buckets>(m, "Buckets")
      .def(pybind11::init(
          [](const std::vector<
              std::tuple<std::vector<int64_t>, at::Tensor, at::Tensor, std::optional<at::Tensor>, bool>>& fields) {
            ocnn_fused::Buckets buckets;
            for (const auto& [members, layout, tables, constants, with_grad] : fields) {
              buckets.all.push_back({members, layout, tables, constants, with_grad});
            }
            return buckets;
          }))
      .def("__call__", &ocnn_fused::Buckets::run, pybind11::call_guard<pybind11::gil_scoped_release>())
      // Both steps in one, because the way through Python costs as much as a small layer.
      .def(
          "attached",
          [](const ocnn_fused::Buckets& buckets, const ocnn_fused::Geometry& geometry,
             const std::vector<at::Tensor>& weights) {
            auto [losses, grads] = buckets.run(weights);
            return ocnn_fused::attach(weights, std::move(losses), std::move(grads), geometry);
          },
          pybind11::call_guard<pybind11::gil_scoped_release>());
  pybind11::class_<ocnn_fused::Geometry>(m, "Geometry")
      .def(pybind11::init([](std::vector<int64_t> strides, std::vector<int64_t> dilations,
                             std::vector<int64_t> paddings, std::vector<int64_t> groups) {
        return ocnn_fused::Geometry{std::move(strides), std::move(dilations), std::move(paddings), std::move(groups)};
      }));
  // Not an op: it only makes a node of autograd's graph, which no device and no tracer has a part in.
  m.def("attach", [](const std::vector<at::Tensor>& weights, std::vector<at::Tensor> losses,
                     std::vector<at::Tensor> grads, const ocnn_fused::Geometry& geometry) {
    return ocnn_fused::attach(weights, std::move(losses), std::move(grads), geometry);
  });
  m.def("set_differentiable_grads", [](pybind11::function formula) {
    ocnn_fused::set_differentiable_grads(
        [formula = std::move(formula)](const std::vector<at::Tensor>& weights, const ocnn_fused::Geometry& geometry) {
          const pybind11::gil_scoped_acquire python;
          return formula(weights, geometry.strides, geometry.dilations, geometry.paddings, geometry.groups)
              .cast<std::vector<at::Tensor>>();
        });
  });
}
