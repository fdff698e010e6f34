// Fourier plans: evaluate every element of the polyphase matrices at all frequencies, gram and apply at each of them,
// gather. Lanes are frequencies, so that matrices of any size are multiplied without a lane left idle.
#pragma once

#include <cstdint>
#include <vector>

#include "../call.h"
#include "stages.h"

namespace ocnn_fused::cpu {

// An axis that is not the last, see FourierPlanAxis: all of its frequencies, or a piece that has w and -w in it.
template <typename T>
struct FourierAxis {
  int64_t taps, points;    // of the longest class; frequencies
  const T *cosine, *sine;  // (ceil(taps / 2), taps), from the piece's first frequency on
};

// The classes of a kernel's taps, and what they are transformed to.
struct FourierTaps {
  FourierTaps(const FourierPlan& plan, const Layout& weights);

  std::vector<int64_t> sources;      // (residues, taps): flat tap index, -1 where there is none
  int64_t taps = 1;                  // of the longest class, on all axes
  int64_t points = 1, residues = 1;  // frequencies of a lag; classes
  bool in_order;                     // sources are 0, 1, 2...
};

// Frequencies of a plan's first axis up to the middle, which are worked on with their mirror images.
struct FourierPiece {
  int64_t begin, end;
};

// The problems of some weights of one shape, each a group of a weight, and a piece of their frequencies.
//
// Frequencies of one problem are counted through all axes, the last of which has half of them, and cut into tiles of
// one vector. In a tile, element (i, n), n over channels and residues, is two vectors, real and imaginary part, at i *
// row_stride + n * 2 * width: A in evaluate and multiply, its gradient G afterwards.
template <typename S, typename T>
struct FourierJob {
  FourierJob(const FourierPlan& plan, const FourierPiece& piece, const T* constants, const WeightView<const S>& weight,
             const WeightView<S>& grad, const FourierTaps& classes, int64_t channels, int64_t width);

  bool with_grad() const { return grad.data != nullptr; }
  int64_t elements() const { return rows * columns; }
  // Elements that are evaluated together.
  int64_t batches() const { return (elements() + batch - 1) / batch; }
  int64_t memory() const { return tiles * tile_stride; }

  const WeightView<const S> weight;
  const WeightView<S> grad;  // no data: no gradient is wanted
  const bool column;
  const int64_t width;
  const bool adds;  // to gradients that are there
  std::vector<FourierAxis<T>> axes;
  int64_t last_taps = 1;                             // of the last axis: as many as it has frequencies
  const T *cosine, *sine, *cosine_back, *sine_back;  // see FourierPlan
  const FourierTaps& classes;
  const T* factors = nullptr;           // (problems): what gradients are multiplied by
  const T* diagonal = nullptr;          // (problems, side): what is subtracted from it
  const int64_t taps, residues;         // of a class; classes
  int64_t frequencies = 1;              // of an element
  int64_t rows, columns, side, length;  // of A, of the Gram matrices, of their sums
  int64_t batch;
  int64_t tiles, row_stride, tile_stride, side_stride, length_stride;
  std::vector<T> counts;  // of every lane: 2 if it stands for w and -w
};

// Work is given as ranges of items, for callers to split over threads. `memory` is one problem's.
template <typename S, typename T>
struct FourierStages {
  int64_t width;
  // A of all frequencies; items: batches of elements.
  void (*evaluate)(const FourierJob<S, T>&, int64_t problem, T* memory, int64_t begin, int64_t end);
  // G = (A A^H - a I) A in place of A; items: tiles. Writes one loss per item, times the number of points.
  void (*multiply)(const FourierJob<S, T>&, int64_t problem, T* memory, int64_t begin, int64_t end, double* losses);
  // dK of G; items: batches of elements.
  void (*gather)(const FourierJob<S, T>&, int64_t problem, const T* memory, int64_t begin, int64_t end);
};

template <typename S, typename T>
const FourierStages<S, T>& fourier_stages();

// See execute.h.
void execute_fourier(const FourierPlan& plan, const Call& call);

}  // namespace ocnn_fused::cpu
