// Products of weights of up to 8 bits with many tokens, on processors with AVX512-VNNI that multiply bfloat16 slowly or
// not at all.
//
// Both are integers. 128 columns of 32 rows are unpacked in cache, with the rows in the lanes: an instruction
// multiplies four columns of 16 rows by four digits of a token. Sums over a group of columns are exact.
#pragma once
#include "cpu/x86/integers.h"
#include "cpu/x86/plan.h"
#include "cpu/x86/weight_tiles.h"

namespace moe_metal {

// An order of the 128 columns of a chunk: runs of four columns, or of eight neighbours the even ones before the odd
// ones.
class ColumnOrder {
 public:
  static constexpr int64_t kColumns = 128;

  explicit ColumnOrder(const std::array<uint8_t, kColumns>& columns) : even_first_(columns[1] == columns[0] + 2) {
    for (int64_t i = 0; i < kColumns / 4; ++i) runs_[i] = columns[4 * i] / 4;
  }
  void operator()(__m512i (&bytes)[2]) const {
    if (even_first_) {
      const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
      for (__m512i& some : bytes) some = _mm512_shuffle_epi8(some, order);
    } else {
      const __m512i low = bytes[0], high = bytes[1];
      for (int i = 0; i < 2; ++i) {
        bytes[i] = _mm512_permutex2var_epi32(low, _mm512_load_si512(runs_ + i * kLanes), high);
      }
    }
  }

 private:
  bool even_first_;
  alignas(64) int32_t runs_[kColumns / 4];
};

// 128 numbers of a token as multiples of a power of two (the unit), in two digits of base 256. A unit is at most 2^-14
// of the largest number.
struct alignas(64) TokenChunk {
  static constexpr int64_t kColumns = ColumnOrder::kColumns, kGroups = 8;  // kGroups: the most groups of a chunk

  int8_t digits[2][kColumns];  // the most significant first
  float unit;                  // NaN if the numbers have no digits
  int32_t sums[kGroups];       // of each group, in units, times `factor`
  bool rest;                   // whether the rests of the numbers matter: they have another chunk

  // Each 1 << shift columns are a group. x is replaced by the rests.
  void set(float (&x)[kColumns], const ColumnOrder& order, int shift, int factor) {
    constexpr int kBits = 15;
    constexpr int64_t kVectors = kColumns / kLanes;
    __m512 most = _mm512_setzero_ps();
    __mmask16 finite = 0xffff, small = 0;
    for (int64_t i = 0; i < kVectors; ++i) {
      const __m512 magnitude = _mm512_abs_ps(_mm512_load_ps(x + i * kLanes));
      finite &= _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(std::numeric_limits<float>::max()), _CMP_LE_OQ);
      most = _mm512_max_ps(most, magnitude);
    }
    const __m512i above = Digits::exponents(_mm512_set1_ps(_mm512_reduce_max_ps(most)), small);
    rest = false;
    std::fill_n(sums, kGroups, 0);
    if (finite != 0xffff || small) {
      std::memset(digits, 0, sizeof(digits));
      unit = NAN;
      return;
    }
    const __m512i bits = _mm512_set1_epi32(kBits);
    const __m512 units = Digits::powers_of_two(_mm512_sub_epi32(above, bits)),
                 of_unit = Digits::powers_of_two(_mm512_sub_epi32(bits, above));
    const int64_t of_group = std::clamp<int64_t>((int64_t{1} << shift) / kLanes, 1, kVectors);
    int lacking = 0;
    __m512i total = _mm512_setzero_si512();
    alignas(64) int8_t bytes[2][kColumns];
    for (int64_t i = 0; i < kVectors; ++i) {
      const __m512 some = _mm512_load_ps(x + i * kLanes);
      const __m512i number = _mm512_cvtps_epi32(_mm512_mul_ps(some, of_unit));
      const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(number, _mm512_set1_epi32(128)), 8);
      _mm_store_si128(reinterpret_cast<__m128i*>(bytes[0] + i * kLanes), _mm512_cvtepi32_epi8(high));
      _mm_store_si128(reinterpret_cast<__m128i*>(bytes[1] + i * kLanes), _mm512_cvtepi32_epi8(number));
      total = _mm512_add_epi32(total, number);
      if ((i + 1) % of_group == 0) {
        sums[i / of_group] = factor * _mm512_reduce_add_epi32(total);
        total = _mm512_setzero_si512();
      }
      const __m512 lost = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(number), units, some);
      const __m512 bearable = _mm512_mul_ps(_mm512_abs_ps(some), _mm512_set1_ps(0x1p-8f));
      lacking += __builtin_popcount(_mm512_cmp_ps_mask(_mm512_abs_ps(lost), bearable, _CMP_GT_OQ));
      _mm512_store_ps(x + i * kLanes, lost);
    }
    for (int64_t d = 0; d < 2; ++d) {
      __m512i both[2] = {_mm512_load_si512(bytes[d]), _mm512_load_si512(bytes[d] + 64)};
      order(both);
      _mm512_store_si512(digits[d], both[0]), _mm512_store_si512(digits[d] + 64, both[1]);
    }
    unit = _mm512_cvtss_f32(units);
    // Few numbers have rests that matter if these numbers are small: the others are at least 2^-8 of the largest.
    rest = lacking > kColumns / 8;
  }
};

