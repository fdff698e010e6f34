// What csrc/cuda/orth_cuda.cu uses of torch's CUDA runtime, for a machine without: one stream, in order.
#pragma once

#include <c10/core/Device.h>

#include <cstring>

namespace at::cuda {
inline int getCurrentCUDAStream() { return 0; }
}  // namespace at::cuda

namespace c10::cuda {
struct CUDAGuard {
  explicit CUDAGuard(c10::Device) {}
};
}  // namespace c10::cuda

inline int cudaMemsetAsync(void* data, int value, size_t bytes, int) {
  std::memset(data, value, bytes);
  return 0;
}
#define C10_CUDA_CHECK(call) (void)(call)
#define C10_CUDA_KERNEL_LAUNCH_CHECK() (void)0
