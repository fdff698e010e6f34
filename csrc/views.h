// What the pipeline tells a device's stages about memory. GPU kernels use it too.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define OCNN_FUSED_ANYWHERE __host__ __device__
#else
#define OCNN_FUSED_ANYWHERE
#endif

namespace ocnn_fused {

// A rectangle of the stacked weights: rows [row_begin, row_end), channels [channel_begin, channel_end).
struct Window {
  int64_t row_begin, row_end;
  int64_t channel_begin, channel_end;
  OCNN_FUSED_ANYWHERE int64_t rows() const { return row_end - row_begin; }
  OCNN_FUSED_ANYWHERE int64_t channels() const { return channel_end - channel_begin; }
};

// Where the planes V of a pool (or their gradients G) lie for the current window:
// plane p, row i, residue r, channel c at p * plane_stride + i * row_stride + r * channels + c.
template <typename T>
struct Planes {
  T* data;
  int64_t plane_stride, row_stride;
};

// Outputs X (outputs, groups, side, side) of the groups now worked on, the first of which is `first_group` of all.
template <typename T>
struct Outputs {
  T* data;
  int64_t groups, side, first_group;
};

// A batch of matrices; one of the two strides is 1.
template <typename T>
struct Matrices {
  T* data;
  int64_t batch, batch_stride;
  int64_t rows, columns, row_stride, column_stride;
  Matrices transposed() const { return {data, batch, batch_stride, columns, rows, column_stride, row_stride}; }
};

// What one group's diagonal of lag 0 is compared with: a number, or nothing.
template <typename T>
struct Target {
  T value;
  bool ignored;
  OCNN_FUSED_ANYWHERE T residual(T entry) const { return ignored ? T(0) : entry - value; }
};

// The same for all groups of some weights. `rule` is Problem.target in ocnn_fused/problem.py: positive is the target
// itself, zero leaves it free (then there is one per group, the squared length of its filters on average), and a
// negative number ignores the diagonal.
template <typename T>
struct Targets {
  double rule;
  const T* of_groups;  // null unless they are free
  OCNN_FUSED_ANYWHERE bool are_free() const { return rule == 0; }
  OCNN_FUSED_ANYWHERE Target<T> at(int64_t group) const {
    return {of_groups == nullptr ? static_cast<T>(rule) : of_groups[group], rule < 0};
  }
  OCNN_FUSED_ANYWHERE Targets from(int64_t group) const {
    return {rule, of_groups == nullptr ? nullptr : of_groups + group};
  }
};

// What the gradients of some weights are multiplied by, group by group.
template <typename T>
struct Factors {
  const double* of_weights;  // null: one
  int64_t groups;            // of each weight
  bool per_target;           // divided by the group's target, unless that is zero
  OCNN_FUSED_ANYWHERE T at(int64_t group, const Target<T>& target) const {
    const T factor = of_weights == nullptr ? T(1) : static_cast<T>(of_weights[group / groups]);
    return per_target && target.value > 0 ? factor / target.value : factor;
  }
  OCNN_FUSED_ANYWHERE Factors from(int64_t weight) const {
    return {of_weights == nullptr ? nullptr : of_weights + weight, groups, per_target};
  }
};

}  // namespace ocnn_fused
