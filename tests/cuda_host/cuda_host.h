// Executes CUDA kernels on the CPU, compiled by a host compiler: every CUDA thread is a fiber, several blocks are in
// flight at once, and which thread runs next is drawn from a seeded generator. A barrier that not all threads of a
// block reach at the same place ends the program. For ThreadSanitizer the fibers are threads that only barriers order;
// shared memory is an allocation of its own, so AddressSanitizer sees where it ends.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define threadIdx (cuda_host::thread_index())
#define blockIdx (cuda_host::block_index())
#define blockDim (cuda_host::block_size())
#define __syncthreads() cuda_host::barrier(__COUNTER__ + 1)
#define OCNN_FUSED_SHARED(name) unsigned char* name = cuda_host::shared_memory()
#define OCNN_FUSED_LAUNCH(kernel, blocks, threads, shared_bytes, stream, arguments) \
  cuda_host::launch(blocks, threads, shared_bytes, kernel, arguments...)

// What the backend uses of CUDA's runtime: one stream, in order.
using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return ""; }
inline cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
  std::memset(data, value, bytes);
  return cudaSuccess;
}

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace cuda_host {

// For what the fibers and the scheduler share: it is no part of the kernels that are checked.
#define CUDA_HOST_UNCHECKED __attribute__((no_sanitize("thread")))

constexpr size_t kStackBytes = size_t{64} << 10;
constexpr size_t kBlocksInFlight = 3;
constexpr unsigned kMostThreads = 256;
constexpr long kMostSharedBytes = 48 << 10;

inline unsigned long next_seed = 1;  // of the next launch
inline long launches = 0;

using Memory = std::unique_ptr<unsigned char[], decltype(&std::free)>;

struct Index {
  unsigned x = 0;
};

struct Block;

// Kept from block to block: a new fiber costs ThreadSanitizer a millisecond.
struct Thread {
  Index index;
  Block* block = nullptr;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  ucontext_t context{};
  int waits_at = 0;  // the barrier, or 0
  bool done = false;
  void* sanitizer = nullptr;  // its ThreadSanitizer fiber, or AddressSanitizer's record of its stack
};

struct Block {
  Index index, threads_each;
  std::vector<Thread> threads{kMostThreads};
  unsigned char* shared = nullptr;
  char started = 0, passed[2] = {};  // ThreadSanitizer's names of the start, of this barrier and the next
  int barriers = 0;
};

struct Scheduler {
  ucontext_t context{};
  Thread* running = nullptr;
  const std::function<void()>* kernel = nullptr;
  std::vector<std::unique_ptr<Block>> idle;
  char finished = 0;  // ThreadSanitizer's name of the end of a launch
  void* sanitizer = nullptr;
  const void* stack = nullptr;
  size_t stack_bytes = 0;
};
inline Scheduler scheduler;

CUDA_HOST_UNCHECKED inline Thread& current() { return *scheduler.running; }

CUDA_HOST_UNCHECKED inline Index thread_index() { return current().index; }
CUDA_HOST_UNCHECKED inline Index block_index() { return current().block->index; }
CUDA_HOST_UNCHECKED inline Index block_size() { return current().block->threads_each; }
CUDA_HOST_UNCHECKED inline unsigned char* shared_memory() { return current().block->shared; }

[[noreturn]] inline void fail(const char* what, const Block& block) {
  std::fprintf(stderr, "cuda_host: %s (block %u)\n", what, block.index.x);
  std::_Exit(3);
}

// The sanitizers follow what runs only if told of every change of stack.
CUDA_HOST_UNCHECKED inline void announce_switch_to(Thread* thread) {
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(thread != nullptr ? thread->sanitizer : scheduler.sanitizer, __tsan_switch_to_fiber_no_sync);
#elif defined(__SANITIZE_ADDRESS__)
  if (thread != nullptr) {
    __sanitizer_start_switch_fiber(&scheduler.sanitizer, thread->stack.get(), kStackBytes);
  } else {
    Thread& leaving = current();
    __sanitizer_start_switch_fiber(leaving.done ? nullptr : &leaving.sanitizer, scheduler.stack, scheduler.stack_bytes);
  }
#else
  (void)thread;
#endif
}

CUDA_HOST_UNCHECKED inline void announce_arrival([[maybe_unused]] void* sanitizer) {
#if defined(__SANITIZE_ADDRESS__)
  const bool on_scheduler = scheduler.running == nullptr;
  __sanitizer_finish_switch_fiber(sanitizer, on_scheduler ? nullptr : &scheduler.stack,
                                  on_scheduler ? nullptr : &scheduler.stack_bytes);
#endif
}

inline void release([[maybe_unused]] char* name) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(name);
#endif
}

inline void acquire([[maybe_unused]] char* name) {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(name);
#endif
}

// From a CUDA thread back to the scheduler, and on when that chooses.
CUDA_HOST_UNCHECKED inline void pause() {
  Thread& thread = current();
  announce_switch_to(nullptr);
  swapcontext(&thread.context, &scheduler.context);
  announce_arrival(thread.sanitizer);
}

CUDA_HOST_UNCHECKED inline void barrier(int place) {
  Thread& thread = current();
  char* name = &thread.block->passed[thread.block->barriers % 2];
  thread.waits_at = place;
  release(name);
  pause();
  acquire(name);
}

