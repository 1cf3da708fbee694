// Tile rows of packed rows as tiles of bfloat16.
#pragma once
#include "cpu/weights/packed_view.h"
#include "cpu/x86/packed_tile_row.h"
#include "cpu/x86/rounded.h"

namespace moe_metal {
namespace {

constexpr int64_t kTwoBlocks = 2 * kDepth;  // columns that are converted together

// Group columns share a scale, or more if it is kTwoBlocks.
template <class Read, int Group>
class PackedTileRowOf final : public PackedTileRow {
 public:
  explicit PackedTileRowOf(const Weight& weight) : rows_(weight) {}

  void start(const TileRowRange& tile_row, const TileRowRange& next) override {
    const RowRange rows = {tile_row.expert, tile_row.first, tile_row.count > 0 ? tile_row.span() : 0};
    next_ = rows_.prefetched(rows, {next.expert, next.first, next.count > 0 ? next.span() : 0});
    matrix_ = &rows_.without_scales(rows, 0, rows.count, next_);
    tile_row_ = tile_row;
    row_ = tile_row.step * matrix_->row;
    groups_ = tile_row.step * matrix_->groups;
    contiguous_ = row_ == matrix_->bytes(matrix_->columns);
    whole_ = tile_row.count == kTile && std::min(rows_.weight().group, kTwoBlocks) == Group;
    if (whole_ && kScaleOfBlock) return;
    rows_.with_scales(rows, 0);
    whole_ = whole_ && rounded_.prepare(matrix_->scales, kTile, groups_, matrix_->groups);
  }
  void pack(int64_t first, int64_t columns, at::BFloat16* to) override {
    const int64_t end = first + columns;
    if (whole_) {
      for (; first + kTwoBlocks <= end; first += kTwoBlocks, to += 2 * kTileSize) pack_whole<2>(first, to);
      if (first + kDepth <= end) pack_whole<1>(first, to), first += kDepth, to += kTileSize;
    }
    if (first < end) pack_part(first, end, to);
  }
  bool multiply(const WeightTiles& to, const TokenTiles& groups, float (*c)[kTile][kTile]) override {
    if (!whole_ || matrix_->columns % kTwoBlocks != 0) return false;
    multiply_ahead(to, groups, c);
    return true;
  }

 private:
  // Whether scales are read with the codes, which are in the same cache lines. Reading all scales of a tile row first
  // takes a pass over its memory: q8_0 takes 0.95 to 0.98 of the time without it (Zen 4, 128 and 512 tokens of 128
  // experts).
  static constexpr bool kScaleOfBlock = requires(float& scale) { Read::scale_of_block(nullptr, scale, scale); };

  // Converts N blocks of a row after the other. The next tile row is prefetched in address order, independent of the
  // rows being converted: on a Sapphire Rapids that is 8 to 10 % faster than row by row. Each line is prefetched twice:
  // with mxfp8 on a Zen 4, experts of 32 tokens take 0.95 of the time of once.
  template <int N>
  class Converted {
   public:
    explicit Converted(PackedTileRowOf& tile_row) : all_(tile_row) {}

    // Goes to a row, at a column.
    [[gnu::always_inline]] void start(int64_t row, int64_t column, at::BFloat16* to) {
      const int64_t begin = PackedMatrix<Read>::bytes(column);
      column_ = column;
      from_ = data_ + row * bytes_;
      next_ = all_.next_ + row * further_ + (all_.contiguous_ ? kTile * begin : begin);
      if constexpr (!kScaleOfBlock) scale_ = scales_ + row * groups_ + (column >> shift_);
      to_ = to + row * kDepth;
    }
    [[MOE_METAL_BF16, gnu::always_inline]] inline void row() {
      if (column_ < 0 || column_ % (N * kDepth) != 0) __builtin_unreachable();  // for simpler addresses
      for (int64_t ahead = 0; ahead < kBytes; ahead += kLine / 2) __builtin_prefetch(next_ + ahead, 0, 2);
      if constexpr (kScaleOfBlock) {
        float scale[N], offset[N];
        MOE_METAL_UNROLL for (int n = 0; n < N; ++n) {
          Read::scale_of_block(from_ + PackedMatrix<Read>::bytes(column_ + n * kDepth), scale[n], offset[n]);
        }
        all_.rounded_.template write<N, Group>(from_, column_, scale, offset, to_);
      } else {
        all_.rounded_.template write<N, Group>(from_, column_, scale_, scale_ + to_offset_, to_);
        scale_ += groups_;
      }
      from_ += bytes_, next_ += further_, to_ += kDepth;
    }

