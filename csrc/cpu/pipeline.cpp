// Executes a plan on the CPU: evaluate | gram | mix | apply | gather. Matrix products go to ATen's BLAS.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "../checks.h"
#include "stages.h"

namespace ocnn_fused::cpu {
namespace {

// Planes V and their gradients G of one chunk: always allowed this much, and as much as the self-convolution and its
// residual would take, unless one narrow chunk needs more.
constexpr int64_t kPlaneBytes = int64_t{8} << 20;
constexpr int64_t kNarrowestChunk = 128;
// Workspace kept by a thread between calls: fresh memory costs more than the stages that write it.
constexpr int64_t kKeptBytes = int64_t{128} << 20;
// Multiply-adds below which another thread does not pay.
constexpr int64_t kThreadWork = int64_t{1} << 20;

int64_t grain(int64_t work_per_item) { return std::max<int64_t>(1, kThreadWork / std::max<int64_t>(1, work_per_item)); }

// Memory of this thread, grown on demand and reused; contents are undefined.
at::Tensor workspace(int64_t bytes) {
  thread_local at::Tensor kept;
  at::Tensor memory = kept;
  if (!memory.defined() || memory.nbytes() < static_cast<size_t>(bytes)) {
    kept.reset();
    memory = at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
    if (bytes <= kKeptBytes) kept = memory;
  }
  const auto& context = at::globalContext();
  if (context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory()) {
    std::memset(memory.data_ptr(), 0xFF, memory.nbytes());  // NaN in every floating type
  }
  return memory;
}

// Hands out cache-line aligned pieces of a workspace; with no memory it only measures.
class Arena {
 public:
  explicit Arena(char* memory = nullptr) : memory_(memory) {}
  template <typename T>
  T* take(int64_t elements) {
    char* piece = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += (elements * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return reinterpret_cast<T*>(piece);
  }
  int64_t used() const { return used_; }

 private:
  char* memory_;
  int64_t used_ = 0;
};

struct Run {
  int64_t block, left, right, out, count;
  bool summed;
};

std::vector<int64_t> tap_offsets(const at::Tensor& weight) {
  std::vector<int64_t> offsets{0};
  for (int64_t axis = 2; axis < weight.dim(); ++axis) {
    std::vector<int64_t> next;
    next.reserve(offsets.size() * weight.size(axis));
    for (const int64_t offset : offsets) {
      for (int64_t u = 0; u < weight.size(axis); ++u) next.push_back(offset + u * weight.stride(axis));
    }
    offsets = std::move(next);
  }
  return offsets;
}

template <typename S>
WeightView<S> weight_view(const at::Tensor& weight, const std::vector<int64_t>& offsets, S* data) {
  const int64_t taps = static_cast<int64_t>(offsets.size());
  bool dense = true;
  for (int64_t u = 0; u < taps; ++u) dense = dense && offsets[u] == u;
  return {data, weight.stride(0), weight.stride(1), offsets.data(), taps, dense};
}

// The loss is a sum of squares: what rounding leaves below zero is zero (and NaN stays NaN).
at::Tensor loss_tensor(double loss, const at::Tensor& like) {
  return at::scalar_tensor(loss < 0 ? 0.0 : loss,
                           like.options().dtype(like.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
}

// Runs item(i) for all items on ATen's threads and adds up the results in order, whatever thread computed them.
template <typename F>
double ordered_sum(int64_t items, int64_t grain, const F& item) {
  std::vector<double> partial(items);
  at::parallel_for(0, items, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) partial[i] = item(i);
  });
  return std::accumulate(partial.begin(), partial.end(), 0.0);
}

// One weight, one plan. S is the weight's type, T the type of everything computed.
template <typename S, typename T>
class Pipeline {
 public:
  Pipeline(const at::Tensor& weight, int64_t groups, bool column, bool flat, at::TensorList evaluation,
           at::IntArrayRef sources, at::IntArrayRef runs, int64_t outputs, at::TensorList mix, bool with_grad)
      : weight_(weight),
        grad_(with_grad ? at::empty_like(weight) : at::empty({0}, weight.options())),
        groups_(groups),
        rows_(weight.size(0) / groups),
        channels_(weight.size(1)),
        column_(column),
        flat_(flat),
        with_grad_(with_grad),
        outputs_(outputs),
        weight_offsets_(tap_offsets(weight)) {
    if (with_grad) grad_offsets_ = tap_offsets(grad_);
    read_runs(runs);
    read_blocks(evaluation, sources);
    if (mix.empty()) {
      mix_ = {nullptr, nullptr, nullptr, nullptr, outputs, outputs};
    } else {
      mix_ = {mix[0].const_data_ptr<T>(),
              mix[1].const_data_ptr<T>(),
              mix[2].const_data_ptr<T>(),
              mix[3].const_data_ptr<T>(),
              mix[0].size(0),
              outputs};
    }
  }

