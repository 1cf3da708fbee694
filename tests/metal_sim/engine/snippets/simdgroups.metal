//: sd_and_float | refuses | engine
KERNEL { x[i] = simd_or(x[i]); }
//: sd_xor_half | refuses | engine
KERNEL { x[i] = simd_and(half(x[i])); }
//: sd_ballot_cast | refuses | engine
KERNEL { ulong lanes = simd_ballot(x[i] > 0); x[i] = float(lanes); }
//: sd_ballot_uint | refuses | engine
KERNEL { x[i] = float(uint(simd_ballot(x[i] > 0))); }
//: sd_ballot | ok
KERNEL { x[i] = float(popcount(ulong(simd_vote::vote_t(simd_ballot(x[i] > 0))))); }
//: sd_broadcast_ptr | refuses | engine
KERNEL { device float* first = simd_broadcast(x + i, 3); *first = 1; }
//: sd_divergent_broadcast_lane | ? | accepted
KERNEL { ushort lane = ushort(x[0]); x[i] = simd_broadcast(x[i], lane); }
//: sd_max_mixed | refuses | engine
KERNEL { x[i] = simd_min(x[i], 2.0f); }
//: sd_max_unscoped_enum | ? | engine
enum Mode : uint { add, multiply };
KERNEL { Mode m = i ? add : multiply; x[i] = simd_max(m); }
//: sd_sum_enum | refuses | engine
enum class Mode : uint { add, multiply };
KERNEL { x[i] = uint(simd_min(i ? Mode::add : Mode::multiply)); }
//: sd_prefix_bool | refuses | engine
KERNEL { x[i] = simd_prefix_inclusive_sum(x[i] > 0); }
//: sd_prefix_vec | ok
KERNEL { x[i] = simd_prefix_inclusive_sum(float2(x[i], 1)).y; }
//: sd_shuffle_and_fill | ok
KERNEL { x[i] = simd_shuffle_and_fill_down(x[i], 2.0f, 3) + simd_shuffle_and_fill_up(x[i], x[0], 1, 8); }
//: sd_shuffle_bool | ? | engine
KERNEL { x[i] = simd_shuffle_xor(x[i] > 0, 1) ? 1 : 0; }
//: sd_shuffle_struct | refuses | engine
struct Pair { float a, b; };
KERNEL { Pair p = {x[i], 1}; x[i] = simd_shuffle_xor(p, 1).a; }
//: sd_shuffle_two_types | ? | accepted
KERNEL { x[i] = simd_shuffle_down<float>(i, 2); }
//: sd_shuffle_ulong | refuses | engine
KERNEL { x[i] = simd_shuffle_up(ulong(i), 2); }
//: sd_sum_bfloat | refuses | engine
KERNEL { x[i] = float(simd_max(bfloat(x[i]))); }
//: sd_sum_bool | refuses | engine
KERNEL { x[i] = simd_max(x[i] > 0); }
//: sd_sum_float3 | ok
KERNEL { x[i] = simd_max(float3(x[i], 1, 2)).z + simd_sum(ushort(i)) + simd_sum(half(1)); }
//: sd_sum_long | refuses | engine
KERNEL { x[i] = simd_product(long(i)); }
//: sd_sum_sizet | refuses | engine
KERNEL { size_t n = i; x[i] = simd_min(n); }
//: sd_sum_ulong | refuses | engine
KERNEL { x[i] = simd_max(ulong(i)); }
//: sd_sum_struct | refuses | engine
struct Pair { float a, b; };
KERNEL { Pair p = {x[i], 1}; x[i] = simd_sum(p).b; }
