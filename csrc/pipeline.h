// Executes a bilinear plan on any device: evaluate | gram | mix | apply | gather. The stages, and matrix products, come
// from the device.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "call.h"
#include "views.h"

namespace ocnn_fused {

// Hands out cache-line aligned parts of a workspace; with no memory it only measures.
class Arena {
 public:
  explicit Arena(char* memory = nullptr) : memory_(memory) {}
  template <typename T>
  T* take(int64_t elements) {
    char* part = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += (elements * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return reinterpret_cast<T*>(part);
  }
  int64_t used() const { return used_; }

 private:
  char* memory_;
  int64_t used_ = 0;
};

// One plan and the weights it is for, all of one shape, strides and type: they are stacked as if they were more groups.
// S is the weights' type, T the type of everything computed. A Device has
//   kPlaneBytes, kNarrowestChunk, kChunkMultiple                         how much is worked on at once
//   kCopiedBytes                                                         see flat_
//   void zero(T*, int64_t elements)
//   void multiply(const Matrices<T>& out, const Matrices<T>& left, const Matrices<T>& right, bool add)
//   void evaluate(const std::vector<Planes<T>>&, const Window&)          V = E K, one entry per pool
//   void mix(const Outputs<T>&, bool with_grad)                          loss per group; Y, times its factor, in place
//                                                                        of X
//   void gather(const std::vector<Planes<T>>&, const Window&)            dK = E^T G, stored or added
template <typename S, typename T, typename Device>
class Pipeline {
 public:
  // `adds`: to what `grads` hold, which may be the weights themselves.
  Pipeline(Device& device, const BilinearPlan& plan, const Tensors<const S>& weights, const Tensors<S>& grads,
           bool adds)
      : device_(device),
        plan_(plan),
        weights_(weights),
        grads_(grads),
        rows_(weights.layout.rows() / plan.groups),
        channels_(weights.layout.channels()),
        groups_(weights.count() * plan.groups),
        side_(plan.column ? channels_ * plan.pools[0].residues : rows_),
        flat_(plan.flat && std::is_same_v<S, T> && weights.layout.is_contiguous() &&
              (grads.empty() || grads.layout.is_contiguous()) && !overlap(weights.addresses, grads.addresses) &&
              (weights.count() == 1 ||
               weights.layout.elements() * static_cast<int64_t>(sizeof(S)) > Device::kCopiedBytes)),
        adds_(adds),
        planes_(plan.pools.size()),
        gradients_(plan.pools.size()) {
    int64_t products = 0;
    for (const PlanRun& run : plan.runs) {
      products += run.count;
      sums_ = sums_ || run.summed;
    }
    accumulates_ = products > plan.outputs;
    // Summed runs are one contraction over neighbouring planes: on the row side those must lie next to each other.
    interleaved_ = sums_ && !plan.column;
    choose_chunks();
  }

  int64_t workspace_bytes() {
    Arena measure;
    lay_out(measure);
    return measure.used();
  }

  // As many groups at once as memory allows; a single one may also be cut along the contraction axis.
  void execute(char* workspace) {
    Arena arena(workspace);
    lay_out(arena);
    for (group_ = 0; group_ < groups_; group_ += groups_now_) {
      // Where the planes are the weight itself, groups of the next weight must wait.
      groups_now_ = std::min(groups_at_once_, flat_ ? plan_.groups - group_ % plan_.groups : groups_ - group_);
      for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
        select(chunk);
        evaluate();
        gram(chunk > 0);
      }
      mix();
      if (!with_grad()) continue;
      for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
        select(chunk);
        if (chunks_ > 1) evaluate();
        apply();
        gather();
      }
    }
  }

 private:
  bool with_grad() const { return !grads_.empty(); }

  void choose_chunks() {
    constexpr int64_t size = sizeof(T);
    int64_t plane_bytes = 0;
    for (const PlanPool& pool : plan_.pools) {
      plane_bytes += 2 * size * pool.planes * pool.residues * rows_ * channels_;  // without gradient too: the same bits
    }
    const int64_t allowed = std::max(Device::kPlaneBytes, 2 * size * (2 * plan_.lags - 1) * rows_ * rows_);
    groups_at_once_ = std::clamp<int64_t>(allowed / (plane_bytes + size * plan_.outputs * side_ * side_), 1, groups_);
    // Several planes of one group are one contraction only if no other group lies between them.
    if (sums_ && plan_.column) groups_at_once_ = 1;
    const int64_t length = plan_.column ? rows_ : channels_;
    chunk_ = length;
    if (groups_at_once_ == 1 && !flat_ && plane_bytes > allowed) {
      const int64_t wanted = (plane_bytes + allowed - 1) / allowed;
      chunk_ = std::max((length + wanted - 1) / wanted, std::min(length, Device::kNarrowestChunk));
      chunk_ = (chunk_ + Device::kChunkMultiple - 1) / Device::kChunkMultiple * Device::kChunkMultiple;
    }
    chunks_ = (length + chunk_ - 1) / chunk_;
  }

  void lay_out(Arena& arena) {
    outputs_ = arena.template take<T>(plan_.outputs * groups_at_once_ * side_ * side_);
    const int64_t area = plan_.column ? std::min(chunk_, rows_) * channels_ : rows_ * std::min(chunk_, channels_);
    for (size_t p = 0; p < planes_.size(); ++p) {
      const int64_t elements = flat_ ? 0 : plan_.pools[p].planes * plan_.pools[p].residues * groups_at_once_ * area;
      planes_[p].data = arena.template take<T>(elements);
      gradients_[p].data = arena.template take<T>(with_grad() ? elements : 0);
    }
  }

