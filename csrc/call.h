// What a call works on, for any device: addresses, sizes and strides.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "numbers.h"
#include "plan.h"

namespace ocnn_fused {

using Address = std::uintptr_t;

enum class Type { kFloat64, kFloat32, kBFloat16, kFloat16 };

// How a tensor (rows, channels, kernel...) lies in memory.
struct Layout {
  Layout(std::vector<int64_t> sizes, std::vector<int64_t> strides);
  int64_t dimensions() const { return static_cast<int64_t>(sizes.size()); }
  int64_t rows() const { return sizes[0]; }
  int64_t channels() const { return sizes[1]; }
  int64_t elements() const {
    int64_t product = 1;
    for (const int64_t size : sizes) product *= size;
    return product;
  }
  bool is_contiguous() const {
    int64_t stride = 1;
    for (size_t axis = sizes.size(); axis-- > 0; stride *= sizes[axis]) {
      if (sizes[axis] != 1 && strides[axis] != stride) return false;
    }
    return true;
  }

  std::vector<int64_t> sizes, strides;
  std::vector<int64_t> tap_offsets{0};  // in elements, of the kernel's entries in order
  // How far apart the entries of a filter are, axis by axis from the closest: nothing unless all are equally far apart,
  // and the weight so a matrix.
  std::optional<int64_t> entry_stride;

 private:
  std::optional<int64_t> find_entry_stride() const;
};

inline Layout::Layout(std::vector<int64_t> all_sizes, std::vector<int64_t> all_strides)
    : sizes(std::move(all_sizes)), strides(std::move(all_strides)), entry_stride(find_entry_stride()) {
  for (size_t axis = 2; axis < sizes.size(); ++axis) {
    std::vector<int64_t> next;
    next.reserve(tap_offsets.size() * sizes[axis]);
    for (const int64_t offset : tap_offsets) {
      for (int64_t u = 0; u < sizes[axis]; ++u) next.push_back(offset + u * strides[axis]);
    }
    tap_offsets = std::move(next);
  }
}

inline std::optional<int64_t> Layout::find_entry_stride() const {
  std::vector<size_t> axes;  // those of a filter, but those of one entry, by how far apart their entries are
  for (size_t axis = 1; axis < sizes.size(); ++axis) {
    if (sizes[axis] > 1) axes.push_back(axis);
  }
  std::sort(axes.begin(), axes.end(), [&](size_t a, size_t b) { return strides[a] < strides[b]; });
  for (size_t a = 1; a < axes.size(); ++a) {
    if (strides[axes[a]] != strides[axes[a - 1]] * sizes[axes[a - 1]]) return std::nullopt;
  }
  return axes.empty() ? 1 : strides[axes[0]];
}

// Tensors of one layout: read if S is const.
template <typename S>
struct Tensors {
  std::span<const Address> addresses;
  const Layout& layout;
  int64_t count() const { return static_cast<int64_t>(addresses.size()); }
  bool empty() const { return addresses.empty(); }
  S* operator[](int64_t index) const { return reinterpret_cast<S*>(addresses[index]); }
  Tensors slice(int64_t begin, int64_t how_many) const { return {addresses.subspan(begin, how_many), layout}; }
};

// Whether gradients go where the weights are read.
inline bool overlap(std::span<const Address> weights, std::span<const Address> grads) {
  for (size_t w = 0; w < grads.size(); ++w) {
    if (weights[w] == grads[w]) return true;
  }
  return false;
}

// What becomes of the gradients of a call: gradient w, times factor * factors[its place], is stored, or added to what
// is there if `adds`.
struct Epilogue {
  const double* factors = nullptr;  // where the weights are; null: one each
  double factor = 1;
  bool per_target = false;  // divided by the free target of each group, unless that is zero
  bool adds = false;
  bool scales() const { return factors != nullptr || factor != 1; }
};

struct WorkspaceTooSmall {
  int64_t needed;  // bytes
};

// Memory for a call, with undefined contents.
struct Workspace {
  char* memory;
  int64_t bytes;
  // Throws before anything was written if it does not suffice.
  char* take(int64_t needed) const {
    if (needed > bytes) throw WorkspaceTooSmall{needed};
    return memory;
  }
};

// Something that is worked out once, by whichever thread wants it first.
class Once {
 public:
  // Always of the same type.
  template <typename Kind, typename... Arguments>
  const Kind& get(const Arguments&... arguments) const {
    std::call_once(flag_, [&] { made_ = std::make_shared<const Kind>(arguments...); });
    return *static_cast<const Kind*>(made_.get());
  }

 private:
  mutable std::once_flag flag_;
  mutable std::shared_ptr<const void> made_;
};

// Weights of one plan, type and layout, at these places of the caller's list.
struct Bucket {
  std::variant<BilinearPlan, SmallPlan, FourierPlan> plan;
  const int64_t* tables;
  const void* constants;
  Type type;
  Layout weights, grads;
  std::vector<int64_t> places;
  Once prepared{};  // what all calls have in common, for the device that executes them
};

// One execution of a bucket.
struct Call {
  const Bucket& bucket;
  std::span<const Address> weights, grads;  // grads: as many, or none
  Epilogue epilogue;
  void* losses;  // of the whole list: float64 if `wide`, else float32
  bool wide;
  Workspace workspace;

  int64_t count() const { return static_cast<int64_t>(weights.size()); }
  bool with_grad() const { return !grads.empty(); }
  template <typename S>
  Tensors<const S> read() const {
    return {weights, bucket.weights};
  }
  template <typename S>
  Tensors<S> written() const {
    return {grads, bucket.grads};
  }
  // A loss is a sum of squares: what rounding leaves below zero is zero (and NaN stays NaN).
  void store_loss(int64_t weight, double loss) const {
    const int64_t place = bucket.places[weight];
    if (loss < 0) loss = 0;
    if (wide) {
      static_cast<double*>(losses)[place] = loss;
    } else {
      static_cast<float*>(losses)[place] = static_cast<float>(loss);
    }
  }
};

// Calls f.operator()<S, T>() for the weights' type S and the type T it is computed in.
template <typename F>
void dispatch(Type type, const F& f) {
  switch (type) {
    case Type::kFloat64:
      return f.template operator()<double, double>();
    case Type::kFloat32:
      return f.template operator()<float, float>();
    case Type::kBFloat16:
      return f.template operator()<BFloat16, float>();
    case Type::kFloat16:
      return f.template operator()<Half, float>();
  }
}

}  // namespace ocnn_fused
