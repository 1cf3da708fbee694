// The recurrence of linear_attention_ for one head. For each token
//
//   S = a * S;  u = b * (v - k @ S);  S = S + outer(k, u);  o = q @ S        with rule "sum": u = b * v
//
// where S is [D, V] and a has a factor per row. Tokens are computed one at a time, or in chunks of kChunkTokens, which
// read and write the state once:
//
//   P = K' @ S, R = Q' @ S            K' and Q' are k and q times the product of the decays from the start of the chunk
//   u[i] = b[i] * (v[i] - P[i] - sum over j < i of L[i][j] * u[j])
//   o[i] = R[i] + sum over j <= i of M[i][j] * u[j]
//   S = g * S + sum over j of outer(K"[j], u[j])        K" is k times the product of the decays to the end of the chunk
//
// L[i][j] and M[i][j] are the products of k[i] or q[i] with k[j], times the decays in between. Decays are only
// multiplied: differences of logarithms lose all digits after a decay of exp(-1e5).
#pragma once
#include "common.h"
#include "cpu/vector/vec.h"

namespace moe_metal {

constexpr int kChunkTokens = kVectorRegisters == 32 ? 8 : 4;

constexpr int64_t whole_vectors(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// Element (d, v) is data[d * row + v * column].
struct HeadState {
  float* data;
  int64_t row, column;
};

// Tokens of a head. Rows of q, k and a have whole_vectors(D) numbers, of which those after D are 0; rows of v, u and o
// have whole_vectors(V).
struct HeadTokens {
  int64_t D, V;
  float *q, *k, *a, *b, *v, *u, *o;

  int64_t key_length() const { return whole_vectors(D); }
  int64_t value_length() const { return whole_vectors(V); }
  HeadTokens from(int64_t t) const {
    const int64_t key = t * key_length(), value = t * value_length();
    return {D, V, q + key, k + key, a + key, b + t, v + value, u + value, o + value};
  }
};

inline float dot(const float* a, const float* b, int64_t n) {
  Vec total(0);
  for_each_vector(
      n, [&](int64_t i, auto count) { total = at::vec::fmadd(load(a + i, count), load(b + i, count), total); });
  return sum(total);
}

// ---------------------------------------------------------------------------------------------- one token

// S = a * S + outer(k, u), for N vectors of columns. These are loops because GCC 12 keeps arrays of vectors in memory
// if unrolled<>() is used.
template <int N, class Count>
inline void update_columns(const HeadState& state, const HeadTokens& token, int64_t first, const Vec (&u)[N],
                           Count count) {
  const int64_t D = token.D, step = state.row;
  const float *a = token.a, *k = token.k;
  float* row = state.data + first;
  for (int64_t d = 0; d < D; ++d, row += step) {
    const Vec factor(a[d]), key(k[d]);
    MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
      store(row + n * kLanes, at::vec::fmadd(key, u[n], factor * load(row + n * kLanes, count)), count);
    }
  }
}

// One token for N vectors of columns, of a state whose rows are contiguous.
template <int N, class Count>
inline void token_columns(const HeadState& state, const HeadTokens& token, bool delta, float qk, int64_t first,
                          Count count) {
  const int64_t D = token.D, step = state.row;
  const float *a = token.a, *k = token.k, *q = token.q, *row = state.data + first;
  Vec seen[N], output[N], u[N];
  MOE_METAL_UNROLL for (int n = 0; n < N; ++n) seen[n] = output[n] = Vec(0);
  for (int64_t d = 0; d < D; ++d, row += step) {
    const Vec key(k[d] * a[d]), query(q[d] * a[d]);
    MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
      const Vec s = load(row + n * kLanes, count);
      seen[n] = at::vec::fmadd(key, s, seen[n]);
      output[n] = at::vec::fmadd(query, s, output[n]);
    }
  }
  const Vec weight(*token.b), own(qk);
  MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
    const int64_t at = first + n * kLanes;
    const Vec v = load(token.v + at, count);
    u[n] = (delta ? v - seen[n] : v) * weight;
    store(token.u + at, u[n], count);
    store(token.o + at, at::vec::fmadd(own, u[n], output[n]), count);
  }
  update_columns(state, token, first, u, count);
}

// Calls body(integral_constant N, first, count) for tiles of N vectors of columns.
template <class Body>
inline void for_each_column_tile(int64_t V, Body&& body) {
  constexpr int kTile = kVectorRegisters / 4;
  int64_t first = 0;
  for (; first + kTile * kLanes <= V; first += kTile * kLanes)
    body(std::integral_constant<int, kTile>(), first, Whole());
  for (; first + kLanes <= V; first += kLanes) body(std::integral_constant<int, 1>(), first, Whole());
  if (first < V) body(std::integral_constant<int, 1>(), first, V - first);
}

