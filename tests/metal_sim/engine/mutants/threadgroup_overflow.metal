// Broken on purpose (bounds): every thread writes its slot, but the launch sets memory for `count` of them
#include <metal_stdlib>
using namespace metal;

kernel void overflow(device float* out [[buffer(0)]], threadgroup float* logits [[threadgroup(0)]],
                     uint tid [[thread_index_in_threadgroup]]) {
  logits[tid] = float(tid);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[tid] = logits[tid];
}
