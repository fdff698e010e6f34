// Work on ATen's threads, and the memory that a thread keeps for it.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "stages.h"

namespace ocnn_fused::cpu {

// Multiply-adds below which another thread does not pay.
constexpr int64_t kThreadWork = int64_t{1} << 18;

inline int64_t grain(int64_t work_per_item) {
  return std::max<int64_t>(1, kThreadWork / std::max<int64_t>(1, work_per_item));
}

// Calls item(i) for all items on ATen's threads and adds up the results in order, whatever thread computed them.
template <typename F>
double ordered_sum(int64_t items, int64_t grain, const F& item) {
  std::vector<double> partial(items);
  at::parallel_for(0, items, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) partial[i] = item(i);
  });
  return std::accumulate(partial.begin(), partial.end(), 0.0);
}

// Workspace kept by a thread between calls: fresh memory costs more than the stages that write it.
constexpr int64_t kKeptBytes = int64_t{128} << 20;

// Memory of this thread, grown on demand and reused; its contents are undefined.
inline at::Tensor workspace_of_thread(int64_t bytes) {
  thread_local at::Tensor kept;
  at::Tensor memory = kept;
  if (!memory.defined() || memory.nbytes() < static_cast<size_t>(bytes)) {
    kept.reset();
    memory = at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
    if (bytes <= kKeptBytes) kept = memory;
  }
  if (fills_undefined_memory()) std::memset(memory.data_ptr(), kUndefinedByte, memory.nbytes());
  return memory;
}

}  // namespace ocnn_fused::cpu
