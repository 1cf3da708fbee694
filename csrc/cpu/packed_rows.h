// Rows of packed weights, and their products: one template for all formats, which formats/*.h have the readers of.
// Every format is compiled in one of affine_rows.cpp, affine_rows_across_bytes.cpp and float_rows.cpp, side by side.
#pragma once
#include <bit>

#include "e4m3_dots.h"
#include "scaled_rows.h"
#include "tiles.h"
#include "weights.h"

namespace moe_metal {
namespace {  // so that a compiler knows all calls of a function and may specialise it

// 2^(e - 127) of an e8m0, of which 255 is NaN.
inline float e8m0(uint8_t e) {
  return std::bit_cast<float>(e == 255 ? 0x7fc00000u : e ? uint32_t{e} << 23 : 0x00400000u);
}

inline void prefetch_bytes(const void* from, int64_t count) {
  for (int64_t i = 0; i < count; i += kLine) __builtin_prefetch(static_cast<const char*>(from) + i);
}

// The scales, or the offsets, of some rows as floats: a row's side by side.
class RowScales {
 public:
  // `shared_rows` rows have the same.
  RowScales(const Tensor& tensor, int64_t shared_rows) : tensor_(tensor), shared_rows_(shared_rows) {
    if (!tensor.defined()) return;
    groups_ = tensor.size(-1);
    expert_ = tensor.dim() > 2 ? tensor.stride(-3) : 0;
    row_ = tensor.stride(-2);
    group_ = tensor.stride(-1);
  }

  // Until the next call. What lies a bit further on comes to the cache.
  const float* floats(int64_t expert, int64_t first, int64_t count) {
    if (!tensor_.defined()) return nullptr;
    const int64_t block = first / shared_rows_;
    const bool shared = shared_rows_ > 1 && block == (first + count - 1) / shared_rows_;
    if (shared && expert == expert_of_floats_ && block == block_of_floats_ && count * groups_ <= std::ssize(floats_)) {
      return floats_.data();
    }
    expert_of_floats_ = shared ? expert : -1, block_of_floats_ = block;
    floats_.resize(count * groups_);
    prefetch_bytes(place(expert, first) + kAhead, bytes(first, count));
    const int64_t from = expert * expert_;
    if (shared_rows_ == 1 && group_ == 1 && row_ == groups_) {
      to_floats(from + first * row_, count * groups_, floats_.data());  // a row alone seldom fills vectors
      return floats_.data();
    }
    for (int64_t r = 0; r < count; ++r) {
      to_floats(from + (first + r) / shared_rows_ * row_, groups_, floats_.data() + r * groups_);
    }
    return floats_.data();
  }
  // The next rows are these: what floats() does not prefetch.
  void prefetch(int64_t expert, int64_t first, int64_t count) const {
    if (tensor_.defined()) prefetch_bytes(place(expert, first), std::min(bytes(first, count), kAhead));
  }
  int64_t groups() const { return groups_; }

 private:
  void to_floats(int64_t from, int64_t count, float* to) const {
    if (tensor_.scalar_type() == at::kByte) {
      const auto* bytes = static_cast<const uint8_t*>(tensor_.const_data_ptr()) + from;
      if (group_ == 1) {  // said to the compiler, which makes vectors of it
        for (int64_t i = 0; i < count; ++i) to[i] = e8m0(bytes[i]);
      } else {
        for (int64_t i = 0; i < count; ++i) to[i] = e8m0(bytes[i * group_]);
      }
      return;
    }
    with_dtype(tensor_.scalar_type(), [&](auto scalar) {
      const auto* values = static_cast<const decltype(scalar)*>(tensor_.const_data_ptr()) + from;
      if (group_ == 1) {
        for_each_vector(count, [&](int64_t i, auto n) { store(to + i, load(values + i, n), n); });
      } else {
        for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(values[i * group_]);
      }
    });
  }

  static constexpr int64_t kAhead = 1024;  // bytes

