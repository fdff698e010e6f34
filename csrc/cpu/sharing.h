// Work that a few threads share out piece by piece, in phases, so that the threads meet once per job and not once per
// phase. It includes nothing of ours, so that it can be tested alone.
//
// Nobody is assigned a piece: whoever is free takes the next. A thread that has no core, because another process is on
// it, then holds up nobody, unless it lost the core in the middle of a piece, or until the threads meet at the end.
// That costs a time slice of the scheduler, several milliseconds, so Backoff remembers it and works alone for a while.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ocnn_fused::cpu {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// Pieces of a phase may be done in any order and by any thread. Phases come one after the other.
struct Phase {
  int64_t pieces;
  std::function<void(int64_t piece, int64_t thread)> run;
};

// What the caller's helpers were good for, in seconds.
struct HelperStats {
  double done = 0;    // how long the caller would have taken for their pieces
  double waited = 0;  // how long the caller waited for them
};

// Decides whether other threads are asked at all: one per calling thread.
//
// Where they cost more than they help, they are left out for twice as long as was lost, and for longer each time that
// this soon happens again: what is lost in all is a small share of the time, whatever else the machine does.
class Backoff {
 public:
  // For work that is done in so many seconds without them.
  bool is_wanted(Clock::time_point now, double seconds) const { return now + duration(seconds) >= alone_until_; }

  void judge(const HelperStats& stats, Clock::time_point now) {
    const double lost = stats.waited - stats.done;
    if (lost < kNothing) return;
    const bool again = now < alone_until_ + duration(kSoon * alone_);
    factor_ = again ? std::min(2 * factor_, kMost) : kFirst;
    alone_ = std::min(factor_ * lost, kLongest);
    alone_until_ = now + duration(alone_);
  }

 private:
  static Clock::duration duration(double seconds) {
    return std::chrono::duration_cast<Clock::duration>(Seconds(seconds));
  }

  static constexpr double kNothing = 50e-6;  // seconds: waking a thread takes about as long
  static constexpr double kFirst = 2, kMost = 64, kSoon = 4, kLongest = 0.25;
  double factor_ = kFirst;
  double alone_ = 0;  // seconds, the last time
  Clock::time_point alone_until_{};
};

inline double since(Clock::time_point start) { return Seconds(Clock::now() - start).count(); }

// How a thread waits for the others. A piece takes them no longer than us; if it does, or if nobody comes, they may be
// waiting for our core.
class SpinWait {
 public:
  // Another of our pieces took so many seconds.
  void expect(double seconds) { longest_ = std::max(longest_, seconds); }

  template <typename Done>
  void wait(const Done& done) const {
    if (done()) return;
    const auto start = Clock::now();
    while (!done()) {
      if (since(start) < kLeast + 2 * longest_) {
        for (int spin = 0; spin < 32; ++spin) pause();
      } else {
        std::this_thread::yield();
      }
    }
  }

 private:
  static constexpr double kLeast = 20e-6;

  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  double longest_ = 0;
};

// One job's phases while threads work on them.
class Sharing {
 public:
  // The caller runs `between_pieces`, which may throw, before each of its pieces.
  Sharing(const std::vector<Phase>& phases, int64_t threads, void (*between_pieces)())
      : phases_(phases), threads_(threads), between_pieces_(between_pieces) {
    for (size_t p = 0; p < phases.size(); ++p) progress_.emplace_back(threads);
  }

  // Thread 0, the caller, takes part until all pieces are done and every thread is there. A thread may stand for
  // several, if fewer come than were announced.
  void call(int64_t stands_for) {
    arrived_.fetch_add(stands_for, std::memory_order_relaxed);
    SpinWait spin;
    for (size_t p = 0; p < phases_.size(); ++p) {
      const auto [mine, each] = take(p, 0);
      spin.expect(each);
      const auto start = Clock::now();
      spin.wait([&] { return is_done(p); });
      const double waited = since(start);
      stats_.waited += waited;
      stats_.done += mine > 0 ? each * static_cast<double>(phases_[p].pieces - mine) : waited;
    }
    finished_ = Clock::now();
    spin.wait([&] { return arrived_.load(std::memory_order_relaxed) >= threads_; });
  }

  // Any other thread takes part. It need not come before everything is done.
  void help(int64_t thread, int64_t stands_for) {
    arrived_.fetch_add(stands_for, std::memory_order_relaxed);
    SpinWait spin;
    for (size_t p = 0; p < phases_.size(); ++p) {
      spin.expect(take(p, thread).each);
      if (p + 1 < phases_.size()) spin.wait([&] { return is_done(p); });
    }
  }

  // After all threads have returned: throws what a piece has thrown, else says what the helpers were good for.
  HelperStats result() const {
    if (error_) std::rethrow_exception(error_);
    HelperStats stats = stats_;
    stats.waited += since(finished_);
    return stats;
  }

 private:
  // How far a phase is.
  struct Progress {
    explicit Progress(int64_t threads) : shares(threads) {}
    struct alignas(64) Share {
      std::atomic<int64_t> taken{0};
    };
    std::vector<Share> shares;  // of the threads
    alignas(64) std::atomic<int64_t> done{0};
  };

  struct Taken {
    int64_t pieces;
    double each;  // seconds
  };

  // Takes pieces of a phase while there are some.
  Taken take(size_t p, int64_t thread) {
    const Phase& phase = phases_[p];
    const auto start = Clock::now();
    int64_t mine = 0;
    for (int64_t other = 0; other < threads_; ++other) {
      const int64_t whose = (thread + other) % threads_;
      const int64_t begin = whose * phase.pieces / threads_, end = (whose + 1) * phase.pieces / threads_;
      std::atomic<int64_t>& taken = progress_[p].shares[whose].taken;
      for (;; ++mine) {
        const int64_t piece = begin + taken.fetch_add(1, std::memory_order_relaxed);
        if (piece >= end) break;
        run(p, piece, thread);
      }
    }
    return {mine, mine > 0 ? since(start) / static_cast<double>(mine) : 0.0};
  }

  void run(size_t p, int64_t piece, int64_t thread) {
    try {
      const bool wanted = !failed_.load(std::memory_order_relaxed);
      if (wanted && thread == 0) between_pieces_();
      if (wanted) phases_[p].run(piece, thread);
    } catch (...) {
      if (!failed_.exchange(true)) error_ = std::current_exception();
    }
    progress_[p].done.fetch_add(1, std::memory_order_release);
  }

  bool is_done(size_t p) const { return progress_[p].done.load(std::memory_order_acquire) >= phases_[p].pieces; }

  const std::vector<Phase>& phases_;
  const int64_t threads_;
  void (*const between_pieces_)();
  std::deque<Progress> progress_;  // of the phases
  std::atomic<int64_t> arrived_{0};
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;  // of the first piece that failed
  // The caller's.
  HelperStats stats_;
  Clock::time_point finished_{};
};

}  // namespace ocnn_fused::cpu
