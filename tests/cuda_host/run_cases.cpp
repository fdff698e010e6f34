// Runs the kernels of csrc/cuda/kernels.cuh on the CPU: run_cases INPUT OUTPUT SEED. The products between the stages
// are plain loops. INPUT holds cases as tests/test_cuda_kernels.py writes them; OUTPUT gets losses and gradients of
// each.
#include "cuda_host.h"
// The shim's words of CUDA come before the kernels.
#include <cmath>
#include <fstream>
#include <string>

#include "kernels.cuh"
#include "lowered.h"

using namespace ocnn_fused;
using namespace ocnn_fused::cuda;

namespace {

unsigned long next_seed = 1;

template <typename Kernel, typename... Arguments>
void launch(const Launch& geometry, Kernel kernel, Arguments... arguments) {
  if (geometry.shared_bytes > kSharedBytes) {
    std::fprintf(stderr, "a launch asks for %ld bytes of shared memory\n", static_cast<long>(geometry.shared_bytes));
    std::exit(4);
  }
  cuda_host::launch(next_seed++, geometry.thread_blocks, geometry.threads, geometry.shared_bytes, kernel, arguments...);
}

class Reader {
 public:
  explicit Reader(const char* path) : file_(path, std::ios::binary) {}
  bool more() { return file_.peek() != std::char_traits<char>::eof(); }
  int64_t integer() { return numbers<int64_t>(1)[0]; }
  double real() { return numbers<double>(1)[0]; }
  std::vector<int64_t> integers() { return numbers<int64_t>(integer()); }
  template <typename T>
  std::vector<T> reals() {
    std::vector<T> result;
    for (const double value : numbers<double>(integer())) result.push_back(static_cast<T>(value));
    return result;
  }

 private:
  template <typename N>
  std::vector<N> numbers(int64_t count) {
    std::vector<N> result(count);
    file_.read(reinterpret_cast<char*>(result.data()), count * static_cast<int64_t>(sizeof(N)));
    if (!file_) {
      std::fprintf(stderr, "the input ends early\n");
      std::exit(2);
    }
    return result;
  }
  std::ifstream file_;
};

class Writer {
 public:
  explicit Writer(const char* path) : file_(path, std::ios::binary) {}
  template <typename T>
  void reals(const std::vector<T>& values) {
    for (const T& value : values) {
      const double number = static_cast<double>(value);
      file_.write(reinterpret_cast<const char*>(&number), sizeof(number));
    }
  }

 private:
  std::ofstream file_;
};

template <typename S, typename T>
struct Case {
  Case(Reader& input, bool with_gradient) : with_grad(with_gradient) {
    adds = input.integer() != 0;
    groups = input.integer();
    rows = input.integer();
    channels = input.integer();
    view.rows = groups * rows;
    view.row_stride = input.integer();
    view.channel_stride = input.integer();
    const auto axis_taps = input.integers(), axis_strides = input.integers();
    view.axes = static_cast<int>(axis_taps.size());
    view.taps = 1;
    for (int axis = 0; axis < view.axes; ++axis) {
      view.axis_taps[axis] = axis_taps[axis];
      view.axis_stride[axis] = axis_strides[axis];
      view.taps *= axis_taps[axis];
    }
    weights.resize(input.integer());
    for (auto& weight : weights) weight = input.reals<S>();
    for (size_t w = 0; w < weights.size(); ++w) {
      grads.emplace_back(with_grad ? weights[w].size() : 0, S(adds ? 1.0f : 0.0f));
      factors_.push_back(-0.25 * static_cast<double>(w + 1));
    }
  }

  // Where gradients are added: those of the last weight first, and all of them doubled.
  PlacedFactors<T> factors() const {
    PlacedFactors<T> result{{adds ? factors_.data() : nullptr, groups, false}, 2, 0, {}};
    for (size_t w = 0; w < weights.size(); ++w) result.place[w] = static_cast<int>(weights.size() - 1 - w);
    return result;
  }

  WeightView<const S> weight_view() const { return with_data<const S>(weights); }
  WeightView<S> grad_view() {
    WeightView<S> result = with_data<S>(grads);
    result.adds = adds;
    return result;
  }

  template <typename E, typename Storage>
  WeightView<E> with_data(Storage& storage) const {
    WeightView<E> result{};
    result.rows = view.rows;
    result.row_stride = view.row_stride;
    result.channel_stride = view.channel_stride;
    result.taps = view.taps;
    result.axes = view.axes;
    std::copy_n(view.axis_taps, kMaxAxes, result.axis_taps);
    std::copy_n(view.axis_stride, kMaxAxes, result.axis_stride);
    for (size_t w = 0; w < storage.size(); ++w) result.data[w] = storage[w].empty() ? nullptr : storage[w].data();
    return result;
  }

