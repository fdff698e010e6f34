// Work on ATen's threads, and the memory that a thread keeps for it.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "sharing.h"
#include "stages.h"

namespace ocnn_fused::cpu {

// Multiply-adds of elementwise stages below which another thread does not pay.
constexpr int64_t kThreadWork = int64_t{1} << 18;
// Multiply-adds in a second of one thread, roughly, elementwise and in products.
constexpr double kElementwiseRate = 1e10, kProductRate = 1e11;

inline int64_t grain(int64_t work_per_item) {
  return std::max<int64_t>(1, kThreadWork / std::max<int64_t>(1, work_per_item));
}

inline Company& company() {
  thread_local Company of_this_thread;
  return of_this_thread;
}

// How many threads to share out work to, at most, that one would do in so many seconds.
inline int64_t threads_for(double seconds) {
  if (at::in_parallel_region() || at::get_num_threads() == 1) return 1;
  return company().is_wanted(Clock::now(), seconds) ? at::get_num_threads() : 1;
}

// A range that the profiler sees.
class Range {
 public:
  explicit Range(const char* name) : record_(at::RecordScope::FUNCTION) {
    if (name != nullptr && record_.isActive()) record_.before(name);
  }

 private:
  at::RecordFunction record_;
};

// All phases, one after the other, on so many of ATen's threads.
inline void share(const std::vector<Phase>& phases, int64_t threads) {
  if (threads == 1) {
    for (const Phase& phase : phases) {
      const Range range(phase.name);
      for (int64_t piece = 0; piece < phase.pieces; ++piece) phase.run(piece, 0);
    }
    return;
  }
  Sharing sharing(phases, threads);
  at::parallel_for(0, threads, 1, [&](int64_t thread, int64_t end) {
    thread == 0 ? sharing.call<Range>(end) : sharing.help(thread, end - thread);
  });
  company().judge(sharing.result(), Clock::now());
}

// A phase of items [0, items) in so many pieces as even as can be; run(begin, end) does some of them.
template <typename F>
Phase even_phase(const char* name, int64_t items, int64_t pieces, F run) {
  const int64_t each = (items + pieces - 1) / pieces;
  return {name, (items + each - 1) / each, [run = std::move(run), each, items](int64_t piece, int64_t) {
            run(piece * each, std::min(items, (piece + 1) * each));
          }};
}

// Calls run(begin, end) for parts of [0, items) that are worth a thread: at least `grain` items.
template <typename F>
void share_items(int64_t items, int64_t grain, const F& run) {
  const int64_t pieces = (items + grain - 1) / grain;
  const double seconds = static_cast<double>(pieces * kThreadWork) / kElementwiseRate;
  const int64_t threads = pieces > 1 ? threads_for(seconds) : 1;
  if (items == 0) return;
  if (threads == 1) return run(0, items);
  share({even_phase(nullptr, items, std::min(pieces, threads), run)}, threads);
}

// item(i) of all items, computed on some threads.
template <typename F>
std::vector<double> each_item(int64_t items, int64_t grain, const F& item) {
  std::vector<double> results(items);
  share_items(items, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) results[i] = item(i);
  });
  return results;
}

// Their sum, added up in order, whatever thread computed them.
template <typename F>
double ordered_sum(int64_t items, int64_t grain, const F& item) {
  const std::vector<double> results = each_item(items, grain, item);
  return std::accumulate(results.begin(), results.end(), 0.0);
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
