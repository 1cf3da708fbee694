// Broken on purpose (compile): two kernels with the same name
#include <metal_stdlib>
using namespace metal;

template <typename T>
kernel void k(device T* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i] = T(0); }
template [[host_name("k")]] kernel decltype(k<float>) k<float>;
template [[host_name("k")]] kernel decltype(k<half>) k<half>;