  // `offset` of all groups of a weight.
  void write(Writer& output, const std::vector<double>& partials, int64_t offset, const Targets<T>& targets_of) {
    const int64_t count = static_cast<int64_t>(weights.size());
    std::vector<T> losses(count, T(NAN));
    Losses<T> targets{};
    for (int64_t w = 0; w < count; ++w) targets.data[w] = &losses[w];
    launch(loss_launch(count), loss_kernel<T>, partials.data(), static_cast<int64_t>(partials.size()) / count,
           static_cast<double>(offset) / static_cast<double>(groups), targets_of, groups, targets);
    output.reals(losses);
    for (const auto& grad : grads) output.reals(grad);
  }

  bool with_grad, adds;
  int64_t groups, rows, channels;
  WeightView<S> view{};
  std::vector<std::vector<S>> weights, grads;
  std::vector<double> factors_;
};

template <typename S, typename T>
class PlanExecution {
 public:
  PlanExecution(Reader& input, bool with_grad)
      : case_(input, with_grad),
        layout_(input.integers()),
        constants_(input.reals<T>()),
        plan_(read_plan({layout_.data(), static_cast<int64_t>(layout_.size())})),
        chunk_(input.integer()),
        interleaved_(input.integer() != 0),
        pools_(plan_.pools.size()),
        side_(plan_.column ? case_.channels * plan_.pools[0].residues : case_.rows),
        groups_(static_cast<int64_t>(case_.weights.size()) * plan_.groups),
        x_(plan_.outputs * groups_ * side_ * side_, T(0)),
        targets_{plan_.target, nullptr} {
    if (targets_.are_free()) find_targets();
    for (const PlanRun& run : plan_.runs) {
      for (int64_t j = 0; j < run.count; ++j) {
        products_.push_back({run.pool, run.left + j, run.right + j, run.summed ? run.out : run.out + j});
      }
    }
  }

  void run(Writer& output) {
    const auto windows = this->windows();
    for (const Window& window : windows) {
      evaluate(window);
      gram(window);
    }
    mix();
    for (const Window& window : windows) {
      if (!case_.with_grad) break;
      evaluate(window);
      apply(window);
      launch(taps_launch<S, T>(window, case_.view.taps), gather_kernel<S, T>, case_.grad_view(),
             views(&Pool::gradients), window);
    }
    case_.write(output, partials_, plan_.offset, targets_);
  }

 private:
  void find_targets() {
    const int64_t elements = case_.rows * case_.channels * case_.view.taps, each = squares_partials(elements);
    std::vector<double> partials(groups_ * each, NAN);
    free_targets_.assign(groups_, T(NAN));
    launch(squares_launch(groups_, elements), squares_kernel<S, T>, case_.weight_view(), case_.rows, case_.channels,
           partials.data());
    launch(targets_launch(groups_), targets_kernel<T>, partials.data(), each, case_.rows, free_targets_.data());
    targets_.of_groups = free_targets_.data();
  }

  struct Pool {
    std::vector<T> planes, gradients;
    int64_t plane_stride, row_stride;
  };
  struct Product {
    int64_t pool, left, right, out;
  };

  // Pieces of the contraction: channels on the row side, rows (of a single group) on the column side.
  std::vector<Window> windows() const {
    std::vector<Window> result;
    const int64_t rows = groups_ * case_.rows, length = plan_.column ? rows : case_.channels;
    const int64_t chunk = chunk_ > 0 ? chunk_ : length;
    for (int64_t begin = 0; begin < length; begin += chunk) {
      const int64_t end = std::min(length, begin + chunk);
      result.push_back(plan_.column ? Window{begin, end, 0, case_.channels} : Window{0, rows, begin, end});
    }
    return result;
  }

  BlockViews<T> views(std::vector<T> Pool::* data) {
    BlockViews<T> result{};
    result.count = static_cast<int>(plan_.blocks.size());
    for (int b = 0; b < result.count; ++b) {
      const PlanBlock& block = plan_.blocks[b];
      Pool& pool = pools_[block.pool];
      result.block[b] = {plan_.diagonal() ? nullptr : &constants_[block.evaluation],
                         &layout_[block.plane_of],
                         &layout_[block.sources],
                         static_cast<int>(block.planes),
                         static_cast<int>(block.taps),
                         static_cast<int>(block.residues),
                         {(pool.*data).data(), pool.plane_stride, pool.row_stride}};
    }
    return result;
  }

  void evaluate(const Window& window) {
    for (size_t p = 0; p < pools_.size(); ++p) {
      const int64_t width = plan_.pools[p].residues * window.channels(), planes = plan_.pools[p].planes;
      // Exactly as large as needed: what is written behind them is seen. NaN: so is what nobody writes.
      pools_[p] = {std::vector<T>(planes * window.rows() * width, T(NAN)),
                   std::vector<T>(planes * window.rows() * width, T(0)), interleaved_ ? width : window.rows() * width,
                   interleaved_ ? planes * width : width};
    }
    launch(taps_launch<S, T>(window, case_.view.taps), evaluate_kernel<S, T>, case_.weight_view(), views(&Pool::planes),
           window);
  }

