// The types of half precision: 16 bits in memory, float32 in every computation.
#pragma once

#include <cstdint>

#include "views.h"

namespace ocnn_fused {

// The upper half of a float32. Rounds to nearest, ties to even.
struct BFloat16 {
  uint16_t bits;
  BFloat16() = default;
  OCNN_FUSED_ANYWHERE explicit BFloat16(float value) {
    const uint32_t wide = __builtin_bit_cast(uint32_t, value);
    const bool is_nan = (wide & 0x7fffffff) > 0x7f800000;
    bits = is_nan ? 0x7fc0 : static_cast<uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
  }
  OCNN_FUSED_ANYWHERE explicit operator float() const {
    return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
  }
};

// IEEE's binary16. Rounds to nearest, ties to even. Without branches, so that compilers can vectorise it.
struct Half {
  uint16_t bits;
  Half() = default;
  OCNN_FUSED_ANYWHERE explicit Half(float value) {
    const uint32_t wide = __builtin_bit_cast(uint32_t, value), magnitude = wide & 0x7fffffff;
    // Exponents are biased by 127 and by 15.
    const uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    // Adding one half rounds to multiples of 2^-24, the least subnormal number.
    const uint32_t subnormal = __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, magnitude) + 0.5f) - 0x3f000000;
    const uint32_t finite = magnitude < 0x38800000 ? subnormal : normal;
    const uint32_t large = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;  // NaN or infinite
    bits = static_cast<uint16_t>((wide >> 16 & 0x8000) | (magnitude < 0x477ff000 ? finite : large));
  }
  OCNN_FUSED_ANYWHERE explicit operator float() const {
    const uint32_t magnitude = bits & 0x7fff;
    const uint32_t normal = (magnitude << 13) + (magnitude < 0x7c00 ? 112u << 23 : 224u << 23);
    const uint32_t subnormal =
        __builtin_bit_cast(uint32_t, static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
    return __builtin_bit_cast(float, sign | (magnitude < 0x400 ? subnormal : normal));
  }
};

}  // namespace ocnn_fused
