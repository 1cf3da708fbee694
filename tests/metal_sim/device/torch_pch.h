// What every project's .mm reads, compiled once: it halves their build.
#include <ATen/core/Tensor.h>
#include <Foundation/Foundation.h>
#include <torch/library.h>