  const char* place(int64_t expert, int64_t row) const {
    const int64_t at = expert * expert_ + row / shared_rows_ * row_;
    return static_cast<const char*>(tensor_.const_data_ptr()) + at * tensor_.element_size();
  }
  int64_t bytes(int64_t first, int64_t count) const {
    return place(0, first + count - 1) - place(0, first) + groups_ * tensor_.element_size();
  }

  const Tensor tensor_;
  const int64_t shared_rows_;
  int64_t groups_ = 0, expert_ = 0, row_ = 0, group_ = 0;
  std::vector<float> floats_;
  int64_t expert_of_floats_ = -1, block_of_floats_ = 0;  // if all of them are the same row
};

// The rows taken, as products read them.
template <class Read>
struct Packed : ScaledRows {
  Read read;

  struct Some {
    const Packed& all;
    const uint8_t* data;
    const float *scales, *offsets;
    template <class Count>
    [[gnu::always_inline]] Vec load(int64_t r, int64_t column, Count count) const {
      const int64_t group = r * all.groups + (column >> all.shift);
      const Vec codes = all.read(data + r * all.row, column, count), scale(scales[group]);
      const Vec values = Read::kOffset ? at::vec::fmadd(codes, scale, Vec(offsets[group])) : codes * scale;
      if constexpr (std::is_same_v<Count, Whole>) return values;
      return Vec::set(Vec(0), values, count);
    }
    // What is left of the row at a column, up to a vector and perhaps nothing.
    Vec load_part(int64_t r, int64_t column) const {
      const int64_t count = std::min(all.columns - column, kLanes);
      return count <= 0 ? Vec(0) : count == kLanes ? load(r, column, Whole()) : load(r, column, count);
    }
    // Packed rows are far too short for the processor's own prefetching.
    [[gnu::always_inline]] void prefetch(int64_t r, int64_t column) const {
      __builtin_prefetch(data + r * all.row + bytes(column), 0, 2);
    }
  };
  Some some(int64_t first) const {
    return {*this, data + first * row, scales + first * groups, offsets + first * groups};
  }
  const void* place(int64_t r, int64_t column) const { return data + r * row + bytes(column); }
  int64_t row_bytes() const { return row; }
  static int64_t bytes(int64_t columns) { return columns * Read::kBits / 8; }
};

// One or two tokens: a group's products with the bare numbers are summed first, then scaled. Integers count from the
// middle of their range, near which most are, so that their sum rounds off less: what the middle takes away is where
// the sum begins, which costs no number anything. What the offsets add is a product of its own, with groups side by
// side.
template <class Read>
class GroupDots {
 public:
  template <int N>
  void operator()(const Packed<Read>& weight, const Tokens& tokens) {
    if (!std::equal(tokens.x, tokens.x + N, laid_out_.begin(), laid_out_.end())) lay_out(weight, tokens);
    constexpr int64_t kUsual = 64;
    const int64_t group = int64_t{1} << weight.shift;
    if (group == kUsual) return all_rows<N>(weight, tokens, std::integral_constant<int64_t, kUsual>());
    all_rows<N>(weight, tokens, group);
  }

 private:
  // The tokens' numbers in the order of the codes; each group's sum of them; and where the sum of a group begins.
  void lay_out(const Packed<Read>& weight, const Tokens& tokens) {
    const int64_t group = int64_t{1} << weight.shift;
    if (tokens.count > static_cast<int64_t>(laid_out_.size())) {
      x_ = scratch<float>(tokens.count * weight.columns);
      sums_ = scratch<float>(tokens.count * weight.groups);
      begin_ = scratch<float>(tokens.count * weight.groups * kLanes);
    }
    float *x = x_.get(), *sums = sums_.get(), *begin = begin_.get();
    for (int64_t n = 0; n < tokens.count; ++n) {
      for (int64_t first = 0; first < weight.columns; first += group, begin += kLanes) {
        Vec all(0);
        for (int64_t c = first; c < first + group; c += kLanes, x += kLanes) {
          const Vec some = weight.read.codes.in_order(Vec::loadu(tokens.x[n] + c));
          some.store(x);
          all = all + some;
        }
        (all * Vec(-Read::kMiddle)).store(begin);
        *sums++ = sum(all);
      }
    }
    laid_out_.assign(tokens.x, tokens.x + tokens.count);
  }

