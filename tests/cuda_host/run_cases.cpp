// Runs the kernels of csrc/cuda/kernels.cuh on the CPU: run_cases INPUT OUTPUT SEED. The products between the stages are
// plain loops. INPUT holds cases as tests/test_cuda_kernels.py writes them; OUTPUT gets losses and gradients of each.
#include "cuda_host.h"
// The shim's words of CUDA come before the kernels.
#include "kernels.cuh"

#include <cmath>
#include <fstream>
#include <string>
#include <type_traits>

using namespace ocnn_fused::cuda;

namespace {

unsigned long next_seed = 1;

template <typename Kernel, typename... Arguments>
void launch(const Launch& geometry, Kernel kernel, Arguments... arguments) {
  if (geometry.shared_bytes > kSharedBytes) {
    std::fprintf(stderr, "a launch asks for %ld bytes of shared memory\n", static_cast<long>(geometry.shared_bytes));
    std::exit(4);
  }
  cuda_host::launch(next_seed++, geometry.blocks, geometry.threads, geometry.shared_bytes, kernel, arguments...);
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
  using Loss = std::conditional_t<std::is_same_v<S, double>, double, float>;

  Case(Reader& input, bool with_gradient) : with_grad(with_gradient) {
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
    for (size_t w = 0; w < weights.size(); ++w) grads.emplace_back(with_grad ? weights[w].size() : 0, S(0.0f));
  }

  WeightView<const S> weight_view() const { return with_data<const S>(weights); }
  WeightView<S> grad_view() { return with_data<S>(grads); }

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

  void write(Writer& output, const std::vector<double>& partials, double offset) {
    const int64_t count = static_cast<int64_t>(weights.size());
    std::vector<Loss> losses(count);
    launch(loss_launch(count), loss_kernel<Loss>, partials.data(), static_cast<int64_t>(partials.size()) / count, offset,
           losses.data());
    output.reals(losses);
    for (const auto& grad : grads) output.reals(grad);
  }

  bool with_grad;
  int64_t groups, rows, channels;
  WeightView<S> view{};
  std::vector<std::vector<S>> weights, grads;
};

template <typename T>
struct Block {
  BlockView<T> view{};
  std::vector<T> evaluation, planes, gradients;
  std::vector<int64_t> sources;
};

struct Product {
  int64_t block, left, right, out;
};

template <typename S, typename T>
class PlanRun {
 public:
  PlanRun(Reader& input, bool with_grad) : case_(input, with_grad) {
    column_ = input.integer() != 0;
    interleaved_ = input.integer() != 0;
    chunk_ = input.integer();
    blocks_.resize(input.integer());
    for (Block<T>& block : blocks_) {
      block.view.planes = input.integer();
      block.view.taps = input.integer();
      block.view.residues = input.integer();
      block.evaluation = input.reals<T>();
      block.sources = input.integers();
    }
    const auto numbers = input.integers();
    for (size_t n = 0; n < numbers.size(); n += 4) {
      products_.push_back({numbers[n], numbers[n + 1], numbers[n + 2], numbers[n + 3]});
    }
    outputs_ = input.integer();
    lags_ = input.integer();
    for (auto& matrix : mix_) matrix = input.reals<T>();
    offset_ = input.real();
    side_ = column_ ? case_.channels * blocks_[0].view.residues : case_.rows;
    groups_ = static_cast<int64_t>(case_.weights.size()) * case_.groups;
    x_.assign(outputs_ * groups_ * side_ * side_, T(0));
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
             views(&Block<T>::gradients), window);
    }
    case_.write(output, partials_, offset_);
  }

 private:
  // Pieces of the contraction: channels on the row side, rows (of a single group) on the column side.
  std::vector<Window> windows() const {
    std::vector<Window> result;
    const int64_t rows = groups_ * case_.rows, length = column_ ? rows : case_.channels;
    const int64_t chunk = chunk_ > 0 ? chunk_ : length;
    for (int64_t begin = 0; begin < length; begin += chunk) {
      const int64_t end = std::min(length, begin + chunk);
      result.push_back(column_ ? Window{begin, end, 0, case_.channels} : Window{0, rows, begin, end});
    }
    return result;
  }

  BlockViews<T> views(std::vector<T> Block<T>::* data) {
    BlockViews<T> result{};
    result.count = static_cast<int>(blocks_.size());
    for (int b = 0; b < result.count; ++b) {
      result.block[b] = blocks_[b].view;
      result.block[b].data = (blocks_[b].*data).data();
    }
    return result;
  }

  void evaluate(const Window& window) {
    for (Block<T>& block : blocks_) {
      const int64_t width = block.view.residues * window.channels();
      block.view.evaluation = block.evaluation.empty() ? nullptr : block.evaluation.data();
      block.view.sources = block.sources.data();
      block.view.plane_stride = interleaved_ ? width : window.rows() * width;
      block.view.row_stride = interleaved_ ? block.view.planes * width : width;
      // Exactly as large as needed: what is written behind them is seen. NaN: so is what nobody writes.
      block.planes.assign(block.view.planes * window.rows() * width, T(NAN));
      block.gradients.assign(block.planes.size(), T(0));
      block.planes.shrink_to_fit();
      block.gradients.shrink_to_fit();
    }
    launch(taps_launch<S, T>(window, case_.view.taps), evaluate_kernel<S, T>, case_.weight_view(),
           views(&Block<T>::planes), window);
  }

  // Calls f(index into the left plane, into the right plane, into x) for every multiplication of a product.
  template <typename F>
  void each_term(const Window& window, const Product& product, const F& f) {
    const BlockView<T>& view = blocks_[product.block].view;
    const int64_t width = view.residues * window.channels(), rows = window.rows() / groups_;
    const int64_t depth = column_ ? rows : width;
    for (int64_t g = 0; g < groups_; ++g) {
      const auto at = [&](int64_t plane, int64_t i, int64_t k) {
        const int64_t row = g * rows + (column_ ? k : i), position = column_ ? i : k;
        return plane * view.plane_stride + row * view.row_stride + position;
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
      const auto& planes = blocks_[product.block].planes;
      each_term(window, product,
                [&](int64_t left, int64_t right, int64_t out) { x_[out] += planes[left] * planes[right]; });
    }
  }

  void apply(const Window& window) {
    for (const Product& product : products_) {
      Block<T>& block = blocks_[product.block];
      each_term(window, product, [&](int64_t left, int64_t right, int64_t out) {
        block.gradients[left] += x_[out] * block.planes[right];
        if (product.left != product.right) block.gradients[right] += x_[out] * block.planes[left];
      });
    }
  }

  void mix() {
    if (mix_[0].empty()) {
      partials_.assign(groups_ * diagonal_runs(outputs_, side_), NAN);
      launch(mix_diagonal_launch(outputs_, groups_, side_), mix_diagonal_kernel<T>, x_.data(), outputs_, groups_, side_,
             case_.with_grad, partials_.data());
      return;
    }
    const MixView<T> view{mix_[0].data(), mix_[1].data(),          mix_[2].data(),
                          mix_[3].data(), static_cast<int>(lags_), static_cast<int>(outputs_)};
    const int tile = mix_tile<T>(lags_, outputs_);
    partials_.assign(groups_ * mix_pairs(side_, tile), NAN);
    const auto kernel = tile == 8 ? mix_kernel<8, T> : tile == 4 ? mix_kernel<4, T> : mix_kernel<2, T>;
    launch(mix_launch<T>(lags_, outputs_, groups_, side_, tile), kernel, x_.data(), view, groups_, side_,
           case_.with_grad, partials_.data());
  }

  Case<S, T> case_;
  bool column_, interleaved_;
  int64_t chunk_, outputs_, lags_, side_, groups_;
  double offset_;
  std::vector<Block<T>> blocks_;
  std::vector<Product> products_;
  std::vector<T> mix_[4];
  std::vector<T> x_;
  std::vector<double> partials_;
};

