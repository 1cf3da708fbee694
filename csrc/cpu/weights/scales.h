// The scales and offsets of packed rows, as floats.
#pragma once
#include <vector>

#include "cpu/vector/bytes.h"
#include "cpu/weights/scaled_rows.h"
#include "weight.h"

namespace moe_metal {
namespace {  // internal linkage, so that the compiler can specialise functions for their calls

inline void prefetch_bytes(const void* from, int64_t count) {
  for (int64_t i = 0; i < count; i += kLine) __builtin_prefetch(static_cast<const char*>(from) + i);
}

// The scales, or the offsets, of some rows as floats, row by row.
class ScaleTensor {
 public:
  // Each `shared_rows` rows share their scales. Tensors of bytes are e8m0 or e4m3.
  ScaleTensor(const Tensor& tensor, int64_t shared_rows, bool e4m3 = false)
      : tensor_(tensor), shared_rows_(shared_rows), e4m3_(e4m3) {
    if (!tensor.defined()) return;
    groups_ = tensor.size(-1);
    expert_ = tensor.dim() > 2 ? tensor.stride(-3) : 0;
    row_ = tensor.stride(-2);
    group_ = tensor.stride(-1);
  }

  // Valid until the next call. Also prefetches the following scales.
  const float* floats(int64_t expert, int64_t first, int64_t count) {
    if (!tensor_.defined()) return nullptr;
    const int64_t block = first / shared_rows_;
    const bool shared = shared_rows_ > 1 && block == (first + count - 1) / shared_rows_;
    if (shared && expert == expert_of_floats_ && block == block_of_floats_ && count * groups_ <= std::ssize(floats_)) {
      return floats_.data();
    }
    expert_of_floats_ = shared ? expert : -1, block_of_floats_ = block;
    floats_.resize(count * groups_);
    prefetch_bytes(address(expert, first) + kAhead, bytes(first, count));
    const int64_t from = expert * expert_;
    if (shared_rows_ == 1 && group_ == 1 && row_ == groups_) {
      to_floats(from + first * row_, count * groups_, floats_.data());  // a single row rarely fills vectors
      return floats_.data();
    }
    for (int64_t r = 0; r < count; ++r) {
      to_floats(from + (first + r) / shared_rows_ * row_, groups_, floats_.data() + r * groups_);
    }
    return floats_.data();
  }
  // Prefetches the first scales of the next rows, which floats() does not prefetch.
  void prefetch(int64_t expert, int64_t first, int64_t count) const {
    if (tensor_.defined()) prefetch_bytes(address(expert, first), std::min(bytes(first, count), kAhead));
  }
  int64_t groups() const { return groups_; }

 private:
  void to_floats(int64_t from, int64_t count, float* to) const {
    if (tensor_.element_size() == 1) {
      return bytes_to_floats(static_cast<const uint8_t*>(tensor_.const_data_ptr()) + from, count, to);
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

  void bytes_to_floats(const uint8_t* from, int64_t count, float* to) const {
    int64_t i = 0;
    if (e4m3_) {
      for (; group_ == 1 && i + kSixteen <= count; i += kSixteen) {
        Sixteen numbers;
        e4m3_floats(from + i, numbers);
        for (int64_t v = 0; v < kSixteen / kLanes; ++v) {
          store(to + i + v * kLanes, numbers[v] * Vec(kE4m3Unit), Whole());
        }
      }
      for (; i < count; ++i) to[i] = e4m3(from[i * group_]);
    } else if (group_ == 1) {  // a separate loop, which the compiler can vectorise
      for (; i < count; ++i) to[i] = e8m0(from[i]);
    } else {
      for (; i < count; ++i) to[i] = e8m0(from[i * group_]);
    }
  }

  static constexpr int64_t kAhead = 1024;  // bytes

  const char* address(int64_t expert, int64_t row) const {
    const int64_t at = expert * expert_ + row / shared_rows_ * row_;
    return static_cast<const char*>(tensor_.const_data_ptr()) + at * tensor_.element_size();
  }
  int64_t bytes(int64_t first, int64_t count) const {
    return address(0, first + count - 1) - address(0, first) + groups_ * tensor_.element_size();
  }

  const Tensor tensor_;
  const int64_t shared_rows_;
  const bool e4m3_;
  int64_t groups_ = 0, expert_ = 0, row_ = 0, group_ = 0;
  std::vector<float> floats_;
  int64_t expert_of_floats_ = -1, block_of_floats_ = 0;  // if all rows of floats_ share their scales
};

// The scales and offsets of a weight's rows, from its tensors or, in the specialisation below, from its blocks.
template <class Read>
class Scales {
 public:
  explicit Scales(const Weight& weight)
      : scale_(weight.scale, weight.format->scale_rows, weight.format->scale == ScaleType::e4m3),
        offset_(Read::kOffset ? weight.offset : Tensor(), 1) {
    if (weight.format->offset == OffsetType::factor && weight.offset.defined()) factor_ = &weight.offset;
  }

  int64_t groups() const { return scale_.groups(); }
  // Sets the scales and offsets of the rows in `to`. They are valid until the next call.
  void read(int64_t expert, int64_t first, ScaledRows& to) {
    to.scales = scale_.floats(expert, first, to.rows);
    to.offsets = offset_.floats(expert, first, to.rows);
    if (factor_) multiply(expert, to);
  }
  void prefetch(int64_t expert, int64_t first, int64_t count) const {
    scale_.prefetch(expert, first, count);
    offset_.prefetch(expert, first, count);
  }

 private:
  void multiply(int64_t expert, ScaledRows& to) {
    const float factor = elements<float>(*factor_)[factor_->dim() > 1 ? expert * factor_->stride(-2) : 0];
    scaled_.resize(to.rows * to.groups);
    for (size_t i = 0; i < scaled_.size(); ++i) scaled_[i] = factor * to.scales[i];
    to.scales = scaled_.data();
  }

  ScaleTensor scale_, offset_;
  const Tensor* factor_ = nullptr;
  std::vector<float> scaled_;
};

template <class Read>
  requires Read::kOwnScales
class Scales<Read> {
 public:
  explicit Scales(const Weight& weight) : groups_(weight.columns / weight.group) {}

  int64_t groups() const { return groups_; }
  // Not inlined in each of its callers: that took a tenth of the time in which a format is compiled.
  [[gnu::noinline]] void read(int64_t, int64_t, ScaledRows& to) {
    scales_.resize(to.rows * groups_);
    if (Read::kOffset) offsets_.resize(to.rows * groups_);
    for (int64_t r = 0; r < to.rows; ++r) {
      Read::scales(to.data + r * to.row, to.columns, &scales_[r * groups_],
                   Read::kOffset ? &offsets_[r * groups_] : nullptr);
    }
    to.scales = scales_.data();
    to.offsets = offsets_.data();
  }
  void prefetch(int64_t, int64_t, int64_t) const {}  // scales are prefetched with the data

 private:
  const int64_t groups_;
  std::vector<float> scales_, offsets_;
};

}  // namespace
}  // namespace moe_metal
