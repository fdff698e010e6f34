// evaluate and gather on panels: planes of a slice from the weight's taps, and the transpose of it.
#pragma once

#include <algorithm>
#include <optional>

#include "panels.h"
#include "transforms.h"

OCNN_FUSED_BEGIN_TARGET
namespace ocnn_fused::cpu::OCNN_FUSED_TARGET {

// A strip on panels is longer, see kStrip: the rows on the way still fit the nearest cache.
constexpr int64_t kPanelStrip = 128;

// Rows of planes of a slice from those of taps: one orbit of the first axis (kPoints of them, see Slice) and all points
// of the second, which may have one tap only.
template <int64_t kPoints, int64_t kTaps0, int64_t kTaps1, typename T>
void taps_to_slice(const Factor<T>& first, int64_t orbit, const Factor<T>* second, const T* const* in, T* const* out,
                   int64_t lanes) {
  using V = typename Vector<T>::type;
  constexpr int64_t evens = (kTaps0 + 1) / 2, odds = kTaps0 / 2, points = points_of(kTaps1);
  const T *even_row = first.even + orbit * evens, *odd_row = orbit > 0 ? first.odd + (orbit - 1) * odds : nullptr;
  for (int64_t at = 0; at < lanes; at += Vector<T>::width) {
    V middle[kPoints * kTaps1];
    OCNN_FUSED_UNROLL
    for (int64_t j = 0; j < kTaps1; ++j) {
      V even{}, odd{};
      OCNN_FUSED_UNROLL
      for (int64_t q = 0; q < odds; ++q) {
        const V one = load(in[q * kTaps1 + j] + at), other = load(in[(kTaps0 - 1 - q) * kTaps1 + j] + at);
        even += (one + other) * even_row[q];
        if (orbit > 0) odd += (one - other) * odd_row[q];
      }
      if constexpr (evens > odds) even += load(in[odds * kTaps1 + j] + at) * even_row[odds];
      middle[j] = even + odd;
      if constexpr (kPoints > 1) middle[kTaps1 + j] = even - odd;
    }
    OCNN_FUSED_UNROLL
    for (int64_t a = 0; a < kPoints; ++a) {
      if constexpr (kTaps1 == 1) {
        store(middle[a], out[a] + at);
      } else {
        V row[points];
        registers_to_points<points, kTaps1, 1>(*second, middle + a * kTaps1, row);
        OCNN_FUSED_UNROLL
        for (int64_t g = 0; g < points; ++g) store(row[g], out[a * points + g] + at);
      }
    }
  }
}

// The transpose: rows of taps from those of planes, added to what is there if `add`.
template <int64_t kPoints, int64_t kTaps0, int64_t kTaps1, typename T>
void slice_to_taps(const Factor<T>& first, int64_t orbit, const Factor<T>* second, const T* const* in, T* const* out,
                   int64_t lanes, bool add) {
  using V = typename Vector<T>::type;
  constexpr int64_t evens = (kTaps0 + 1) / 2, odds = kTaps0 / 2, points = points_of(kTaps1);
  const T *even_row = first.even + orbit * evens, *odd_row = orbit > 0 ? first.odd + (orbit - 1) * odds : nullptr;
  for (int64_t at = 0; at < lanes; at += Vector<T>::width) {
    V middle[kPoints * kTaps1];
    OCNN_FUSED_UNROLL
    for (int64_t a = 0; a < kPoints; ++a) {
      if constexpr (kTaps1 == 1) {
        middle[a] = load(in[a] + at);
      } else {
        V row[points];
        OCNN_FUSED_UNROLL
        for (int64_t g = 0; g < points; ++g) row[g] = load(in[a * points + g] + at);
        registers_from_points<points, kTaps1, 1>(*second, row, middle + a * kTaps1);
      }
    }
    OCNN_FUSED_UNROLL
    for (int64_t j = 0; j < kTaps1; ++j) {
      const V other = kPoints > 1 ? middle[(kPoints - 1) * kTaps1 + j] : V{};
      const V sum = middle[j] + other, difference = middle[j] - other;
      OCNN_FUSED_UNROLL
      for (int64_t q = 0; q < odds; ++q) {
        const V even = sum * even_row[q], odd = orbit > 0 ? difference * odd_row[q] : V{};
        T *const target = out[q * kTaps1 + j] + at, *const mirror = out[(kTaps0 - 1 - q) * kTaps1 + j] + at;
        store(add ? load(target) + (even + odd) : even + odd, target);
        store(add ? load(mirror) + (even - odd) : even - odd, mirror);
      }
      if constexpr (evens > odds) {
        T* const target = out[odds * kTaps1 + j] + at;
        store(add ? load(target) + sum * even_row[odds] : sum * even_row[odds], target);
      }
    }
  }
}

// Planes of a slice, from the weight's taps and back to them, a strip at a time.
template <typename T>
class SliceWorker {
 public:
  explicit SliceWorker(const PanelPlan<T>& plan)
      : plan_(plan),
        rows_(plan.slice_rows),
        taps_(scratch<T*>(2 * rows_ + Grid<T>::pointers(rows_))),
        planes_(taps_ + rows_) {}

