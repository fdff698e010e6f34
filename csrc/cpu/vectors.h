// Vectors as wide as the instruction set allows: loading, storing, copying and transposing them, and scratch memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "stages.h"
#include "target.h"

OCNN_FUSED_BEGIN_TARGET
namespace ocnn_fused::cpu::OCNN_FUSED_TARGET {

template <typename T, int64_t kBytes = OCNN_FUSED_VECTOR_BYTES>
struct Vector {
  typedef T type __attribute__((vector_size(kBytes), aligned(alignof(T)), may_alias));
  static constexpr int64_t width = kBytes / sizeof(T);
  static constexpr int64_t count = kLanes / width;  // vectors for kLanes
};

template <typename T>
inline typename Vector<T>::type load(const T* from) {
  return *reinterpret_cast<const typename Vector<T>::type*>(from);
}
template <typename T>
inline void store(const typename Vector<T>::type& value, T* to) {
  *reinterpret_cast<typename Vector<T>::type*>(to) = value;
}

// Loads and stores the first lanes of a vector, and touches no others in memory: one instruction where there are masks.
template <typename T>
class Lanes {
 public:
  using V = typename Vector<T>::type;
  static constexpr bool is_fast = OCNN_FUSED_VECTOR_BYTES > 16;

#if OCNN_FUSED_VECTOR_BYTES == 64
  explicit Lanes(int64_t lanes) : mask_(static_cast<__mmask16>((1u << lanes) - 1)) {}
  V load(const T* from) const {
    if constexpr (sizeof(T) == 4) return (V)_mm512_maskz_loadu_ps(mask_, from);
    if constexpr (sizeof(T) == 8) return (V)_mm512_maskz_loadu_pd(static_cast<__mmask8>(mask_), from);
  }
  void store(const V& value, T* to) const {
    if constexpr (sizeof(T) == 4) _mm512_mask_storeu_ps(to, mask_, (__m512)value);
    if constexpr (sizeof(T) == 8) _mm512_mask_storeu_pd(to, static_cast<__mmask8>(mask_), (__m512d)value);
  }

 private:
  __mmask16 mask_;
#elif OCNN_FUSED_VECTOR_BYTES == 32
  explicit Lanes(int64_t lanes) {
    const __m256i count = sizeof(T) == 4 ? _mm256_set1_epi32(static_cast<int>(lanes)) : _mm256_set1_epi64x(lanes);
    mask_ = sizeof(T) == 4 ? _mm256_cmpgt_epi32(count, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))
                           : _mm256_cmpgt_epi64(count, _mm256_setr_epi64x(0, 1, 2, 3));
  }
  V load(const T* from) const {
    if constexpr (sizeof(T) == 4) return (V)_mm256_maskload_ps(from, mask_);
    if constexpr (sizeof(T) == 8) return (V)_mm256_maskload_pd(from, mask_);
  }
  void store(const V& value, T* to) const {
    if constexpr (sizeof(T) == 4) _mm256_maskstore_ps(to, mask_, (__m256)value);
    if constexpr (sizeof(T) == 8) _mm256_maskstore_pd(to, mask_, (__m256d)value);
  }

 private:
  __m256i mask_;
#else
  explicit Lanes(int64_t lanes) : lanes_(lanes) {}
  V load(const T* from) const {
    V value{};
    for (int64_t l = 0; l < lanes_; ++l) value[l] = from[l];
    return value;
  }
  void store(const V& value, T* to) const {
    for (int64_t l = 0; l < lanes_; ++l) to[l] = value[l];
  }

 private:
  int64_t lanes_;
#endif
};

// For loops over arrays that must stay in registers.
#define OCNN_FUSED_UNROLL _Pragma("GCC unroll 16")

// Copies `lanes` numbers; inline, because a few of them are often all there is.
template <typename T>
inline void copy_lanes(const T* from, int64_t lanes, T* to) {
  constexpr int64_t width = Vector<T>::width;
  int64_t l = 0;
  for (; l + width <= lanes; l += width) store(load(from + l), to + l);
  for (; l < lanes; ++l) to[l] = from[l];
}

// Lanes of a and b for one butterfly of a transposition: those without and those with the bit kStep.
template <int64_t kStep, typename V, size_t... l>
inline V lower_half(const V& a, const V& b, std::index_sequence<l...>) {
  return __builtin_shufflevector(a, b, ((l & kStep) ? sizeof...(l) + l - kStep : l)...);
}
template <int64_t kStep, typename V, size_t... l>
inline V upper_half(const V& a, const V& b, std::index_sequence<l...>) {
  return __builtin_shufflevector(a, b, ((l & kStep) ? sizeof...(l) + l : l + kStep)...);
}

// Transposes a square of vectors in registers.
template <int64_t kWidth, int64_t kStep = kWidth / 2, typename V>
inline void transpose(V* rows) {
  constexpr auto lanes = std::make_index_sequence<kWidth>();
  for (int64_t r = 0; r < kWidth; ++r) {
    if (r & kStep) continue;
    const V low = lower_half<kStep>(rows[r], rows[r + kStep], lanes);
    rows[r + kStep] = upper_half<kStep>(rows[r], rows[r + kStep], lanes);
    rows[r] = low;
  }
  if constexpr (kStep > 1) transpose<kWidth, kStep / 2>(rows);
}

// Vector r of a square is read at from(r), and of its transpose written at to(r).
template <typename Kind, typename From, typename To>
inline void transpose_square(const From& from, const To& to) {
  typename Kind::type rows[Kind::width];
  for (int64_t r = 0; r < Kind::width; ++r) rows[r] = *reinterpret_cast<const typename Kind::type*>(from(r));
  transpose<Kind::width>(rows);
  for (int64_t r = 0; r < Kind::width; ++r) *reinterpret_cast<typename Kind::type*>(to(r)) = rows[r];
}

// For squares of taps, of which there are often few: eight float32 at most.
template <typename T>
using Short = Vector<T, std::min(32, OCNN_FUSED_VECTOR_BYTES)>;

// Memory of this thread that stages use for what fits a cache, aligned to a cache line; grows on demand, contents are
// undefined.
template <typename T>
inline T* scratch(int64_t elements) {
  constexpr int64_t line = 64;
  thread_local std::vector<T> memory;
  const int64_t size = elements + line / static_cast<int64_t>(sizeof(T));
  if (static_cast<int64_t>(memory.size()) < size) memory.resize(size);
  if (poisons) std::memset(memory.data(), kPoison, memory.size() * sizeof(T));
  return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory.data()) + line - 1) / line * line);
}

}  // namespace ocnn_fused::cpu::OCNN_FUSED_TARGET
OCNN_FUSED_END_TARGET
