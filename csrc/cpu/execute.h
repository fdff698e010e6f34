// The CPU's side of the interface, see bindings.cpp.
#pragma once

#include <string>

#include "../call.h"

namespace ocnn_fused::cpu {

// Throws WorkspaceTooSmall before anything was written, or what the signal check throws.
void execute(const Call& call);

// Says which instruction set to use: torch's own answer, as far as this machine has it.
void choose_instruction_set(const std::string& capability);

}  // namespace ocnn_fused::cpu
