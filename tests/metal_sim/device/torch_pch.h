// What every csrc/mps/*.mm reads, compiled once: it halves the simulator's build.
#include <ATen/core/Tensor.h>
#include <Foundation/Foundation.h>
#include <torch/library.h>
