// Switches for tests and benchmarks, which compare both ways in one process.
#pragma once

#include <atomic>

namespace ocnn_fused::cpu {

// False: all bilinear plans go through the pipeline.
inline std::atomic<bool> panels_allowed{true};

// True: memory whose contents are undefined is filled with NaN, to find out who reads it.
inline std::atomic<bool> poisons{false};
constexpr int kPoison = 0xFF;

}  // namespace ocnn_fused::cpu
