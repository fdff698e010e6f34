// Work that a few threads share out piece by piece, in phases, so that the threads meet once per job and not once per
// phase. Without torch, so that it can be tested alone.
//
// Nobody is assigned a piece: whoever is free takes the next. A thread that has no core, because another process is on
// it, then holds up nobody, unless it lost the core in the middle of a piece, or until the threads meet at the end.
// That costs a time slice of the scheduler, several milliseconds, so Company remembers it and works alone for a while.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
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
  const char* name;  // for a profiler, or null
  int64_t pieces;
  std::function<void(int64_t piece, int64_t thread)> run;
};

// What the caller's helpers were good for, in seconds.
struct Help {
  double done = 0;    // how long the caller would have taken for their pieces
  double waited = 0;  // how long the caller waited for them
};

// Decides whether other threads are asked at all: one per calling thread.
//
// Where they cost more than they help, they are left out for several times as long as was lost, and longer each time in
// a row: what is lost in all is a small share of the time, whatever else the machine does.
class Company {
 public:
  bool is_wanted(Clock::time_point now) const { return now >= alone_until_; }

  void judge(const Help& help, Clock::time_point now) {
    const double lost = help.waited - help.done;
    if (lost < kNothing) {
      patience_ = kFirst;
      return;
    }
    const Seconds alone(std::min(patience_ * lost, kLongest));
    alone_until_ = now + std::chrono::duration_cast<Clock::duration>(alone);
    patience_ = std::min(2 * patience_, kMost);
  }

 private:
  static constexpr double kNothing = 50e-6;  // seconds: waking a thread takes about as long
  static constexpr double kFirst = 8, kMost = 64, kLongest = 0.25;
  double patience_ = kFirst;
  Clock::time_point alone_until_{};
};

// One job's phases while threads work on them.
class Sharing {
 public:
  Sharing(const std::vector<Phase>& phases, int64_t threads)
      : phases_(phases), threads_(threads), progress_(phases.size()) {}

  // Thread 0, the caller, takes part until all pieces are done and every thread is there. Watch(name) is alive while it
  // is in a phase. Who comes may stand for several threads, if there are fewer than was said.
  template <typename Watch>
  void call(int64_t stands_for) {
    arrived_.fetch_add(stands_for, std::memory_order_relaxed);
    for (size_t p = 0; p < phases_.size(); ++p) {
      [[maybe_unused]] const Watch watch(phases_[p].name);
      const auto start = Clock::now();
      const int64_t mine = take(p, 0);
      const auto end = Clock::now();
      const double each = mine > 0 ? Seconds(end - start).count() / static_cast<double>(mine) : 0;
      longest_ = std::max(longest_, each);
      wait([&] { return is_done(p); });
      const double waited = Seconds(Clock::now() - end).count();
      help_.waited += waited;
      help_.done += mine > 0 ? each * static_cast<double>(phases_[p].pieces - mine) : waited;
    }
    finished_ = Clock::now();
    wait([&] { return arrived_.load(std::memory_order_relaxed) >= threads_; });
  }

  // Any other thread takes part. It need not come before everything is done.
  void help(int64_t thread, int64_t stands_for) {
    arrived_.fetch_add(stands_for, std::memory_order_relaxed);
    for (size_t p = 0; p < phases_.size(); ++p) {
      take(p, thread);
      if (p + 1 < phases_.size()) wait([&] { return is_done(p); });
    }
  }

  // After all threads have returned: throws what a piece has thrown, else says what the helpers were good for.
  Help result() const {
    if (error_) std::rethrow_exception(error_);
    Help help = help_;
    help.waited += Seconds(Clock::now() - finished_).count();
    return help;
  }

 private:
  struct alignas(64) Progress {
    std::atomic<int64_t> next{0}, done{0};
  };

  // Takes pieces of a phase while there are some; returns how many.
  int64_t take(size_t p, int64_t thread) {
    const Phase& phase = phases_[p];
    Progress& progress = progress_[p];
    for (int64_t mine = 0;; ++mine) {
      const int64_t piece = progress.next.fetch_add(1, std::memory_order_relaxed);
      if (piece >= phase.pieces) return mine;
      try {
        if (!failed_.load(std::memory_order_relaxed)) phase.run(piece, thread);
      } catch (...) {
        if (!failed_.exchange(true)) error_ = std::current_exception();
      }
      progress.done.fetch_add(1, std::memory_order_release);
    }
  }

  bool is_done(size_t p) const { return progress_[p].done.load(std::memory_order_acquire) >= phases_[p].pieces; }

  // A piece takes others no longer than us. If it does, or if nobody comes, they may be waiting for our core.
  template <typename Done>
  void wait(const Done& done) const {
    if (done()) return;
    const auto patient = Clock::now() + std::chrono::duration_cast<Clock::duration>(Seconds(20e-6 + 2 * longest_));
    while (!done()) {
      if (Clock::now() < patient) {
        for (int spin = 0; spin < 32; ++spin) pause();
      } else {
        std::this_thread::yield();
      }
    }
  }

  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  const std::vector<Phase>& phases_;
  const int64_t threads_;
  std::vector<Progress> progress_;
  std::atomic<int64_t> arrived_{0};
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;  // of the first piece that failed
  // The caller's.
  double longest_ = 0;  // seconds for a piece
  Help help_;
  Clock::time_point finished_{};
};

}  // namespace ocnn_fused::cpu
