// The stages are written once and compiled for several instruction sets: stages.cpp and fourier_stages.cpp are compiled
// once with each of -DOCNN_FUSED_TARGET=baseline, avx2 and avx512 (x86-64 only), and instruction_sets.cpp chooses.
//
// A header of stages puts all that it defines between OCNN_FUSED_BEGIN_TARGET and OCNN_FUSED_END_TARGET, in the
// namespace ocnn_fused::cpu::OCNN_FUSED_TARGET, and includes others before: of inline functions and templates that are
// not ours the linker keeps one copy for the whole program, which must not need an instruction that the machine may
// lack. For the same reason no -m option is given to the compiler.
#pragma once

#if !defined(OCNN_FUSED_TARGET)
#define OCNN_FUSED_TARGET baseline
#endif

#define OCNN_FUSED_PASTE(a, b) a##b
#define OCNN_FUSED_JOIN(a, b) OCNN_FUSED_PASTE(a, b)
#define OCNN_FUSED_BYTES_baseline 16
#define OCNN_FUSED_BYTES_avx2 32
#define OCNN_FUSED_BYTES_avx512 64
#define OCNN_FUSED_VECTOR_BYTES OCNN_FUSED_JOIN(OCNN_FUSED_BYTES_, OCNN_FUSED_TARGET)

#if OCNN_FUSED_VECTOR_BYTES == 64
#define OCNN_FUSED_FEATURES "avx512f,avx512dq,avx512bw,avx512vl,fma,f16c"
#elif OCNN_FUSED_VECTOR_BYTES == 32
#define OCNN_FUSED_FEATURES "avx2,fma,f16c"
#endif

#define OCNN_FUSED_PRAGMA_TEXT(...) _Pragma(#__VA_ARGS__)
#define OCNN_FUSED_PRAGMA(...) OCNN_FUSED_PRAGMA_TEXT(__VA_ARGS__)
#if !defined(OCNN_FUSED_FEATURES)
#define OCNN_FUSED_BEGIN_TARGET
#define OCNN_FUSED_END_TARGET
#elif defined(__clang__)
#define OCNN_FUSED_BEGIN_TARGET \
  OCNN_FUSED_PRAGMA(clang attribute push(__attribute__((target(OCNN_FUSED_FEATURES))), apply_to = function))
#define OCNN_FUSED_END_TARGET OCNN_FUSED_PRAGMA(clang attribute pop)
#else
#define OCNN_FUSED_BEGIN_TARGET OCNN_FUSED_PRAGMA(GCC push_options) OCNN_FUSED_PRAGMA(GCC target(OCNN_FUSED_FEATURES))
#define OCNN_FUSED_END_TARGET OCNN_FUSED_PRAGMA(GCC pop_options)
#endif
