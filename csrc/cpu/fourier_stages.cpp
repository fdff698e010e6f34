// The stages of Fourier plans, see FourierStages; compiled once per instruction set, see target.h.
#include <algorithm>

#include "fourier.h"
#include "fourier_products.h"
#include "fourier_transforms.h"

OCNN_FUSED_BEGIN_TARGET
namespace ocnn_fused::cpu::OCNN_FUSED_TARGET {
namespace {

// Calls visit(channel in the weight, taps of its class for flat tap indices, number in the batch) for every element of
// a batch.
template <typename S, typename T, typename View, typename F>
inline void each_element(const FourierJob<S, T>& job, const View& view, int64_t problem, int64_t first, int64_t count,
                         const F& visit) {
  const int64_t residues = static_cast<int64_t>(job.sources.size()) / job.taps;
  for (int64_t b = 0; b < count; ++b) {
    const int64_t i = (first + b) / job.columns, n = (first + b) % job.columns;
    visit(view.row(problem * job.rows + i) + n / residues * view.channel_stride,
          job.sources.data() + n % residues * job.taps, b);
  }
}

template <typename S, typename T>
void fourier_evaluate(const FourierJob<S, T>& job, int64_t problem, T* memory, int64_t begin, int64_t end) {
  constexpr int64_t width = Vector<T>::width;
  FourierWorker<S, T> worker(job);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t first = item * job.batch, count = std::min(job.batch, job.elements() - first);
    each_element(job, job.weight, problem, first, count, [&](const S* channel, const int64_t* sources, int64_t b) {
      T* const taps = worker.taps(b);
      for (int64_t m = 0; m < job.taps; ++m) {
        taps[m] = sources[m] < 0 ? T(0) : static_cast<T>(channel[job.weight.tap_offsets[sources[m]]]);
      }
    });
    worker.evaluate(count);
    for (int64_t b = 0; b < count; ++b) {
      T* to = memory + (first + b) / job.columns * job.row_stride + (first + b) % job.columns * 2 * width;
      const T *real = worker.real(b), *imaginary = worker.imaginary(b);
      for (int64_t t = 0; t < job.tiles; ++t, to += job.tile_stride) {
        store(load(real + t * width), to);
        store(load(imaginary + t * width), to + width);
      }
    }
  }
}

template <typename S, typename T>
void fourier_multiply(const FourierJob<S, T>& job, int64_t problem, T* memory, int64_t begin, int64_t end,
                      double* losses) {
  constexpr int64_t width = Vector<T>::width;
  const int64_t side = job.side, some = std::min(std::max(kCachedEntries / side, kComplexBlock), job.length);
  // Rows of R an odd number of lines apart.
  const int64_t stride = (side | 1) * 2 * width;
  T* const own = scratch<T>(side * (stride + some * 2 * width));
  const ComplexMatrix<T> r{own, stride, 2 * width};
  for (int64_t tile = begin; tile < end; ++tile) {
    const ComplexMatrix<T> a{memory + tile * job.tile_stride, job.side_stride, job.length_stride};
    fourier_gram(a, side, job.length, r);
    losses[tile] = fourier_residual(r, side, job.diagonal + problem * side, job.counts.data() + tile * width);
    if (job.with_grad()) fourier_apply(r, a, side, job.length, own + side * stride, some);
  }
}

template <typename S, typename T>
void fourier_gather(const FourierJob<S, T>& job, int64_t problem, const T* memory, int64_t begin, int64_t end) {
  constexpr int64_t width = Vector<T>::width;
  FourierWorker<S, T> worker(job);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t first = item * job.batch, count = std::min(job.batch, job.elements() - first);
    for (int64_t b = 0; b < count; ++b) {
      const T* from = memory + (first + b) / job.columns * job.row_stride + (first + b) % job.columns * 2 * width;
      T *real = worker.real(b), *imaginary = worker.imaginary(b);
      for (int64_t t = 0; t < job.tiles; ++t, from += job.tile_stride) {
        store(load(from), real + t * width);
        store(load(from + width), imaginary + t * width);
      }
    }
    worker.gather(count);
    each_element(job, job.grad, problem, first, count, [&](S* channel, const int64_t* sources, int64_t b) {
      const T* const taps = worker.taps(b);
      for (int64_t m = 0; m < job.taps; ++m) {
        if (sources[m] < 0) continue;
        S& element = channel[job.grad.tap_offsets[sources[m]]];
        const T value = taps[m] * job.factors[problem];
        element = static_cast<S>(job.adds ? static_cast<T>(element) + value : value);
      }
    });
  }
}

}  // namespace

template <typename S, typename T>
const FourierStages<S, T>& fourier_stages() {
  static constexpr FourierStages<S, T> table{Vector<T>::width, fourier_evaluate<S, T>, fourier_multiply<S, T>,
                                             fourier_gather<S, T>};
  return table;
}

template const FourierStages<double, double>& fourier_stages();
template const FourierStages<float, float>& fourier_stages();
template const FourierStages<BFloat16, float>& fourier_stages();
template const FourierStages<Half, float>& fourier_stages();

}  // namespace ocnn_fused::cpu::OCNN_FUSED_TARGET
OCNN_FUSED_END_TARGET
