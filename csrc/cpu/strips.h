// evaluate and gather, strip by strip (see Strips).
#pragma once

#include <algorithm>
#include <vector>

#include "taps.h"
#include "transforms.h"

OCNN_FUSED_BEGIN_TARGET
namespace ocnn_fused::cpu::OCNN_FUSED_TARGET {

// One strip after the other, and the buffers for it: taps on one end of the evaluation matrix, planes on the other.
// Lanes are the channels of its rows, one row after the other; where residues are folded, those of all residues.
template <typename T>
class StripWorker {
 public:
  StripWorker(const std::vector<BlockView<T>>& blocks, int64_t weight_taps, const Window& window)
      : window_(window), strips_(window, most_residues(blocks)), weight_taps_(weight_taps), grid_(memory_for(blocks)) {}

  void select(int64_t item) {
    row_ = item / strips_.across * strips_.rows;
    rows_ = std::min(strips_.rows, window_.rows() - row_);
    channel_ = item % strips_.across * kStrip;
    per_row_ = std::min(kStrip, window_.channels() - channel_);
  }

  void select(const BlockView<T>& view) {
    view_ = &view;
    folded_ = strips_.folded && view.block->residues > 1;
    stretch_ = folded_ ? view.block->residues * per_row_ : per_row_;
    padded_ = (rows_ * stretch_ + kLanes - 1) / kLanes * kLanes;
  }

  // Of the block: all residues in one, or one by one.
  int64_t passes() const { return folded_ ? 1 : view_->block->residues; }

  // Calls visit(pointer to the first channel in the weight, first lane, lanes) for every row, or for all of them at
  // once if their channels are equally far apart, too.
  template <typename S, typename F>
  void each_row(const WeightView<S>& weight, const F& visit) const {
    const int64_t first = window_.row_begin + row_;
    const bool even = weight.row_stride == per_row_ * weight.channel_stride &&
                      first / weight.rows == (first + rows_ - 1) / weight.rows;
    const int64_t together = even ? rows_ : 1;
    for (int64_t q = 0; q < rows_; q += together) {
      visit(weight.row(first + q) + (window_.channel_begin + channel_) * weight.channel_stride, q * per_row_,
            together * per_row_);
    }
  }

  // Rows with the block's taps in the lanes of this pass.
  void collect_taps(int64_t pass) {
    for (int64_t m = 0; m < view_->block->taps; ++m) in[m] = class_row(pass, m);
    each_fold([&](int64_t m, T* taps, int64_t lane) { copy_lanes(taps, per_row_, class_row(0, m) + lane); });
  }

  // The way back, in two steps: before and after they are written.
  void aim_at_taps(int64_t pass) {
    for (int64_t m = 0; m < view_->block->taps; ++m) out[m] = class_row(pass, m);
  }
  void scatter_taps() {
    each_fold([&](int64_t m, T* taps, int64_t lane) { copy_lanes(class_row(0, m) + lane, per_row_, taps); });
  }

  // Where lane 0 of this pass lies in plane 0.
  T* in_pool(const Planes<T>& pool, int64_t pass) const {
    return pool.data + row_ * pool.row_stride + pass * window_.channels() + channel_;
  }

  // Whether all lanes lie side by side in the planes, and fill whole vectors there.
  bool is_whole(const Planes<T>& pool) const { return rows_ * stretch_ == padded_ && is_dense(pool); }

  void to_pool(const T* row, const Planes<T>& pool, T* target) const {
    each_stretch(pool, [&](int64_t lane, int64_t lanes, int64_t at) { copy_lanes(row + lane, lanes, target + at); });
  }

  void from_pool(const Planes<T>& pool, const T* source, T* row) const {
    each_stretch(pool, [&](int64_t lane, int64_t lanes, int64_t at) { copy_lanes(source + at, lanes, row + lane); });
  }

  template <bool kToPoints>
  void transform() {
    grid_.template transform_all<kToPoints>(view_->evaluation, in, out, padded_);
  }

  // One row more than there are taps: it is zero for evaluate and takes what belongs to no tap from gather.
  T* tap_row(int64_t source) { return memory_ + (source < 0 ? weight_taps_ : source) * kStrip; }
  T* plane_row(int64_t plane) { return tap_row(weight_taps_ + 1 + plane); }

  T **in = nullptr, **out = nullptr;

 private:
  T* class_row(int64_t pass, int64_t tap) {
    const PlanBlock& block = *view_->block;
    return folded_ ? plane_row(block.planes + tap) : tap_row(view_->sources[pass * block.taps + tap]);
  }