  // Of the strip's buffers, which the caller supplies.
  int64_t elements() const { return rows_ * kPanelStrip + Grid<T>::elements(rows_, kPanelStrip); }
  void use(T* memory) {
    middle_ = memory;
    grid_.emplace(memory + rows_ * kPanelStrip, planes_ + rows_, rows_, kPanelStrip);
  }

  // plane(g) = sum over m of evaluation[g][m] tap(m), for all planes of the slice.
  template <typename Tap, typename Plane>
  void evaluate(const Slice& slice, int64_t lanes, const Tap& tap, const Plane& plane) {
    transform<true>(slice, lanes, tap, plane, false);
  }

  // tap(m) = sum over the slice's planes of evaluation[g][m] plane(g), added to what is there if `add`.
  template <typename Tap, typename Plane>
  void gather(const Slice& slice, int64_t lanes, const Tap& tap, const Plane& plane, bool add) {
    transform<false>(slice, lanes, tap, plane, add);
  }

 private:
  template <int64_t kTaps = 2, typename F>
  static void by_taps(int64_t taps, const F& f) {
    if (taps == kTaps) {
      f.template operator()<kTaps>();
    } else if constexpr (kTaps < kMostTaps) {
      by_taps<kTaps + 1>(taps, f);
    }
  }

  template <typename F>
  static void by_shape(const Slice& slice, const Factor<T>& first, const Factor<T>* second, const F& f) {
    by_taps(first.span, [&]<int64_t kTaps>() {
      if (second == nullptr) {
        slice.points > 1 ? f.template operator()<2, kTaps, 1>() : f.template operator()<1, kTaps, 1>();
      } else {
        slice.points > 1 ? f.template operator()<2, kTaps, kTaps>() : f.template operator()<1, kTaps, kTaps>();
      }
    });
  }

  // Between the rows in taps_ and those in planes_: along one axis, or two.
  template <bool kToPlanes>
  void transform_rows(const Slice& slice, const Factor<T>& first, const Factor<T>* second, int64_t lanes, bool add) {
    by_shape(slice, first, second, [&]<int64_t kPoints, int64_t kTaps0, int64_t kTaps1>() {
      if constexpr (kToPlanes) {
        taps_to_slice<kPoints, kTaps0, kTaps1>(first, slice.orbit, second, taps_, planes_, lanes);
      } else {
        slice_to_taps<kPoints, kTaps0, kTaps1>(first, slice.orbit, second, planes_, taps_, lanes, add);
      }
    });
  }

  template <bool kToPlanes, typename Tap, typename Plane>
  void transform(const Slice& slice, int64_t lanes, const Tap& tap, const Plane& plane, bool add) {
    const SliceAxes<T>& axes = plan_.axes[slice.block];
    if (axes.first.points == 0) {
      kToPlanes ? std::copy_n(tap(0), lanes, plane(0)) : std::copy_n(plane(0), lanes, tap(0));
    } else if (axes.is_square()) {
      for (int64_t m = 0; m < axes.taps; ++m) taps_[m] = tap(m);
      for (int64_t g = 0; g < slice.planes; ++g) planes_[g] = plane(g);
      transform_rows<kToPlanes>(slice, axes.first, axes.second(), lanes, add);
    } else {
      for (int64_t at = 0; at < lanes; at += kPanelStrip) {
        transform_strip<kToPlanes>(slice, axes, at, std::min(kPanelStrip, lanes - at), tap, plane, add);
      }
    }
  }

  // The first axis on its own and the others together; what lies between them is in memory.
  template <bool kToPlanes, typename Tap, typename Plane>
  void transform_strip(const Slice& slice, const SliceAxes<T>& axes, int64_t at, int64_t lanes, const Tap& tap,
                       const Plane& plane, bool add) {
    const int64_t inner = axes.taps / axes.first.span, rest = slice.planes / slice.points;
    const auto along_first = [&] {
      for (int64_t j = 0; j < inner; ++j) {
        for (int64_t u = 0; u < axes.first.span; ++u) taps_[u] = tap(u * inner + j) + at;
        for (int64_t a = 0; a < slice.points; ++a) planes_[a] = middle(a * inner + j);
        transform_rows<kToPlanes>(slice, axes.first, nullptr, lanes, add);
      }
    };
    if constexpr (kToPlanes) along_first();
    for (int64_t a = 0; a < slice.points; ++a) {
      for (int64_t j = 0; j < inner; ++j) taps_[j] = middle(a * inner + j);
      for (int64_t g = 0; g < rest; ++g) planes_[g] = plane(a * rest + g) + at;
      grid_->template transform_all<kToPlanes>(axes.others, kToPlanes ? taps_ : planes_, kToPlanes ? planes_ : taps_,
                                               lanes);
    }
    if constexpr (!kToPlanes) along_first();
  }

  T* middle(int64_t row) { return middle_ + row * kPanelStrip; }

  const PanelPlan<T>& plan_;
  const int64_t rows_;  // of the largest grid
  T **const taps_, **const planes_;
  T* middle_ = nullptr;
  std::optional<Grid<T>> grid_;
};

}  // namespace ocnn_fused::cpu::OCNN_FUSED_TARGET
OCNN_FUSED_END_TARGET