  // Planes that are the weight and its gradient themselves.
  void point_at_weight() {
    if constexpr (std::is_same_v<S, T>) {
      const int64_t weight = group_ / plan_.groups;
      const int64_t offset = group_ % plan_.groups * rows_ * (weights_.layout.elements() / weights_.layout.rows());
      planes_[0].data = const_cast<T*>(weights_[weight]) + offset;  // only read
      if (with_grad()) gradients_[0].data = grads_[weight] + offset;
    }
  }

  // Sets the window of this chunk and the strides of the planes for it.
  void select(int64_t chunk) {
    if (flat_) point_at_weight();
    const int64_t begin = chunk * chunk_, row = group_ * rows_;
    window_ = plan_.column ? Window{row + begin, row + std::min(begin + chunk_, rows_), 0, channels_}
                           : Window{row, row + groups_now_ * rows_, begin, std::min(begin + chunk_, channels_)};
    if (plan_.column && chunks_ == 1) window_.row_end = row + groups_now_ * rows_;
    for (size_t p = 0; p < planes_.size(); ++p) {
      const int64_t width = plan_.pools[p].residues * window_.channels();
      for (Planes<T>* planes : {&planes_[p], &gradients_[p]}) {
        planes->plane_stride = interleaved_ ? width : window_.rows() * width;
        planes->row_stride = interleaved_ ? plan_.pools[p].planes * width : width;
      }
    }
  }

  void evaluate() {
    if (flat_) return;
    device_.evaluate(planes_, window_);
  }

  void mix() { device_.mix(Outputs<T>{outputs_, groups_now_, side_, group_}, with_grad()); }

  void gather() {
    if (flat_) return;
    device_.gather(gradients_, window_);
  }

  // As many planes as the run has, from `plane` on, as one batch of matrices, oriented (gram side, contraction).
  Matrices<T> matrices(const PlanRun& run, const std::vector<Planes<T>>& all, int64_t plane) const {
    const Planes<T>& planes = all[run.pool];
    T* first = planes.data + plane * planes.plane_stride;
    const int64_t width = plan_.pools[run.pool].residues * window_.channels(), rows = window_.rows() / groups_now_;
    if (plan_.column) {
      const int64_t batch = run.summed ? groups_now_ : run.count * groups_now_;
      const int64_t length = run.summed ? run.count * rows : rows;
      return {first, batch, length * width, width, length, 1, width};
    }
    if (interleaved_) {
      return {first, groups_now_, rows * planes.row_stride, rows, run.count * width, planes.row_stride, 1};
    }
    return {first, run.count * groups_now_, rows * width, rows, width, width, 1};
  }

  Matrices<T> outputs(const PlanRun& run) const {
    const int64_t area = side_ * side_, count = run.summed ? 1 : run.count;
    return {outputs_ + run.out * groups_now_ * area, count * groups_now_, area, side_, side_, side_, 1};
  }

  // Calls f for every run of products that can be issued at once.
  template <typename F>
  void each_run(const F& f) const {
    for (const PlanRun& run : plan_.runs) {
      if (interleaved_ && !run.summed) {
        for (int64_t j = 0; j < run.count; ++j) {
          f(PlanRun{run.pool, run.left + j, run.right + j, run.out + j, 1, false});
        }
      } else {
        f(run);
      }
    }
  }

  void gram(bool add) {
    if (accumulates_ && !add) {
      device_.zero(outputs_, plan_.outputs * groups_now_ * side_ * side_);
      add = true;
    }
    each_run([&](const PlanRun& run) {
      device_.multiply(outputs(run), matrices(run, planes_, run.left), matrices(run, planes_, run.right).transposed(),
                       add);
    });
  }

  // G = Y V, or the transpose of it where the planes lie transposed.
  void multiply_planes(const Matrices<T>& gradients, const Matrices<T>& y, const Matrices<T>& planes) const {
    const bool add = accumulates_ || (flat_ && adds_);
    if (plan_.column) {
      device_.multiply(gradients.transposed(), planes.transposed(), y.transposed(), add);
    } else {
      device_.multiply(gradients, y, planes, add);
    }
  }

  void apply() {
    for (size_t p = 0; accumulates_ && p < gradients_.size(); ++p) {
      const PlanPool& pool = plan_.pools[p];
      device_.zero(gradients_[p].data, pool.planes * pool.residues * window_.rows() * window_.channels());
    }
    each_run([&](const PlanRun& run) {
      const Matrices<T> y = outputs(run);
      multiply_planes(matrices(run, gradients_, run.left), y, matrices(run, planes_, run.right));
      if (run.left == run.right) return;  // the output is its own transpose
      multiply_planes(matrices(run, gradients_, run.right), y.transposed(), matrices(run, planes_, run.left));
    });
  }

  Device& device_;
  const BilinearPlan& plan_;
  const Tensors<const S> weights_;
  const Tensors<S> grads_;
  const int64_t rows_, channels_, groups_;  // per group, per group, of all weights
  const int64_t side_;
  // The weight itself serves as planes, unless several are so small that a copy of all is cheaper. Not where gradients
  // go into the weights: a product would then read what another has written, while stages do so chunk by chunk.
  const bool flat_;
  const bool adds_;
  std::vector<Planes<T>> planes_, gradients_;  // of all pools
  bool sums_ = false, accumulates_ = false, interleaved_ = false;
  int64_t groups_at_once_ = 1, chunk_ = 1, chunks_ = 1;
  T* outputs_ = nullptr;
  // Where the pass is now.
  int64_t group_ = 0, groups_now_ = 1;
  Window window_{};
};

}  // namespace ocnn_fused