  // Calls visit(tap of the block, its channels in one row and residue, their first lane), unless nothing is folded.
  template <typename F>
  void each_fold(const F& visit) {
    const int64_t taps = view_->block->taps, residues = folded_ ? view_->block->residues : 0;
    for (int64_t r = 0; r < residues; ++r) {
      for (int64_t m = 0; m < taps; ++m) {
        T* const channels = tap_row(view_->sources[r * taps + m]);
        for (int64_t q = 0; q < rows_; ++q) visit(m, channels + q * per_row_, (q * residues + r) * per_row_);
      }
    }
  }

  bool is_dense(const Planes<T>& pool) const { return rows_ == 1 || pool.row_stride == stretch_; }

  // Calls visit(first lane, lanes, where they lie in the planes) for lanes that lie side by side.
  template <typename F>
  void each_stretch(const Planes<T>& pool, const F& visit) const {
    if (is_dense(pool)) return visit(0, rows_ * stretch_, 0);
    for (int64_t q = 0; q < rows_; ++q) visit(q * stretch_, stretch_, q * pool.row_stride);
  }

  Grid<T> memory_for(const std::vector<BlockView<T>>& blocks) {
    int64_t rows = 1, most = 1;
    for (const BlockView<T>& view : blocks) {
      rows = std::max(rows, grid_rows(view.evaluation));
      most = std::max(most, view.block->planes + view.block->taps);
    }
    memory_ = scratch<T>((weight_taps_ + 1 + most) * kStrip + Grid<T>::elements(rows, kStrip));
    in = scratch<T*>(2 * rows + Grid<T>::pointers(rows));
    out = in + rows;
    return Grid<T>(plane_row(most), out + rows, rows, kStrip);
  }

  const Window& window_;
  const Strips strips_;
  const int64_t weight_taps_;
  T* memory_ = nullptr;
  Grid<T> grid_;
  // The strip.
  int64_t row_ = 0, rows_ = 0, channel_ = 0, per_row_ = 0;
  // The block; stretch_: lanes that lie side by side in the planes.
  const BlockView<T>* view_ = nullptr;
  bool folded_ = false;
  int64_t stretch_ = 0, padded_ = 0;
};

template <typename S, typename T>
void evaluate(const WeightView<const S>& weight, const std::vector<BlockView<T>>& blocks,
              const std::vector<Planes<T>>& planes, const Window& window, int64_t begin, int64_t end) {
  StripWorker<T> strip(blocks, weight.taps, window);
  std::fill_n(strip.tap_row(-1), kStrip, T(0));
  for (int64_t item = begin; item < end; ++item) {
    strip.select(item);
    strip.each_row(weight, [&](const S* source, int64_t lane, int64_t lanes) {
      move_taps<T>(weight, source, lanes, [&](int64_t u) { return strip.tap_row(u) + lane; });
    });
    for (const BlockView<T>& view : blocks) {
      strip.select(view);
      const Planes<T>& pool = planes[view.block->pool];
      const bool whole = strip.is_whole(pool);
      for (int64_t pass = 0; pass < strip.passes(); ++pass) {
        T* target = strip.in_pool(pool, pass);
        for (int64_t g = 0; g < view.block->planes; ++g) {
          strip.out[g] = whole ? target + view.plane_of[g] * pool.plane_stride : strip.plane_row(g);
        }
        strip.collect_taps(pass);
        strip.template transform<true>();
        for (int64_t g = 0; !whole && g < view.block->planes; ++g) {
          strip.to_pool(strip.out[g], pool, target + view.plane_of[g] * pool.plane_stride);
        }
      }
    }
  }
}

template <typename S, typename T>
void gather(const WeightView<S>& grad, const std::vector<BlockView<T>>& blocks, const std::vector<Planes<T>>& planes,
            const Window& window, int64_t begin, int64_t end) {
  StripWorker<T> strip(blocks, grad.taps, window);
  for (int64_t item = begin; item < end; ++item) {
    strip.select(item);
    for (const BlockView<T>& view : blocks) {
      strip.select(view);
      const Planes<T>& pool = planes[view.block->pool];
      for (int64_t pass = 0; pass < strip.passes(); ++pass) {
        const T* source = strip.in_pool(pool, pass);
        // Copied, because planes lie powers of two apart and would evict each other while they are read again.
        for (int64_t g = 0; g < view.block->planes; ++g) {
          strip.from_pool(pool, source + view.plane_of[g] * pool.plane_stride, strip.plane_row(g));
          strip.in[g] = strip.plane_row(g);
        }
        strip.aim_at_taps(pass);
        strip.template transform<false>();
        strip.scatter_taps();
      }
    }
    strip.each_row(grad, [&](S* target, int64_t lane, int64_t lanes) {
      move_taps<T>(grad, target, lanes, [&](int64_t u) { return strip.tap_row(u) + lane; });
    });
  }
}

}  // namespace ocnn_fused::cpu::OCNN_FUSED_TARGET
OCNN_FUSED_END_TARGET
