// Work on torch's own threads, which the process has already, and interruption by signals.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "sharing.h"
#include "stages.h"

namespace ocnn_fused::cpu {

// C functions of torch; null: one thread.
struct Torch {
  int32_t (*parallel_for)(int64_t begin, int64_t end, int64_t grain, void (*run)(int64_t, int64_t, void*),
                          void* context) = nullptr;
  int32_t (*num_threads)(uint32_t* count) = nullptr;
};
inline Torch torch;

inline int64_t num_threads() {
  uint32_t count = 1;
  if (torch.num_threads != nullptr) torch.num_threads(&count);
  return std::max<int64_t>(1, count);
}

// Throws if the user wants to interrupt the process. Set by the bindings.
inline void (*check_signals)() = nullptr;

// When the calling thread looks for signals next; threads that only help never do.
inline thread_local Clock::time_point next_check = Clock::time_point::max();
constexpr auto kCheckInterval = std::chrono::milliseconds(50);

inline void poll_signals() {
  if (next_check == Clock::time_point::max() || Clock::now() < next_check) return;
  next_check = Clock::now() + kCheckInterval;
  if (check_signals != nullptr) check_signals();
}

// While it lives, the thread looks for signals between pieces of work.
struct SignalWatch {
  SignalWatch() { next_check = Clock::now() + kCheckInterval; }
  ~SignalWatch() { next_check = Clock::time_point::max(); }
};

// Multiply-adds of elementwise stages below which another thread does not pay.
constexpr int64_t kThreadWork = int64_t{1} << 18;
// Multiply-adds in a second of one thread, roughly, elementwise and in products.
constexpr double kElementwiseRate = 1e10, kProductRate = 1e11;
// Work is cut into pieces at least so short, because signals wait for them.
constexpr double kLongestPiece = 0.1;  // seconds

inline int64_t pieces_for(double seconds, int64_t threads) {
  return std::max(threads, static_cast<int64_t>(seconds / kLongestPiece));
}

// Items that a thread takes at least.
inline int64_t grain(int64_t work_per_item) {
  return std::max<int64_t>(1, kThreadWork / std::max<int64_t>(1, work_per_item));
}

inline Backoff& backoff() {
  thread_local Backoff of_this_thread;
  return of_this_thread;
}

// How many threads to share out work to, at most, that one would do in so many seconds.
inline int64_t threads_for(double seconds) {
  const int64_t threads = num_threads();
  return threads > 1 && backoff().is_wanted(Clock::now(), seconds) ? threads : 1;
}

// All phases, one after the other, on so many of torch's threads.
inline void share(const std::vector<Phase>& phases, int64_t threads) {
  if (threads == 1) {
    for (const Phase& phase : phases) {
      for (int64_t piece = 0; piece < phase.pieces; ++piece) {
        poll_signals();
        phase.run(piece, 0);
      }
    }
    return;
  }
  Sharing sharing(phases, threads, poll_signals);
  const auto take_part = [](int64_t thread, int64_t end, void* context) {
    Sharing& shared = *static_cast<Sharing*>(context);
    thread == 0 ? shared.call(end) : shared.help(thread, end - thread);
  };
  if (torch.parallel_for(0, threads, 1, take_part, &sharing) != 0) throw std::runtime_error("torch's threads failed");
  backoff().judge(sharing.result(), Clock::now());
}

// A phase of items [0, items) in so many pieces as even as can be; run(begin, end) does some of them.
template <typename F>
Phase even_phase(int64_t items, int64_t pieces, F run) {
  const int64_t each = (items + pieces - 1) / pieces;
  return {(items + each - 1) / each, [run = std::move(run), each, items](int64_t piece, int64_t) {
            run(piece * each, std::min(items, (piece + 1) * each));
          }};
}

// Calls run(begin, end) for parts of [0, items) that are worth a thread, where an item takes `work` multiply-adds.
template <typename F>
void share_items(int64_t items, int64_t work, const F& run) {
  if (items == 0) return;
  const double seconds = static_cast<double>(items) * static_cast<double>(work) / kElementwiseRate;
  const int64_t pieces = (items + grain(work) - 1) / grain(work);
  const int64_t threads = pieces > 1 ? threads_for(seconds) : 1,
                wanted = std::min(pieces, pieces_for(seconds, threads));
  if (wanted == 1) return run(0, items);
  share({even_phase(items, wanted, run)}, threads);
}

// item(i) of all items, computed on some threads.
template <typename F>
std::vector<double> each_item(int64_t items, int64_t work, const F& item) {
  std::vector<double> results(items);
  share_items(items, work, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) results[i] = item(i);
  });
  return results;
}

}  // namespace ocnn_fused::cpu
