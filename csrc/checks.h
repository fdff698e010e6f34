// Argument checks shared by the backends.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

namespace ocnn_fused {

inline void check_weight(const at::Tensor& weight, int64_t groups) {
  TORCH_CHECK_VALUE(weight.dim() >= 2, "weight must have at least 2 dimensions, got ", weight.dim());
  TORCH_CHECK_VALUE(weight.numel() > 0, "weight must not be empty, got shape ", weight.sizes());
  TORCH_CHECK_VALUE(groups > 0 && weight.size(0) % groups == 0, "groups must divide weight.size(0) = ", weight.size(0),
                    ", got ", groups);
}

}  // namespace ocnn_fused
