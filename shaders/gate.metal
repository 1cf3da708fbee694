// The whole router: route(norm(hidden) @ router_weight^T + router_bias, ...); see reference.gate.
//
// hidden [T, H]; router_weight [E, H], T or float; norm_weight [H], router_bias, select_bias, per_expert_scale [E], or
// absent; weights float [T, K]; ids int [T, K]; logits float [T, E].
//   gate         the whole op, for few tokens and a small router. Grid: one threadgroup per token, along x.
//   gate_logits  logits for few tokens; route.metal does the rest. Grid: tiles of tokens along x, of experts along y.
//   gate_tile    logits for many tokens. Grid: tiles of 32 tokens along x, of 64 experts along y.
#include <metal_stdlib>
using namespace metal;

#include "gate.h"

namespace moe_metal {

// A simdgroup computes the dot product of one expert, or of a part of H if there are fewer experts than simdgroups.
// Then the first simdgroup routes.
template <typename T, typename W>
[[kernel]] void gate(device const T* hidden [[buffer(0)]], device const W* router_weight [[buffer(1)]],
                     device const T* norm_weight [[buffer(2)]], device const T* router_bias [[buffer(3)]],
                     device const T* select_bias [[buffer(4)]], device const T* per_expert_scale [[buffer(5)]],
                     device float* weights [[buffer(6)]], device int* ids [[buffer(7)]],
                     constant GateParams& params [[buffer(8)]], uint token [[threadgroup_position_in_grid]],
                     uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                     uint simdgroups [[simdgroups_per_threadgroup]]) {
  constexpr uint N = kGateMaxExperts / kSimdgroup;
  threadgroup float dots[kGateMaxExperts];  // [experts, parts]; parts > 1 only if experts <= 16, so they fit
  threadgroup float squares[kMaxSimdgroups];
  if (token >= params.row.count) return;
  const uint E = params.route.routing.experts, K = params.route.routing.top_k;
  const uint parts = max(1u, simdgroups / E);
  for (uint index = simdgroup; index < E * parts; index += simdgroups) {
    const uint first = index % parts * kSimdgroup + lane, step = parts * kSimdgroup;
    Dots<1, 1> sums;
    if (params.row.aligned) {
      sums = gate_dots<true, 1, 1>(hidden, router_weight, norm_weight, token, index / parts, first, step, params);
    } else {
      sums = gate_dots<false, 1, 1>(hidden, router_weight, norm_weight, token, index / parts, first, step, params);
    }
    const float dot_sum = simd_sum(sums.dots[0][0]), square_sum = simd_sum(sums.squares[0]);
    if (lane == 0) dots[index] = dot_sum;
    if (lane == 0 && index < parts) squares[index] = square_sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup > 0) return;
  const float inv_rms = gate_inv_rms(simd_sum(lane < parts ? squares[lane] : 0), params);
  float logits[N];
  for (uint n = 0; n < N; ++n) {
    const uint expert = lane + n * kSimdgroup;
    logits[n] = 0;
    if (expert >= E) continue;
    for (uint part = 0; part < parts; ++part) logits[n] += dots[expert * parts + part];
    logits[n] = logits[n] * inv_rms + gate_bias(router_bias, expert, params);
  }
  route_token<N>(logits, select_bias, per_expert_scale, weights + ulong(token) * K, ids + ulong(token) * K, lane,
                 params.route);
}

// A threadgroup computes `Tokens` tokens by `Experts` experts; its simdgroups divide H.
template <typename T, typename W, uint Tokens, uint Experts>
[[kernel]] void gate_logits(device const T* hidden [[buffer(0)]], device const W* router_weight [[buffer(1)]],
                            device const T* norm_weight [[buffer(2)]], device const T* router_bias [[buffer(3)]],
                            device float* logits [[buffer(4)]], constant GateParams& params [[buffer(5)]],
                            uint2 group [[threadgroup_position_in_grid]],
                            uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                            uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float dots[kGateSimdgroups][Tokens * Experts];
  threadgroup float squares[kGateSimdgroups][Tokens];
  const uint E = params.route.routing.experts, step = kGateSimdgroups * kSimdgroup;
  const ulong token = ulong(group.x) * Tokens;
  const uint expert = group.y * Experts;
  Dots<Tokens, Experts> sums;
  if (params.row.aligned) {
    sums =
        gate_dots<true, Tokens, Experts>(hidden, router_weight, norm_weight, token, expert, thread_index, step, params);
  } else {
    sums = gate_dots<false, Tokens, Experts>(hidden, router_weight, norm_weight, token, expert, thread_index, step,
                                             params);
  }
  for (uint t = 0; t < Tokens; ++t) {
    const float square_sum = simd_sum(sums.squares[t]);
    if (lane == 0) squares[simdgroup][t] = square_sum;
    for (uint e = 0; e < Experts; ++e) {
      const float dot_sum = simd_sum(sums.dots[t][e]);
      if (lane == 0) dots[simdgroup][t * Experts + e] = dot_sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint t = thread_index / Experts, e = thread_index % Experts;
  if (thread_index >= Tokens * Experts || token + t >= params.route.tokens || expert + e >= E) return;
  float dot_sum = 0, square_sum = 0;
  for (uint part = 0; part < kGateSimdgroups; ++part) {
    dot_sum += dots[part][thread_index];
    square_sum += squares[part][t];
  }
  logits[(token + t) * E + expert + e] =
      dot_sum * gate_inv_rms(square_sum, params) + gate_bias(router_bias, expert + e, params);
}

// Tiles of x and of the router are copied to threadgroup memory, kTileStep columns of H at a time, while the next are
// being loaded. Rows are padded by one chunk, so that reads of 16 rows at once use different banks.
MOE_METAL_CONSTANT uint kTileStep = 32;
MOE_METAL_CONSTANT uint kTileChunks = kTileStep / 4;
MOE_METAL_CONSTANT uint kTileStride = kTileChunks + 1;
MOE_METAL_CONSTANT uint kDown = kGateTileTokens / 4, kAcross = kGateTileExperts / 4;  // threads of a tile

// The chunks of a tile that one thread loads. Chunks past the end of H are 0.
template <uint Rows>
struct TileLoads {
  float4 chunks[Rows * kTileChunks / kGateTileThreads];
};

template <uint Rows, bool aligned, typename T>
TileLoads<Rows> load_tile(device const T* rows, ulong first_row, ulong last_row, uint h, uint thread_index, uint H) {
  TileLoads<Rows> loads;
  for (uint n = 0; n < Rows * kTileChunks / kGateTileThreads; ++n) {
    const uint chunk = thread_index + n * kGateTileThreads, i = h + chunk % kTileChunks * 4;
    device const T* row = rows + min(first_row + chunk / kTileChunks, last_row) * H;
    const float4 v = load4<aligned>(row, aligned ? min(i, H - 4) : i, H);  // no branch between the loads
    loads.chunks[n] = i < H ? v : float4(0);
  }
  return loads;
}

template <uint Rows>
void store_tile(TileLoads<Rows> loads, threadgroup float4* tile, uint thread_index) {
  for (uint n = 0; n < Rows * kTileChunks / kGateTileThreads; ++n) {
    const uint chunk = thread_index + n * kGateTileThreads;
    tile[chunk / kTileChunks * kTileStride + chunk % kTileChunks] = loads.chunks[n];
  }
}

template <bool aligned, typename T, typename W>
void tile_logits(device const T* hidden, device const W* router_weight, device const T* norm_weight,
                 device const T* router_bias, device float* logits, GateParams params, uint2 group, uint thread_index,
                 threadgroup float4* x_tile, threadgroup float4* w_tile, threadgroup float* inv_rms) {
  const uint E = params.route.routing.experts, H = params.row.length;
  const ulong token = ulong(group.x) * kGateTileTokens, last_token = params.route.tokens - 1;
  const uint expert = group.y * kGateTileExperts, own_h = thread_index % kTileChunks * 4;
  const uint own_token = thread_index / kAcross, own_expert = thread_index % kAcross;
  float dots[4][4] = {}, squares[2] = {};
  auto x = load_tile<kGateTileTokens, aligned>(hidden, token, last_token, 0, thread_index, H);
  auto w = load_tile<kGateTileExperts, aligned>(router_weight, expert, E - 1, 0, thread_index, H);
  float4 weight = own_h < H ? norm_weight4(norm_weight, own_h, params) : float4(0);
  for (uint h = 0; h < H; h += kTileStep) {
    for (uint n = 0; n < 2; ++n) {
      squares[n] += dot(x.chunks[n], x.chunks[n]);
      x.chunks[n] *= weight;
    }
    store_tile(x, x_tile, thread_index);
    store_tile(w, w_tile, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint next = h + kTileStep;
    x = load_tile<kGateTileTokens, aligned>(hidden, token, last_token, next, thread_index, H);
    w = load_tile<kGateTileExperts, aligned>(router_weight, expert, E - 1, next, thread_index, H);
    weight = next + own_h < H ? norm_weight4(norm_weight, next + own_h, params) : float4(0);
    for (uint chunk = 0; chunk < kTileChunks; ++chunk) {
      float4 a[4], b[4];
      for (uint n = 0; n < 4; ++n) a[n] = x_tile[(own_token + kDown * n) * kTileStride + chunk];
      for (uint n = 0; n < 4; ++n) b[n] = w_tile[(own_expert + kAcross * n) * kTileStride + chunk];
      for (uint t = 0; t < 4; ++t) {
        for (uint e = 0; e < 4; ++e) dots[t][e] += dot(a[t], b[e]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (uint n = 0; n < 2; ++n) {  // eight neighbouring lanes hold one row of x
    for (uint apart = 1; apart < kTileChunks; apart *= 2) squares[n] += simd_shuffle_xor(squares[n], ushort(apart));
    const uint chunk = thread_index + n * kGateTileThreads;
    if (chunk % kTileChunks == 0) inv_rms[chunk / kTileChunks] = gate_inv_rms(squares[n], params);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint t = 0; t < 4; ++t) {
    for (uint e = 0; e < 4; ++e) {
      const uint row = own_token + kDown * t, column = expert + own_expert + kAcross * e;
      if (token + row > last_token || column >= E) continue;
      logits[(token + row) * E + column] = dots[t][e] * inv_rms[row] + gate_bias(router_bias, column, params);
    }
  }
}

template <typename T, typename W>
[[kernel]] void gate_tile(device const T* hidden [[buffer(0)]], device const W* router_weight [[buffer(1)]],
                          device const T* norm_weight [[buffer(2)]], device const T* router_bias [[buffer(3)]],
                          device float* logits [[buffer(4)]], constant GateParams& params [[buffer(5)]],
                          uint2 group [[threadgroup_position_in_grid]],
                          uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float4 x_tile[kGateTileTokens * kTileStride];
  threadgroup float4 w_tile[kGateTileExperts * kTileStride];
  threadgroup float inv_rms[kGateTileTokens];
  if (params.row.aligned) {
    tile_logits<true>(hidden, router_weight, norm_weight, router_bias, logits, params, group, thread_index, x_tile,
                      w_tile, inv_rms);
  } else {
    tile_logits<false>(hidden, router_weight, norm_weight, router_bias, logits, params, group, thread_index, x_tile,
                       w_tile, inv_rms);
  }
}

}  // namespace moe_metal

// clang-format off
#define for_both_dtypes(instantiate)                                \
  if_float(instantiate(float, float))                               \
  if_half(instantiate(half, half) instantiate(half, float))         \
  if_bfloat(instantiate(bfloat, bfloat) instantiate(bfloat, float))
#define instantiate_gate(T, W) instantiate_kernel("gate_" #T "_" #W, moe_metal::gate<T, W>)
#define instantiate_one(T, W) instantiate_kernel("gate_logits_1_" #T "_" #W, moe_metal::gate_logits<T, W, 1, 2>)
#define instantiate_four(T, W) instantiate_kernel("gate_logits_4_" #T "_" #W, moe_metal::gate_logits<T, W, 4, 4>)
#define instantiate_tile(T, W) instantiate_kernel("gate_tile_" #T "_" #W, moe_metal::gate_tile<T, W>)

#if in_part(gate)
for_both_dtypes(instantiate_gate)
#endif
#if in_part(logits_1)
for_both_dtypes(instantiate_one)
#endif
#if in_part(logits_4)
for_both_dtypes(instantiate_four)
#endif
#if in_part(tile)
for_both_dtypes(instantiate_tile)
#endif
