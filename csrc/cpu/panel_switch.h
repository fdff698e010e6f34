// For tests and benchmarks, which compare both ways in one process.
#pragma once

#include <atomic>

namespace ocnn_fused::cpu {

// False: all products are left to the BLAS.
inline std::atomic<bool> panels_allowed{true};

}  // namespace ocnn_fused::cpu
