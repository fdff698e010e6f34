// Taps of a weight of any strides, and rows of lanes: read from a weight that is const, written to one that is not.

template <typename S, typename T>
inline void move_lane(S& element, T& lane) {
  if constexpr (std::is_const_v<S>) {
    lane = static_cast<T>(element);
  } else {
    element = static_cast<S>(lane);
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
      for (int64_t l = 0; l < lanes; ++l) move_lane(channels[l], to[l]);
    }
    return;
  }
  int64_t l = 0;
  if constexpr (std::is_same_v<std::remove_const_t<S>, T>) {
    for (; weight.dense && weight.taps >= width && l + width <= lanes; l += width) {
      each_cover<width>(weight.taps, [&](int64_t u) {
        transpose_square<Short<T>, std::is_const_v<S>>(
            [&](int64_t r) { return first + (l + r) * weight.channel_stride + u; },
            [&](int64_t r) { return row(u + r) + l; });
      });
    }
  }
  for (; l < lanes; ++l) {
    S* const channel = first + l * weight.channel_stride;
    for (int64_t u = 0; u < weight.taps; ++u) move_lane(channel[weight.tap_offsets[u]], row(u)[l]);
  }
}
