// The elementwise stages of a plan, compiled once per instruction set and chosen at run time.
#pragma once

#include <cstdint>

namespace ocnn_fused::cpu {

// Elements that every elementwise stage handles at once: one cache line of float32.
constexpr int64_t kLanes = 16;
// Channels that evaluate and gather take at once: long enough a run of each plane for the memory system to stream.
constexpr int64_t kStrip = 4 * kLanes;
// Side of the square tiles that mix reads together with their mirror image.
constexpr int64_t kTile = kLanes;

// A weight K[row, channel, tap] of any strides; tap_offsets maps a flat tap index to an element offset.
template <typename S>
struct WeightView {
  S* data;
  int64_t row_stride;
  int64_t channel_stride;
  const int64_t* tap_offsets;
  int64_t taps;
  bool dense;  // tap_offsets[u] == u
};

// One block of a plan and the planes V (or their gradients G) it owns:
// plane p, row i, residue r, channel c lies at p * plane_stride + i * row_stride + r * channels + c.
template <typename T>
struct BlockView {
  const T* evaluation;     // (planes, taps)
  const T* evaluation_t;   // (taps, planes)
  const int64_t* sources;  // (residues, taps), -1 where a short phase has no tap
  int64_t planes;
  int64_t taps;
  int64_t residues;
  T* data;
  int64_t plane_stride;
  int64_t row_stride;
};

// A rectangle of the weight: rows [row_begin, row_end), channels [channel_begin, channel_end).
struct Window {
  int64_t row_begin, row_end;
  int64_t channel_begin, channel_end;
  int64_t rows() const { return row_end - row_begin; }
  int64_t channels() const { return channel_end - channel_begin; }
  int64_t strips() const { return (channels() + kStrip - 1) / kStrip; }
};

// Matrices of the mix stage; see Plan.symmetric, Plan.antisymmetric and Plan.adjoint.
// Diagonal plans (outputs are the lags) carry none of them.
template <typename T>
struct MixView {
  const T* symmetric;        // (lags, outputs)
  const T* antisymmetric;    // (lags - 1, outputs): lag 0 has no antisymmetric part
  const T* symmetric_t;      // adjoint, (outputs, lags)
  const T* antisymmetric_t;  // adjoint, (outputs, lags - 1)
  int64_t lags;
  int64_t outputs;
  bool diagonal() const { return symmetric == nullptr; }
};

// Tap pairs of a small plan, sorted by lag; lag 0 comes first.
struct TapPairs {
  const int64_t* left;
  const int64_t* right;
  const int64_t* lag_begin;  // (lags + 1)
  int64_t lags;
};

// Stages that touch the weight. Ranges of work items let the caller split them over threads.
template <typename S, typename T>
struct WeightStages {
  // V = E K on items [begin, end) of rows x strips.
  void (*evaluate)(const WeightView<const S>&, const BlockView<T>*, int64_t blocks, const Window&, int64_t begin,
                   int64_t end);
  // dK = E^T G on items [begin, end) of rows x strips.
  void (*gather)(const WeightView<S>&, const BlockView<T>*, int64_t blocks, const Window&, int64_t begin, int64_t end);
  // The whole pass for kLanes groups at once: returns the loss of lane block `item`; writes dK if grad.data is set.
  double (*small)(const WeightView<const S>&, const WeightView<S>& grad, const TapPairs&, int64_t groups, int64_t rows,
                  int64_t channels, int64_t item);
};

template <typename T>
struct MixStage {
  // R = mix(X) - I and, in place over X (outputs, groups, side, side), Y. Returns the loss of the tile pair.
  double (*tile_pair)(T* x, const MixView<T>&, int64_t groups, int64_t side, int64_t group, int64_t tile_i,
                      int64_t tile_j, bool with_grad, T* scratch);
  // The same where outputs are lags: row `row` of output `output`.
  double (*diagonal_row)(T* x, int64_t side, int64_t output, int64_t row, bool with_grad);
};

// Scratch elements that tile_pair needs.
template <typename T>
constexpr int64_t mix_scratch(const MixView<T>& mix) {
  return (2 * mix.outputs + 2 * mix.lags) * kTile * kTile;
}

template <typename S, typename T>
const WeightStages<S, T>& weight_stages();
template <typename T>
const MixStage<T>& mix_stage();

}  // namespace ocnn_fused::cpu
