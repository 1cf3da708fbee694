// `experts` in bfloat16 with several tokens per expert, on processors with AMX: tiles of 16 x 32 weights.
//
//   c[r][n] = sum over k of weight(r, k) * token[k][n]     16 rows, 16 tokens, k in steps of 32
//
// Weights are the left operand, which AMX reads as it lies in memory; what it wants rearranged (pairs of k side by
// side, token by token) is the right one, and tokens are few. The result comes out with the tokens side by side, so two
// rows of `inner` interleave into just that arrangement for pass 2. `inner` is rounded to bfloat16; sums are float.
// Matrices that are not row-major, or whose sizes are no multiples of 32, are rearranged kRows at a time in cache.
#pragma once
#if defined(CPU_CAPABILITY_AVX512) && defined(__linux__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "experts_parts.h"
#include "pages.h"

namespace moe_metal {

constexpr int64_t kTile = 16;   // rows of a weight tile, and tokens of a token tile
constexpr int64_t kDepth = 32;  // bfloat16 of k in a tile
constexpr int64_t kTileSize = kTile * kDepth;
static_assert(kRows == 2 * kTile && kRows == kDepth && kLanes == kTile);

// Whether the processor has AMX for bfloat16 and Linux lets this process use it.
inline bool tiles_available() {
  static const bool available = [] {
    unsigned a, b, c, d;
    constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (kBf16 | kTiles)) != (kBf16 | kTiles)) return false;
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return available;
}

#define MOE_METAL_AMX [[gnu::target("amx-tile,amx-bf16")]]

// All eight tiles as 16 rows of 64 bytes, for the life of this object and on this thread.
class TileShapes {
 public:
  MOE_METAL_AMX TileShapes() {
    _tile_storeconfig(&before_);
    _tile_loadconfig(&kOurs);
  }
  MOE_METAL_AMX ~TileShapes() { _tile_loadconfig(&before_); }
  TileShapes(const TileShapes&) = delete;

 private:
  struct alignas(64) Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  // In memory, since compilers see just the first words that the instruction reads.
  static constexpr Config kOurs = {
      1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {kTile, kTile, kTile, kTile, kTile, kTile, kTile, kTile}};
  Config before_;
};

// 16 rows of a weight matrix: row r's k block b stands at data + r * row + b * block.
struct WeightTiles {
  const at::BFloat16* data;
  int64_t row, block;
};