  // Groups are handled in spans; a span of one group may also be cut along the contraction axis.
  double run() {
    choose_chunks();
    Arena measure;
    lay_out(measure);
    const at::Tensor memory = workspace(measure.used());
    Arena arena(static_cast<char*>(memory.data_ptr()));
    lay_out(arena);
    double loss = 0;
    for (group_begin_ = 0; group_begin_ < groups_; group_begin_ += span_) {
      span_now_ = std::min(span_, groups_ - group_begin_);
      for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
        select(chunk);
        evaluate();
        gram(chunk > 0);
      }
      loss += mix();
      if (!with_grad_) continue;
      for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
        select(chunk);
        if (chunks_ > 1) evaluate();
        apply();
        gather();
      }
    }
    return loss;
  }

  const at::Tensor& grad() const { return grad_; }

 private:
  struct Block {
    BlockView<T> view;  // of V; strides are those of the current window
    T* planes = nullptr;
    T* gradients = nullptr;
    std::vector<T> evaluation_t;
  };

  void read_runs(at::IntArrayRef flat) {
    for (size_t n = 0; n + 6 <= flat.size(); n += 6) {
      runs_.push_back({flat[n], flat[n + 1], flat[n + 2], flat[n + 3], flat[n + 4], flat[n + 5] != 0});
      sums_ = sums_ || flat[n + 5] != 0;
    }
    int64_t products = 0;
    for (const Run& run : runs_) products += run.count;
    accumulates_ = products > outputs_;
    // Summed runs are one contraction over neighbouring planes: on the row side those must lie next to each other.
    interleaved_ = sums_ && !column_;
  }

  void read_blocks(at::TensorList evaluation, at::IntArrayRef sources) {
    const int64_t* next = sources.data();
    for (const at::Tensor& matrix : evaluation) {
      Block block;
      const int64_t planes = matrix.size(0), taps = matrix.size(1), residues = *next++;
      block.evaluation_t.resize(planes * taps);
      const T* values = matrix.const_data_ptr<T>();
      for (int64_t p = 0; p < planes; ++p) {
        for (int64_t m = 0; m < taps; ++m) block.evaluation_t[m * planes + p] = values[p * taps + m];
      }
      block.view = {values, block.evaluation_t.data(), next, planes, taps, residues, nullptr, 0, 0};
      next += residues * taps;
      blocks_.push_back(std::move(block));
    }
    // Moving a Block moves its buffer along, but not the view's pointer into a short-lived one.
    for (Block& block : blocks_) block.view.evaluation_t = block.evaluation_t.data();
    side_ = column_ ? channels_ * blocks_[0].view.residues : rows_;
  }

  int64_t plane_elements(int64_t rows, int64_t channels) const {
    int64_t total = 0;
    for (const Block& block : blocks_) total += block.view.planes * block.view.residues * rows * channels;
    return total;
  }

  void choose_chunks() {
    if (flat_ && !std::is_same_v<S, T>) flat_ = false;
    flat_ = flat_ && weight_.is_contiguous() && (!with_grad_ || grad_.is_contiguous());
    constexpr int64_t size = sizeof(T);
    const int64_t plane_bytes = size * (with_grad_ ? 2 : 1) * plane_elements(rows_, channels_);
    const int64_t allowed = std::max(kPlaneBytes, 2 * size * (2 * mix_.lags - 1) * rows_ * rows_);
    span_ = std::clamp<int64_t>(allowed / (plane_bytes + size * outputs_ * side_ * side_), 1, groups_);
    // Several planes of one group are one contraction only if no other group lies between them.
    if (sums_ && column_) span_ = 1;
    const int64_t length = column_ ? rows_ : channels_;
    chunk_ = length;
    if (span_ == 1 && !flat_ && plane_bytes > allowed) {
      const int64_t wanted = (plane_bytes + allowed - 1) / allowed;
      chunk_ = std::max((length + wanted - 1) / wanted, std::min(length, kNarrowestChunk));
      chunk_ = (chunk_ + kLanes - 1) / kLanes * kLanes;
    }
    chunks_ = (length + chunk_ - 1) / chunk_;
  }

