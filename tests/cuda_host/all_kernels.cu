// Every kernel of csrc/cuda/kernels.cuh, with the toolkit's own half types in place of torch's; compiled by tests for
// every architecture, never run. What is shipped is checked by tools/cuda_build.py.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels.cuh"

namespace ocnn_fused::cuda {

#define WEIGHT_KERNELS(S, T)                                                                                        \
  template __global__ void evaluate_kernel<S, T>(const WeightView<const S>, const BlockViews<T>, const Window);     \
  template __global__ void gather_kernel<S, T>(const WeightView<S>, const BlockViews<T>, const Window);             \
  template __global__ void small_kernel<S, T>(const WeightView<const S>, const WeightView<S>, const TapPairs,       \
                                              const Targets<T>, const PlacedFactors<T>, const SmallShape, double*); \
  template __global__ void squares_kernel<S, T>(const WeightView<const S>, int64_t, int64_t, double*);
WEIGHT_KERNELS(float, float)
WEIGHT_KERNELS(double, double)
WEIGHT_KERNELS(__half, float)
WEIGHT_KERNELS(__nv_bfloat16, float)

#define KERNELS(T)                                                                                                \
  template MixKernel<T> mix_kernel_for<T>(int);                                                                   \
  template __global__ void mix_diagonal_kernel<T>(T*, int64_t, const Targets<T>, const PlacedFactors<T>, int64_t, \
                                                  int64_t, bool, double*);                                        \
  template __global__ void targets_kernel<T>(const double*, int64_t, int64_t, T*);                                \
  template __global__ void loss_kernel<T>(const double*, int64_t, double, const Targets<T>, int64_t, const Losses<T>);
KERNELS(float)
KERNELS(double)

}  // namespace ocnn_fused::cuda