// c[g] = a strip of weights times token tile g, of which tokens + g * size is the first block. One strip at a time: its
// 16 rows are as many streams as memory serves well (32 were 5 % slower).
template <int G>
MOE_METAL_AMX inline void multiply_tiles(const WeightTiles& weights, const at::BFloat16* tokens, int64_t size,
                                         int64_t blocks, float (*c)[kTile][kTile]) {
  static_assert(1 <= G && G <= 4);
  _tile_zero(0);
  if constexpr (G > 1) _tile_zero(1);
  if constexpr (G > 2) _tile_zero(2);
  if constexpr (G > 3) _tile_zero(3);
  for (int64_t b = 0; b < blocks; ++b) {
    const at::BFloat16* here = tokens + b * kTileSize;
    _tile_loadd(4, weights.data + b * weights.block, weights.row * 2);
    _tile_loadd(5, here, 64);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (G > 1) {
      _tile_loadd(6, here + size, 64);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (G > 2) {
      _tile_loadd(7, here + 2 * size, 64);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (G > 3) {
      _tile_loadd(5, here + 3 * size, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, c[0], 64);
  if constexpr (G > 1) _tile_stored(1, c[1], 64);
  if constexpr (G > 2) _tile_stored(2, c[2], 64);
  if constexpr (G > 3) _tile_stored(3, c[3], 64);
}

// 16 x 16 words of 32 bits, rows to columns.
inline void transpose(__m512i (&m)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(m[i], m[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(m[i], m[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    m[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    m[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    m[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    m[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int half = 0; half < 16; half += 8) {
    for (int i = 0; i < 4; ++i) {
      t[half + i] = _mm512_shuffle_i32x4(m[half + i], m[half + i + 4], 0x88);
      t[half + i + 4] = _mm512_shuffle_i32x4(m[half + i], m[half + i + 4], 0xdd);
    }
  }
  for (int i = 0; i < 8; ++i) {
    m[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    m[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

// `count` bfloat16, and zeros up to a tile's depth.
inline __m512i load_part(const at::BFloat16* from, int64_t count) {
  return _mm512_maskz_loadu_epi16(count >= kDepth ? ~0u : (1u << count) - 1, from);
}

// Rows to left operands, where AMX cannot read them as they lie: tiles of 16 rows side by side, filled up with zeros.
inline void pack_rows(const Matrix<at::BFloat16>& weight, at::BFloat16* to) {
  __m512i tile[kTile];
  const auto load_row = [&](int64_t r, int64_t k) {
    return r < weight.rows ? load_part(weight.data + r * weight.row + k, weight.columns - k) : _mm512_setzero_si512();
  };
  // Rows r = 0 .. 15 of column k, in the low halves of words. Rows may lie side by side or be every other one.
  const auto load_column = [&](int64_t k) {
    if (weight.rows <= 0 || k >= weight.columns) return _mm512_setzero_si512();
    const auto* from = weight.data + k * weight.column;
    if (weight.row == 1) return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16((1u << weight.rows) - 1, from));
    return _mm512_and_si512(load_part(from, 2 * weight.rows - 1), _mm512_set1_epi32(0xffff));
  };
  for (int64_t k = 0; k < weight.columns; k += kDepth, to += kTileSize) {
    if (weight.column == 1) {
      for (int64_t r = 0; r < kTile; ++r) tile[r] = load_row(r, k);
    } else if (weight.row == 1 || weight.row == 2) {
      for (int64_t p = 0; p < kTile; ++p) {
        tile[p] = _mm512_or_si512(load_column(k + 2 * p), _mm512_slli_epi32(load_column(k + 2 * p + 1), 16));
      }
      transpose(tile);
    } else {
      alignas(64) at::BFloat16 gathered[kTile][kDepth] = {};
      for (int64_t r = 0; r < weight.rows; ++r) {
        const auto* row = weight.data + r * weight.row;
        for (int64_t c = k; c < std::min(k + kDepth, weight.columns); ++c) gathered[r][c - k] = row[c * weight.column];
      }
      for (int64_t r = 0; r < kTile; ++r) tile[r] = _mm512_load_si512(gathered[r]);
    }
    for (int64_t r = 0; r < kTile; ++r) _mm512_storeu_si512(to + r * kDepth, tile[r]);
  }
}

// Two strips of 16 rows as left operands. Each matrix has at most 16 rows; a strip past the last row is all zeros.
class Strips {
 public:
  explicit Strips(int64_t columns) : blocks_(at::divup(columns, kDepth)) {}
  int64_t blocks() const { return blocks_; }

  void read(int which, const Matrix<at::BFloat16>& weight) {
    if (weight.column == 1 && weight.rows == kTile && weight.columns % kDepth == 0) {
      tiles[which] = {weight.data, weight.row, kDepth};
      return;
    }
    panels_.resize(2 * blocks_ * kTileSize);
    at::BFloat16* panel = panels_.data() + which * blocks_ * kTileSize;
    pack_rows(weight, panel);
    tiles[which] = {panel, kDepth, kTileSize};
  }
  WeightTiles tiles[2];

 private:
  int64_t blocks_;
  std::vector<at::BFloat16> panels_;
};

// The slots of each expert in groups of 16, and what the groups bring to each pass, as right operands.
struct TokenTiles {
  std::vector<int64_t> first;  // of each expert's groups, and one last end
  int64_t x_size, inner_size;  // of a group
  Tensor x, inner;

  TokenTiles(const Experts& call, const Slots& slots) : first(1, 0) {
    for (int64_t group = 0; group < slots.used(); ++group) {
      first.push_back(first.back() + at::divup(slots.begin[group + 1] - slots.begin[group], kTile));
    }
    x_size = at::divup(call.H, kDepth) * kTileSize;
    inner_size = at::divup(call.I, kDepth) * kTileSize;
    x = at::empty({first.back(), x_size}, call.x.options());
    inner = at::empty({first.back(), inner_size}, call.x.options());
    ask_for_huge_pages(x);
    ask_for_huge_pages(inner);
  }
};

// The tokens of a group as a right operand: pairs of k side by side, token by token. Zeros fill it up.
inline void pack_tokens(const Experts& call, const int64_t* slots, int64_t count, at::BFloat16* to) {
  const at::BFloat16* x = call.x.data_ptr<at::BFloat16>();
  for (int64_t k = 0; k < call.H; k += kDepth, to += kTileSize) {
    __m512i tile[kTile];
    for (int64_t n = 0; n < kTile; ++n) {
      tile[n] = n < count ? load_part(x + slots[n] / call.K * call.H + k, call.H - k) : _mm512_setzero_si512();
    }
    transpose(tile);
    for (int64_t p = 0; p < kTile; ++p) _mm512_storeu_si512(to + p * kDepth, tile[p]);
  }
}

inline void pack_all_tokens(const Experts& call, const Slots& slots, const TokenTiles& tokens) {
  share(slots.used(), [&](auto take) {
    for (int64_t group = take(); group < slots.used(); group = take()) {
      at::BFloat16* to = tokens.x.mutable_data_ptr<at::BFloat16>() + tokens.first[group] * tokens.x_size;
      for (int64_t at = slots.begin[group]; at < slots.begin[group + 1]; at += kTile, to += tokens.x_size) {
        pack_tokens(call, slots.order.data() + at, slots.begin[group + 1] - at, to);
      }
    }
  });
}

// use(group, c0, c1) for each group of tokens: its products with the two strips.
template <class Use>
inline void multiply_groups(const Strips& strips, const at::BFloat16* tokens, int64_t size, int64_t groups, Use&& use) {
  alignas(64) float c[2][4][kTile][kTile];
  for (int64_t g = 0; g < groups; g += 4) {
    const int64_t count = std::min<int64_t>(4, groups - g);
    constexpr decltype(&multiply_tiles<1>) kMultiply[] = {multiply_tiles<1>, multiply_tiles<2>, multiply_tiles<3>,
                                                          multiply_tiles<4>};
    for (int w = 0; w < 2; ++w) kMultiply[count - 1](strips.tiles[w], tokens + g * size, size, strips.blocks(), c[w]);
    for (int64_t i = 0; i < count; ++i) use(g + i, c[0][i], c[1][i]);
  }
}

// Two rows of floats as pairs of bfloat16, rounded to nearest even; NaN stays NaN.
inline __m512i pairs(const Vec& even, const Vec& odd) {
  const auto rounded = [](__m512 x) {
    const __m512i bits = _mm512_castps_si512(x),
                  last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff)));
    return _mm512_mask_mov_epi32(sum, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
  };
  const __m512i high = _mm512_and_si512(rounded(odd), _mm512_set1_epi32(0xffff0000));
  return _mm512_or_si512(_mm512_srli_epi32(rounded(even), 16), high);
}

// Pass 1 for kRows rows of one expert.
class GateUpTiles {
 public:
  GateUpTiles(const Experts& call, const Slots& slots, const TokenTiles& tokens)
      : call_(call), slots_(slots), tokens_(tokens), strips_(call.H) {}

  void operator()(int64_t group, int64_t row) {
    const int64_t expert = slots_.experts[group], first = tokens_.first[group];
    const GateUpBias bias(call_, expert, row, std::min(kRows, call_.I - row));
    const auto& strides = call_.gate_up_strides;
    const at::BFloat16* gate_up = call_.gate_up.data_ptr<at::BFloat16>() + expert * strides.expert;
    for (int64_t half = 0; half < kRows; half += kTile) {
      const int64_t rows = std::clamp<int64_t>(call_.I - row - half, 0, kTile);
      Matrix<at::BFloat16> weight{gate_up + (row + half) * strides.row, strides.row, strides.column, rows, call_.H};
      strips_.read(0, weight);
      weight.data += call_.up_offset;
      strips_.read(1, weight);
      at::BFloat16* to = tokens_.inner.mutable_data_ptr<at::BFloat16>() + first * tokens_.inner_size + row * kTile;
      multiply_groups(strips_, tokens_.x.data_ptr<at::BFloat16>() + first * tokens_.x_size, tokens_.x_size,
                      tokens_.first[group + 1] - first, [&](int64_t g, const auto& gate, const auto& up) {
                        activate(gate, up, bias.gate + half, bias.up + half,
                                 to + g * tokens_.inner_size + half * kTile);
                      });
    }
  }

 private:
  void activate(const float (&gate)[kTile][kTile], const float (&up)[kTile][kTile], const float* gate_bias,
                const float* up_bias, at::BFloat16* to) {
    with_activation(call_.params.activation, [&](auto activation) {
      const auto row = [&](int64_t r) {
        return activated<decltype(activation)::value>(Vec::loadu(gate[r]) + Vec(gate_bias[r]),
                                                      Vec::loadu(up[r]) + Vec(up_bias[r]), call_.params);
      };
      for (int64_t r = 0; r < kTile; r += 2) _mm512_storeu_si512(to + r * kTile, pairs(row(r), row(r + 1)));
    });
  }

  const Experts& call_;
  const Slots& slots_;
  const TokenTiles& tokens_;
  Strips strips_;
};

// Pass 2 for one block of the output.
class DownTiles {
 public:
  DownTiles(const Experts& call, const Slots& slots, const TokenTiles& tokens, int64_t size)
      : call_(call), slots_(slots), tokens_(tokens), size_(size), strips_(call.I), output_(call, size) {}

  void operator()(int64_t first) {
    output_.start(first);
    for (int64_t group = 0; group < slots_.used(); ++group) {
      for (int64_t row = first; row < std::min(first + size_, call_.H); row += kRows) rows_of_expert(group, row);
    }
    output_.finish();
  }

 private:
  void rows_of_expert(int64_t group, int64_t row) {
    output_.expect(slots_.experts[group], row);
    read_strips(slots_.experts[group], row);
    const int64_t first = tokens_.first[group], begin = slots_.begin[group], end = slots_.begin[group + 1];
    multiply_groups(strips_, tokens_.inner.data_ptr<at::BFloat16>() + first * tokens_.inner_size, tokens_.inner_size,
                    tokens_.first[group + 1] - first, [&](int64_t g, const auto& upper, const auto& lower) {
                      const int64_t at = begin + g * kTile;
                      add(upper, lower, slots_.order.data() + at, std::min(kTile, end - at));
                    });
  }

  void read_strips(int64_t expert, int64_t row) {
    const auto& strides = call_.down_strides;
    const at::BFloat16* down = call_.down.data_ptr<at::BFloat16>() + expert * strides.expert;
    for (int i = 0; i < 2; ++i, row += kTile) {
      strips_.read(i, {down + row * strides.row, strides.row, strides.column,
                       std::clamp<int64_t>(call_.H - row, 0, kTile), call_.I});
    }
  }

  void add(const float (&upper)[kTile][kTile], const float (&lower)[kTile][kTile], const int64_t* slots,
           int64_t count) {
    alignas(64) float values[kTile][kRows];  // token by token
    for (const auto* half : {&upper, &lower}) {
      __m512i tile[kTile];
      for (int64_t r = 0; r < kTile; ++r) tile[r] = _mm512_loadu_si512((*half)[r]);
      transpose(tile);
      for (int64_t n = 0; n < kTile; ++n) _mm512_store_si512(values[n] + (half == &lower) * kTile, tile[n]);
    }
    for (int64_t n = 0; n < count; ++n) output_.add(slots[n], values[n]);
  }

  const Experts& call_;
  const Slots& slots_;
  const TokenTiles& tokens_;
  const int64_t size_;
  Strips strips_;
  OutputBlock<at::BFloat16> output_;
};

inline void experts_by_tiles(const Experts& call, const Slots& slots) {
  const TokenTiles tokens(call, slots);
  pack_all_tokens(call, slots, tokens);
  const int64_t blocks = at::divup(call.I, kRows), items = slots.used() * blocks;
  share(items, [&](auto take) {
    const TileShapes shapes;
    GateUpTiles work(call, slots, tokens);
    for (int64_t item = take(); item < items; item = take()) work(item / blocks, item % blocks * kRows);
  });
  const int64_t size = output_block(call), outputs = at::divup(call.H, size);
  share(outputs, [&](auto take) {
    const TileShapes shapes;
    DownTiles work(call, slots, tokens, size);
    for (int64_t item = take(); item < outputs; item = take()) work(item * size);
  });
}

}  // namespace moe_metal
#endif