  void lay_out(Arena& arena) {
    outputs_data_ = arena.template take<T>(outputs_ * span_ * side_ * side_);
    for (Block& block : blocks_) {
      const int64_t area = column_ ? std::min(chunk_, rows_) * channels_ : rows_ * std::min(chunk_, channels_);
      const int64_t elements = flat_ ? 0 : block.view.planes * block.view.residues * span_ * area;
      block.planes = arena.template take<T>(elements);
      block.gradients = arena.template take<T>(with_grad_ ? elements : 0);
    }
  }

  // The planes of a flat plan are the weight and its gradient themselves.
  void point_at_weight() {
    if constexpr (std::is_same_v<S, T>) {
      const int64_t offset = group_begin_ * rows_ * weight_.stride(0);
      blocks_[0].planes = const_cast<T*>(weight_.template const_data_ptr<T>()) + offset;  // only ever read
      blocks_[0].gradients = with_grad_ ? grad_.template mutable_data_ptr<T>() + offset : nullptr;
    }
  }

  // Sets the window of this chunk and the strides of the planes for it.
  void select(int64_t chunk) {
    if (flat_) point_at_weight();
    const int64_t begin = chunk * chunk_, row = group_begin_ * rows_;
    window_ = column_ ? Window{row + begin, row + std::min(begin + chunk_, rows_), 0, channels_}
                      : Window{row, row + span_now_ * rows_, begin, std::min(begin + chunk_, channels_)};
    if (column_ && chunks_ == 1) window_.row_end = row + span_now_ * rows_;
    for (Block& block : blocks_) {
      const int64_t width = block.view.residues * window_.channels();
      block.view.plane_stride = interleaved_ ? width : window_.rows() * width;
      block.view.row_stride = interleaved_ ? block.view.planes * width : width;
    }
  }

  std::vector<BlockView<T>> views(T* Block::* data) const {
    std::vector<BlockView<T>> result;
    for (const Block& block : blocks_) {
      result.push_back(block.view);
      result.back().data = block.*data;
    }
    return result;
  }

  // Multiply-adds of evaluate or gather on one strip.
  int64_t strip_work() const {
    int64_t total = 0;
    for (const Block& block : blocks_) total += block.view.planes * block.view.taps * block.view.residues;
    return total * std::min(kStrip, (window_.channels() + kLanes - 1) / kLanes * kLanes);  // idle lanes cost as much
  }

  void evaluate() {
    if (flat_) return;
    RECORD_FUNCTION("ocnn_fused::evaluate", {});
    const auto blocks = views(&Block::planes);
    const auto view = weight_view(weight_, weight_offsets_, weight_.template const_data_ptr<S>());
    at::parallel_for(0, window_.rows() * window_.strips(), grain(strip_work()), [&](int64_t begin, int64_t end) {
      weight_stages<S, T>().evaluate(view, blocks.data(), static_cast<int64_t>(blocks.size()), window_, begin, end);
    });
  }

  void gather() {
    if (flat_) return;
    RECORD_FUNCTION("ocnn_fused::gather", {});
    const auto blocks = views(&Block::gradients);
    const auto view = weight_view(grad_, grad_offsets_, grad_.template mutable_data_ptr<S>());
    at::parallel_for(0, window_.rows() * window_.strips(), grain(strip_work()), [&](int64_t begin, int64_t end) {
      weight_stages<S, T>().gather(view, blocks.data(), static_cast<int64_t>(blocks.size()), window_, begin, end);
    });
  }

  at::Tensor wrap(T* data, at::IntArrayRef sizes, at::IntArrayRef strides) const {
    return at::from_blob(data, sizes, strides, at::TensorOptions().dtype(c10::CppTypeToScalarType<T>::value));
  }

