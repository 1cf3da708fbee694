// Broken on purpose (race): a plain read concurrent with atomic writes
#include <metal_stdlib>
using namespace metal;

kernel void mixed(device atomic_uint* counter [[buffer(0)]], device uint* out [[buffer(1)]],
                  uint i [[thread_position_in_grid]]) {
  atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed);
  device const uint* plain = (device const uint*)counter;
  out[i] = plain[0] & 0x80000000u;
}
