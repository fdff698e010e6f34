// A call for any list of weights: which compiled op serves which of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

namespace ocnn_fused {

// Weights of one plan, type and memory layout, by their places in the list: one op serves them all.
struct Bucket {
  std::vector<int64_t> members;
  at::Tensor layout, tables;
  std::optional<at::Tensor> constants;  // none for groups too small for matrix products
  bool with_grad;
};

struct Buckets {
  // One loss per weight and one gradient per weight, empty where none is wanted; without a graph.
  std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>> run(const std::vector<at::Tensor>& weights) const;

  std::vector<Bucket> all;
};

}  // namespace ocnn_fused