  // Planes [plane, plane + count) of a block as one batch of matrices, oriented (gram side, contraction).
  at::Tensor planes(const Block& block, T* data, int64_t plane, int64_t count, bool summed) const {
    const BlockView<T>& view = block.view;
    T* first = data + plane * view.plane_stride;
    const int64_t width = view.residues * window_.channels(), rows = window_.rows() / span_now_;
    if (column_) {
      const int64_t batch = summed ? span_now_ : count * span_now_, length = summed ? count * rows : rows;
      return wrap(first, {batch, width, length}, {length * width, 1, width});
    }
    if (interleaved_) {
      return wrap(first, {span_now_, rows, count * width}, {rows * view.row_stride, view.row_stride, 1});
    }
    return wrap(first, {count * span_now_, rows, width}, {rows * width, width, 1});
  }

  at::Tensor outputs(int64_t out, int64_t count) const {
    const int64_t area = side_ * side_;
    return wrap(outputs_data_ + out * span_now_ * area, {count * span_now_, side_, side_}, {area, side_, 1});
  }

  static void multiply(at::Tensor out, const at::Tensor& left, const at::Tensor& right, bool add) {
    if (add) {
      out.baddbmm_(left, right);
    } else {
      at::bmm_out(out, left, right);
    }
  }

  // Calls f(block, left, right, out, count, summed) for every product that can be issued at once.
  template <typename F>
  void each_run(const F& f) const {
    for (const Run& run : runs_) {
      const Block& block = blocks_[run.block];
      if (interleaved_ && !run.summed) {
        for (int64_t j = 0; j < run.count; ++j) f(block, run.left + j, run.right + j, run.out + j, int64_t{1}, false);
      } else {
        f(block, run.left, run.right, run.out, run.count, run.summed);
      }
    }
  }

  void gram(bool add) {
    RECORD_FUNCTION("ocnn_fused::gram", {});
    if (accumulates_ && !add) {
      std::fill_n(outputs_data_, outputs_ * span_now_ * side_ * side_, T(0));
      add = true;
    }
    each_run([&](const Block& block, int64_t left, int64_t right, int64_t out, int64_t count, bool summed) {
      multiply(outputs(out, summed ? 1 : count), planes(block, block.planes, left, count, summed),
               planes(block, block.planes, right, count, summed).transpose(1, 2), add);
    });
  }

  double mix() {
    RECORD_FUNCTION("ocnn_fused::mix", {});
    const MixStage<T>& stage = mix_stage<T>();
    if (mix_.diagonal()) {
      const int64_t rows = span_now_ * side_;
      return ordered_sum(outputs_ * rows, grain(2 * side_), [&](int64_t item) {
        T* matrix = outputs_data_ + (item / side_) * side_ * side_;
        return stage.diagonal_row(matrix, side_, item / rows, item % side_, with_grad_);
      });
    }
    const int64_t tiles = (side_ + kTile - 1) / kTile;
    std::vector<std::pair<int64_t, int64_t>> pairs;
    for (int64_t i = 0; i < tiles; ++i) {
      for (int64_t j = i; j < tiles; ++j) pairs.emplace_back(i, j);
    }
    const int64_t count = static_cast<int64_t>(pairs.size());
    const int64_t work = 4 * kTile * kTile * mix_.lags * outputs_;
    return ordered_sum(span_now_ * count, grain(work), [&](int64_t item) {
      thread_local std::vector<T> scratch;
      scratch.resize(mix_scratch(mix_));
      const auto [i, j] = pairs[item % count];
      return stage.tile_pair(outputs_data_, mix_, span_now_, side_, item / count, i, j, with_grad_, scratch.data());
    });
  }

  // G = Y V, or the transpose of it where the planes lie transposed.
  void multiply_planes(const at::Tensor& gradients, const at::Tensor& y, const at::Tensor& planes) const {
    if (column_) {
      multiply(gradients.transpose(1, 2), planes.transpose(1, 2), y.transpose(1, 2), accumulates_);
    } else {
      multiply(gradients, y, planes, accumulates_);
    }
  }