// The same for a state whose columns are contiguous, as in Mamba 2.
inline void token_rows(const HeadState& state, const HeadTokens& token, bool delta, float qk) {
  for (int64_t v = 0; v < token.V; ++v) {
    float* column = state.data + v * state.column;
    Vec seen(0), output(0);
    for_each_vector(token.D, [&](int64_t d, auto count) {
      const Vec s = load(token.a + d, count) * load(column + d, count);
      seen = at::vec::fmadd(load(token.k + d, count), s, seen);
      output = at::vec::fmadd(load(token.q + d, count), s, output);
    });
    token.u[v] = (delta ? token.v[v] - sum(seen) : token.v[v]) * *token.b;
    token.o[v] = sum(output) + qk * token.u[v];
    for_each_vector(token.D, [&](int64_t d, auto count) {
      const Vec s = load(token.a + d, count) * load(column + d, count);
      store(column + d, at::vec::fmadd(load(token.k + d, count), Vec(token.u[v]), s), count);
    });
  }
}

inline void one_token(const HeadState& state, const HeadTokens& token, bool delta) {
  const float qk = dot(token.q, token.k, token.D);
  if (state.column != 1) return token_rows(state, token, delta, qk);
  for_each_column_tile(token.V, [&](auto n, int64_t first, auto count) {
    token_columns<decltype(n)::value>(state, token, delta, qk, first, count);
  });
}

// A logged token: the same change of the state, with a `u` that is known.
inline void replay_token(const HeadState& state, const HeadTokens& token) {
  if (state.column == 1) {
    for_each_column_tile(token.V, [&](auto n, int64_t first, auto count) {
      Vec u[decltype(n)::value];
      for (int i = 0; i < n; ++i) u[i] = load(token.u + first + i * kLanes, count);
      update_columns(state, token, first, u, count);
    });
    return;
  }
  for (int64_t v = 0; v < token.V; ++v) {
    float* column = state.data + v * state.column;
    for_each_vector(token.D, [&](int64_t d, auto count) {
      const Vec s = load(token.a + d, count) * load(column + d, count);
      store(column + d, at::vec::fmadd(load(token.k + d, count), Vec(token.u[v]), s), count);
    });
  }
}

// ---------------------------------------------------------------------------------------------- chunks

// What a chunk multiplies the state and the values by.
struct ChunkFactors {
  // In the order in which they are read: for each row of the state K' and Q' of all tokens, or K" and then g.
  static constexpr int kReads = 2 * kChunkTokens, kWrites = (kChunkTokens + kLanes) / kLanes * kLanes;
  static constexpr int kReadRows = (kReads + kLanes - 1) / kLanes * kLanes;
  float *reads, *writes;                // [whole_vectors(D), kReadRows] and [whole_vectors(D), kWrites]
  float L[kChunkTokens][kChunkTokens];  // negated
  float M[kChunkTokens][kChunkTokens];

  static int64_t floats(int64_t D) { return whole_vectors(D) * (kReadRows + kWrites); }
  explicit ChunkFactors(float* memory, int64_t D) : reads(memory), writes(memory + whole_vectors(D) * kReadRows) {}

  void compute(const HeadTokens& tokens) {
    for (int64_t d = 0; d < tokens.D; d += kLanes) products_with_decays(tokens, d);
    unrolled<kChunkTokens>([&](auto i) { products_of_tokens<i>(tokens); });
  }

 private:
  // Writes `rows` of kLanes numbers each as columns.
  template <int rows>
  static void write_transposed(const Vec (&vecs)[rows], float* to) {
    static_assert(rows % kLanes == 0);
    for (int first = 0; first < rows; first += kLanes) {
      Vec part[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) part[i] = vecs[first + i];
      transpose(part);
      for (int64_t i = 0; i < kLanes; ++i) store(to + i * rows + first, part[i], Whole());
    }
  }

  void products_with_decays(const HeadTokens& tokens, int64_t d) {
    const int64_t length = tokens.key_length();
    Vec read[kReadRows], write[kWrites];
    for (auto& each : read) each = Vec(0);
    for (auto& each : write) each = Vec(0);
    Vec decay(1);
    for (int i = 0; i < kChunkTokens; ++i) {
      decay = decay * load(tokens.a + i * length + d, Whole());
      read[i] = decay * load(tokens.k + i * length + d, Whole());
      read[kChunkTokens + i] = decay * load(tokens.q + i * length + d, Whole());
    }
    write[kChunkTokens] = decay;
    decay = Vec(1);
    for (int i = kChunkTokens - 1; i >= 0; --i) {
      write[i] = decay * load(tokens.k + i * length + d, Whole());
      decay = decay * load(tokens.a + i * length + d, Whole());
    }
    write_transposed(read, reads + d * kReadRows);
    write_transposed(write, writes + d * kWrites);
  }