  template <int N, class Group>
  void all_rows(const Packed<Read>& weight, const Tokens& tokens, Group group) const {
    constexpr int R = 4, G = N == 1 || kLanes == 16 ? 2 : 1;
    const int64_t later = weight.later(R);
    int64_t row = 0;
    for (; row + R <= weight.rows; row += R) some_rows<R, N, G>(weight, row, tokens, group, weight.ahead(row + later));
    for (; row < weight.rows; ++row) some_rows<1, N, G>(weight, row, tokens, group, weight.ahead(row + later));
  }

  template <int R, int N, int G, class Group>
  [[gnu::flatten]] void some_rows(const Packed<Read>& weight, int64_t first, const Tokens& tokens, Group group,
                                  const uint8_t* ahead) const {
    const auto rows = weight.some(first);
    Vec sums[R][N];
    unrolled<R>([&](auto r) { unrolled<N>([&](auto n) { sums[r][n] = Vec(0); }); });
    int64_t g = 0;
    for (; g + G <= weight.groups; g += G) some_groups<R, N, G>(rows, g, group, ahead, sums);
    for (; g < weight.groups; ++g) some_groups<R, N, 1>(rows, g, group, ahead, sums);
    if constexpr (Read::kOffset) {
      for_each_vector(weight.groups, [&](int64_t g, auto count) {
        Vec sums_of_x[N];
        unrolled<N>([&](auto n) { sums_of_x[n] = load(&sums_[n * weight.groups + g], count); });
        unrolled<R>([&](auto r) {
          const int64_t at = r * weight.groups + g;
          const Vec scale = load(rows.scales + at, count), offset = load(rows.offsets + at, count);
          const Vec of_middle = at::vec::fmadd(scale, Vec(Read::kMiddle), offset);
          unrolled<N>([&](auto n) { sums[r][n] = at::vec::fmadd(of_middle, sums_of_x[n], sums[r][n]); });
        });
      });
    }
    unrolled<R>([&](auto r) { unrolled<N>([&](auto n) { tokens.out[n][first + r] = sum(sums[r][n]); }); });
  }

  // G groups of R rows.
  template <int R, int N, int G, class Group>
  [[gnu::always_inline]] inline void some_groups(const typename Packed<Read>::Some& rows, int64_t g, Group group,
                                                 const uint8_t* ahead, Vec (&sums)[R][N]) const {
    const Packed<Read>& weight = rows.all;
    Vec parts[R][N][G];
    unrolled<N>([&](auto n) {
      unrolled<G>([&](auto i) {
        const Vec begin = Read::kOffset ? Vec::loadu(&begin_[(n * weight.groups + g + i) * kLanes]) : Vec(0);
        unrolled<R>([&](auto r) { parts[r][n][i] = begin; });
      });
    });
    const float* x = &x_[g * group];
    for (int64_t c = 0; c < group; c += 2 * kLanes) {
      unrolled<G>([&](auto i) {
        unrolled<2>([&](auto v) {
          const int64_t here = c + i * group + v * kLanes, column = g * group + here;
          __builtin_prefetch(ahead + R * Packed<Read>::bytes(column));  // in memory's order
          Vec of_tokens[N];
          unrolled<N>([&](auto n) { of_tokens[n] = Vec::loadu(x + n * weight.columns + here); });
          unrolled<R>([&](auto r) {
            const Vec codes = weight.read.quick(rows.data + r * weight.row, column);
            unrolled<N>([&](auto n) { parts[r][n][i] = at::vec::fmadd(codes, of_tokens[n], parts[r][n][i]); });
          });
        });
      });
    }
    unrolled<R>([&](auto r) {
      unrolled<G>([&](auto i) {
        const Vec scale(rows.scales[r * weight.groups + g + i]);
        unrolled<N>([&](auto n) {
          if constexpr (Read::kUnit != 1) parts[r][n][i] = parts[r][n][i] * Vec(Read::kUnit);
          sums[r][n] = at::vec::fmadd(scale, parts[r][n][i], sums[r][n]);
        });
      });
    });
  }

