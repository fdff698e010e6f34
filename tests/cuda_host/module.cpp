// ocnn_fused._C with the CUDA backend alone, which here runs on the CPU: kernels as in cuda_host.h, products as plain
// loops in place of cuBLAS.
#include "cuda_host.h"
// The shim's words of CUDA come before the kernels.
#include "cuda/orth_cuda.cu"
// The bindings ask for this.
#define OCNN_FUSED_WITH_CUDA
#include "bindings.cpp"

namespace ocnn_fused::cpu {
void execute(const Call&) { throw std::runtime_error("the CPU backend is not compiled"); }
void choose_instruction_set(const std::string&) {}
}  // namespace ocnn_fused::cpu

namespace {
long products = 0;

template <typename T>
int multiply(int transposes_a, int transposes_b, int m, int n, int k, const T* alpha, const T* a, int lda,
             long long a_stride, const T* b, int ldb, long long b_stride, const T* beta, T* c, int ldc,
             long long c_stride, int batch) {
  constexpr int kInvalidValue = 7;
  if (lda < (transposes_a ? k : m) || ldb < (transposes_b ? n : k) || ldc < m) return kInvalidValue;
  ++products;
  for (int index = 0; index < batch; ++index, a += a_stride, b += b_stride, c += c_stride) {
    for (int j = 0; j < n; ++j) {
      for (int i = 0; i < m; ++i) {
        T sum = 0;
        for (int l = 0; l < k; ++l) {
          sum += a[transposes_a ? l + int64_t{i} * lda : i + int64_t{l} * lda] *
                 b[transposes_b ? j + int64_t{l} * ldb : l + int64_t{j} * ldb];
        }
        T& out = c[i + int64_t{j} * ldc];
        out = *alpha * sum + (*beta == 0 ? T(0) : *beta * out);
      }
    }
  }
  return 0;
}
}  // namespace

extern "C" {
int cublasSgemmStridedBatched(void*, int transposes_a, int transposes_b, int m, int n, int k, const float* alpha,
                              const float* a, int lda, long long a_stride, const float* b, int ldb, long long b_stride,
                              const float* beta, float* c, int ldc, long long c_stride, int batch) {
  return multiply(transposes_a, transposes_b, m, n, k, alpha, a, lda, a_stride, b, ldb, b_stride, beta, c, ldc,
                  c_stride, batch);
}
int cublasDgemmStridedBatched(void*, int transposes_a, int transposes_b, int m, int n, int k, const double* alpha,
                              const double* a, int lda, long long a_stride, const double* b, int ldb,
                              long long b_stride, const double* beta, double* c, int ldc, long long c_stride,
                              int batch) {
  return multiply(transposes_a, transposes_b, m, n, k, alpha, a, lda, a_stride, b, ldb, b_stride, beta, c, ldc,
                  c_stride, batch);
}
// For tests/cuda_host/run.py.
void cuda_host_seed(unsigned long seed) { cuda_host::next_seed = seed; }
long cuda_host_launches() { return cuda_host::launches; }
long cuda_host_products() { return products; }
}