CUDA_HOST_UNCHECKED inline void run_thread() {
  announce_arrival(nullptr);
  acquire(&current().block->started);
  (*scheduler.kernel)();
  release(&scheduler.finished);
  current().done = true;
  pause();
}

CUDA_HOST_UNCHECKED inline void resume(Thread& thread) {
  scheduler.running = &thread;
  announce_switch_to(&thread);
  swapcontext(&scheduler.context, &thread.context);
  scheduler.running = nullptr;
  announce_arrival(scheduler.sanitizer);
}

inline Memory new_shared_memory(size_t bytes) {
  Memory memory(static_cast<unsigned char*>(std::malloc(std::max<size_t>(bytes, 1))), &std::free);
  std::memset(memory.get(), 0xFF, bytes);  // NaN, until somebody writes
  return memory;
}

inline std::unique_ptr<Block> idle_block() {
  if (scheduler.idle.empty()) {
    scheduler.idle.push_back(std::make_unique<Block>());
#if defined(__SANITIZE_THREAD__)
    for (Thread& thread : scheduler.idle.back()->threads) thread.sanitizer = __tsan_create_fiber(0);
#endif
  }
  std::unique_ptr<Block> block = std::move(scheduler.idle.back());
  scheduler.idle.pop_back();
  return block;
}

CUDA_HOST_UNCHECKED inline void prepare(Thread& thread, unsigned index, Block* block) {
  thread.index.x = index;
  thread.block = block;
  thread.done = false;
  char* stack = thread.stack.get();
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(stack, kStackBytes);
#endif
  getcontext(&thread.context);
  thread.context.uc_stack.ss_sp = stack;
  thread.context.uc_stack.ss_size = kStackBytes;
  thread.context.uc_link = nullptr;
  makecontext(&thread.context, run_thread, 0);
  // Else AddressSanitizer clears its record of the whole stack at every switch, of which it is told anyway.
  thread.context.uc_stack = {};
}

CUDA_HOST_UNCHECKED inline void start(Block& block, unsigned index, unsigned threads, unsigned char* shared) {
  block.index.x = index;
  block.threads_each.x = threads;
  block.shared = shared;
  for (unsigned t = 0; t < threads; ++t) prepare(block.threads[t], t, &block);
  release(&block.started);
}

// Runs every thread up to its next barrier, in random order; returns whether the block has come to its end.
template <typename Random>
CUDA_HOST_UNCHECKED bool advance(Block& block, Random& random) {
  std::vector<Thread*> order;
  for (unsigned t = 0; t < block.threads_each.x; ++t) order.push_back(&block.threads[t]);
  std::shuffle(order.begin(), order.end(), random);
  for (Thread* thread : order) resume(*thread);
  const Thread& first = block.threads[0];
  for (const Thread* thread : order) {
    if (thread->done != first.done) fail("__syncthreads() that not all threads of the block reach", block);
    if (thread->waits_at != first.waits_at) fail("threads of a block wait at different __syncthreads()", block);
  }
  ++block.barriers;
  return first.done;
}

// kernel<<<blocks, threads, shared_bytes>>>(arguments...)
template <typename Kernel, typename... Arguments>
void launch(long blocks, int threads, long shared_bytes, Kernel kernel, Arguments... arguments) {
  if (threads < 1 || threads > static_cast<int>(kMostThreads) || shared_bytes > kMostSharedBytes) {
    std::fprintf(stderr, "cuda_host: blocks of %d threads and %ld bytes\n", threads, shared_bytes);
    std::_Exit(3);
  }
  ++launches;
  std::mt19937_64 random(next_seed++);
  const std::function<void()> body = [&] { kernel(arguments...); };
  scheduler.kernel = &body;
#if defined(__SANITIZE_THREAD__)
  scheduler.sanitizer = __tsan_get_current_fiber();
#endif
  std::vector<unsigned> waiting(blocks);
  for (long b = 0; b < blocks; ++b) waiting[b] = static_cast<unsigned>(b);
  std::shuffle(waiting.begin(), waiting.end(), random);
  std::vector<std::unique_ptr<Block>> in_flight;
  std::vector<Memory> memory;  // freed at the end, when all threads have let go
  while (!waiting.empty() || !in_flight.empty()) {
    while (!waiting.empty() && in_flight.size() < kBlocksInFlight) {
      memory.push_back(new_shared_memory(shared_bytes));
      in_flight.push_back(idle_block());
      start(*in_flight.back(), waiting.back(), threads, memory.back().get());
      waiting.pop_back();
    }
    const size_t chosen = random() % in_flight.size();
    if (advance(*in_flight[chosen], random)) {
      scheduler.idle.push_back(std::move(in_flight[chosen]));
      in_flight.erase(in_flight.begin() + chosen);
    }
  }
  acquire(&scheduler.finished);
}

// Bytes behind a part of a workspace, up to `end` and these many more, that nobody may touch.
inline long fence([[maybe_unused]] char* part, [[maybe_unused]] long bytes, [[maybe_unused]] char* end) {
  constexpr long kGap = 64;
#if defined(__SANITIZE_ADDRESS__)
  if (part != nullptr) __asan_poison_memory_region(part + bytes, end + kGap - (part + bytes));
#endif
  return kGap;
}

}  // namespace cuda_host