// The chunks of all tokens of a call, and the chunks of their rests. Those of the same columns are neighbours.
class TokenChunks final : public PreparedTokens {
 public:
  TokenChunks(const Tensor& x, const ColumnOrder& order, int shift, int factor)
      : x_(elements<float>(x)), columns_(x.size(-1)), tokens_(x.numel() / columns_) {
    const int64_t chunks = at::divup(columns_, kColumns);
    memory_ = empty({2, chunks * tokens_, int64_t{sizeof(TokenChunk)}}, x.options().dtype(at::kByte));
    first_ = reinterpret_cast<TokenChunk*>(memory_.mutable_data_ptr<uint8_t>()), rests_ = first_ + chunks * tokens_;
    at::parallel_for(0, tokens_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        for (int64_t c = 0; c < chunks; ++c) lay_out(n, c, order, shift, factor);
      }
    });
  }
  // The first chunk of a token; the others follow at this distance.
  const TokenChunk* find(const float* token) const { return first_ + (token - x_) / columns_; }
  int64_t distance() const { return tokens_; }
  const TokenChunk* rest_of(const TokenChunk* chunk) const { return rests_ + (chunk - first_); }

 private:
  static constexpr int64_t kColumns = TokenChunk::kColumns;

  void lay_out(int64_t token, int64_t chunk, const ColumnOrder& order, int shift, int factor) {
    const int64_t begin = chunk * kColumns, count = std::min(kColumns, columns_ - begin);
    alignas(64) float x[kColumns];
    std::copy_n(x_ + token * columns_ + begin, count, x);
    std::fill(x + count, x + kColumns, 0.0f);
    TokenChunk& first = first_[chunk * tokens_ + token];
    first.set(x, order, shift, factor);
    if (!first.rest) return;
    TokenChunk& rest = rests_[chunk * tokens_ + token];
    rest.set(x, order, shift, factor);
    if (rest.rest) rest.unit = NAN;
  }

  const float* x_;
  int64_t columns_, tokens_;
  Tensor memory_;
  TokenChunk *first_, *rests_;
};

// 128 columns of 32 rows of codes, four columns at a time, and the scales of these columns.
struct alignas(64) CodePanel {
  static constexpr int64_t kSteps = TokenChunk::kColumns / 4, kTileRows = 2, kPanelRows = kTileRows * kTile;
  uint8_t codes[kSteps][kTileRows][kTile][4];
};

[[gnu::always_inline]] inline __m512i four_digits(const int8_t* digits, int64_t step) {
  int32_t four;
  std::memcpy(&four, digits + 4 * step, sizeof(four));
  return _mm512_set1_epi32(four);
}