  // L[i][j] and M[i][j] for all j.
  template <int i>
  void products_of_tokens(const HeadTokens& tokens) {
    const int64_t length = tokens.key_length();
    const float *of_a = tokens.a, *of_k = tokens.k, *of_q = tokens.q;
    Vec by_k[i + 1], by_q[i + 1];
    MOE_METAL_UNROLL for (int j = 0; j <= i; ++j) by_k[j] = by_q[j] = Vec(0);
    for (int64_t d = 0; d < tokens.D; d += kLanes) {
      const Vec k = load(of_k + i * length + d, Whole()), q = load(of_q + i * length + d, Whole());
      by_q[i] = at::vec::fmadd(q, k, by_q[i]);
      Vec decay(1);
      MOE_METAL_UNROLL for (int j = i - 1; j >= 0; --j) {
        decay = decay * load(of_a + (j + 1) * length + d, Whole());
        const Vec decayed = decay * load(of_k + j * length + d, Whole());
        by_k[j] = at::vec::fmadd(k, decayed, by_k[j]);
        by_q[j] = at::vec::fmadd(q, decayed, by_q[j]);
      }
    }
    MOE_METAL_UNROLL for (int j = 0; j <= i; ++j) L[i][j] = -sum(by_k[j]), M[i][j] = sum(by_q[j]);
  }
};

// A chunk for a vector of columns of a state whose rows are contiguous.
template <bool delta, class Count>
inline void chunk_columns(const HeadState& state, const HeadTokens& tokens, const ChunkFactors& factors, int64_t first,
                          Count count) {
  constexpr int C = kChunkTokens;
  const int64_t D = tokens.D, row = state.row, length = tokens.value_length();
  float* const data = state.data + first;
  Vec seen[C], output[C], u[C];
  MOE_METAL_UNROLL for (int i = 0; i < C; ++i) seen[i] = output[i] = Vec(0);
  for (int64_t d = 0; d < D; ++d) {
    const Vec s = load(data + d * row, count);
    const float* read = factors.reads + d * ChunkFactors::kReadRows;
    MOE_METAL_UNROLL for (int i = 0; i < C; ++i) {
      if constexpr (delta) seen[i] = at::vec::fmadd(Vec(read[i]), s, seen[i]);
      output[i] = at::vec::fmadd(Vec(read[C + i]), s, output[i]);
    }
  }
  MOE_METAL_UNROLL for (int i = 0; i < C; ++i) {
    Vec value = load(tokens.v + i * length + first, count);
    if constexpr (delta) {
      value = value - seen[i];
      MOE_METAL_UNROLL for (int j = 0; j < i; ++j) value = at::vec::fmadd(Vec(factors.L[i][j]), u[j], value);
    }
    u[i] = value * Vec(tokens.b[i]);
    MOE_METAL_UNROLL for (int j = 0; j <= i; ++j) { output[i] = at::vec::fmadd(Vec(factors.M[i][j]), u[j], output[i]); }
    store(tokens.o + i * length + first, output[i], count);
  }
  for (int64_t d = 0; d < D; ++d) {
    const float* write = factors.writes + d * ChunkFactors::kWrites;
    Vec s = Vec(write[C]) * load(data + d * row, count);
    MOE_METAL_UNROLL for (int i = 0; i < C; ++i) s = at::vec::fmadd(Vec(write[i]), u[i], s);
    store(data + d * row, s, count);
  }
}

inline void one_chunk(const HeadState& state, const HeadTokens& tokens, bool delta, ChunkFactors& factors) {
  factors.compute(tokens);
  for_each_vector(tokens.V, [&](int64_t first, auto count) {
    if (delta) return chunk_columns<true>(state, tokens, factors, first, count);
    chunk_columns<false>(state, tokens, factors, first, count);
  });
}

// ---------------------------------------------------------------------------------------------- copies

inline void copy_state(const HeadState& from, const HeadState& to, int64_t D, int64_t V) {
  const bool transposes = from.row == 1 ? to.column == 1 : from.column == 1 && to.row == 1;
  int64_t whole_d = 0, whole_v = 0;
  if (transposes) {
    whole_d = D / kLanes * kLanes, whole_v = V / kLanes * kLanes;
    // Vectors are contiguous in `from` along one dimension, and in `to` along the other.
    const bool by_column = from.row == 1;
    for (int64_t d = 0; d < whole_d; d += kLanes) {
      for (int64_t v = 0; v < whole_v; v += kLanes) {
        Vec tile[kLanes];
        const float* source = from.data + d * from.row + v * from.column;
        float* target = to.data + d * to.row + v * to.column;
        for (int64_t i = 0; i < kLanes; ++i) tile[i] = load(source + i * (by_column ? from.column : from.row), Whole());
        transpose(tile);
        for (int64_t i = 0; i < kLanes; ++i) store(target + i * (by_column ? to.row : to.column), tile[i], Whole());
      }
    }
  }
  for (int64_t d = 0; d < D; ++d) {
    for (int64_t v = d < whole_d ? whole_v : 0; v < V; ++v) {
      to.data[d * to.row + v * to.column] = from.data[d * from.row + v * from.column];
    }
  }
}

}  // namespace moe_metal