  std::unique_ptr<float[], Free> x_, sums_, begin_;
  std::vector<const float*> laid_out_;  // the tokens of x_: they stay what they are as long as this lives
};

#ifdef MOE_METAL_AMX
[[MOE_METAL_BF16, gnu::always_inline]] inline __m512i both(const Vec& low, const Vec& high) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

// Numbers with one scale and offset, rounded to bfloat16, 32 at a time. Those of 4 bits are looked up.
template <class Read>
class Rounded {
 public:
  [[MOE_METAL_BF16, gnu::always_inline]] inline void set(const Read& read, float scale, float offset) {
    scale_ = scale, offset_ = offset;
    if constexpr (Read::kBits == 4) {
      const auto values = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(scaled(read.codes.few())));
      values_ = _mm512_inserti64x4(_mm512_castsi256_si512(values), values, 1);
    }
  }
  // For later rows, where it lasts.
  static void keep(Rounded&) {}
  // N blocks of a row, to N tiles.
  template <int N>
  [[MOE_METAL_BF16, gnu::always_inline]] inline void write(const Read& read, const uint8_t* from,
                                                           at::BFloat16* to) const {
    MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
      _mm512_storeu_si512(to + n * kTileSize, block(read, from + n * kDepth * Read::kBits / 8));
    }
  }

 private:
  [[MOE_METAL_BF16, gnu::always_inline]] inline __m512i block(const Read& read, const uint8_t* from) const {
    if constexpr (Read::kBits == 4) {  // by 5 bits, of which the last is the next number's
      const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
      return _mm512_permutexvar_epi16(_mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12)), values_);
    } else {
      return both(scaled(read(from, 0, Whole())), scaled(read(from, kLanes, Whole())));
    }
  }
  [[gnu::always_inline]] Vec scaled(const Vec& codes) const {
    if constexpr (Read::kOffset) return at::vec::fmadd(codes, scale_, offset_);
    return codes * scale_;
  }

  Vec scale_, offset_;
  __m512i values_;
};

// e4m3 by its magnitudes' bytes, of which each scale, one for 128 rows and columns, has its own.
template <class Read>
  requires Read::kScalesAreRare
class Rounded<Read> {
 public:
  [[gnu::always_inline]] void set(const Read& read, float scale, float) {
    if (std::bit_cast<uint32_t>(scale) != last_) renew(read, scale);
  }
  [[gnu::always_inline]] void keep(Rounded& rounded) const {
    if (last_ != rounded.last_) rounded = *this;
  }
  template <int N>
  [[MOE_METAL_BF16, gnu::always_inline]] inline void write(const Read&, const uint8_t* from, at::BFloat16* to) const {
    // The halves of eight bytes apart, which come out side by side.
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i bytes = N == 2 ? _mm512_loadu_si512(from)
                                 : _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    __m512i out[2];
    numbers_(_mm512_permutexvar_epi64(order, bytes), out);
    MOE_METAL_UNROLL for (int n = 0; n < N; ++n) _mm512_storeu_si512(to + n * kTileSize, out[n]);
  }

 private:
  [[MOE_METAL_BF16, gnu::noinline]] void renew(const Read& read, float scale) {
    last_ = std::bit_cast<uint32_t>(scale);
    alignas(64) at::BFloat16 magnitudes[128];
    uint8_t codes[kDepth];
    for (int first = 0; first < 128; first += kDepth) {
      for (int i = 0; i < kDepth; ++i) codes[i] = static_cast<uint8_t>(first + i);
      const Vec low = read(codes, 0, Whole()) * Vec(scale), high = read(codes, kLanes, Whole()) * Vec(scale);
      _mm512_store_si512(magnitudes + first, both(low, high));
    }
    numbers_ = EightBits(magnitudes);
  }

