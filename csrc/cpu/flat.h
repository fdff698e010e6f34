// Plans of lag 0 alone on panels, see panels.h: their one plane is the flattened weight, so that nothing is evaluated,
// mixed or gathered. The weight passes through the panels chunk by chunk; only the output stays.
#pragma once

#include <algorithm>
#include <cstdint>

#include "panels.h"

namespace ocnn_fused::cpu {

// Problems, each a group of a weight, that are worked on together, and their memory.
template <typename S, typename T>
struct FlatJob {
  // Weight and gradient are matrices of `columns`: they have one tap. Sums are added up in stretches of `depth` terms.
  FlatJob(const BilinearPlan& plan, const WeightView<const S>& weight, const WeightView<S>& grad,
          const Targets<T>& targets, const Factors<T>& factors, int64_t columns, int64_t width, int64_t depth)
      : weight(weight),
        grad(grad),
        targets(targets),
        factors(factors),
        column(plan.column),
        rows(weight.rows / plan.groups),
        side(plan.column ? columns : rows),
        length(plan.column ? rows : columns),
        panels((side + width - 1) / width),
        padded_side(panels * width),
        chunk(std::min(length, std::max<int64_t>(1, kChunkElements<T> / (padded_side * depth)) * depth)),
        apart(spread(chunk * width)),
        output_stride(spread(padded_side * padded_side)),
        elements(output_stride + panels * apart) {}

  bool with_grad() const { return grad.data != nullptr; }
  T* output(int64_t problem) const { return memory + problem * elements; }
  T* chunk_panel(int64_t problem, int64_t panel) const { return output(problem) + output_stride + panel * apart; }

  const WeightView<const S> weight;
  const WeightView<S> grad;  // no data: no gradient is wanted
  const Targets<T> targets;
  const Factors<T> factors;
  const bool column;
  const int64_t rows, side, length;  // of a problem's weight, of the Gram matrix, of the contraction
  const int64_t panels, padded_side;
  const int64_t chunk;  // steps of the contraction
  // Per problem: the output X or Y, and a chunk of the weight, in panels so far apart.
  const int64_t apart, output_stride, elements;
  int64_t first_problem = 0, problems = 1;
  T* memory = nullptr;
};

// As PanelStages; a chunk is given by its first step.
template <typename S, typename T>
struct FlatStages {
  int64_t width, depth;
  // A chunk of the weight in panels; items: panels.
  void (*load)(const FlatJob<S, T>&, int64_t step, int64_t begin, int64_t end);
  // What the chunk adds to X; items: see SliceProduct.
  void (*gram)(const FlatJob<S, T>&, int64_t step, int64_t begin, int64_t end);
  // Y in place of X; items: pairs of panels. Writes one loss per item.
  void (*mix)(const FlatJob<S, T>&, int64_t begin, int64_t end, double* losses);
  // dK; items: steps of the contraction.
  void (*apply)(const FlatJob<S, T>&, int64_t begin, int64_t end);
};

template <typename S, typename T>
const FlatStages<S, T>& flat_stages();

}  // namespace ocnn_fused::cpu
