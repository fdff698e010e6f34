// Every compiled op's schema, once; implementations register themselves per device key.
#include <pybind11/pybind11.h>
#include <torch/library.h>

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
}
