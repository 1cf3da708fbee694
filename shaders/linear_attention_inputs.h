// What the tokens of linear_attention_ need, in threadgroup memory: their keys, queries and values after convolution,
// mask and norm, and the factors of the state.
//
// A token has `token_floats`: its key, its query (key_rows each), value and output (tile_columns each), with decays per
// channel its decays (key_rows), and with a gate of this kernel its activated gate (tile_columns). Beyond D and V keys,
// queries and values are 0. `gates` has three numbers of each token: decay, beta (or the step), and the product of
// query and key.
#pragma once
#include "linear_attention.h"

namespace moe_metal {

// ------------------------------------------------------------------------------------------ convolution

// The part of the channels that an element of a token is in. The gate is not convolved.
enum class Part : uint { key, query, value, gate };

// A channel's inputs: element s >= 0 is that of token s of the sequence, and s < 0 counts back from the end of `past`.
template <typename T>
struct Channel {
  device const T* tokens;
  device const T* past;
  ulong row, past_row, index;
  Part part;
  bool exists, has_past;

  T raw(int s) const thread {
    if (s < 0 && !has_past) return T(0);
    return raw_or_first(s);
  }
  // The same without a condition around the load. If there is no past, that of the first token.
  T raw_or_first(int s) const thread {
    device const T* from = tokens;
    ulong step = row;
    if (s < 0 && has_past) {
      from = past;
      step = past_row;
    }
    return from[long(s < 0 && !has_past ? 0 : s) * long(step)];
  }
  float input(int s) const thread { return float(raw(s)); }
};

// The number of channels that are convolved.
inline uint channels_of(constant LinearAttentionParams& params) { return 2 * params.key_rows + params.tile_columns; }

// The channel of element i of a token, or from channels_of() on its gate.
template <typename T>
Channel<T> channel_of(thread const LinearAttentionTensors<T>& tensors, uint i, thread const LinearAttentionWork& work,
                      constant LinearAttentionParams& params) {
  const uint keys = params.key_rows, columns_at = 2 * keys, gates_at = channels_of(params);
  const bool queries_first = params.order == ChannelOrder::qkv;
  const ulong before_keys = ulong(params.J) * params.D, values = ulong(params.A) * params.V;
  Channel<T> channel;
  channel.part = i < keys ? Part::key : i < columns_at ? Part::query : i < gates_at ? Part::value : Part::gate;
  if (channel.part == Part::key) {
    channel.exists = i < params.D;
    channel.tokens = tensors.k + token_offset(params.k, work, 0) + i * params.k.element;
    channel.row = params.k.row;
    channel.index = (queries_first ? before_keys : values) + ulong(work.key_head) * params.D + i;
  } else if (channel.part == Part::query) {
    const uint d = i - keys;
    channel.exists = d < params.D;
    channel.tokens = tensors.q + token_offset(params.q, work, 0) + d * params.q.element;
    channel.row = params.q.row;
    channel.index = (queries_first ? 0 : values + before_keys) + ulong(work.key_head) * params.D + d;
  } else if (channel.part == Part::value) {
    const uint column = i - columns_at, at = work.first_column + column;
    channel.exists = column < work.columns;
    channel.tokens = tensors.v + token_offset(params.v, work, 0) + at * params.v.element;
    channel.row = params.v.row;
    channel.index = (queries_first ? 2 * before_keys : 0) + ulong(work.head) * params.V + at;
  } else {
    const uint column = i - gates_at, at = work.first_column + column;
    channel.exists = column < work.columns;
    channel.tokens = tensors.gate + token_offset(params.gate, work, 0) + at * params.gate.element;
    channel.row = params.gate.row;
    channel.index = 0;
  }
  // Row W - 1 of `past` would be the first token.
  channel.has_past = params.has_past;
  channel.past = tensors.past + work.sequence * params.past.sequence + ulong(params.W - 1) * params.past.row +
                 channel.index * params.past.element;
  channel.past_row = params.past.row;
  return channel;
}

// Up to four taps, and the inputs of the last four tokens, so that each input is loaded once. Missing taps are the
// first.
struct Window {
  float4 taps, inputs;
  int missing;

