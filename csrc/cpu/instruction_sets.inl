// Includes the file OCNN_FUSED_STAGES once per instruction set, in a namespace of its own and with
// OCNN_FUSED_VECTOR_BYTES set; OCNN_FUSED_CHOOSE then takes one of what it defines. To be included inside
// ocnn_fused::cpu, after all other headers.

namespace baseline {
#define OCNN_FUSED_VECTOR_BYTES 16
#include OCNN_FUSED_STAGES
#undef OCNN_FUSED_VECTOR_BYTES
}  // namespace baseline

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace avx2 {
#define OCNN_FUSED_VECTOR_BYTES 32
#include OCNN_FUSED_STAGES
#undef OCNN_FUSED_VECTOR_BYTES
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,fma,f16c")
#endif
namespace avx512 {
#define OCNN_FUSED_VECTOR_BYTES 64
#include OCNN_FUSED_STAGES
#undef OCNN_FUSED_VECTOR_BYTES
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

#if defined(__x86_64__)
#define OCNN_FUSED_CHOOSE(table, ...)                  \
  (vector_bytes() == 64   ? avx512::table<__VA_ARGS__> \
   : vector_bytes() == 32 ? avx2::table<__VA_ARGS__>   \
                          : baseline::table<__VA_ARGS__>)
#else
#define OCNN_FUSED_CHOOSE(table, ...) baseline::table<__VA_ARGS__>
#endif
