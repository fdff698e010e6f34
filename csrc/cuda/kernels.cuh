// The stages of a plan between its matrix products, and the geometry of their launches. No instruction that a host
// compiler does not know: tests/cuda_host executes these very kernels on the CPU.
//
// A thread accumulates a few results of a few elements in registers, so that no array is indexed at run time; what does
// not fit there lies in shared memory. Partial losses are added in a fixed order, in double; there are no atomics.
#pragma once

#include <cstdint>

#include "../views.h"

#ifndef OCNN_FUSED_SHARED
// The thread block's dynamic shared memory.
#define OCNN_FUSED_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#endif

namespace ocnn_fused::cuda {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
// Of kThreads threads: 128 registers each. Left to itself, ptxas takes fewer on some architectures, and spills.
constexpr int kThreadBlocksPerProcessor = 2;
// Shared memory that every architecture grants without being asked.
constexpr int64_t kSharedBytes = 48 << 10;
// Results that a thread accumulates at once.
constexpr int kResults = 4;

// Weights of one launch; a kernel's arguments take no more than 4 KB.
constexpr int kMaxWeights = 64;
// A spatial axis has residue classes of at most two lengths.
constexpr int kMaxAxes = 3;
constexpr int kMaxBlocks = 1 << kMaxAxes;

struct Launch {
  int64_t thread_blocks;
  int threads;
  int64_t shared_bytes;
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Equally shaped and strided weights K[row, channel, tap], or their gradients; rows are numbered through all of them.
template <typename S>
struct WeightView {
  S* data[kMaxWeights];
  int64_t rows;  // of one weight
  int64_t row_stride;
  int64_t channel_stride;
  int64_t taps;
  int axes;  // of the taps, the last one fastest; neighbours that one stride serves are one
  int64_t axis_taps[kMaxAxes];
  int64_t axis_stride[kMaxAxes];
  bool adds;  // what is written is added to what is there

  template <typename T>
  __device__ void write(S& element, const T& value) const {
    element = static_cast<S>(adds ? static_cast<T>(element) + value : value);
  }
  __device__ S* at(int64_t row, int64_t channel) const {
    return data[row / rows] + row % rows * row_stride + channel * channel_stride;
  }
  __device__ int64_t tap_offset(int64_t tap) const {
    int64_t offset = 0;
    for (int axis = axes - 1; axis > 0; --axis) {
      offset += tap % axis_taps[axis] * axis_stride[axis];
      tap /= axis_taps[axis];
    }
    return offset + tap * axis_stride[0];
  }
  __device__ bool channels_are_neighbours() const { return channel_stride < axis_stride[axes - 1]; }
};

// One block of a plan and the pool in which its planes V (or their gradients G) lie.
template <typename T>
struct BlockView {
  const T* evaluation;      // (planes, taps); null for the identity
  const int64_t* plane_of;  // (planes): where each plane lies in the pool
  const int64_t* sources;   // (residues, taps), -1 where a short phase has no tap
  int planes, taps, residues;
  Planes<T> memory;

  // An element of the pool's first plane.
  __device__ T* at(int64_t row, int residue, int64_t channel, const Window& window) const {
    return memory.data + row * memory.row_stride + residue * window.channels() + channel;
  }
  __device__ int64_t offset(int plane) const { return plane_of[plane] * memory.plane_stride; }
  // Entries [begin, end) of a row or column of the evaluation that can differ from zero for results [first, +
  // kResults).
  __device__ int begin(int first) const { return evaluation == nullptr ? first : 0; }
  __device__ int end(int first, int length) const {
    return evaluation == nullptr && first + kResults < length ? first + kResults : length;
  }
  __device__ int source(int residue, int tap) const { return static_cast<int>(sources[residue * taps + tap]); }
  __device__ T factor(int plane, int tap) const {
    if (evaluation == nullptr) return T(plane == tap);
    // Results past the last one are computed and thrown away.
    return evaluation[(plane < planes ? plane : planes - 1) * taps + (tap < taps ? tap : taps - 1)];
  }
};

template <typename T>
struct BlockViews {
  BlockView<T> block[kMaxBlocks];
  int count;
};

// What the gradients of a launch's weights are multiplied by, see Factors.
template <typename T>
struct PlacedFactors {
  Factors<T> all;  // of a list that these weights are a part of
  double factor;   // of all of them
  int64_t first_group;
  int place[kMaxWeights];  // in the list

