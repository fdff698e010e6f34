// The stages of Fourier plans, see FourierStages; compiled once per instruction set, see target.h.
#include <algorithm>
#include <type_traits>

#include "fourier.h"
#include "fourier_products.h"
#include "fourier_transforms.h"

OCNN_FUSED_BEGIN_TARGET
namespace ocnn_fused::cpu::OCNN_FUSED_TARGET {
namespace {

// Moves a number of elements between tensors and our own memory, where all vectors are whole: it has room for one more.
template <typename T>
class VectorCopy {
 public:
  explicit VectorCopy(int64_t count) : whole_((count - 1) / width * width), rest_(count - whole_) {}

  void load(const T* from, T* to) const {
    for (int64_t m = 0; m < whole_; m += width) OCNN_FUSED_TARGET::store(OCNN_FUSED_TARGET::load(from + m), to + m);
    OCNN_FUSED_TARGET::store(rest_.load(from + whole_), to + whole_);
  }

  // Times a factor, and added to what is there if `adds`.
  void store(const T* from, T factor, T* to, bool adds) const {
    for (int64_t m = 0; m < whole_; m += width) {
      const V value = OCNN_FUSED_TARGET::load(from + m) * factor;
      OCNN_FUSED_TARGET::store(adds ? OCNN_FUSED_TARGET::load(to + m) + value : value, to + m);
    }
    const V value = OCNN_FUSED_TARGET::load(from + whole_) * factor;
    rest_.store(adds ? rest_.load(to + whole_) + value : value, to + whole_);
  }

 private:
  using V = typename Vector<T>::type;
  static constexpr int64_t width = Vector<T>::width;
  const int64_t whole_;  // in whole vectors
  const Lanes<T> rest_;
};

// An element of A: its column is a channel and a residue.
struct Element {
  int64_t row, column, channel, residue;
};

// Calls visit(number in the batch, element) for the `count` elements from the `first` on.
template <typename Job, typename F>
inline void each_element(const Job& job, int64_t first, int64_t count, const F& visit) {
  const int64_t column = first % job.columns;
  Element at{first / job.columns, column, column / job.residues, column % job.residues};
  for (int64_t b = 0; b < count; ++b) {
    visit(b, at);
    ++at.column;
    if (++at.residue == job.residues) ++at.channel, at.residue = 0;
    if (at.column == job.columns) at = {at.row + 1, 0, 0, 0};
  }
}

// Where the taps of an element lie, of a problem with this first row.
template <typename S>
inline S* channel_of(const WeightView<S>& view, S* first_row, const Element& at) {
  return first_row + at.row * view.row_stride + at.channel * view.channel_stride;
}

template <typename S, typename T>
void fourier_evaluate(const FourierJob<S, T>& job, int64_t problem, T* memory, int64_t begin, int64_t end) {
  constexpr int64_t width = Vector<T>::width;
  FourierWorker<S, T> worker(job);
  const WeightView<const S>& weight = job.weight;
  const S* const first_row = weight.row(problem * job.rows);
  const VectorCopy<T> copy(job.taps);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t first = item * job.batch, count = std::min(job.batch, job.elements() - first);
    each_element(job, first, count, [&](int64_t b, const Element& at) {
      const S* const channel = channel_of(weight, first_row, at);
      const int64_t* const sources = job.classes.sources.data() + at.residue * job.taps;
      T* const taps = worker.taps(b);
      if constexpr (std::is_same_v<S, T>) {
        if (job.classes.in_order && weight.dense) return copy.load(channel, taps);
      }
      for (int64_t m = 0; m < job.taps; ++m) {
        taps[m] = sources[m] < 0 ? T(0) : static_cast<T>(channel[weight.tap_offsets[sources[m]]]);
      }
    });
    worker.evaluate(count);
    each_element(job, first, count, [&](int64_t b, const Element& at) {
      T* to = memory + at.row * job.row_stride + at.column * 2 * width;
      const T *real = worker.real(b), *imaginary = worker.imaginary(b);
      for (int64_t t = 0; t < job.tiles; ++t, to += job.tile_stride) {
        store(load(real + t * width), to);
        store(load(imaginary + t * width), to + width);
      }
    });
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
  const WeightView<S>& grad = job.grad;
  S* const first_row = grad.row(problem * job.rows);
  const VectorCopy<T> copy(job.taps);
  const T factor = job.factors[problem];
  const bool adds = job.adds;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t first = item * job.batch, count = std::min(job.batch, job.elements() - first);
    each_element(job, first, count, [&](int64_t b, const Element& at) {
      const T* from = memory + at.row * job.row_stride + at.column * 2 * width;
      T *real = worker.real(b), *imaginary = worker.imaginary(b);
      for (int64_t t = 0; t < job.tiles; ++t, from += job.tile_stride) {
        store(load(from), real + t * width);
        store(load(from + width), imaginary + t * width);
      }
    });
    worker.gather(count);
    each_element(job, first, count, [&](int64_t b, const Element& at) {
      S* const channel = channel_of(grad, first_row, at);
      const int64_t* const sources = job.classes.sources.data() + at.residue * job.taps;
      const T* const taps = worker.taps(b);
      if constexpr (std::is_same_v<S, T>) {
        if (job.classes.in_order && grad.dense) return copy.store(taps, factor, channel, adds);
      }
      for (int64_t m = 0; m < job.taps; ++m) {
        if (sources[m] < 0) continue;
        S& element = channel[grad.tap_offsets[sources[m]]];
        const T value = taps[m] * factor;
        element = static_cast<S>(adds ? static_cast<T>(element) + value : value);
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
