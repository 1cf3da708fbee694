// The precompiled header of every project's .mm files: it halves their build time.
#include <ATen/core/Tensor.h>
#include <Foundation/Foundation.h>
#include <torch/library.h>