  EightBits numbers_;
  int64_t last_ = -1;  // the bits of the last scale
};
#endif

template <class Read>
class PackedRows final : public WeightRows {
 public:
  PackedRows(const Weight& weight, bool bfloat16)
      : weight_(weight),
        scales_(weight.scale, weight.format->scale_rows),
        offsets_(weight.offset, 1),
        few_(std::clamp<int64_t>(1024 / std::max<int64_t>(scales_.groups() + offsets_.groups(), 1), 8, kMany) / 4 * 4),
        bfloat16_(bfloat16) {
    packed_.columns = weight.columns;
    packed_.row = weight.row;
    packed_.shift = std::countr_zero(static_cast<uint64_t>(weight.group));
    packed_.groups = scales_.groups();
  }

  void take(int64_t expert, int64_t first, int64_t count) override {
    expert_ = expert, first_ = first, count_ = count;
    next_ = place(expert, first + count);
  }
  void next(int64_t expert, int64_t first, int64_t count) override {
    scales_.prefetch(expert, first, count);
    offsets_.prefetch(expert, first, count);
    next_ = place(expert, first);
  }
  void product(const Tokens& tokens, std::optional<Panel>& panel) override {
    if (panel) {
      look_at(0, count_);
      return panel->product(packed_, tokens);
    }
    out_.resize(tokens.count);
    const int64_t at_once = bfloat16_ && Read::Tiles::wants(tokens) ? kMany : few_;
    for (int64_t first = 0; first < count_; first += at_once) {
      look_at(first, std::min(at_once, count_ - first));
      for (int64_t n = 0; n < tokens.count; ++n) out_[n] = tokens.out[n] + first;
      some_rows({tokens.x, out_.data(), tokens.count});
    }
  }
  void dequantize(int64_t row, float* to) override {
    look_at(row, 1);
    const auto some = packed_.some(0);
    for_each_vector(packed_.columns, [&](int64_t c, auto count) { store(to + c, some.load(0, c, count), count); });
  }
#ifdef MOE_METAL_AMX
  void take_strip(const StripRows& strip, const StripRows& next) override {
    if (strip.count > 0) {
      take(strip.expert, strip.first, strip.span());
      look_at(0, strip.span());
    }
    strip_ = strip;
    whole_ = strip.count == kTile && weight_.group >= kDepth;
    row_ = strip.step * packed_.row;
    groups_ = strip.step * packed_.groups;
    in_a_run_ = row_ == packed_.bytes(packed_.columns);
    if (next.count > 0) this->next(next.expert, next.first, next.span());
  }
  [[MOE_METAL_BF16]] void pack(int64_t row, int64_t rows, int64_t first, int64_t columns, at::BFloat16* to) override {
    const int64_t end = first + columns;
    while (whole_ && first + kDepth <= end) {
      if (first + 2 * kDepth <= end && first >> packed_.shift == (first + kDepth) >> packed_.shift) {
        pack_whole<2>(row, rows, first, to);
        first += 2 * kDepth, to += 2 * kTileSize;
      } else {
        pack_whole<1>(row, rows, first, to);
        first += kDepth, to += kTileSize;
      }
    }
    if (first < end) pack_part(row, rows, first, end, to);
  }
#endif

