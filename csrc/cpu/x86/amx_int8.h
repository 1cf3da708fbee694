// Products of weights of up to 8 bits with several tokens, on processors with AMX.
//
// Both are integers. A tile has 64 columns of 16 rows of weights; 8-bit weights are read in place. It is multiplied by
// five tokens at a time: each digit of a token is a column of the right operand. Sums over a group are exact.
#pragma once
#include "cpu/x86/integers.h"
#include "cpu/x86/plan.h"
#include "cpu/x86/tiles.h"

namespace moe_metal {

template <class Numbers>
class IntegerTiles {
 public:
  static constexpr int64_t kRowsAtOnce = kTile;
  static bool takes(const ScaledRows& rows, int64_t tokens) {
    return tokens >= kWorthIntegerTiles && amx_available() && rows.columns > 0 && rows.columns % kWidth == 0 &&
           1 << rows.shift >= kWidth / 2;
  }
  // The result of a token without digits is NaN.
  void operator()(const ScaledRows& rows, const Tokens& tokens) {
    if (!shapes_) shapes_.emplace();
    const auto strips = 1 << rows.shift < kWidth ? &IntegerTiles::strips<2> : &IntegerTiles::strips<1>;
    for (int64_t n = 0; n < tokens.count; n += kTokensPerTile) {
      const Tokens some = {tokens.x + n, tokens.out + n, std::min(kTokensPerTile, tokens.count - n)};
      strips(rows, form_of(rows, some), some);
    }
  }

 private:
  static constexpr int64_t kWidth = 64, kDigits = Digits::kCount, kTokensPerTile = kTile / kDigits;
  static constexpr int64_t kChunk = Digits::kColumns, kTilesOfChunk = kChunk / kWidth;

  // The right operand for the columns of one group in a tile; the columns of other groups are 0.
  struct alignas(64) Right {
    int8_t digits[kTile][kWidth];
    int32_t begin[kTile];  // initial values of the sums, which subtract the middle of the weights
  };
  // A chunk of the columns. Chunks with rests have another turn for them.
  struct alignas(64) Turn {
    float units[kTile];  // the values of digits; in the first turn NaN for a token without digits
    int64_t chunk;
    int64_t count;  // in the first turn: the number of turns
  };
  // Up to five tokens: the turns with their operands, and the sums of each group of each token.
  struct Form {
    Right* rights;
    Turn* turns;
    float (*sums)[kTokensPerTile];
  };

  static int64_t rights_of_tile(const ScaledRows& rows) { return 1 << rows.shift < kWidth ? 2 : 1; }

  Form form_of(const ScaledRows& rows, const Tokens& tokens) {
    const int64_t turns = 2 * at::divup(rows.columns, kChunk), rights = kTilesOfChunk * rights_of_tile(rows);
    const int64_t sums = Numbers::kOffset ? rows.groups : 0;
    const int64_t of_turn = sizeof(Turn) + rights * sizeof(Right), of_sums = sums * sizeof(float[kTokensPerTile]);
    const auto form_at = [&](char* at) {
      auto* turn = reinterpret_cast<Turn*>(at);
      auto* right = reinterpret_cast<Right*>(turn + turns);
      return Form{right, turn, reinterpret_cast<float(*)[kTokensPerTile]>(right + turns * rights)};
    };
    return form_at(const_cast<char*>(forms_.look_up(tokens.x, tokens.count, turns * of_turn + of_sums, [&](char* to) {
      return lay_out(rows, tokens, turns, form_at(to)) * of_turn + of_sums;
    })));
  }

  // -> the number of turns
  static int64_t lay_out(const ScaledRows& rows, const Tokens& tokens, int64_t most, const Form& to) {
    bool finite[kTokensPerTile];
    std::fill_n(finite, kTokensPerTile, true);
    int64_t turns = 0;
    for (int64_t c = 0; c < most / 2; ++c) {
      Digits all[kTokensPerTile];
      bool whole = true;
      for (int64_t n = 0; n < tokens.count; ++n) {
        const int64_t first = c * kChunk;
        finite[n] &= all[n].set(tokens.x[n] + first, std::min(kChunk, rows.columns - first));
        whole &= all[n].whole;
      }
      lay_out(all, tokens.count, rows, c, to, turns++);
      while (!whole) {
        const bool room = turns + most / 2 - c <= most;  // for this turn and the first turns of later chunks
        whole = true;
        for (int64_t n = 0; n < tokens.count; ++n) {
          if (all[n].whole)
            all[n].clear();
          else
            finite[n] &= room && all[n].set(all[n].rest, kChunk);
          whole &= all[n].whole;
        }
        if (!room) break;
        lay_out(all, tokens.count, rows, c, to, turns++);
      }
    }
    to.turns->count = turns;
    for (int64_t n = 0; n < tokens.count; ++n) {
      if (!finite[n]) to.turns->units[n * kDigits] = NAN;
    }
    if (Numbers::kOffset) lay_out_sums(rows, tokens, to);
    return turns;
  }

