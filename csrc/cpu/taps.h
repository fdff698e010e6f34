// Taps of a weight of any strides, and rows of lanes: read from a weight that is const, written to one that is not, or
// added to it.
#pragma once

#include <algorithm>
#include <type_traits>

#include "vectors.h"

OCNN_FUSED_BEGIN_TARGET
namespace ocnn_fused::cpu::OCNN_FUSED_TARGET {

template <typename S, typename T>
inline void move_lane(S& element, T& lane, bool adds) {
  if constexpr (std::is_const_v<S>) {
    lane = static_cast<T>(element);
  } else {
    element = static_cast<S>(adds ? static_cast<T>(element) + lane : lane);
  }
}

// `lanes` numbers that lie side by side in the weight, in pieces of kBytes and then of half as many.
template <int64_t kBytes = OCNN_FUSED_VECTOR_BYTES, typename S, typename T>
inline void move_lanes(S* elements, T* row, int64_t lanes, bool adds) {
  using V = typename Vector<T, kBytes>::type;
  constexpr int64_t width = Vector<T, kBytes>::width;
  if constexpr (!std::is_same_v<std::remove_const_t<S>, T> || width == 1) {
    for (int64_t l = 0; l < lanes; ++l) move_lane(elements[l], row[l], adds);
  } else {
    for (; lanes >= width; lanes -= width, elements += width, row += width) {
      V& lane = *reinterpret_cast<V*>(row);
      if constexpr (std::is_const_v<S>) {
        lane = *reinterpret_cast<const V*>(elements);
      } else {
        V& target = *reinterpret_cast<V*>(elements);
        target = adds ? target + lane : lane;
      }
    }
    if (lanes > 0) move_lanes<kBytes / 2>(elements, row, lanes, adds);
  }
}

// Calls visit(first, adds) for squares of kWidth, and returns how much of `count` they cover. The last may overlap its
// neighbour, where that does no harm: not where squares are added.
template <int64_t kWidth, typename F>
inline int64_t each_square(int64_t count, bool adds, const F& visit) {
  if (!adds) {
    for (int64_t q = 0; q < count; q += kWidth) visit(std::min(q, count - kWidth), std::false_type());
    return count;
  }
  int64_t q = 0;
  for (; q + kWidth <= count; q += kWidth) visit(q, std::true_type());
  return q;
}

// A vector of numbers of another type, if need be.
template <typename Kind, typename T, typename S>
inline typename Kind::type load_as(const S* from) {
  T values[Kind::width];
  for (int64_t l = 0; l < Kind::width; ++l) values[l] = static_cast<T>(from[l]);
  return *reinterpret_cast<const typename Kind::type*>(values);
}
template <typename Kind, typename T, typename S>
inline void store_as(const typename Kind::type& value, S* to) {
  for (int64_t l = 0; l < Kind::width; ++l) to[l] = static_cast<S>(value[l]);
}

// A square of vectors of a weight, at entries(r) for r < `lanes`, and what it is transposed to or from, at rows(r).
// Lanes that the weight does not have are read as zero.
template <typename Kind, typename T, bool kReads, bool kAdds, typename Entries, typename Rows>
inline void move_square(int64_t lanes, const Entries& entries, const Rows& rows) {
  using V = typename Kind::type;
  V square[Kind::width];
  if constexpr (kReads) {
    for (int64_t r = 0; r < Kind::width; ++r) square[r] = r < lanes ? load_as<Kind, T>(entries(r)) : V{};
    transpose<Kind::width>(square);
    for (int64_t r = 0; r < Kind::width; ++r) *reinterpret_cast<V*>(rows(r)) = square[r];
  } else {
    for (int64_t r = 0; r < Kind::width; ++r) square[r] = *reinterpret_cast<const V*>(rows(r));
    transpose<Kind::width>(square);
    for (int64_t r = 0; r < std::min(lanes, Kind::width); ++r) {
      store_as<Kind, T>(kAdds ? load_as<Kind, T>(entries(r)) + square[r] : square[r], entries(r));
    }
  }
}

// Taps of `lanes` channels, in one row per tap: row(u) is where lane 0 of tap u lies.
template <typename T, typename S, typename Row>
inline void move_taps(const WeightView<S>& weight, S* first, int64_t lanes, const Row& row) {
  constexpr int64_t width = Short<T>::width;
  if (weight.channel_stride == 1) {
    for (int64_t u = 0; u < weight.taps; ++u) {
      S* const channels = first + weight.tap_offsets[u];
      T* const to = row(u);
      for (int64_t l = 0; l < lanes; ++l) move_lane(channels[l], to[l], weight.adds);
    }
    return;
  }
  int64_t l = 0;
  if constexpr (std::is_same_v<std::remove_const_t<S>, T>) {
    for (; weight.dense && weight.taps >= width && l + width <= lanes; l += width) {
      const int64_t done = each_square<width>(weight.taps, weight.adds, [&](int64_t u, auto adds) {
        move_square<Short<T>, T, std::is_const_v<S>, adds>(
            width, [&](int64_t r) { return first + (l + r) * weight.channel_stride + u; },
            [&](int64_t r) { return row(u + r) + l; });
      });
      for (int64_t u = done; u < weight.taps; ++u) {
        for (int64_t r = l; r < l + width; ++r) move_lane(first[r * weight.channel_stride + u], row(u)[r], true);
      }
    }
  }
  for (; l < lanes; ++l) {
    S* const channel = first + l * weight.channel_stride;
    for (int64_t u = 0; u < weight.taps; ++u) move_lane(channel[weight.tap_offsets[u]], row(u)[l], weight.adds);
  }
}

}  // namespace ocnn_fused::cpu::OCNN_FUSED_TARGET
OCNN_FUSED_END_TARGET
