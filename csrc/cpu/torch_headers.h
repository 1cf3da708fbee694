// What the files of this folder include of PyTorch. setup.py compiles it once per library, so that not every file has
// to read 200,000 lines; each file still includes what it uses.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <torch/library.h>