  __device__ T at(int64_t group, const Target<T>& target) const {
    const int64_t weight = (first_group + group) / all.groups;
    return static_cast<T>(factor) * all.at(place[weight] * all.groups, target);
  }
  PlacedFactors from(int64_t group) const {
    PlacedFactors later = *this;
    later.first_group = group;
    return later;
  }
};

// Sum over the threads of a thread block, in the same order each time; valid in every thread.
__device__ inline double thread_block_sum(double value, double* shared) {
  const int thread = threadIdx.x;
  shared[thread] = value;
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (thread < half) shared[thread] += shared[thread + half];
    __syncthreads();
  }
  return shared[0];
}

// ---------------------------------------------------------------------------------------------------------------------
// evaluate and gather
// ---------------------------------------------------------------------------------------------------------------------

// Elements (row, channel) of one thread block, neighbours in the planes. Their taps pass through shared memory, so that
// both the weight and the planes are read and written in the order of memory.
constexpr int kElements = 2 * kWarp;
constexpr int kEach = kElements / kWarp;  // elements per thread
constexpr int kPitch = kElements + 1;     // no two taps of an element in one bank

template <typename S>
struct Place {
  S* data;  // null outside of the window
  int64_t row, channel;
};

template <typename S, typename T>
__host__ __device__ constexpr int64_t taps_bytes(int64_t taps) {
  return kElements * sizeof(Place<S>) + taps * kPitch * sizeof(T);
}

// Of evaluate_kernel and gather_kernel. Very many taps do not fit and are read and written where they lie.
template <typename S, typename T>
Launch taps_launch(const Window& window, int64_t taps) {
  const int64_t bytes = taps_bytes<S, T>(taps);
  return {ceil_div(window.rows() * window.channels(), kElements), kThreads,
          bytes <= kSharedBytes ? bytes : taps_bytes<S, T>(0)};
}

template <typename S, typename T>
struct TapStage {
  Place<S>* places;
  T* taps;  // (taps, kPitch), or null
  const WeightView<S>& weight;

  __device__ TapStage(unsigned char* shared, const WeightView<S>& view, const Window& window)
      : places(reinterpret_cast<Place<S>*>(shared)),
        taps(taps_bytes<S, T>(view.taps) <= kSharedBytes ? reinterpret_cast<T*>(places + kElements) : nullptr),
        weight(view) {
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kElements;
    for (int e = threadIdx.x; e < kElements; e += kThreads) {
      const int64_t row = (first + e) / window.channels(), channel = (first + e) % window.channels();
      S* data = row < window.rows() ? view.at(window.row_begin + row, window.channel_begin + channel) : nullptr;
      places[e] = {data, row, channel};
    }
    __syncthreads();
  }

