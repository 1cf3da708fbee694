// Broken on purpose (address space): only one instantiation passes the wrong address space
#include <metal_stdlib>
using namespace metal;

template <typename P>
float first(P x) {
  thread const float* at = x;
  return at[0];
}
template <typename T>
kernel void k(device T* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  float mine[1] = {1.0f};
  out[i] = T(first(&mine[0]) + (sizeof(T) == 2 ? 0.0f : first(out)));
}
template [[host_name("k_float")]] kernel decltype(k<float>) k<float>;