  [[MOE_METAL_AMX_INTEGERS]] static void lay_out(const Digits (&all)[kTokensPerTile], int64_t count,
                                                 const ScaledRows& rows, int64_t chunk, const Form& to, int64_t turn) {
    const int64_t parts = rights_of_tile(rows);
    to.turns[turn].chunk = chunk;
    std::fill_n(to.turns[turn].units, kTile, 0.0f);
    for (int64_t n = 0; n < count; ++n) {
      for (int64_t d = 0; d < kDigits; ++d) {
        to.turns[turn].units[n * kDigits + d] = all[n].units[0] * Numbers::kUnit * (1 << 8 * (kDigits - 1 - d));
      }
    }
    for (int64_t t = 0; t < kTilesOfChunk; ++t) {
      __m512i digits[kTile] = {};
      for (int64_t n = 0; n < count; ++n) {
        for (int64_t d = 0; d < kDigits; ++d) {
          digits[n * kDigits + d] = in_order(_mm512_load_si512(all[n].digits[d] + t * kWidth));
        }
      }
      transpose(digits);
      for (int64_t part = 0; part < parts; ++part) {
        fill(digits, part, parts, to.rights[(turn * kTilesOfChunk + t) * parts + part]);
      }
    }
  }

  static void lay_out_sums(const ScaledRows& rows, const Tokens& tokens, const Form& to) {
    const int64_t group = int64_t{1} << rows.shift;
    for (int64_t g = 0; g < rows.groups; ++g) {
      std::fill_n(to.sums[g], kTokensPerTile, 0.0f);
      for (int64_t n = 0; n < tokens.count; ++n) to.sums[g][n] = sum_of(tokens.x[n] + g * group, group);
    }
  }
  // Puts digits in the order of a tile's columns.
  static __m512i in_order(__m512i digits) { return Numbers::kBits == 4 ? Digits::even_then_odd(digits) : digits; }

  [[MOE_METAL_AMX_INTEGERS]] static void fill(const __m512i (&digits)[kTile], int64_t part, int64_t parts, Right& to) {
    constexpr int64_t kHalf = Numbers::kBits == 4 ? kTile / 4 : kTile / 2;  // consecutive rows of one group
    __m512i sums = _mm512_setzero_si512();
    for (int64_t i = 0; i < kTile; ++i) {
      const __m512i some = parts == 1 || i / kHalf % 2 == part ? digits[i] : _mm512_setzero_si512();
      _mm512_store_si512(to.digits[i], some);
      sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(static_cast<char>(Numbers::kMiddle)), some);
    }
    _mm512_store_si512(to.begin, _mm512_sub_epi32(_mm512_setzero_si512(), sums));
  }

  // P is the number of groups in a tile.
  template <int P>
  static void strips(const ScaledRows& rows, const Form& form, const Tokens& tokens) {
    for (int64_t row = 0; row < rows.rows; row += kTile) {
      __m512 digits[kTile];
      strip<P>(rows, row, form, digits);
      write(rows, row, form, digits, tokens);
    }
  }