  // Calls visit(element of memory, slot) for all that is staged, neighbouring threads at neighbouring addresses.
  template <typename F>
  __device__ void each(const F& visit) const {
    const int length = static_cast<int>(weight.taps), count = kElements * length;
    const bool along_channels = weight.channels_are_neighbours();
    for (int n = threadIdx.x; n < count; n += kThreads) {
      const int e = along_channels ? n % kElements : n / length, tap = along_channels ? n / kElements : n % length;
      if (places[e].data != nullptr) visit(places[e].data[weight.tap_offset(tap)], taps[tap * kPitch + e]);
    }
  }
};

// Calls task(block, residue, first) for every group of kResults results that this warp computes.
template <typename T, typename L, typename F>
__device__ void each_task(const BlockViews<T>& blocks, const L& length, const F& task) {
  int index = threadIdx.x / kWarp;
  for (int b = 0; b < blocks.count; ++b) {
    const BlockView<T>& block = blocks.block[b];
    const int each = (length(block) + kResults - 1) / kResults, tasks = block.residues * each;
    for (; index < tasks; index += kThreads / kWarp) task(block, index / each, index % each * kResults);
    index -= tasks;
  }
}

// V = E K
template <typename S, typename T>
__global__ void __launch_bounds__(kThreads, kThreadBlocksPerProcessor)
    evaluate_kernel(const WeightView<const S> weight, const BlockViews<T> blocks, const Window window) {
  OCNN_FUSED_SHARED(shared);
  const TapStage<const S, T> stage(shared, weight, window);
  if (stage.taps != nullptr) {
    stage.each([](const S& element, T& slot) { slot = static_cast<T>(element); });
    __syncthreads();
  }
  const int lane = threadIdx.x % kWarp;
  const auto planes = [](const BlockView<T>& block) { return block.planes; };
  each_task(blocks, planes, [&](const BlockView<T>& block, int residue, int first) {
    T sum[kResults][kEach] = {};
    for (int m = block.begin(first); m < block.end(first, block.taps); ++m) {
      const int tap = block.source(residue, m);
      if (tap < 0) continue;
      T value[kEach];
#pragma unroll
      for (int v = 0; v < kEach; ++v) {
        const int e = lane + v * kWarp;
        if (stage.taps != nullptr) {
          value[v] = stage.taps[tap * kPitch + e];
        } else {
          const S* data = stage.places[e].data;
          value[v] = data == nullptr ? T(0) : static_cast<T>(data[weight.tap_offset(tap)]);
        }
      }
#pragma unroll
      for (int q = 0; q < kResults; ++q) {
        const T factor = block.factor(first + q, m);
#pragma unroll
        for (int v = 0; v < kEach; ++v) sum[q][v] += factor * value[v];
      }
    }
#pragma unroll
    for (int v = 0; v < kEach; ++v) {
      const Place<const S>& place = stage.places[lane + v * kWarp];
      if (place.data == nullptr) continue;
      T* target = block.at(place.row, residue, place.channel, window);
#pragma unroll
      for (int q = 0; q < kResults; ++q) {
        if (first + q < block.planes) target[block.offset(first + q)] = sum[q][v];
      }
    }
  });
}

// dK = E^T G
template <typename S, typename T>
__global__ void __launch_bounds__(kThreads, kThreadBlocksPerProcessor)
    gather_kernel(const WeightView<S> grad, const BlockViews<T> blocks, const Window window) {
  OCNN_FUSED_SHARED(shared);
  const TapStage<S, T> stage(shared, grad, window);
  const int lane = threadIdx.x % kWarp;
  const auto taps = [](const BlockView<T>& block) { return block.taps; };
  each_task(blocks, taps, [&](const BlockView<T>& block, int residue, int first) {
    T sum[kResults][kEach] = {};
    const T* source[kEach];
#pragma unroll
    for (int v = 0; v < kEach; ++v) {
      const Place<S>& place = stage.places[lane + v * kWarp];
      source[v] = place.data == nullptr ? nullptr : block.at(place.row, residue, place.channel, window);
    }
    for (int p = block.begin(first); p < block.end(first, block.planes); ++p) {
      T value[kEach];
#pragma unroll
      for (int v = 0; v < kEach; ++v) value[v] = source[v] == nullptr ? T(0) : source[v][block.offset(p)];
#pragma unroll
      for (int q = 0; q < kResults; ++q) {
        const T factor = block.factor(p, first + q);
#pragma unroll
        for (int v = 0; v < kEach; ++v) sum[q][v] += factor * value[v];
      }
    }
#pragma unroll
    for (int q = 0; q < kResults; ++q) {
      const int tap = first + q < block.taps ? block.source(residue, first + q) : -1;
      if (tap < 0) continue;
#pragma unroll
      for (int v = 0; v < kEach; ++v) {
        const int e = lane + v * kWarp;
        if (stage.taps != nullptr) {
          stage.taps[tap * kPitch + e] = sum[q][v];
        } else if (source[v] != nullptr) {
          grad.write(stage.places[e].data[grad.tap_offset(tap)], sum[q][v]);
        }
      }
    }
  });
  if (stage.taps == nullptr) return;
  __syncthreads();
  stage.each([&](S& element, const T& slot) { grad.write(element, slot); });
}

// ---------------------------------------------------------------------------------------------------------------------
// Free targets
// ---------------------------------------------------------------------------------------------------------------------

// Elements of one thread block of squares_kernel.
constexpr int64_t kSquaredElements = 64 * kThreads;

// Thread blocks, and partial sums, of a group with so many elements.
__host__ __device__ inline int64_t squares_partials(int64_t elements) {
  return (elements + kSquaredElements - 1) / kSquaredElements;
}

inline Launch squares_launch(int64_t groups, int64_t elements) {
  return {groups * squares_partials(elements), kThreads, kThreads * static_cast<int64_t>(sizeof(double))};
}

// Sums of squares of the weights, (groups, thread blocks).
template <typename S, typename T>
__global__ void __launch_bounds__(kThreads, kThreadBlocksPerProcessor)
    squares_kernel(const WeightView<const S> weight, int64_t rows, int64_t channels, double* partials) {
  OCNN_FUSED_SHARED(shared);
  const int64_t filter = channels * weight.taps, elements = rows * filter, each = squares_partials(elements);
  const int64_t first_row = blockIdx.x / each * rows, begin = blockIdx.x % each * kSquaredElements;
  const int64_t end = begin + kSquaredElements < elements ? begin + kSquaredElements : elements;
  T sum = 0;
  for (int64_t e = begin + threadIdx.x; e < end; e += kThreads) {
    const S* filters = weight.at(first_row + e / filter, e / weight.taps % channels);
    const T value = static_cast<T>(filters[weight.tap_offset(e % weight.taps)]);
    sum += value * value;
  }
  const double total = thread_block_sum(static_cast<double>(sum), reinterpret_cast<double*>(shared));
  if (threadIdx.x == 0) partials[blockIdx.x] = total;
}

inline Launch targets_launch(int64_t groups) {
  return {groups, kThreads, kThreads * static_cast<int64_t>(sizeof(double))};
}

// The free target of each group: the squared length of its filters on average.
template <typename T>
__global__ void __launch_bounds__(kThreads, kThreadBlocksPerProcessor)
    targets_kernel(const double* partials, int64_t partials_per_group, int64_t rows, T* targets) {
  OCNN_FUSED_SHARED(shared);
  const double* own = partials + blockIdx.x * partials_per_group;
  double sum = 0;
  for (int64_t n = threadIdx.x; n < partials_per_group; n += kThreads) sum += own[n];
  const double total = thread_block_sum(sum, reinterpret_cast<double*>(shared));
  if (threadIdx.x == 0) targets[blockIdx.x] = static_cast<T>(total / static_cast<double>(rows));
}

// ---------------------------------------------------------------------------------------------------------------------
// mix
// ---------------------------------------------------------------------------------------------------------------------

// Matrices of the mix stage; see Plan.symmetric, Plan.antisymmetric and Plan.adjoint.
template <typename T>
struct MixView {
  const T* symmetric;        // (lags, outputs)
  const T* antisymmetric;    // (lags - 1, outputs): lag 0 has no antisymmetric part
  const T* symmetric_t;      // adjoint, (outputs, lags)
  const T* antisymmetric_t;  // adjoint, (outputs, lags - 1)
  int lags;
  int outputs;
};

constexpr int kMixThreads = 128;
// Elements of a tile that one thread of mix_kernel works on.
constexpr int kTileEach = 4;

// Side of the tiles that mix_kernel reads together with their mirror image: 8, 4 or 2, whatever fits into shared
// memory, or 0 if nothing does. A row of 8 is a sector of memory.
template <typename T>
__host__ __device__ constexpr int64_t mix_bytes(int64_t lags, int64_t outputs, int tile) {
  return kMixThreads * sizeof(double) + 2 * (outputs + lags) * tile * (tile + 1) * sizeof(T);
}

template <typename T>
int mix_tile(int64_t lags, int64_t outputs) {
  for (int tile = 8; tile > 1; tile /= 2) {
    if (mix_bytes<T>(lags, outputs, tile) <= kSharedBytes) return tile;
  }
  return 0;
}

// Pairs of a tile on or above the diagonal and its mirror image; also the partial losses of a group.
__host__ __device__ inline int64_t mix_pairs(int64_t side, int tile) {
  const int64_t tiles = (side + tile - 1) / tile;
  return tiles * (tiles + 1) / 2;
}

template <typename T>
Launch mix_launch(int64_t lags, int64_t outputs, int64_t groups, int64_t side, int tile) {
  return {groups * mix_pairs(side, tile), kMixThreads, mix_bytes<T>(lags, outputs, tile)};
}

// Row and column of the tile of a pair. The triangle is folded into a rectangle, a short row at the end of a long one.
struct TilePair {
  int64_t row, column;
  __device__ TilePair(int64_t pair, int64_t tiles) {
    const int64_t width = tiles | 1, long_row = pair / width, position = pair % width;
    const int64_t short_row = width - (tiles % 2 ? 0 : 2) - long_row;
    const bool in_long_row = position < tiles - long_row;
    row = in_long_row ? long_row : short_row;
    column = in_long_row ? long_row + position : short_row + position - (tiles - long_row);
  }
};

// out = matrix in, for every element of a tile; (results, tile) and (inputs, tile) in shared memory.
template <int kTile, typename T>
__device__ void combine(const T* __restrict__ matrix, int results, int inputs, const T* in, T* out, int part,
                        int parts) {
  constexpr int kPlane = kTile * (kTile + 1), kLanes = kTile * kTile / kTileEach;
  const int lane = threadIdx.x % kLanes;
  int position[kTileEach];
#pragma unroll
  for (int v = 0; v < kTileEach; ++v) {
    const int e = lane + v * kLanes;
    position[v] = e / kTile * (kTile + 1) + e % kTile;
  }
  for (int first = part * kResults; first < results; first += parts * kResults) {
    T sum[kResults][kTileEach] = {};
    for (int c = 0; c < inputs; ++c) {
      T value[kTileEach];
#pragma unroll
      for (int v = 0; v < kTileEach; ++v) value[v] = in[c * kPlane + position[v]];
#pragma unroll
      for (int q = 0; q < kResults; ++q) {
        // Results past the last one are computed and thrown away.
        const T factor = matrix[static_cast<int64_t>(first + q < results ? first + q : results - 1) * inputs + c];
#pragma unroll
        for (int v = 0; v < kTileEach; ++v) sum[q][v] += factor * value[v];
      }
    }
#pragma unroll
    for (int q = 0; q < kResults; ++q) {
      if (first + q >= results) break;
#pragma unroll
      for (int v = 0; v < kTileEach; ++v) out[(first + q) * kPlane + position[v]] = sum[q][v];
    }
  }
}

// R = mix(X) - a I, partial losses (groups, pairs) and, in place over X (outputs, groups, side, side), Y times its
// factor.
template <int kTile, typename T>
__global__ void __launch_bounds__(kMixThreads, kThreadBlocksPerProcessor* kThreads / kMixThreads)
    mix_kernel(T* x, const MixView<T> mix, const Targets<T> targets, const PlacedFactors<T> factors, int64_t groups,
               int64_t side, bool with_grad, double* partials) {
  OCNN_FUSED_SHARED(shared);
  constexpr int kArea = kTile * kTile, kPlane = kTile * (kTile + 1), kParts = kMixThreads / (kArea / kTileEach);
  double* sums = reinterpret_cast<double*>(shared);
  T* sum = reinterpret_cast<T*>(sums + kMixThreads);  // x, then x + y, then the symmetric part of Y; (outputs, tile)
  T* difference = sum + mix.outputs * kPlane;         // y, then x - y, then the antisymmetric part of Y
  T* symmetric = difference + mix.outputs * kPlane;   // of the residual; (lags, tile)
  T* antisymmetric = symmetric + mix.lags * kPlane;

  const int64_t pairs = mix_pairs(side, kTile), group = blockIdx.x / pairs;
  const TilePair tile(blockIdx.x % pairs, (side + kTile - 1) / kTile);
  const int64_t row = tile.row * kTile, column = tile.column * kTile;
  const bool on_diagonal = tile.row == tile.column;
  const Target<T> target = targets.at(group);
  // Calls visit(plane, i, j, index of (i, j), index of (j, i)) for every element of `planes` tiles.
  const auto each = [&](int planes, const auto& visit) {
    for (int n = threadIdx.x; n < planes * kArea; n += kMixThreads) {
      const int plane = n / kArea, i = n % kArea / kTile, j = n % kTile;
      visit(plane, i, j, plane * kPlane + i * (kTile + 1) + j, plane * kPlane + j * (kTile + 1) + i);
    }
  };

  each(mix.outputs, [&](int o, int i, int j, int here, int mirrored) {
    const T* matrix = x + (o * groups + group) * side * side;
    const bool inside = row + i < side && column + j < side, mirror_inside = column + i < side && row + j < side;
    sum[here] = inside ? matrix[(row + i) * side + column + j] : T(0);
    difference[mirrored] = mirror_inside ? matrix[(column + i) * side + row + j] : T(0);
  });
  __syncthreads();
  each(mix.outputs, [&](int, int, int, int here, int) {
    const T above = sum[here], below = difference[here];
    sum[here] = above + below;
    difference[here] = above - below;
  });
  __syncthreads();

  // Half of the warps take the symmetric part, half the antisymmetric one, which has no lag 0.
  static_assert(kMixThreads / 2 % kWarp == 0, "a warp would work on both parts, one after the other");
  const bool takes_symmetric = threadIdx.x < kMixThreads / 2;
  const int part = threadIdx.x / (kArea / kTileEach) % (kParts / 2), lags = takes_symmetric ? mix.lags : mix.lags - 1;
  T* of_outputs = takes_symmetric ? sum : difference;
  T* of_lags = takes_symmetric ? symmetric : antisymmetric;
  combine<kTile>(takes_symmetric ? mix.symmetric : mix.antisymmetric, lags, mix.outputs, of_outputs, of_lags, part,
                 kParts / 2);
  __syncthreads();

  // One entry stands for (i, j) and (j, i): weight 2 for lag 0 and 4 for a lag and its negative. A tile on the diagonal
  // holds both already.
  T squares = 0;
  each(mix.lags, [&](int t, int i, int j, int here, int) {
    if (t == 0 && on_diagonal && i == j && row + i < side) symmetric[here] = target.residual(symmetric[here]);
    const T s = symmetric[here], a = t == 0 ? T(0) : antisymmetric[here - kPlane];
    squares += (t == 0 ? T(2) : T(4)) * (s * s + a * a);
  });
  const double loss = thread_block_sum(static_cast<double>(squares), sums);
  if (threadIdx.x == 0) partials[blockIdx.x] = on_diagonal ? loss / 2 : loss;
  if (!with_grad) return;

  combine<kTile>(takes_symmetric ? mix.symmetric_t : mix.antisymmetric_t, mix.outputs, lags, of_lags, of_outputs, part,
                 kParts / 2);
  __syncthreads();
  const T factor = factors.at(group, target);
  each(mix.outputs, [&](int o, int i, int j, int here, int mirrored) {
    T* matrix = x + (o * groups + group) * side * side;
    if (row + i < side && column + j < side) {
      matrix[(row + i) * side + column + j] = factor * (sum[here] + difference[here]);
    }
    if (!on_diagonal && column + i < side && row + j < side) {
      matrix[(column + i) * side + row + j] = factor * (sum[mirrored] - difference[mirrored]);
    }
  });
}

template <typename T>
using MixKernel = void (*)(T*, MixView<T>, Targets<T>, PlacedFactors<T>, int64_t, int64_t, bool, double*);

template <typename T>
MixKernel<T> mix_kernel_for(int tile) {
  return tile == 8 ? mix_kernel<8, T> : tile == 4 ? mix_kernel<4, T> : mix_kernel<2, T>;
}

// Elements of one thread block of mix_diagonal_kernel.
constexpr int64_t kDiagonalElements = 8 * kThreads;

// Partial losses of a group.
__host__ __device__ inline int64_t diagonal_partials(int64_t outputs, int64_t side) {
  return outputs * ((side * side + kDiagonalElements - 1) / kDiagonalElements);
}

inline Launch mix_diagonal_launch(int64_t outputs, int64_t groups, int64_t side) {
  return {groups * diagonal_partials(outputs, side), kThreads, kThreads * static_cast<int64_t>(sizeof(double))};
}

// The same where outputs are lags: R = X - a I, partial losses (groups, outputs, thread blocks) and Y = 4 f R in
// place.
template <typename T>
__global__ void __launch_bounds__(kThreads, kThreadBlocksPerProcessor)
    mix_diagonal_kernel(T* x, int64_t outputs, const Targets<T> targets, const PlacedFactors<T> factors, int64_t groups,
                        int64_t side, bool with_grad, double* partials) {
  OCNN_FUSED_SHARED(shared);
  const int64_t area = side * side, each = (area + kDiagonalElements - 1) / kDiagonalElements, item = blockIdx.x;
  const int64_t group = item / each / outputs, output = item / each % outputs, begin = item % each * kDiagonalElements;
  const int64_t end = begin + kDiagonalElements < area ? begin + kDiagonalElements : area;
  T* matrix = x + (output * groups + group) * area;
  const Target<T> target = targets.at(group);
  const T factor = T(4) * factors.at(group, target);
  T squares = 0;
  for (int64_t e = begin + threadIdx.x; e < end; e += kThreads) {
    const T residual = output == 0 && e % (side + 1) == 0 ? target.residual(matrix[e]) : matrix[e];
    squares += residual * residual;
    if (with_grad) matrix[e] = factor * residual;
  }
  const double loss = thread_block_sum(static_cast<double>(squares), reinterpret_cast<double*>(shared));
  if (threadIdx.x == 0) partials[item] = output == 0 ? loss : 2 * loss;
}

// ---------------------------------------------------------------------------------------------------------------------
// Groups too small for matrix products
// ---------------------------------------------------------------------------------------------------------------------

// Tap pairs sorted by lag, lag 0 first; and the same sorted by tap: each pair once as left and once as right.
struct TapPairs {
  const int64_t* left;
  const int64_t* right;
  const int64_t* lag_begin;  // (lags + 1)
  const int64_t* terms;      // (2 * pairs, 3): lag, the other tap, whether this one is the right
  const int64_t* tap_begin;  // (taps + 1), into terms
};

struct SmallShape {
  int groups;  // of one weight
  int rows, channels, taps, lags;
  int groups_at_once;  // by one thread block; 0 if not even one fits
  __host__ __device__ int filter() const { return channels * taps; }
  __host__ __device__ int weights() const { return rows * filter(); }       // of a group
  __host__ __device__ int residuals() const { return lags * rows * rows; }  // of a group
  // Thread blocks, and partial losses, of a weight.
  __host__ __device__ int64_t thread_blocks() const { return (groups + groups_at_once - 1) / groups_at_once; }
};

template <typename T>
SmallShape small_shape(int64_t groups, int64_t rows, int64_t channels, int64_t taps, int64_t lags) {
  const int64_t room = (kSharedBytes - kThreads * static_cast<int64_t>(sizeof(double))) / sizeof(T);
  const int64_t residuals = lags * rows * rows, fitting = room / (rows * channels * taps + residuals);
  const int64_t busy = residuals < kThreads ? kThreads / residuals : 1;
  int64_t at_once = fitting < busy ? fitting : busy;
  if (groups < at_once) at_once = groups;
  return {static_cast<int>(groups), static_cast<int>(rows), static_cast<int>(channels),
          static_cast<int>(taps),   static_cast<int>(lags), static_cast<int>(at_once)};
}

template <typename T>
Launch small_launch(const SmallShape& shape, int64_t weights) {
  const int64_t elements = static_cast<int64_t>(shape.groups_at_once) * (shape.weights() + shape.residuals());
  return {weights * shape.thread_blocks(), kThreads,
          static_cast<int64_t>(kThreads * sizeof(double) + elements * sizeof(T))};
}

// The free target of a group of which all is in shared memory.
template <typename T>
__device__ T small_target(const T* k, const SmallShape& shape) {
  T sum = 0;
  for (int e = 0; e < shape.weights(); ++e) sum += k[e] * k[e];
  return sum / T(shape.rows);
}

// The whole pass: partial losses (weights, thread blocks) and, if grad.data is set, dK. Free targets are found here.
template <typename S, typename T>
__global__ void __launch_bounds__(kThreads, kThreadBlocksPerProcessor)
    small_kernel(const WeightView<const S> weight, const WeightView<S> grad, const TapPairs pairs,
                 const Targets<T> targets, const PlacedFactors<T> factors, const SmallShape shape, double* partials) {
  OCNN_FUSED_SHARED(shared);
  double* sums = reinterpret_cast<double*>(shared);
  T* k = reinterpret_cast<T*>(sums + kThreads);              // (group, row, channel, tap)
  T* residual = k + shape.groups_at_once * shape.weights();  // (group, lag, row, row)
  const int64_t of_weight = blockIdx.x / shape.thread_blocks();
  const int first = static_cast<int>(blockIdx.x % shape.thread_blocks()) * shape.groups_at_once;
  const int here = shape.groups - first < shape.groups_at_once ? shape.groups - first : shape.groups_at_once;
  const int64_t first_row = (of_weight * shape.groups + first) * shape.rows;
  const int rows = shape.rows, channels = shape.channels, taps = shape.taps;
  const int elements = here * shape.weights(), entries = here * shape.residuals();

  for (int n = threadIdx.x; n < elements; n += kThreads) {
    const int row = n / shape.filter(), channel = n / taps % channels;
    k[n] = static_cast<T>(weight.at(first_row + row, channel)[weight.tap_offset(n % taps)]);
  }
  __syncthreads();

  double loss = 0;
  for (int n = threadIdx.x; n < entries; n += kThreads) {
    const int group = n / shape.residuals(), lag = n / (rows * rows) % shape.lags, i = n / rows % rows, j = n % rows;
    const T* left = k + (group * rows + i) * shape.filter();
    const T* right = k + (group * rows + j) * shape.filter();
    T value = 0;
    for (int64_t pair = pairs.lag_begin[lag]; pair < pairs.lag_begin[lag + 1]; ++pair) {
      const int64_t u = pairs.left[pair], v = pairs.right[pair];
      for (int c = 0; c < channels; ++c) value += left[c * taps + u] * right[c * taps + v];
    }
    if (lag == 0 && i == j) {
      Target<T> target = targets.at(0);
      if (targets.are_free()) target.value = small_target(k + group * shape.weights(), shape);
      value = target.residual(value);
    }
    const T twice = lag == 0 ? T(1) : T(2);  // a lag stands for its negative too
    loss += static_cast<double>(twice * value * value);
    residual[n] = 2 * twice * value;
  }
  const double total = thread_block_sum(loss, sums);
  if (threadIdx.x == 0) partials[blockIdx.x] = total;
  if (grad.data[0] == nullptr) return;

  for (int n = threadIdx.x; n < elements; n += kThreads) {
    const int group = n / shape.weights(), i = n / shape.filter() % rows, channel = n / taps % channels, tap = n % taps;
    const T* filters = k + group * shape.weights() + channel * taps;
    T value = 0;
    for (int64_t term = pairs.tap_begin[tap]; term < pairs.tap_begin[tap + 1]; ++term) {
      const int64_t lag = pairs.terms[3 * term], other = pairs.terms[3 * term + 1];
      const bool is_right = pairs.terms[3 * term + 2] != 0;
      const T* matrix = residual + (group * shape.lags + lag) * rows * rows;
      for (int j = 0; j < rows; ++j) {
        value += matrix[is_right ? j * rows + i : i * rows + j] * filters[j * shape.filter() + other];
      }
    }
    Target<T> target = targets.at(0);
    if (targets.are_free()) target.value = small_target(k + group * shape.weights(), shape);
    value *= factors.at(of_weight * shape.groups + first + group, target);
    grad.write(grad.at(first_row + group * rows + i, channel)[grad.tap_offset(tap)], value);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Loss
// ---------------------------------------------------------------------------------------------------------------------

inline Launch loss_launch(int64_t weights) {
  return {weights, kThreads, kThreads * static_cast<int64_t>(sizeof(double))};
}

struct Losses {
  void* data;              // of the whole list
  bool wide;               // float64, else float32
  int place[kMaxWeights];  // in the list

  __device__ void store(int64_t weight, double loss) const {
    if (wide) {
      static_cast<double*>(data)[place[weight]] = loss;
    } else {
      static_cast<float*>(data)[place[weight]] = static_cast<float>(loss);
    }
  }
};

// Loss of each weight from its partial sums; a sum of squares, so what rounding leaves below zero is zero (NaN stays).
// `offset` per group and square of its target is what the side adds, see Plan.offset.
template <typename T>
__global__ void __launch_bounds__(kThreads, kThreadBlocksPerProcessor)
    loss_kernel(const double* partials, int64_t partials_per_weight, double offset, const Targets<T> targets,
                int64_t groups, const Losses losses) {
  OCNN_FUSED_SHARED(shared);
  const double* own = partials + blockIdx.x * partials_per_weight;
  double sum = 0;
  for (int64_t n = threadIdx.x; n < partials_per_weight; n += kThreads) sum += own[n];
  for (int64_t group = threadIdx.x; offset != 0 && group < groups; group += kThreads) {
    const double target = static_cast<double>(targets.at(blockIdx.x * groups + group).value);
    sum += offset * target * target;
  }
  const double loss = thread_block_sum(sum, reinterpret_cast<double*>(shared));
  if (threadIdx.x == 0) losses.store(blockIdx.x, loss < 0 ? 0 : loss);
}

}  // namespace ocnn_fused::cuda