// The intrinsic makes GCC copy the sums before each instruction.
[[MOE_METAL_VNNI, gnu::always_inline]] inline void add_products(__m512i& sums, __m512i codes, __m512i digits) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(digits));
}

// out[n] += the panel times the chunks of N tokens, in which there are `groups` groups. Without offsets, the sums of a
// chunk's numbers subtract the middle of the codes.
template <int N, bool has_offset>
[[MOE_METAL_VNNI]] inline void multiply_panel(const CodePanel& panel, const float* scales, const float* offsets,
                                              int64_t groups, const TokenChunk* const* x, float* const* out) {
  constexpr int S = CodePanel::kTileRows, kUnrolled = 4;  // steps; without, compilers copy the sums in each step
  const int64_t steps = CodePanel::kSteps / groups;
  __m512 sums[N][S];
  MOE_METAL_UNROLL for (int i = 0; i < N * S; ++i) sums[i / S][i % S] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; ++g) {
    __m512i high[N][S], low[N][S];
    MOE_METAL_UNROLL for (int i = 0; i < N * S; ++i) high[i / S][i % S] = low[i / S][i % S] = _mm512_setzero_si512();
    for (int64_t first = g * steps; first < (g + 1) * steps; first += kUnrolled) {
      MOE_METAL_UNROLL for (int i = 0; i < kUnrolled; ++i) {
        const int64_t step = first + i;
        __m512i codes[S];
        MOE_METAL_UNROLL for (int s = 0; s < S; ++s) codes[s] = _mm512_load_si512(panel.codes[step][s]);
        MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
          const __m512i upper = four_digits(x[n]->digits[0], step), lower = four_digits(x[n]->digits[1], step);
          MOE_METAL_UNROLL for (int s = 0; s < S; ++s) {
            add_products(high[n][s], codes[s], upper);
            add_products(low[n][s], codes[s], lower);
          }
        }
      }
    }
    MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
      const __m512i sum_of_x = _mm512_set1_epi32(x[n]->sums[g]);
      MOE_METAL_UNROLL for (int s = 0; s < S; ++s) {
        const int64_t at = g * CodePanel::kPanelRows + s * kTile;
        __m512i both = _mm512_add_epi32(_mm512_slli_epi32(high[n][s], 8), low[n][s]);
        if (!has_offset) both = _mm512_add_epi32(both, sum_of_x);
        sums[n][s] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(both), _mm512_load_ps(scales + at), sums[n][s]);
        if (has_offset) {
          sums[n][s] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum_of_x), _mm512_load_ps(offsets + at), sums[n][s]);
        }
      }
    }
  }
  MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
    const __m512 unit = _mm512_set1_ps(x[n]->unit);
    MOE_METAL_UNROLL for (int s = 0; s < S; ++s) {
      float* to = out[n] + s * kTile;
      _mm512_storeu_ps(to, _mm512_fmadd_ps(sums[n][s], unit, _mm512_loadu_ps(to)));
    }
  }
}

// For formats that have none.
struct NoPanels {
  static std::unique_ptr<PreparedTokens> prepare(const Weight&, const Tensor&) { return nullptr; }
  void operator()(const ScaledRows&, const Tokens&) {}
};

template <class Numbers>
class IntegerPanels {
  static constexpr int64_t kColumns = TokenChunk::kColumns, kPanelRows = CodePanel::kPanelRows;

 public:
  // Returns null if there are faster products.
  static std::unique_ptr<PreparedTokens> prepare(const Weight& weight, const Tensor& x) {
    if (!integers_available<Numbers>() || !integer_panels_are_fast()) return nullptr;
    return std::make_unique<TokenChunks>(x, ColumnOrder(kOrder), std::countr_zero(static_cast<uint64_t>(weight.group)),
                                         Numbers::kOffset ? 1 : -Numbers::kMiddle);
  }