template <typename S, typename T>
void run_small(Reader& input, Writer& output, bool with_grad) {
  Case<S, T> own(input, with_grad);
  const auto left = input.integers(), right = input.integers(), lag_begin = input.integers();
  const auto terms = input.integers(), tap_begin = input.integers();
  const TapPairs pairs{left.data(), right.data(), lag_begin.data(), terms.data(), tap_begin.data()};
  const int64_t lags = static_cast<int64_t>(lag_begin.size()) - 1, count = static_cast<int64_t>(own.weights.size());
  const SmallShape shape = small_shape<T>(own.groups, own.rows, own.channels, own.view.taps, lags);
  std::vector<double> partials(count * shape.blocks(), NAN);
  launch(small_launch<T>(shape, count), small_kernel<S, T>, own.weight_view(), own.grad_view(), pairs, shape,
         partials.data());
  own.write(output, partials, 0.0);
}

template <typename S, typename T>
void run(Reader& input, Writer& output) {
  const bool is_small = input.integer() != 0, with_grad = input.integer() != 0;
  if (is_small) {
    run_small<S, T>(input, output, with_grad);
  } else {
    PlanRun<S, T>(input, with_grad).run(output);
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
      default:
        std::fprintf(stderr, "a dtype that this program was not compiled for\n");
        return 2;
    }
  }
  return 0;
}
