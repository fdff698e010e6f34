// cuBLAS of the process that loads this, which is torch's: neither its header nor its library is needed to build.
#pragma once

#include <dlfcn.h>

#include <climits>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "../call.h"
#include "../views.h"

namespace ocnn_fused::cuda {

// cublasSgemmStridedBatched and cublasDgemmStridedBatched, of matrices that lie column by column.
template <typename T>
using BatchedProduct = int (*)(void* handle, int transposes_a, int transposes_b, int m, int n, int k, const T* alpha,
                               const T* a, int lda, long long a_stride, const T* b, int ldb, long long b_stride,
                               const T* beta, T* c, int ldc, long long c_stride, int batch);

inline void* find_in_cublas(const char* name) {
  if (void* found = dlsym(RTLD_DEFAULT, name)) return found;
  // Loaded, but hidden from others.
  for (const char* library : {"libcublas.so.13", "libcublas.so.12", "libcublas.so.11"}) {
    if (void* handle = dlopen(library, RTLD_NOLOAD | RTLD_NOW)) {
      if (void* found = dlsym(handle, name)) return found;
    }
  }
  throw std::runtime_error(std::string("cuBLAS is not loaded: no library of this process has ") + name);
}

template <typename T>
BatchedProduct<T> batched_product() {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, double>);
  static const auto product = reinterpret_cast<BatchedProduct<T>>(
      find_in_cublas(std::is_same_v<T, float> ? "cublasSgemmStridedBatched" : "cublasDgemmStridedBatched"));
  return product;
}

inline int blas_int(int64_t value) {
  if (value > INT_MAX) throw std::invalid_argument("a product is too large for cuBLAS: " + std::to_string(value));
  return static_cast<int>(value);
}

// A matrix that lies row by row is its transpose column by column.
template <typename T>
struct BlasOperand {
  explicit BlasOperand(const Matrices<T>& matrices)
      : by_rows(matrices.column_stride == 1 && matrices.row_stride >= matrices.columns),
        leading(blas_int(by_rows ? matrices.row_stride : matrices.column_stride)) {}
  const bool by_rows;
  const int leading;
};

// out = left right, or out += left right: cuBLAS computes the transpose of it.
template <typename T>
void multiply_by_blas(Address handle, const Matrices<T>& out, const Matrices<T>& left, const Matrices<T>& right,
                      bool add) {
  const BlasOperand<T> c(out), a(right), b(left);
  if (!c.by_rows) return multiply_by_blas(handle, out.transposed(), right.transposed(), left.transposed(), add);
  const int columns = blas_int(out.columns), rows = blas_int(out.rows), length = blas_int(left.columns);
  const T one = 1, beta = add ? 1 : 0;
  const int status =
      batched_product<T>()(reinterpret_cast<void*>(handle), !a.by_rows, !b.by_rows, columns, rows, length, &one,
                           right.data, a.leading, right.batch_stride, left.data, b.leading, left.batch_stride, &beta,
                           out.data, c.leading, out.batch_stride, blas_int(out.batch));
  if (status != 0) throw std::runtime_error("cuBLAS failed with status " + std::to_string(status));
}

}  // namespace ocnn_fused::cuda