  // `out` must have room for whole panels. The result of a token without digits is NaN.
  void operator()(const ScaledRows& rows, const Tokens& tokens) {
    const auto& prepared = static_cast<const TokenChunks&>(*tokens.prepared);
    const int64_t chunks = at::divup(rows.columns, kColumns),
                  most = tokens.count >= kWorthPanelsTogether ? kMostPanels : 1;
    chunks_.resize(tokens.count);
    for (Block block{0}; block.first < rows.rows; block.first += most * kPanelRows) {
      block.panels = std::min(most, at::divup(rows.rows - block.first, kPanelRows));
      read_scales(rows, block);
      for (int64_t n = 0; n < tokens.count; ++n) {
        chunks_[n] = prepared.find(tokens.x[n]);
        std::fill_n(tokens.out[n] + block.first, block.panels * kPanelRows, 0.0f);
      }
      for (int64_t c = 0; c < chunks; ++c) {
        fill(rows, block, c);
        for (int64_t n = 0, some; n < tokens.count; n += some) {
          some = even_part(tokens.count - n, kAtOnce);
          multiply(rows, block, c, tokens, n, some);
        }
        for (const TokenChunk*& chunk : chunks_) chunk += prepared.distance();
      }
    }
  }

 private:
  static constexpr int64_t kAtOnce = 4;      // tokens
  static constexpr int64_t kMostPanels = 4;  // that are multiplied by these tokens while they are in the L1 cache
  struct Block {                             // of rows
    int64_t first, panels = 0;
  };
  // The lanes of a chunk in the order of their columns, so that those of a group are neighbours.
  static constexpr auto kLanesInOrder = [] {
    std::array<int, 16> lanes{};
    for (int i = 0; i < 16; ++i) lanes[i] = i;
    std::sort(lanes.begin(), lanes.end(), [](int a, int b) { return Numbers::kOrder[4 * a] < Numbers::kOrder[4 * b]; });
    return lanes;
  }();
  // The columns of a panel: for each of these lanes, its four columns of both halves of Numbers::kOrder.
  static constexpr auto kOrder = [] {
    std::array<uint8_t, kColumns> columns{};
    for (int i = 0; i < kColumns; ++i) {
      columns[i] = Numbers::kOrder[i / 4 % 2 * 64 + 4 * kLanesInOrder[i / 8] + i % 4];
    }
    return columns;
  }();

  static int64_t groups_of_chunk(const ScaledRows& rows) { return std::max<int64_t>(kColumns >> rows.shift, 1); }

  // Transposes the scales and offsets, so that the rows are in the lanes. Those past the end of a row are 0.
  void read_scales(const ScaledRows& rows, const Block& block) {
    scales_of_panel_ = (at::divup(rows.groups, kTile) * kTile + TokenChunk::kGroups) * kPanelRows;
    if (kMostPanels * scales_of_panel_ > room_) {
      room_ = kMostPanels * scales_of_panel_;
      scales_ = scratch<float>(room_), offsets_ = scratch<float>(room_);
    }
    for (int64_t tile_row = 0; tile_row < block.panels * kPanelRows; tile_row += kTile) {
      const int64_t row = block.first + tile_row, to = tile_row / kPanelRows * scales_of_panel_ + tile_row % kPanelRows;
      for (int64_t g = 0; g < scales_of_panel_ / kPanelRows; g += kTile) {
        const auto mask = static_cast<__mmask16>((1u << std::clamp<int64_t>(rows.groups - g, 0, kTile)) - 1);
        __m512i scales[kTile], offsets[kTile];
        for (int64_t r = 0; r < kTile; ++r) {
          const int64_t at = (row + r) * rows.groups + g;
          const __mmask16 some = row + r < rows.rows ? mask : 0;
          const __m512 scale = _mm512_maskz_loadu_ps(some, rows.scales + at);
          scales[r] = _mm512_castps_si512(_mm512_mul_ps(scale, _mm512_set1_ps(Numbers::kUnit)));
          if constexpr (Numbers::kOffset) offsets[r] = _mm512_maskz_loadu_epi32(some, rows.offsets + at);
        }
        transpose(scales);
        if constexpr (Numbers::kOffset) transpose(offsets);
        for (int64_t i = 0; i < std::min(kTile, scales_of_panel_ / kPanelRows - g); ++i) {
          _mm512_store_si512(&scales_[to + (g + i) * kPanelRows], scales[i]);
          if constexpr (Numbers::kOffset) _mm512_store_si512(&offsets_[to + (g + i) * kPanelRows], offsets[i]);
        }
      }
    }
  }

