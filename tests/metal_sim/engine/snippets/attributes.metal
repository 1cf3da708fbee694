//: attr_atomic_param | ok
kernel void k(device atomic_int* n [[buffer(0)]], uint i [[thread_position_in_grid]]) { atomic_fetch_max_explicit(n, int(i), memory_order_relaxed); }
//: attr_bool_lane | refuses | engine
kernel void k(device float* x [[buffer(0)]], bool lane [[thread_index_in_simdgroup]]) { x[0] = lane ? 1 : 0; }
//: attr_buffer31 | refuses | engine
kernel void k(device float* y [[buffer(31)]]) { y[0] = 0; }
//: attr_buffer30 | ok
kernel void k(device float* y [[buffer(30)]], threadgroup float* t [[threadgroup(30)]]) { t[0] = 0; y[0] = 0; }
//: attr_buffer_dup_expr | refuses | engine
constant constexpr int kOut = 2;
kernel void k(device float* a [[buffer(2)]], device float* b [[buffer(kOut)]]) { b[0] = a[0]; }
//: attr_buffer_constant | ok
constant constexpr int kOut = 3;
kernel void k(device float* a [[buffer(kOut - 1)]], device float* b [[buffer(kOut)]], threadgroup float* c [[threadgroup(2)]]) { c[0] = 1; b[0] = a[0]; }
//: attr_buffer_neg | refuses | engine
kernel void k(device float* y [[buffer(-2)]]) { y[0] = 0; }
//: attr_byvalue | refuses | translation
kernel void k(device float* y [[buffer(0)]], float scale [[buffer(1)]]) { y[0] *= scale; }
//: attr_const | ok
kernel void k(device float* y [[buffer(0)]], const ushort lane [[thread_index_in_simdgroup]]) { y[lane] = 0; }
//: attr_const_noref | refuses | engine
struct Params { float eps; };
kernel void k(device float* y [[buffer(0)]], constant Params params [[buffer(1)]]) { y[0] = params.eps; }
//: attr_const_ref | refuses | engine
kernel void k(device float* y [[buffer(0)]], thread const uint& i [[thread_position_in_grid]]) { y[i] = 0; }
//: attr_device_bool_ptr | ok
kernel void k(device float* y [[buffer(0)]], device const bool* mask [[buffer(1)]]) { y[0] = mask[0] ? 1 : 0; }
//: attr_float_position | refuses | engine
kernel void k(device float* y [[buffer(0)]], float i [[thread_position_in_grid]]) { y[uint(i)] = 0; }
//: attr_half2_position | refuses | engine
kernel void k(device float* y [[buffer(0)]], half2 i [[thread_position_in_grid]]) { y[uint(i.x)] = 0; }
//: attr_helper_builtin | ok
inline float at(device float* y, uint i [[thread_position_in_grid]]) { return y[i]; }
kernel void k(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]]) { y[i] = at(y, i + 1); }
//: attr_hostname_bad | ? | translation
[[host_name(copy)]] kernel void k(device float* y [[buffer(0)]]) { y[0] = 0; }
//: attr_hostname_two | refuses | translation
template <typename T> [[kernel]] void clear(device T* y [[buffer(0)]]) { y[0] = T(0); }
template [[host_name("clear_all")]] [[kernel]] decltype(clear<half>) clear<half>;
kernel void clear_all(device float* y [[buffer(0)]]) { y[0] = 0; }
//: attr_inst_other_ns | refuses | engine
namespace ops { template <typename T> [[kernel]] void clear(device T* y [[buffer(0)]]) { y[0] = T(0); } }
namespace others { template [[host_name("clear")]] [[kernel]] decltype(ops::clear<half>) ops::clear<half>; }
//: attr_inst_twice | refuses | engine
template <typename T> [[kernel]] void clear(device T* y [[buffer(0)]]) { y[0] = T(0); }
template [[host_name("one")]] [[kernel]] decltype(clear<half>) clear<half>;
template [[host_name("two")]] [[kernel]] decltype(clear<half>) clear<half>;
//: attr_inst_two_types | ok
template <typename T> [[kernel]] void clear(device T* y [[buffer(0)]]) { y[0] = T(0); }
template [[host_name("clear_half")]] [[kernel]] decltype(clear<half>) clear<half>;
template [[host_name("clear_" "float")]] [[kernel]] decltype(clear<float>) clear<float>;
//: attr_int2_position | refuses | engine
kernel void k(device float* y [[buffer(0)]], int2 i [[threadgroup_position_in_grid]]) { y[i.x] = 0; }
//: attr_int_lane | refuses | engine
kernel void k(device float* y [[buffer(0)]], int lane [[thread_index_in_simdgroup]]) { y[lane] = 0; }
//: attr_int_position | refuses | engine
kernel void k(device float* y [[buffer(0)]], int i [[threadgroup_position_in_grid]]) { y[i] = 0; }
//: attr_max_threads_bad | refuses | engine
[[max_total_threads_per_threadgroup(0)]] kernel void k(device float* y [[buffer(0)]]) { y[0] = 0; }
//: attr_max_threads | ok
[[kernel, max_total_threads_per_threadgroup(256)]] void k(device float* y [[buffer(0)]]) { y[0] = 0; }
//: attr_mix_scalar_vec | refuses | engine
kernel void k(device float* y [[buffer(0)]], uint3 i [[thread_position_in_grid]], uint n [[threads_per_grid]]) { y[i.x] = n; }
//: attr_mix_uint2_uint3 | refuses | engine
kernel void k(device float* y [[buffer(0)]], uint3 i [[thread_position_in_grid]], uint2 n [[threads_per_threadgroup]]) { y[i.z] = n.x; }
//: attr_mix_ushort | ? | accepted | Apple's message speaks of the number of elements, not of their type
kernel void k(device float* y [[buffer(0)]], uint3 i [[thread_position_in_grid]], ushort3 n [[threads_per_threadgroup]]) { y[i.z] = n.x; }
//: attr_vector_and_lane | ok
kernel void k(device float* y [[buffer(0)]], uint3 group [[threadgroup_position_in_grid]], uint3 groups [[threadgroups_per_grid]],
              uint lane [[thread_index_in_simdgroup]], ushort simdgroup [[simdgroup_index_in_threadgroup]]) { y[group.x + lane] = groups.y + simdgroup; }
