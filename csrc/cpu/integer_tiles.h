// Products of numbers of 4 and 8 bits with some tokens, on processors with AMX.
//
// Both are integers. A tile has 64 columns of 16 rows of weights, which for 8 bits are read as they lie; it is
// multiplied by five tokens at a time, each of whose digits is a column of the right operand. Sums over a group are
// exact.
#pragma once
#include "integers.h"
#include "tiles.h"
#ifdef MOE_METAL_AMX

namespace moe_metal {

#define MOE_METAL_AMX_INTEGERS [[gnu::target("amx-tile,amx-int8,avx512vnni")]]

template <class Numbers>
class IntegerTiles {
 public:
  // Whether it multiplies so many tokens, 16 rows at a time.
  static bool wants(const Tokens& tokens) { return tokens.count >= kFewest && tiles_available(); }
  // False where nothing was done, or something that is not finite came out.
  bool operator()(const ScaledRows& rows, const Tokens& tokens) {
    if (!wants(tokens) || rows.rows % kTile != 0 || rows.columns % kWidth != 0) return false;
    if (rows.columns == 0 || 1 << rows.shift < kWidth / 2) return false;
    if (!shapes_) shapes_.emplace();
    const auto strips = 1 << rows.shift < kWidth ? &IntegerTiles::strips<2> : &IntegerTiles::strips<1>;
    for (int64_t n = 0; n < tokens.count; n += kMost) {
      const Tokens some = {tokens.x + n, tokens.out + n, std::min(kMost, tokens.count - n)};
      const Form form = form_of(rows, some);
      if (!form.finite() || !strips(rows, form, some)) return false;
    }
    return true;
  }

 private:
  static constexpr int64_t kWidth = 64, kDigits = Digits::kCount, kMost = kTile / kDigits;
  // Two tokens are 1.2 times as fast by dots of 8 bits, and as fast by those of 4.
  static constexpr int64_t kFewest = 3;
  static constexpr int64_t kChunk = Digits::kColumns, kTilesOfChunk = kChunk / kWidth;

  // What columns of one group bring to a tile: columns of other groups count as 0.
  struct alignas(64) Right {
    int8_t digits[kTile][kWidth];
    int32_t begin[kTile];  // of the sums, so that the middle of the weights counts as 0
  };
  using Row = float[kTile];
  // Of up to five tokens: what a digit counts in each chunk, and each group's sum of each token.
  struct Form {
    Right* rights;
    Row* units;
    float (*sums)[kMost];
    bool finite() const { return !std::isnan(units[0][0]); }
  };

  static int64_t rights_of_tile(const ScaledRows& rows) { return 1 << rows.shift < kWidth ? 2 : 1; }

  Form form_of(const ScaledRows& rows, const Tokens& tokens) {
    const int64_t chunks = at::divup(rows.columns, kChunk), rights = chunks * kTilesOfChunk * rights_of_tile(rows);
    const int64_t sums = Numbers::kOffset ? rows.groups : 0;
    const int64_t bytes = rights * sizeof(Right) + chunks * sizeof(Row) + sums * sizeof(float[kMost]);
    const auto form_at = [&](char* at) {
      auto* units = reinterpret_cast<Row*>(at + rights * sizeof(Right));
      return Form{reinterpret_cast<Right*>(at), units, reinterpret_cast<float(*)[kMost]>(units + chunks)};
    };
    return form_at(const_cast<char*>(
        forms_.look_up(tokens.x, tokens.count, bytes, [&](char* to) { lay_out(rows, tokens, chunks, form_at(to)); })));
  }

  MOE_METAL_AMX_INTEGERS static void lay_out(const ScaledRows& rows, const Tokens& tokens, int64_t chunks,
                                             const Form& to) {
    const int64_t parts = rights_of_tile(rows);
    bool finite = true;
    for (int64_t c = 0; c < chunks; ++c) {
      Digits all[kMost];
      std::fill_n(to.units[c], kTile, 0.0f);
      for (int64_t n = 0; n < tokens.count; ++n) {
        const int64_t first = c * kChunk;
        finite &= all[n].set(tokens.x[n] + first, std::min(kChunk, rows.columns - first));
        for (int64_t d = 0; d < kDigits; ++d) {
          to.units[c][n * kDigits + d] = all[n].unit * Numbers::kUnit * (1 << 8 * (kDigits - 1 - d));
        }
      }
      for (int64_t t = 0; t < kTilesOfChunk; ++t) {
        __m512i digits[kTile] = {};
        for (int64_t n = 0; n < tokens.count; ++n) {
          for (int64_t d = 0; d < kDigits; ++d) {
            digits[n * kDigits + d] = in_order(_mm512_load_si512(all[n].digits[d] + t * kWidth));
          }
        }
        transpose(digits);
        for (int64_t part = 0; part < parts; ++part) {
          fill(digits, part, parts, to.rights[(c * kTilesOfChunk + t) * parts + part]);
        }
      }
    }
    if (!finite) to.units[0][0] = NAN;
    if (!Numbers::kOffset) return;
    const int64_t group = int64_t{1} << rows.shift;
    for (int64_t g = 0; g < rows.groups; ++g) {
      std::fill_n(to.sums[g], kMost, 0.0f);
      for (int64_t n = 0; n < tokens.count; ++n) to.sums[g][n] = sum_of(tokens.x[n] + g * group, group);
    }
  }
  // The order of a tile's columns.
  static __m512i in_order(__m512i digits) { return Numbers::kBits == 4 ? Digits::even_then_odd(digits) : digits; }