  // Unpacks a chunk of the rows, and prefetches the next one.
  void fill(const ScaledRows& rows, const Block& block, int64_t chunk) {
    constexpr int64_t kBytes = kColumns * Numbers::kBytes / Numbers::kColumns;
    const bool last = (chunk + 1) * kColumns >= rows.columns;
    for (int64_t tile_row = 0; tile_row < block.panels * CodePanel::kTileRows; ++tile_row) {
      __m512i lanes[2][kTile] = {};
      for (int64_t r = 0; r < kTile; ++r) {
        const int64_t row = block.first + tile_row * kTile + r;
        if (row >= rows.rows) break;
        const uint8_t* data = rows.data + row * rows.row;
        const uint8_t* ahead = last ? rows.ahead(row + block.panels * kPanelRows) : data + (chunk + 1) * kBytes;
        for (int64_t line = 0; line < kBytes; line += kLine) __builtin_prefetch(ahead + line, 0, 2);
        __m512i numbers[2];
        Numbers::unpack(data, chunk, rows.columns, numbers);
        lanes[0][r] = numbers[0], lanes[1][r] = numbers[1];
      }
      CodePanel& panel = panels_[tile_row / CodePanel::kTileRows];
      for (int64_t half = 0; half < 2; ++half) {
        transpose(lanes[half]);
        for (int64_t i = 0; i < kTile; ++i) {
          _mm512_store_si512(panel.codes[2 * i + half][tile_row % CodePanel::kTileRows], lanes[half][kLanesInOrder[i]]);
        }
      }
    }
  }

  // Multiplies a chunk of the panels by `count` tokens from token n on. The next tokens are prefetched.
  void multiply(const ScaledRows& rows, const Block& block, int64_t chunk, const Tokens& tokens, int64_t n,
                int64_t count) const {
    static constexpr TokenChunk kNothing{};
    const TokenChunk *const *x = &chunks_[n], *rests[kAtOnce];
    float* out[kAtOnce];
    bool rest = false;
    for (int64_t i = 0; i < count; ++i) {
      rests[i] = x[i]->rest ? static_cast<const TokenChunks&>(*tokens.prepared).rest_of(x[i]) : &kNothing;
      out[i] = tokens.out[n + i] + block.first;
      rest |= x[i]->rest;
    }
    constexpr bool kOffset = Numbers::kOffset;
    constexpr decltype(&multiply_panel<1, kOffset>) kWays[] = {multiply_panel<1, kOffset>, multiply_panel<2, kOffset>,
                                                               multiply_panel<3, kOffset>, multiply_panel<4, kOffset>};
    const auto product = kWays[count - 1];
    for (int64_t p = 0; p < block.panels; ++p) {
      // A few at a time, because a core can keep few loads in flight.
      for (int64_t next = n + count + p; next < std::min(n + 2 * count, tokens.count); next += block.panels) {
        const auto* line = reinterpret_cast<const char*>(chunks_[next]);
        for (size_t i = 0; i < sizeof(TokenChunk); i += kLine) __builtin_prefetch(line + i);
      }
      const int64_t at = p * scales_of_panel_ + (chunk * kColumns >> rows.shift) * kPanelRows;
      product(panels_[p], &scales_[at], &offsets_[at], groups_of_chunk(rows), x, out);
      if (rest) product(panels_[p], &scales_[at], &offsets_[at], groups_of_chunk(rows), rests, out);
      for (int64_t i = 0; i < count; ++i) out[i] += kPanelRows;
    }
  }

  CodePanel panels_[kMostPanels];
  std::unique_ptr<float[], Free> scales_, offsets_;
  int64_t room_ = 0, scales_of_panel_ = 0;  // floats
  std::vector<const TokenChunk*> chunks_;   // the current chunk of each token
};

}  // namespace moe_metal