  // Calls f(index into the left plane, into the right plane, into x) for every multiplication of a product.
  template <typename F>
  void each_term(const Window& window, const Product& product, const F& f) {
    const Pool& pool = pools_[product.pool];
    const int64_t width = plan_.pools[product.pool].residues * window.channels(), rows = window.rows() / groups_;
    const int64_t depth = plan_.column ? rows : width;
    for (int64_t g = 0; g < groups_; ++g) {
      const auto at = [&](int64_t plane, int64_t i, int64_t k) {
        const int64_t row = g * rows + (plan_.column ? k : i), position = plan_.column ? i : k;
        return plane * pool.plane_stride + row * pool.row_stride + position;
      };
      for (int64_t i = 0; i < side_; ++i) {
        for (int64_t j = 0; j < side_; ++j) {
          const int64_t out = ((product.out * groups_ + g) * side_ + i) * side_ + j;
          for (int64_t k = 0; k < depth; ++k) f(at(product.left, i, k), at(product.right, j, k), out);
        }
      }
    }
  }

  void gram(const Window& window) {
    for (const Product& product : products_) {
      const auto& planes = pools_[product.pool].planes;
      each_term(window, product,
                [&](int64_t left, int64_t right, int64_t out) { x_[out] += planes[left] * planes[right]; });
    }
  }

  void apply(const Window& window) {
    for (const Product& product : products_) {
      Pool& pool = pools_[product.pool];
      each_term(window, product, [&](int64_t left, int64_t right, int64_t out) {
        pool.gradients[left] += x_[out] * pool.planes[right];
        if (product.left != product.right) pool.gradients[right] += x_[out] * pool.planes[left];
      });
    }
  }

  void mix() {
    const int64_t outputs = plan_.outputs, lags = plan_.lags;
    if (plan_.diagonal()) {
      partials_.assign(groups_ * diagonal_partials(outputs, side_), NAN);
      launch(mix_diagonal_launch(outputs, groups_, side_), mix_diagonal_kernel<T>, x_.data(), outputs, targets_,
             case_.factors(), groups_, side_, case_.with_grad, partials_.data());
      return;
    }
    const T* values = constants_.data();
    const MixView<T> view{values + plan_.symmetric,       values + plan_.antisymmetric, values + plan_.symmetric_t,
                          values + plan_.antisymmetric_t, static_cast<int>(lags),       static_cast<int>(outputs)};
    const int tile = mix_tile<T>(lags, outputs);
    partials_.assign(groups_ * mix_pairs(side_, tile), NAN);
    launch(mix_launch<T>(lags, outputs, groups_, side_, tile), mix_kernel_for<T>(tile), x_.data(), view, targets_,
           case_.factors(), groups_, side_, case_.with_grad, partials_.data());
  }

  Case<S, T> case_;
  const std::vector<int64_t> layout_;
  const std::vector<T> constants_;
  const LoweredPlan plan_;
  const int64_t chunk_;
  const bool interleaved_;
  std::vector<Pool> pools_;
  const int64_t side_, groups_;
  std::vector<T> x_;
  Targets<T> targets_;
  std::vector<T> free_targets_;
  std::vector<Product> products_;
  std::vector<double> partials_;
};

template <typename S, typename T>
void run_small(Reader& input, Writer& output, bool with_grad) {
  Case<S, T> own(input, with_grad);
  const auto layout = input.integers();
  const SmallPlan plan = read_small_plan({layout.data(), static_cast<int64_t>(layout.size())});
  const TapPairs pairs{&layout[plan.left], &layout[plan.right], &layout[plan.lag_begin], &layout[plan.terms],
                       &layout[plan.tap_begin]};
  const int64_t count = static_cast<int64_t>(own.weights.size());
  const SmallShape shape = small_shape<T>(plan.groups, own.rows, own.channels, plan.taps, plan.lags);
  std::vector<double> partials(count * shape.thread_blocks(), NAN);
  const Targets<T> targets{plan.target, nullptr};
  launch(small_launch<T>(shape, count), small_kernel<S, T>, own.weight_view(), own.grad_view(), pairs, targets,
         own.factors(), shape, partials.data());
  own.write(output, partials, 0, targets);
}

template <typename S, typename T>
void run(Reader& input, Writer& output) {
  const bool is_small = input.integer() != 0, with_grad = input.integer() != 0;
  if (is_small) {
    run_small<S, T>(input, output, with_grad);
  } else {
    PlanExecution<S, T>(input, with_grad).run(output);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: run_cases INPUT OUTPUT SEED\n");
    return 2;
  }
  Reader input(argv[1]);
  Writer output(argv[2]);
  next_seed = std::stoul(argv[3]);
  while (input.more()) {
    switch (input.integer()) {
      case 0:
        run<float, float>(input, output);
        break;
#if !defined(FLOAT_ONLY)
      case 1:
        run<double, double>(input, output);
        break;
#if defined(CUDA_HOST_HAS_HALF)
      case 2:
        run<__half, float>(input, output);
        break;
      case 3:
        run<__nv_bfloat16, float>(input, output);
        break;
#endif
#endif
      default:
        std::fprintf(stderr, "a dtype that this program was not compiled for\n");
        return 2;
    }
  }
  return 0;
}