  // Pipelined: the chunk of one turn is unpacked while the previous turn is multiplied and the sums of the turn before
  // that are scaled. So vectors never wait for memory that AMX has just written, nor AMX for vectors.
  template <int P>
  [[MOE_METAL_AMX_INTEGERS]] static void strip(const ScaledRows& rows, int64_t first, const Form& form,
                                               __m512 (&to)[kTile]) {
    constexpr int64_t kPieces = kTilesOfChunk * P;  // of a chunk
    alignas(64) uint8_t unpacked[2][kTilesOfChunk][kTile][kWidth];
    alignas(64) int32_t sums[2][kPieces][kTile][kTile];
    const int64_t tiles = rows.columns / kWidth, turns = form.turns->count;
    const uint8_t *data = rows.data + first * rows.row, *ahead = rows.ahead(first + kTile);
    const float* scales = rows.scales + first * rows.groups;
    __m512 all[kTile];
    MOE_METAL_UNROLL for (int r = 0; r < kTile; ++r) all[r] = _mm512_setzero_ps();

    const auto unpack = [&](int64_t turn, int64_t row) {
      constexpr int64_t kBytes = Numbers::kBits * kChunk / 8;
      if (turn == turns) return;
      const int64_t c = form.turns[turn].chunk, columns = (c + 1) * kTilesOfChunk <= tiles ? kChunk : kWidth;
      MOE_METAL_UNROLL for (int64_t i = 0; i < kTile / 2; ++i) {
        const int64_t r = row + i;
        prefetch_lines(ahead + (c * kTile + row) * kBytes, i * kBytes, kBytes);
        if constexpr (Numbers::kBits < 8) {
          __m512i numbers[kTilesOfChunk];
          Numbers::tiles(data + r * rows.row + c * kBytes, columns, numbers);
          for (int64_t t = 0; t < kTilesOfChunk; ++t) _mm512_store_si512(unpacked[turn % 2][t][r], numbers[t]);
        }
      }
    };
    const auto left = [&](int64_t turn, int64_t t) -> const uint8_t* {
      if constexpr (Numbers::kBits < 8) return unpacked[turn % 2][t][0];
      return data + (form.turns[turn].chunk * kTilesOfChunk + t) * kWidth;
    };
    const int64_t step = Numbers::kBits < 8 ? kWidth : rows.row;
    const auto scale = [&](int64_t turn) __attribute__((always_inline)) {
      const int64_t c = form.turns[turn].chunk, count = std::min(kTilesOfChunk, tiles - c * kTilesOfChunk) * P;
      const __m512 units = _mm512_load_ps(form.turns[turn].units);
      for (int64_t i = 0; i < count; ++i) {
        const float* scale = scales + ((c * kPieces + i) * (kWidth / P) >> rows.shift);
        MOE_METAL_UNROLL for (int r = 0; r < kTile; ++r) {
          const __m512 unit = _mm512_mul_ps(units, _mm512_set1_ps(scale[r * rows.groups]));
          all[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(sums[turn % 2][i][r])), unit, all[r]);
        }
      }
    };
    unpack(0, 0);
    unpack(0, kTile / 2);
    for (int64_t turn = 0; turn < turns; ++turn) {
      const Right* right = form.rights + turn * kPieces;
      _tile_loadd(0, right[0].begin, 0);
      _tile_loadd(4, left(turn, 0), step);
      _tile_loadd(5, right[0].digits, kWidth);
      _tile_dpbusd(0, 4, 5);
      if constexpr (P == 2) {
        _tile_loadd(1, right[1].begin, 0);
        _tile_loadd(6, right[1].digits, kWidth);
        _tile_dpbusd(1, 4, 6);
      }
      unpack(turn + 1, 0);
      if (form.turns[turn].chunk * kTilesOfChunk + 1 < tiles) {
        _tile_loadd(2, right[P].begin, 0);
        _tile_loadd(4, left(turn, 1), step);
        _tile_loadd(5, right[P].digits, kWidth);
        _tile_dpbusd(2, 4, 5);
        if constexpr (P == 2) {
          _tile_loadd(3, right[3].begin, 0);
          _tile_loadd(6, right[3].digits, kWidth);
          _tile_dpbusd(3, 4, 6);
        }
      }
      unpack(turn + 1, kTile / 2);
      if (turn > 0) scale(turn - 1);
      _tile_stored(0, sums[turn % 2][0], kWidth);
      if constexpr (P == 2) _tile_stored(1, sums[turn % 2][1], kWidth);
      _tile_stored(2, sums[turn % 2][P], kWidth);
      if constexpr (P == 2) _tile_stored(3, sums[turn % 2][3], kWidth);
    }
    scale(turns - 1);
    MOE_METAL_UNROLL for (int r = 0; r < kTile; ++r) to[r] = all[r];
  }

  // Writes the results of 16 rows: the sums of the digits, plus the offsets' contribution.
  static void write(const ScaledRows& rows, int64_t first, const Form& form, const __m512 (&digits)[kTile],
                    const Tokens& tokens) {
    __m512i columns[kTile];
    for (int64_t r = 0; r < kTile; ++r) columns[r] = _mm512_castps_si512(digits[r]);
    transpose(columns);
    __m512 results[kTokensPerTile];
    MOE_METAL_UNROLL for (int n = 0; n < kTokensPerTile; ++n) {
      results[n] = _mm512_setzero_ps();
      for (int64_t d = 0; d < kDigits; ++d) {
        results[n] = _mm512_add_ps(results[n], _mm512_castsi512_ps(columns[n * kDigits + d]));
      }
    }
    if constexpr (Numbers::kOffset) add_offsets(rows, first, form, results);
    for (int64_t n = 0; n < tokens.count; ++n) _mm512_storeu_ps(tokens.out[n] + first, results[n]);
  }

  // Adds the offsets times the sums of x.
  static void add_offsets(const ScaledRows& rows, int64_t row, const Form& form, __m512 (&to)[kTokensPerTile]) {
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
        MOE_METAL_UNROLL for (int n = 0; n < kTokensPerTile; ++n) {
          to[n] = _mm512_fmadd_ps(_mm512_castsi512_ps(of_middle[i]), _mm512_set1_ps(of_x[n]), to[n]);
        }
      }
    }
  }

  std::optional<TileShapes> shapes_;  // of this thread, which computes all products of this object
  PreparedTokenCache forms_;
};

}  // namespace moe_metal