 private:
#ifdef MOE_METAL_AMX
  // Some rows of N blocks that share their scales. The next strip is asked for in the order in which it lies in memory,
  // whatever rows these are: on a Sapphire Rapids the same bytes come 8 to 10 % faster than row by row.
  template <int N>
  [[MOE_METAL_BF16, gnu::always_inline]] inline void pack_whole(int64_t row, int64_t rows, int64_t column,
                                                                at::BFloat16* to) {
    const int64_t bytes = row_, groups = groups_, group = row * groups + (column >> packed_.shift);
    const int64_t begin = packed_.bytes(column), further = in_a_run_ ? packed_.bytes(N * kDepth) : bytes;
    const uint8_t* from = packed_.data + row * bytes + begin;
    const uint8_t* next = next_ + row * further + (in_a_run_ ? kTile * begin : begin);
    const float *scale = packed_.scales + group, *offset = Read::kOffset ? packed_.offsets + group : scale;
    Rounded<Read> rounded = rounded_;  // which no store below can change
    to += row * kDepth;
    for (int64_t r = 0; r < rows; ++r) {
      __builtin_prefetch(next, 0, 2);
      rounded.set(packed_.read, *scale, *offset);
      rounded.template write<N>(packed_.read, from, to);
      from += bytes, next += further, scale += groups, offset += groups, to += kDepth;
    }
    rounded.keep(rounded_);
  }
  [[MOE_METAL_BF16, gnu::noinline]] void pack_part(int64_t row, int64_t rows, int64_t first, int64_t end,
                                                   at::BFloat16* to) const {
    for (; first < end; first += kDepth, to += kTileSize) {
      for (int64_t r = row; r < row + rows; ++r) {
        const auto from = packed_.some(r * strip_.step);
        const auto part = [&](int64_t column) { return r < strip_.count ? from.load_part(0, column) : Vec(0); };
        _mm512_storeu_si512(to + r * kDepth, both(part(first), part(first + kLanes)));
      }
    }
  }

  StripRows strip_;
  bool whole_ = false;  // 16 rows, whose groups fill blocks
  bool in_a_run_ = false;
  int64_t row_ = 0, groups_ = 0;  // from one of its rows to the next, bytes and scales
  Rounded<Read> rounded_;
#endif

  // Makes packed_ some of the rows taken.
  void look_at(int64_t first, int64_t count) {
    packed_.rows = count;
    packed_.data = place(expert_, first_ + first);
    packed_.scales = scales_.floats(expert_, first_ + first, count);
    packed_.offsets = offsets_.floats(expert_, first_ + first, count);
    packed_.left = count_ - first;
    packed_.next = next_;
  }

  void some_rows(const Tokens& tokens) {
    if (!scaled_last(tokens)) return product_by_rows(packed_, tokens);
    // What has no digits comes to NaN there, and a group may have an infinite sum before its scale: once more, then,
    // with each number scaled.
    for (int64_t n = 0; n < tokens.count; ++n) {
      if (!all_finite(tokens.out[n], packed_.rows)) product_by_rows(packed_, {tokens.x + n, tokens.out + n, 1});
    }
  }
  // Products that are summed before they are scaled. False where nothing was done.
  bool scaled_last(const Tokens& tokens) {
    if (bfloat16_ && (tiles_(packed_, tokens) || dots_(packed_, tokens))) return true;
    if constexpr (kLanes >= 8) {
      if (weight_.group >= 2 * kLanes && weight_.columns % weight_.group == 0 && tokens.count <= 2) {
        tokens.count == 1 ? by_groups_.template operator()<1>(packed_, tokens)
                          : by_groups_.template operator()<2>(packed_, tokens);
        return true;
      }
    }
    return false;
  }

  const uint8_t* place(int64_t expert, int64_t row) const {
    return static_cast<const uint8_t*>(weight_.data.const_data_ptr()) + expert * weight_.expert + row * weight_.row;
  }

  const Weight& weight_;
  RowScales scales_, offsets_;
  // Rows whose scales become floats together: so few that these stay in the first cache, and a multiple of those that
  // are multiplied together; or as many as tiles have.
  static constexpr int64_t kMany = 16;
  const int64_t few_;
  int64_t expert_ = 0, first_ = 0, count_ = 0;  // the rows taken
  const uint8_t* next_ = nullptr;               // and what is read after them
  Packed<Read> packed_;
  const bool bfloat16_;  // as rows_of() has it
  typename Read::Tiles tiles_;
  typename Read::Dots dots_;
  GroupDots<Read> by_groups_;
  std::vector<float*> out_;
};

}  // namespace

template <class Read>
std::unique_ptr<WeightRows> packed_rows(const Weight& weight, bool bfloat16) {
  return std::make_unique<PackedRows<Read>>(weight, bfloat16);
}

}  // namespace moe_metal