  MOE_METAL_AMX_INTEGERS static void fill(const __m512i (&digits)[kTile], int64_t part, int64_t parts, Right& to) {
    constexpr int64_t kHalf = Numbers::kBits == 4 ? kTile / 4 : kTile / 2;  // rows of neighbours in one half
    __m512i sums = _mm512_setzero_si512();
    for (int64_t i = 0; i < kTile; ++i) {
      const __m512i some = parts == 1 || i / kHalf % 2 == part ? digits[i] : _mm512_setzero_si512();
      _mm512_store_si512(to.digits[i], some);
      sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(static_cast<char>(Numbers::kMiddle)), some);
    }
    _mm512_store_si512(to.begin, _mm512_sub_epi32(_mm512_setzero_si512(), sums));
  }

  // P groups in a tile.
  template <int P>
  static bool strips(const ScaledRows& rows, const Form& form, const Tokens& tokens) {
    bool finite = true;
    for (int64_t row = 0; row < rows.rows; row += kTile) {
      __m512 digits[kTile];
      strip<P>(rows, row, form, digits);
      finite &= write(rows, row, form, digits, tokens);
    }
    return finite;
  }

  // A chunk is unpacked while the one before is multiplied and the sums of the one before that are scaled: no
  // instruction waits for memory that AMX has just written, or the other way round.
  template <int P>
  MOE_METAL_AMX_INTEGERS static void strip(const ScaledRows& rows, int64_t first, const Form& form,
                                           __m512 (&to)[kTile]) {
    constexpr int64_t kPieces = kTilesOfChunk * P;  // of a chunk
    alignas(64) uint8_t unpacked[2][kTilesOfChunk][kTile][kWidth];
    alignas(64) int32_t sums[2][kPieces][kTile][kTile];
    const int64_t tiles = rows.columns / kWidth, chunks = at::divup(tiles, kTilesOfChunk);
    const uint8_t *data = rows.data + first * rows.row, *ahead = rows.ahead(first + kTile);
    const float* scales = rows.scales + first * rows.groups;
    __m512 all[kTile];
    MOE_METAL_UNROLL for (int r = 0; r < kTile; ++r) all[r] = _mm512_setzero_ps();

    const auto unpack = [&](int64_t c, int64_t row) {
      constexpr int64_t kLines = Numbers::kBits * kChunk / 8 / kLine;
      if (c == chunks) return;
      for (int64_t r = row; r < row + kTile / 2; ++r) {
        for (int64_t i = 0; i < kLines; ++i) __builtin_prefetch(ahead + ((c * kTile + r) * kLines + i) * kLine, 0, 2);
        if constexpr (Numbers::kBits == 4) {
          const bool whole = (c + 1) * kTilesOfChunk <= tiles;
          const __m512i bytes = _mm512_maskz_loadu_epi8(whole ? ~0ull : ~0u, data + r * rows.row + c * kLine);
          __m512i numbers[2];
          Numbers::unpack(bytes, numbers);
          _mm512_store_si512(unpacked[c % 2][0][r], _mm512_shuffle_i64x2(numbers[0], numbers[1], 0x44));
          _mm512_store_si512(unpacked[c % 2][1][r], _mm512_shuffle_i64x2(numbers[0], numbers[1], 0xee));
        }
      }
    };
    const auto left = [&](int64_t c, int64_t t) -> const uint8_t* {
      if constexpr (Numbers::kBits == 4) return unpacked[c % 2][t][0];
      return data + (c * kTilesOfChunk + t) * kWidth;
    };
    const int64_t step = Numbers::kBits == 4 ? kWidth : rows.row;
    const auto scale = [&](int64_t c) __attribute__((always_inline)) {
      const int64_t count = std::min(kTilesOfChunk, tiles - c * kTilesOfChunk) * P;
      const __m512 units = _mm512_load_ps(form.units[c]);
      for (int64_t i = 0; i < count; ++i) {
        const float* scale = scales + ((c * kPieces + i) * (kWidth / P) >> rows.shift);
        MOE_METAL_UNROLL for (int r = 0; r < kTile; ++r) {
          const __m512 unit = _mm512_mul_ps(units, _mm512_set1_ps(scale[r * rows.groups]));
          all[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(sums[c % 2][i][r])), unit, all[r]);
        }
      }
    };
    unpack(0, 0);
    unpack(0, kTile / 2);
    for (int64_t c = 0; c < chunks; ++c) {
      const Right* right = form.rights + c * kPieces;
      _tile_loadd(0, right[0].begin, 0);
      _tile_loadd(4, left(c, 0), step);
      _tile_loadd(5, right[0].digits, kWidth);
      _tile_dpbusd(0, 4, 5);
      if constexpr (P == 2) {
        _tile_loadd(1, right[1].begin, 0);
        _tile_loadd(6, right[1].digits, kWidth);
        _tile_dpbusd(1, 4, 6);
      }
      unpack(c + 1, 0);
      if (c * kTilesOfChunk + 1 < tiles) {
        _tile_loadd(2, right[P].begin, 0);
        _tile_loadd(4, left(c, 1), step);
        _tile_loadd(5, right[P].digits, kWidth);
        _tile_dpbusd(2, 4, 5);
        if constexpr (P == 2) {
          _tile_loadd(3, right[3].begin, 0);
          _tile_loadd(6, right[3].digits, kWidth);
          _tile_dpbusd(3, 4, 6);
        }
      }
      unpack(c + 1, kTile / 2);
      if (c > 0) scale(c - 1);
      _tile_stored(0, sums[c % 2][0], kWidth);
      if constexpr (P == 2) _tile_stored(1, sums[c % 2][1], kWidth);
      _tile_stored(2, sums[c % 2][P], kWidth);
      if constexpr (P == 2) _tile_stored(3, sums[c % 2][3], kWidth);
    }
    scale(chunks - 1);
    MOE_METAL_UNROLL for (int r = 0; r < kTile; ++r) to[r] = all[r];
  }

  // The results of 16 rows, unless one is not finite: the sums of the digits, and what the offsets add.
  static bool write(const ScaledRows& rows, int64_t first, const Form& form, const __m512 (&digits)[kTile],
                    const Tokens& tokens) {
    __m512i columns[kTile];
    for (int64_t r = 0; r < kTile; ++r) columns[r] = _mm512_castps_si512(digits[r]);
    transpose(columns);
    __m512 results[kMost];
    MOE_METAL_UNROLL for (int n = 0; n < kMost; ++n) {
      results[n] = _mm512_setzero_ps();
      for (int64_t d = 0; d < kDigits; ++d) {
        results[n] = _mm512_add_ps(results[n], _mm512_castsi512_ps(columns[n * kDigits + d]));
      }
    }
    if constexpr (Numbers::kOffset) add_offsets(rows, first, form, results);
    __mmask16 finite = 0xffff;
    for (int64_t n = 0; n < tokens.count; ++n) {
      finite &= _mm512_cmp_ps_mask(_mm512_abs_ps(results[n]), _mm512_set1_ps(INFINITY), _CMP_LT_OQ);
      _mm512_storeu_ps(tokens.out[n] + first, results[n]);
    }
    return finite == 0xffff;
  }

  // A product of its own.
  static void add_offsets(const ScaledRows& rows, int64_t row, const Form& form, __m512 (&to)[kMost]) {
    const float *scales = rows.scales + row * rows.groups, *offsets = rows.offsets + row * rows.groups;
    for (int64_t first = 0; first < rows.groups; first += kTile) {
      const int64_t count = std::min(kTile, rows.groups - first);
      const auto mask = static_cast<__mmask16>((1u << count) - 1);
      __m512i of_middle[kTile];
      for (int64_t r = 0; r < kTile; ++r) {
        const __m512 scale = _mm512_maskz_loadu_ps(mask, scales + r * rows.groups + first),
                     offset = _mm512_maskz_loadu_ps(mask, offsets + r * rows.groups + first);
        of_middle[r] = _mm512_castps_si512(_mm512_fmadd_ps(scale, _mm512_set1_ps(Numbers::kMiddle), offset));
      }
      transpose(of_middle);
      for (int64_t i = 0; i < count; ++i) {
        const float* of_x = form.sums[first + i];
        MOE_METAL_UNROLL for (int n = 0; n < kMost; ++n) {
          to[n] = _mm512_fmadd_ps(_mm512_castsi512_ps(of_middle[i]), _mm512_set1_ps(of_x[n]), to[n]);
        }
      }
    }
  }

  std::optional<TileShapes> shapes_;  // of this thread, which all products are made on
  TokenForms forms_;
};

}  // namespace moe_metal
#else
namespace moe_metal {
template <class>
using IntegerTiles = NoDots;
}
#endif
