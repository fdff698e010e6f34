// What the diagonals of some weights are compared with, and what that adds to a loss of the column side.
#pragma once

#include <numeric>
#include <vector>

#include "tensors.h"
#include "threads.h"

namespace ocnn_fused::cpu {

template <typename S, typename T>
class GroupTargets {
 public:
  // Free targets are computed here, in one pass over the weights.
  GroupTargets(double rule, const WeightView<const S>& weight, int64_t weights, int64_t groups, int64_t channels)
      : rule_(rule), groups_(groups) {
    if (!view().are_free()) return;
    const int64_t rows = weight.rows / groups;
    std::vector<double> squares(weights * weight.rows);
    share_items(weights * weight.rows, channels * weight.taps, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) squares[i] = square_of(weight, i, channels);
    });
    for (auto row = squares.begin(); row != squares.end(); row += rows) {
      of_groups_.push_back(static_cast<T>(std::accumulate(row, row + rows, 0.0) / static_cast<double>(rows)));
    }
  }

  Targets<T> view() const { return {rule_, of_groups_.empty() ? nullptr : of_groups_.data()}; }

  // What the loss of a weight has beyond that of the side worked on; `offset` is the plan's.
  double constant(int64_t weight, int64_t offset) const {
    double squares = 0;
    for (int64_t group = 0; offset != 0 && group < groups_; ++group) {
      const double target = view().at(weight * groups_ + group).value;
      squares += target * target;
    }
    return static_cast<double>(offset) * squares / static_cast<double>(groups_);
  }

  // Squared length of one filter; sums in lanes, which a compiler may keep in vectors.
  static double square_of(const WeightView<const S>& weight, int64_t i, int64_t channels) {
    const bool in_one_piece = weight.dense && weight.channel_stride == weight.taps;
    const int64_t pieces = in_one_piece ? 1 : channels, length = in_one_piece ? channels * weight.taps : weight.taps;
    T lanes[kLanes] = {};
    for (int64_t c = 0; c < pieces; ++c) {
      const S* piece = weight.row(i) + c * weight.channel_stride;
      const auto square = [&](int64_t u) {
        const T value = static_cast<T>(piece[weight.dense ? u : weight.tap_offsets[u]]);
        return value * value;
      };
      int64_t u = 0;
      for (; u + kLanes <= length; u += kLanes) {
        for (int64_t l = 0; l < kLanes; ++l) lanes[l] += square(u + l);
      }
      for (; u < length; ++u) lanes[u % kLanes] += square(u);
    }
    return std::accumulate(lanes, lanes + kLanes, 0.0);
  }

 private:
  const double rule_;
  const int64_t groups_;
  std::vector<T> of_groups_;
};

// What all stages of a call take: `flat` views of weights that are matrices have one row per filter.
template <typename S, typename T>
struct Operands {
  Operands(const Call& call, double target, int64_t groups, bool flat = false)
      : count(call.count()),
        groups(groups),
        rows(call.bucket.weights.rows() / groups),
        channels(flat ? call.bucket.weights.elements() / call.bucket.weights.rows() : call.bucket.weights.channels()),
        weight(flat ? flat_view_of(call.read<S>()) : view_of(call.read<S>())),
        grad(flat ? flat_view_of(call.written<S>(), call.epilogue.adds)
                  : view_of(call.written<S>(), call.epilogue.adds)),
        targets(target, weight, count, groups, channels),
        factors(call.epilogue, call.bucket.places, groups) {}

  const int64_t count, groups, rows, channels;  // weights; of each; per group
  const WeightView<const S> weight;
  const WeightView<S> grad;  // no data: no gradient is wanted
  const GroupTargets<S, T> targets;
  const GroupFactors<T> factors;
};

}  // namespace ocnn_fused::cpu
