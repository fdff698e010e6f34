// Taps of a weight of any strides, and rows of lanes: read from a weight that is const, written to one that is not, or
// added to it.

template <typename S, typename T>
inline void move_lane(S& element, T& lane, bool adds) {
  if constexpr (std::is_const_v<S>) {
    lane = static_cast<T>(element);
  } else {
    element = static_cast<S>(adds ? static_cast<T>(element) + lane : lane);
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

// A square of vectors of a weight, at entries(r), and what it is transposed to or from, at rows(r).
template <typename Kind, bool kReads, bool kAdds, typename Entries, typename Rows>
inline void move_square(const Entries& entries, const Rows& rows) {
  using V = typename Kind::type;
  if constexpr (kReads) {
    transpose_square<Kind>(entries, rows);
  } else {
    V square[Kind::width];
    for (int64_t r = 0; r < Kind::width; ++r) square[r] = *reinterpret_cast<const V*>(rows(r));
    transpose<Kind::width>(square);
    for (int64_t r = 0; r < Kind::width; ++r) {
      V& target = *reinterpret_cast<V*>(entries(r));
      target = kAdds ? target + square[r] : square[r];
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
        move_square<Short<T>, std::is_const_v<S>, adds>(
            [&](int64_t r) { return first + (l + r) * weight.channel_stride + u; },
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