//: attr_ptr_in_struct | ? | accepted | an argument buffer: Metal 3 takes it; the simulator has none
struct Tensors { device float* data; };
kernel void k(constant Tensors& t [[buffer(0)]]) { t.data[0] = 0; }
//: attr_threadgroup31 | refuses | engine
kernel void k(threadgroup float* t [[threadgroup(31)]]) { t[0] = 0; }
//: attr_twice | refuses | translation
kernel void k(device float* y [[buffer(0)]], uint a [[thread_index_in_simdgroup]], uint b [[thread_index_in_simdgroup]]) { y[a] = b; }
//: attr_uint4_position | refuses | engine
kernel void k(device float* y [[buffer(0)]], uint4 i [[threads_per_grid]]) { y[i.x] = 0; }
//: attr_ulong_position | refuses | engine
kernel void k(device float* y [[buffer(0)]], ulong i [[thread_position_in_grid]]) { y[i] = 0; }
//: attr_function_constants | ok
constant bool masked [[function_constant(0)]];
constant uint tile [[function_constant(1)]];
constant uint area = tile * tile;
constant bool wide = is_function_constant_defined(masked) ? !masked : false;
KERNEL { if (wide && i < area) x[i] = tile; }
//: attr_function_constant_as_size | refuses | address_spaces
constant uint tile [[function_constant(1)]];
KERNEL { float v[tile]; v[0] = 1; x[i] = v[0]; }
