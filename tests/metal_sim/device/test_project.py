"""Builds and runs the extension of another project, in a temporary folder, with its own kernel and op."""

import sys
from pathlib import Path

import pytest
import torch

import metal_sim
from metal_sim.device.build import BuildError

if sys.platform == "darwin":
    pytest.skip("a Mac has the real device", allow_module_level=True)

KERNEL = """
#include <metal_stdlib>
using namespace metal;
kernel void twice(device const float* x [[buffer(0)]], device float* out [[buffer(1)]],
                  uint i [[thread_position_in_grid]]) {
  out[i] = 2 * x[i];
}
"""
EXTENSION = """
#include <ATen/ATen.h>
#include <ATen/mps/MPSStream.h>
#include <torch/library.h>

#include "kernel_text.h"
#include "own_header.h"

static id<MTLComputePipelineState> pipeline() {
  @autoreleasepool {
    NSError* error = nil;
    id<MTLDevice> device = at::mps::MPSDevice::getInstance()->device();
    NSString* text = [NSString stringWithUTF8String:kernel_text];
    id<MTLLibrary> library = [device newLibraryWithSource:text options:nil error:&error];
    TORCH_CHECK(library, error.localizedDescription.UTF8String);
    id<MTLFunction> function = [[library newFunctionWithName:@"twice"] autorelease];
    [library release];
    return [device newComputePipelineStateWithFunction:function error:&error];
  }
}

static at::Tensor twice(const at::Tensor& x) {
  static id<MTLComputePipelineState> state = pipeline();
  at::Tensor out = at::empty_like(x);
  auto* stream = at::mps::getCurrentMPSStream();
  at::mps::dispatch_sync_with_rethrow(stream->queue(), ^{
    id<MTLComputeCommandEncoder> encoder = stream->commandEncoder();
    [encoder setComputePipelineState:state];
    [encoder setBuffer:(id<MTLBuffer>)x.storage().data() offset:0 atIndex:0];
    [encoder setBuffer:(id<MTLBuffer>)out.storage().data() offset:0 atIndex:1];
    [encoder dispatchThreads:MTLSizeMake(x.numel(), 1, 1) threadsPerThreadgroup:MTLSizeMake(kThreads, 1, 1)];
  });
  return out;
}

TORCH_LIBRARY(metal_sim_foreign, m) { m.def("twice(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(metal_sim_foreign, MPS, m) { m.impl("twice", &twice); }
"""


def project(folder: Path, name: str = "foreign") -> metal_sim.Project:
    source, include = folder / "extension.mm", folder / "include"
    source.write_text(EXTENSION)
    include.mkdir()
    (include / "own_header.h").write_text("constexpr int kThreads = 32;\n")

    def prepare(built: Path) -> None:
        (built / "kernel_text.h").write_text(f'constexpr const char* kernel_text = R"({KERNEL})";\n')

    return metal_sim.Project(name, [source], [include], prepare)


def test_another_projects_extension_runs(tmp_path: Path) -> None:
    metal_sim.load(project(tmp_path))
    x = torch.arange(70.0, device="mps")
    with metal_sim.record() as record:
        out = torch.ops.metal_sim_foreign.twice(x)
    assert torch.equal(out.cpu(), torch.arange(70.0) * 2)
    assert record.kernels == ["twice"] and record.dispatches[0].grid == [70, 1, 1]


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"project nothing: there is no .*absent\.mm"):
        metal_sim.load(metal_sim.Project("nothing", [tmp_path / "absent.mm"]))
    with pytest.raises(BuildError, match="project nothing names no sources"):
        metal_sim.load(metal_sim.Project("nothing", sorted(tmp_path.glob("*.mm"))))


def test_a_source_that_does_not_compile(tmp_path: Path) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("int f() {\n  return missing_name;\n}\n")
    with pytest.raises(BuildError, match=r"project broken does not build:[^$]*broken\.cpp:2:10: error: .*missing_name"):
        metal_sim.load(metal_sim.Project("broken", [source]))
