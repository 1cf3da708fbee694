//: at_all_of_them | ok
kernel void k(device atomic_uint* u [[buffer(0)]], device atomic_int* n [[buffer(1)]], device atomic_float* f [[buffer(2)]],
              device atomic_bool* b [[buffer(3)]], device atomic_ulong* l [[buffer(4)]]) {
  threadgroup atomic_int shared;
  const memory_order relaxed = memory_order_relaxed;
  uint e = 0; float ef = 0; bool eb = false;
  atomic_store_explicit(&shared, 0, relaxed);
  atomic_fetch_min_explicit(&shared, -1, relaxed);
  atomic_fetch_add_explicit(u, 1u, relaxed); atomic_fetch_xor_explicit(&u[1], 3u, relaxed);
  atomic_fetch_or_explicit(n, 1, relaxed); atomic_exchange_explicit(n, 2, relaxed); atomic_fetch_sub_explicit(n + 1, 2, relaxed);
  atomic_fetch_add_explicit(f, 1.0f, relaxed); atomic_compare_exchange_weak_explicit(f, &ef, 1.0f, relaxed, relaxed);
  atomic_store_explicit(b, true, relaxed); atomic_exchange_explicit(b, false, relaxed);
  atomic_compare_exchange_weak_explicit(b, &eb, true, relaxed, relaxed);
  atomic_compare_exchange_weak_explicit(u, &e, atomic_load_explicit(u + 1, relaxed), relaxed, relaxed);
  atomic_max_explicit(l, 7ul, relaxed); atomic_min_explicit(l + 1, 7ul, relaxed);
}
//: at_acquire | refuses | engine
kernel void k(device atomic_uint* n [[buffer(0)]]) { uint v = atomic_load_explicit(n, memory_order_acquire); (void)v; }
//: at_seq_cst | refuses | engine
kernel void k(device atomic_uint* n [[buffer(0)]]) { atomic_store_explicit(n, 1u, memory_order_seq_cst); }
//: at_barrier_int | refuses | engine
KERNEL { threadgroup_barrier(2); x[i] = 0; }
//: at_barrier_opencl | refuses | engine
KERNEL { barrier(mem_flags::mem_threadgroup); x[i] = 0; }
//: at_barrier_scope | refuses | engine
KERNEL { threadgroup_barrier(mem_flags::mem_threadgroup, memory_scope_workgroup); x[i] = 0; }
//: at_barrier_site | refuses | engine
KERNEL { simdgroup_barrier(mem_flags::mem_none, 12); x[i] = 0; }
//: at_barrier_both | ok
KERNEL { threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup); simdgroup_barrier(mem_flags::mem_none); x[i] = 0; }
//: at_bool_add | refuses | engine
kernel void k(device atomic_bool* b [[buffer(0)]]) { atomic_fetch_add_explicit(b, false, memory_order_relaxed); }
//: at_bool_or | refuses | engine
kernel void k(device atomic_bool* b [[buffer(0)]]) { atomic_fetch_or_explicit(b, true, memory_order_relaxed); }
//: at_cas_strong | refuses | engine
kernel void k(device atomic_int* n [[buffer(0)]]) { int e = 1;
  atomic_compare_exchange_strong_explicit(n, &e, 2, memory_order_relaxed, memory_order_relaxed); }
//: at_cas_weak_fail_device | refuses | engine
kernel void k(device atomic_int* n [[buffer(0)]], device int* e [[buffer(1)]]) {
  atomic_compare_exchange_weak_explicit(n, e, 2, memory_order_relaxed, memory_order_relaxed); }
//: at_const_load | ? | accepted
kernel void k(device float* x [[buffer(0)]], device const atomic_int* n [[buffer(1)]]) { x[0] = atomic_load_explicit(n, memory_order_relaxed); }
//: at_copy | refuses | engine
kernel void k(device float* x [[buffer(0)]], device atomic_int* n [[buffer(1)]]) { atomic_int mine = n[1]; x[0] = 0; }
//: at_fence | ? | engine | a fence between threadgroups is not simulated
KERNEL { x[i] = 1; atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device); }
//: at_float_and | refuses | engine
kernel void k(device atomic_float* f [[buffer(0)]]) { atomic_fetch_and_explicit(f, 2.0f, memory_order_relaxed); }
//: at_float_max | refuses | engine
kernel void k(device atomic_float* f [[buffer(0)]]) { atomic_fetch_max_explicit(f, 2.0f, memory_order_relaxed); }
//: at_half | refuses | engine
kernel void k(device atomic<half>* h [[buffer(0)]]) { atomic_fetch_add_explicit(h, 2.0h, memory_order_relaxed); }
//: at_short | refuses | engine
kernel void k(device atomic<short>* s [[buffer(0)]]) { atomic_store_explicit(s, short(2), memory_order_relaxed); }
//: at_no_order | refuses | engine
kernel void k(device atomic_int* n [[buffer(0)]]) { atomic_fetch_sub(n, 1); }
//: at_plain_uint | refuses | engine
kernel void k(device uint* n [[buffer(0)]]) { atomic_fetch_or_explicit(n, 1u, memory_order_relaxed); }
//: at_plus_eq | refuses | engine
kernel void k(device atomic_int* n [[buffer(0)]]) { n[0] += 2; }
//: at_read_plain | refuses | engine
kernel void k(device int* to [[buffer(0)]], device atomic_int* n [[buffer(1)]]) { to[0] = n[0]; }
//: at_tg_float | refuses | engine
KERNEL { threadgroup atomic_float sum; atomic_store_explicit(&sum, x[i], memory_order_relaxed); }
//: at_tg_float_parameter | refuses | engine
inline void add(threadgroup atomic_float* sum) { atomic_fetch_add_explicit(sum, 1.0f, memory_order_relaxed); }
kernel void k(threadgroup atomic_float* sum [[threadgroup(0)]]) { add(sum); }
//: at_thread_obj | refuses | address_spaces
KERNEL { atomic_int n; atomic_store_explicit(&n, 3, memory_order_relaxed); x[i] = 0; }
//: at_ulong_add | refuses | engine
kernel void k(device atomic_ulong* l [[buffer(0)]]) { atomic_fetch_add_explicit(l, 2ul, memory_order_relaxed); }
//: at_ulong_fetch_max | refuses | engine
kernel void k(device atomic_ulong* l [[buffer(0)]]) { atomic_fetch_max_explicit(l, 2ul, memory_order_relaxed); }
//: at_ulong_load | refuses | engine
kernel void k(device ulong* to [[buffer(0)]], device atomic_ulong* l [[buffer(1)]]) { to[0] = atomic_load_explicit(l, memory_order_relaxed); }
//: at_value_member | refuses | engine
kernel void k(device int* to [[buffer(0)]], device atomic_int* n [[buffer(1)]]) { to[0] = n[0].value; }
