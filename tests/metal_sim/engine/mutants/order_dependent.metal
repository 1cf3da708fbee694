// Broken on purpose (order): atomics hide the race, and the result still depends on the order
#include <metal_stdlib>
using namespace metal;

kernel void tickets(device atomic_uint* counter [[buffer(0)]], device uint* out [[buffer(1)]],
                    uint i [[thread_position_in_grid]]) {
  out[i] = atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed);
}
