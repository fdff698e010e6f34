// The CUDA backend's side of the interface, see bindings.cpp. It is compiled without CUDA's headers too.
#pragma once

#include "../call.h"

namespace ocnn_fused::cuda {

// Where a call runs: handles of CUDA and cuBLAS, of the device that is current.
struct Queue {
  Address stream, blas;
};

// What a call needs; more if gradients go into the weights themselves.
int64_t workspace_bytes(const Bucket& bucket, bool with_grad);

// Queues everything and waits for nothing. Throws WorkspaceTooSmall before anything was queued.
void execute(const Call& call, const Queue& queue);

}  // namespace ocnn_fused::cuda