   private:
    static constexpr int64_t kBytes = PackedMatrix<Read>::bytes(N * kDepth);
    PackedTileRowOf& all_;
    // Copies, which cannot alias what row() writes.
    const uint8_t* const data_ = all_.matrix_->data;
    const float* const scales_ = all_.matrix_->scales;
    const int64_t to_offset_ = Read::kOffset ? all_.matrix_->offsets - scales_ : 0;
    const int64_t bytes_ = all_.row_, groups_ = all_.groups_, further_ = all_.contiguous_ ? kBytes : bytes_;
    const int shift_ = all_.matrix_->shift;
    int64_t column_;
    const uint8_t *from_, *next_;
    const float* scale_;
    at::BFloat16* to_;
  };

  template <int N>
  [[MOE_METAL_BF16]] void pack_whole(int64_t column, at::BFloat16* to) {
    Converted<N> converted(*this);
    converted.start(0, column, to);
    for (int64_t r = 0; r < kTile; ++r) converted.row();
  }

  // For a product of vectors: converts a row in each part of a block, two blocks ahead.
  class Ahead {
   public:
    Ahead(PackedTileRowOf& tile_row, const WeightTiles& to)
        : converted_(tile_row), columns_(tile_row.matrix_->columns), to_(to) {}
    [[MOE_METAL_BF16, gnu::always_inline]] inline void begin(int64_t first) {
      first_ = first;
      start(0);
      for (int64_t r = 0; r < kRowsOfVectors; ++r) converted_.row();
    }
    [[MOE_METAL_BF16, gnu::always_inline]] inline void operator()(int64_t block, int64_t part) {
      if (block % 2 == 0 && part == 0) start(block + 2);
      if (more_) converted_.row();
    }

   private:
    [[gnu::always_inline]] void start(int64_t block) {
      more_ = block * kDepth < columns_;
      converted_.start(first_, block * kDepth, const_cast<at::BFloat16*>(to_.data) + (block & to_.ring) * to_.chunk);
    }
    Converted<2> converted_;
    bool more_ = true;
    int64_t first_ = 0;
    const int64_t columns_;
    const WeightTiles to_;
  };
  [[MOE_METAL_BF16, gnu::noinline]] void multiply_ahead(const WeightTiles& to, const TokenTiles& groups,
                                                        float (*c)[kTile][kTile]) {
    // For up to 16, 24, 32 and 40 tokens; up to 8 are not multiplied here.
    static constexpr decltype(&multiply_by_vectors<2, true, Ahead>) kProducts[] = {
        multiply_by_vectors<1, false, Ahead>, multiply_by_vectors<1, true, Ahead>, multiply_by_vectors<2, false, Ahead>,
        multiply_by_vectors<2, true, Ahead>};
    kProducts[at::divup(groups.tokens, kTile / 2) - 2](to, groups.data, groups.size, matrix_->columns / kDepth, c,
                                                       false, Ahead(*this, to));
  }

  // The rest of a row from a column on, up to a vector; 0 past the end.
  Vec load_up_to_vector(const typename PackedMatrix<Read>::RowBlock& row, int64_t column) const {
    const int64_t count = std::min(matrix_->columns - column, kLanes);
    return count <= 0 ? Vec(0) : count == kLanes ? row.load(0, column, Whole()) : row.load(0, column, count);
  }
  [[MOE_METAL_BF16, gnu::noinline]] void pack_part(int64_t first, int64_t end, at::BFloat16* to) const {
    for (; first < end; first += kDepth, to += kTileSize) {
      for (int64_t r = 0; r < kTile; ++r) {
        const auto from = matrix_->row_block(r * tile_row_.step);
        const auto part = [&](int64_t column) {
          return r < tile_row_.count ? load_up_to_vector(from, column) : Vec(0);
        };
        _mm512_storeu_si512(to + r * kDepth, both(part(first), part(first + kLanes)));
      }
    }
  }

  PackedView<Read> rows_;
  TileRowRange tile_row_;
  const PackedMatrix<Read>* matrix_ = nullptr;
  const uint8_t* next_ = nullptr;
  bool contiguous_ = false, whole_ = false;
  int64_t row_ = 0, groups_ = 0;  // strides of the tile_row's rows, in bytes and in scales
  Rounded<Read> rounded_;
};

template <class Read>
std::unique_ptr<PackedTileRow> make_packed_tile_row(const Weight& weight) {
  if constexpr (Read::kGroup != 0) {
    return std::make_unique<PackedTileRowOf<Read, std::min<int>(Read::kGroup, kTwoBlocks)>>(weight);
  } else {
    if (weight.group >= kTwoBlocks) return std::make_unique<PackedTileRowOf<Read, kTwoBlocks>>(weight);
    if (weight.group == kDepth) return std::make_unique<PackedTileRowOf<Read, kDepth>>(weight);
    return std::make_unique<PackedTileRowOf<Read, kLanes>>(weight);
  }
}

}  // namespace
}  // namespace moe_metal
