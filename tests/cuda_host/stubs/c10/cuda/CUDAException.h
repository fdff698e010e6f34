// See ATen/cuda/CUDAContext.h here.
#pragma once

#include <ATen/cuda/CUDAContext.h>
