// Every compiled op's schema, once; implementations register themselves per device key.
#include <pybind11/pybind11.h>
#include <torch/library.h>

#ifndef OCNN_FUSED_VERSION
#define OCNN_FUSED_VERSION "unknown"
#endif
#ifndef OCNN_FUSED_TORCH_VERSION
#define OCNN_FUSED_TORCH_VERSION "unknown"
#endif
#ifndef OCNN_FUSED_FLAGS
#define OCNN_FUSED_FLAGS ""
#endif

TORCH_LIBRARY_FRAGMENT(ocnn_fused, m) {
  // Executes a lowered plan (see ocnn_fused/backends/lowering.py) and returns the loss and, if asked for, its gradient
  // (else an empty tensor).
  //   evaluation  one (planes, taps) matrix per block
  //   sources     per block: the number of residues, then a (residues, taps) table of flat tap indices, -1 for none
  //   runs        six numbers per run: block, left, right, out, count, summed
  //   mix         symmetric, antisymmetric and their adjoints; empty if the outputs are the lags themselves
  m.def(
      "execute_plan(Tensor weight, int groups, bool column, bool flat, Tensor[] evaluation, int[] sources, int[] runs, "
      "int outputs, Tensor[] mix, float offset, bool with_grad) -> (Tensor, Tensor)");
  // The same for groups too small for matrix products: tap pairs left[n], right[n], sorted by lag.
  m.def(
      "execute_small(Tensor weight, int groups, int[] left, int[] right, int[] lag_begin, bool with_grad) -> "
      "(Tensor, Tensor)");
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "Compiled backends of ocnn_fused; importing it registers their ops.";
  m.def("build_info", [] {
    pybind11::dict info;
    info["version"] = OCNN_FUSED_VERSION;
    info["torch"] = OCNN_FUSED_TORCH_VERSION;
    info["compiler"] = __VERSION__;
    info["cxx_standard"] = static_cast<long>(__cplusplus);
    info["flags"] = OCNN_FUSED_FLAGS;
    return info;
  });
}
