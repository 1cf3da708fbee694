// The compiled kernels, for launch.mm. Objective-C++, unlike launch.h.
#pragma once
#include <ATen/mps/MPSStream.h>

#include <string>

#include "mps/launch.h"

namespace moe_metal {

struct Pipeline {
  id<MTLComputePipelineState> state;
  NSString* name;
};

// The kernel's pipeline, which its first call compiles. Raises if it does not compile, or is refused.
const Pipeline* pipeline_of(at::mps::MPSStream* stream, Kernel& kernel);

// What a warm-up call does with a kernel: compiles it, or lists it if this thread lists kernels.
void prepare(at::mps::MPSStream* stream, Kernel& kernel);

bool is_macos_at_least(int major, int minor = 0);

inline std::string reason(NSError* error) {
  return error ? [[error localizedDescription] UTF8String] : "no reason given";
}

}  // namespace moe_metal
