// Vectors as wide as the instruction set allows: loading, storing, copying and transposing them, and scratch memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

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