  float sum(float next) thread {
    inputs = float4(inputs.yzw, next);
    float sum = 0;
#pragma unroll
    for (int n = 0; n < kVectorWidth; ++n) sum = n < missing ? 0 : fma(taps[n], inputs[n], sum);
    return sum;
  }
};

// Loads are not conditional, so that they do not wait for each other: missing ones are those of another element.
template <typename T>
void load_taps(thread Window& window, device const T* weights, constant LinearAttentionParams& params) {
  T taps[kVectorWidth];
#pragma unroll
  for (int n = 0; n < kVectorWidth; ++n) taps[n] = weights[max(n - window.missing, 0)];
#pragma unroll
  for (int n = 0; n < kVectorWidth; ++n) window.taps[n] = float(taps[n]);
}

// A channel's window before token `first`, and its inputs of `count` tokens from there on, as they are.
template <typename T>
Window load_inputs(thread const LinearAttentionTensors<T>& tensors, thread const Channel<T>& channel, uint first,
                   uint count, bool has_window, threadgroup float* to, constant LinearAttentionParams& params) {
  T before[kVectorWidth], inputs[kStateTokens];
  Window window;
  window.missing = kVectorWidth - int(params.W);
  if (has_window) {
#pragma unroll
    for (int n = 1; n < kVectorWidth; ++n)
      before[n] = channel.raw_or_first(int(first) + max(n, window.missing + 1) - kVectorWidth);
  }
  device const T* next = channel.tokens + first * channel.row;
#pragma unroll
  for (uint t = 0; t < kStateTokens; ++t) {
    if (t < count) inputs[t] = next[t * channel.row];
  }
  if (has_window) {
    const ulong index = channel.index * params.W;
    if (params.conv_weight == ParameterType::float32) {
      load_taps(window, reinterpret_cast<device const float*>(tensors.conv_weight) + index, params);
    } else {
      load_taps(window, tensors.conv_weight + index, params);
    }
#pragma unroll
    for (int n = 1; n < kVectorWidth; ++n) {
      const bool exists = n > window.missing && (int(first) + n >= kVectorWidth || channel.has_past);
      window.inputs[n] = exists ? float(before[n]) : 0;
    }
  }
#pragma unroll
  for (uint t = 0; t < kStateTokens; ++t) {
    if (t < count) to[t * params.token_floats] = float(inputs[t]);
  }
  return window;
}

// The same for any number of taps.
template <typename T>
float sum_of_taps(thread const LinearAttentionTensors<T>& tensors, thread const Channel<T>& channel, int token,
                  constant LinearAttentionParams& params) {
  float sum = 0;
  for (uint i = 0; i < params.W; ++i) {
    const float tap = load(tensors.conv_weight, channel.index * params.W + i, params.conv_weight);
    sum = fma(tap, channel.input(token - int(params.W - 1 - i)), sum);
  }
  return sum;
}

// Keys, queries, values and gates of `count` tokens from `first` on. `few_taps`: at most four.
template <bool few_taps, typename T>
void load_channels(thread const LinearAttentionTensors<T>& tensors, uint first, uint count, threadgroup float* memory,
                   thread const LinearAttentionWork& work, LinearAttentionThread at,
                   constant LinearAttentionParams& params) {
  const uint channels = channels_of(params), all = channels + (gates_here(params) ? params.tile_columns : 0);
  for (uint i = at.index; i < all; i += at.threads) {
    const Channel<T> channel = channel_of(tensors, i, work, params);
    threadgroup float* to = memory + (i < channels ? i : params.token_floats - params.tile_columns + (i - channels));
    if (!channel.exists) {
      for (uint t = 0; t < count; ++t) to[t * params.token_floats] = 0;
      continue;
    }
    const bool is_gate = channel.part == Part::gate;
    const bool is_convolved = !is_gate && params.conv_weight != ParameterType::absent;
    const bool is_masked = params.has_mask && (channel.part == Part::key || channel.part == Part::value);
    float bias = 0;
    Window window = load_inputs(tensors, channel, first, count, is_convolved && few_taps, to, params);
    if (is_convolved && params.conv_bias != ParameterType::absent) {
      bias = load(tensors.conv_bias, channel.index, params.conv_bias);
    }
    for (uint t = 0; t < count; ++t, to += params.token_floats) {
      float x = *to;
      if (is_convolved) {
        x = few_taps ? window.sum(x) : sum_of_taps(tensors, channel, int(first + t), params);
        x = pointwise(x + bias, params.activation);
      }
      if (is_gate) x = pointwise(x, params.gate_activation);
      if (is_masked && !tensors.mask[mask_offset(work, first + t, params)]) x = 0;
      *to = x;
    }
  }
}

// ------------------------------------------------------------------------------------------ factors

// The step of a head or a channel, and the factor of its state.
inline float step_of(float raw, constant LinearAttentionParams& params) {
  const float step = softplus(raw);
  return step < params.step_min ? params.step_min : step > params.step_max ? params.step_max : step;
}

inline float decay_of(float raw, float rate, constant LinearAttentionParams& params) {
  if (params.decay_kind == DecayKind::sigmoid) return exp(params.lower_bound * sigmoid(rate * raw));
  return exp(-rate * step_of(raw, params));
}

// The raw decay of a head, or of its channel d, with its bias.
template <typename T>
float raw_decay(thread const LinearAttentionTensors<T>& tensors, uint token, uint d,
                thread const LinearAttentionWork& work, constant LinearAttentionParams& params) {
  const ulong offset = token_offset(params.decay, work, token) + d * params.decay.element;
  const float raw = load(tensors.decay, offset, params.decay_type);
  if (params.decay_bias == ParameterType::absent) return raw;
  const ulong index = params.decays_channels ? ulong(work.head) * params.D + d : work.head;
  return raw + load(tensors.decay_bias, index, params.decay_bias);
}

// What a factor is made of, each loaded by a lane of its own.
enum class FactorPart : uint { decay, bias, beta, rate };
MOE_METAL_CONSTANT uint kFactorParts = 4;

// The decay of a head (or of its first channel) at a token, its bias, beta, or the logarithm of the rate.
template <typename T>
float factor_part(thread const LinearAttentionTensors<T>& tensors, FactorPart part, uint token,
                  thread const LinearAttentionWork& work, constant LinearAttentionParams& params) {
  device const T* from = tensors.decay;
  ParameterType type = params.decay_type;
  ulong index = token_offset(params.decay, work, token);
  if (part == FactorPart::bias) {
    from = tensors.decay_bias;
    type = params.decay_bias;
    index = params.decays_channels ? ulong(work.head) * params.D : work.head;
  } else if (part == FactorPart::beta) {
    from = tensors.beta;
    type = params.rule == Rule::delta ? params.beta_type : ParameterType::absent;
    index = token_offset(params.beta, work, token);
  } else if (part == FactorPart::rate) {
    from = tensors.log_rate;
    type = params.log_rate;
    index = work.head;
  }
  return type == ParameterType::absent ? 0 : load(from, index, type);
}

// Decays and betas of `count` tokens from `first` on.
template <typename T>
void load_factors(thread const LinearAttentionTensors<T>& tensors, uint first, uint count, threadgroup float* memory,
                  threadgroup float* gates, thread const LinearAttentionWork& work, LinearAttentionThread at,
                  constant LinearAttentionParams& params) {
  const bool has_rate = params.log_rate != ParameterType::absent;
  if (at.simdgroup + 1 == at.simdgroups) {  // its channels are the least work
    const uint t = at.lane / kFactorParts;
    const float part =
        factor_part(tensors, FactorPart(at.lane % kFactorParts), first + min(t, count - 1), work, params);
    const float raw = part + simd_shuffle_xor(part, 1);  // of the first two lanes
    const float beta = simd_shuffle_xor(part, 2);
    const float rate = has_rate ? exp(simd_shuffle_xor(part, 3)) : 1;
    if (at.lane % kFactorParts == 0 && t < count) {
      gates[t] = decay_of(raw, rate, params);  // not used with decays per channel
      gates[kStateTokens + t] = params.rule == Rule::delta ? params.beta_scale * sigmoid(beta) : step_of(raw, params);
    }
  }
  if (!params.decays_channels) return;
  const float rate = has_rate ? exp(load(tensors.log_rate, work.head, params.log_rate)) : 1;
  threadgroup float* decays = memory + 2 * (params.key_rows + params.tile_columns);
  for (uint i = at.index; i < count * params.key_rows; i += at.threads) {
    const uint t = i / params.key_rows, d = i % params.key_rows;
    const bool exists = d < params.D;
    decays[t * params.token_floats + d] =
        exists ? decay_of(raw_decay(tensors, first + t, d, work, params), rate, params) : 0;
  }
}

// ------------------------------------------------------------------------------------------ norms

// Norms keys and queries, scales queries, and multiplies both. A simdgroup has a token.
inline void norm_keys(uint count, threadgroup float* memory, threadgroup float* gates, LinearAttentionThread at,
                      constant LinearAttentionParams& params) {
  for (uint t = at.simdgroup; t < count; t += at.simdgroups) {
    threadgroup float* key = memory + t * params.token_floats;
    threadgroup float* query = key + params.key_rows;
    float2 factors = 1;
    if (params.qk_eps >= 0) {
      float2 squares = 0;
      for (uint d = at.lane; d < params.D; d += kSimdgroup) squares += float2(key[d] * key[d], query[d] * query[d]);
      factors = rsqrt(simd_sum(squares) + params.qk_eps);
    }
    float product = 0;
    for (uint d = at.lane; d < params.D; d += kSimdgroup) {
      key[d] *= factors.x;
      query[d] *= factors.y * params.scale;
      product = fma(key[d], query[d], product);
    }
    product = simd_sum(product);
    if (at.lane == 0) gates[2 * kStateTokens + t] = product;
  }
}

// Keys, queries, values and factors of `count` tokens from `first` on.
template <typename T>
void load_tokens(thread const LinearAttentionTensors<T>& tensors, uint first, uint count, threadgroup float* memory,
                 threadgroup float* gates, thread const LinearAttentionWork& work, LinearAttentionThread at,
                 constant LinearAttentionParams& params) {
  if (params.W <= uint(kVectorWidth)) {
    load_channels<true>(tensors, first, count, memory, work, at, params);
  } else {
    load_channels<false>(tensors, first, count, memory, work, at, params);
  }
  load_factors(tensors, first, count, memory, gates, work, at, params);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  norm_keys(count, memory, gates, at, params);
}

// Keys, updates (in place of values) and decays of `count` tokens from rows of the log.
inline void load_log(device const float* log, uint first, uint count, threadgroup float* memory,
                     threadgroup float* gates, thread const LinearAttentionWork& work, LinearAttentionThread at,
                     constant LinearAttentionParams& params) {
  const uint keys = params.key_rows, columns = params.tile_columns;
  const uint decays_at = 2 * (keys + columns), decays = params.decays_channels ? keys : 1;
  for (uint i = at.index; i < count * (keys + columns + decays); i += at.threads) {
    const uint t = i / (keys + columns + decays), n = i % (keys + columns + decays);
    device const float* row = log_row(log, work, first + t, params);
    threadgroup float* token = memory + t * params.token_floats;
    if (n < keys) {
      const ulong index = log_keys(params) + ulong(work.key_head) * params.D + n;
      token[n] = n < params.D ? row[index * params.log.element] : 0;
    } else if (n < keys + columns) {
      const uint column = n - keys;
      const ulong index = ulong(work.head) * params.V + work.first_column + column;
      token[keys + n] = column < work.columns ? row[index * params.log.element] : 0;
    } else {
      const uint d = n - keys - columns;
      const ulong index = log_decays(params) + (params.decays_channels ? ulong(work.head) * params.D + d : work.head);
      const float decay = d < params.D ? row[index * params.log.element] : 0;
      if (params.decays_channels) token[decays_at + d] = decay;
      if (d == 0) gates[t] = decay;
    }
  }
}

}  // namespace moe_metal