  void apply() {
    RECORD_FUNCTION("ocnn_fused::apply", {});
    if (accumulates_) {
      for (const Block& block : blocks_) std::fill_n(block.gradients, plane_elements_of(block), T(0));
    }
    each_run([&](const Block& block, int64_t left, int64_t right, int64_t out, int64_t count, bool summed) {
      const at::Tensor y = outputs(out, summed ? 1 : count);
      multiply_planes(planes(block, block.gradients, left, count, summed), y,
                      planes(block, block.planes, right, count, summed));
      if (left == right) return;  // the output is its own transpose
      multiply_planes(planes(block, block.gradients, right, count, summed), y.transpose(1, 2),
                      planes(block, block.planes, left, count, summed));
    });
  }

  int64_t plane_elements_of(const Block& block) const {
    return block.view.planes * block.view.residues * window_.rows() * window_.channels();
  }

  const at::Tensor weight_;
  at::Tensor grad_;
  const int64_t groups_, rows_, channels_;
  const bool column_;
  bool flat_;
  const bool with_grad_;
  const int64_t outputs_;
  std::vector<int64_t> weight_offsets_, grad_offsets_;
  std::vector<Run> runs_;
  std::vector<Block> blocks_;
  MixView<T> mix_{};
  bool sums_ = false, accumulates_ = false, interleaved_ = false;
  int64_t side_ = 0, span_ = 1, chunk_ = 1, chunks_ = 1;
  T* outputs_data_ = nullptr;
  // Where the pass is now.
  int64_t group_begin_ = 0, span_now_ = 1;
  Window window_{};
};

// Calls f.operator()<S, T>() for the weight's type S and the type T it is computed in.
template <typename F>
auto dispatch(const at::Tensor& weight, const F& f) {
  switch (weight.scalar_type()) {
    case at::kFloat:
      return f.template operator()<float, float>();
    case at::kDouble:
      return f.template operator()<double, double>();
    case at::kBFloat16:
      return f.template operator()<c10::BFloat16, float>();
    case at::kHalf:
      return f.template operator()<c10::Half, float>();
    default:
      TORCH_CHECK_TYPE(false, "weight must be float64, float32, bfloat16 or float16, got ", weight.scalar_type());
  }
}

std::tuple<at::Tensor, at::Tensor> execute_plan(const at::Tensor& weight, int64_t groups, bool column, bool flat,
                                                at::TensorList evaluation, at::IntArrayRef sources,
                                                at::IntArrayRef runs, int64_t outputs, at::TensorList mix,
                                                double offset, bool with_grad) {
  check_weight(weight, groups);
  return dispatch(weight, [&]<typename S, typename T>() {
    Pipeline<S, T> pipeline(weight, groups, column, flat, evaluation, sources, runs, outputs, mix, with_grad);
    const double loss = pipeline.run();
    return std::make_tuple(loss_tensor(loss + offset, weight), pipeline.grad());
  });
}

std::tuple<at::Tensor, at::Tensor> execute_small(const at::Tensor& weight, int64_t groups, at::IntArrayRef left,
                                                 at::IntArrayRef right, at::IntArrayRef lag_begin, bool with_grad) {
  check_weight(weight, groups);
  const TapPairs pairs{left.data(), right.data(), lag_begin.data(), static_cast<int64_t>(lag_begin.size()) - 1};
  const at::Tensor grad = with_grad ? at::empty_like(weight) : at::empty({0}, weight.options());
  return dispatch(weight, [&]<typename S, typename T>() {
    const auto weight_offsets = tap_offsets(weight);
    const auto grad_offsets = with_grad ? tap_offsets(grad) : weight_offsets;
    const auto view = weight_view(weight, weight_offsets, weight.const_data_ptr<S>());
    auto grad_view = weight_view(with_grad ? grad : weight, grad_offsets, static_cast<S*>(nullptr));
    if (with_grad) grad_view.data = grad.mutable_data_ptr<S>();
    const int64_t rows = weight.size(0) / groups, channels = weight.size(1);
    const int64_t work = 3 * kLanes * rows * rows * channels * static_cast<int64_t>(left.size());
    const double loss = ordered_sum((groups + kLanes - 1) / kLanes, grain(work), [&](int64_t item) {
      return weight_stages<S, T>().small(view, grad_view, pairs, groups, rows, channels, item);
    });
    return std::make_tuple(loss_tensor(loss, weight), grad);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(ocnn_fused, CPU, m) {
  m.impl("execute_plan", execute_plan);
  m.impl("execute_small", execute_small);
}

}  // namespace ocnn_fused::cpu
