// What products of packed numbers with few tokens share.
#pragma once
#include <vector>

#include "cpu/vector/dots.h"

namespace moe_metal {

// Rows of packed numbers, their scales, and their offsets if any.
struct ScaledRows {
  const uint8_t* data;
  int64_t row, rows, columns;  // bytes from one row to the next
  const float *scales, *offsets;
  int64_t groups;  // of a row
  int shift;       // of a column, to its group

  // What is read later: the `left` of these rows and those that follow them, and then others. While R rows are
  // multiplied, as many that are read later() are brought to the first cache, line by line, so that memory is asked all
  // along for as much as it has under way at a time. Rows left over ask as far ahead, or some would never be asked for.
  int64_t left;
  const uint8_t* next;
  const uint8_t* ahead(int64_t r) const { return r < left ? data + r * row : next + (r - left) * row; }
  int64_t later(int64_t R) const { return at::divup(distance, std::max<int64_t>(R * row, 1)) * R; }
  int64_t distance = 4096;  // bytes, and up to whole R rows
};

inline bool all_finite(const float* values, int64_t count) {
  Vec differences(0);  // NaN of what is not finite
  for_each_vector(count, [&](int64_t i, auto n) {
    const Vec some = load(values + i, n);
    differences = differences + (some - some);
  });
  return sum(differences) == 0;
}

// For numbers and processors that have no products of their own.
struct NoDots {
  static constexpr int64_t kRowsAtOnce = 1;
  static constexpr bool kReadsScales = false;
  static bool takes(const ScaledRows&, int64_t) { return false; }
  void operator()(const ScaledRows&, const Tokens&) {}
};

// Tokens in the form that a product wants them in, which they are given once: those of `down` come again with each
// block of the output. A token stays what it is as long as this lives.
class TokenForms {
 public:
  // The form of these tokens, of so many bytes at most, for which make(form) is called unless it was before: it says
  // how many it filled. Until the next call.
  template <class Make>
  const char* look_up(const float* const* x, int64_t count, int64_t bytes, Make&& make) {
    // Mostly they are those of the last call, or those that followed them before.
    for (int64_t i = 0; i < used_; ++i, last_ = last_ + 1 < used_ ? last_ + 1 : 0) {
      const auto& tokens = forms_[last_].tokens;
      if (std::equal(x, x + count, tokens.begin(), tokens.end())) return forms_[last_].data.get();
    }
    if (bytes_ > kBytes) used_ = 0, bytes_ = 0;
    last_ = used_++;
    if (last_ == std::ssize(forms_)) forms_.emplace_back();
    Form& form = forms_[last_];
    if (form.bytes < bytes) form.data = scratch<char>(bytes), form.bytes = bytes;
    form.tokens.assign(x, x + count);
    bytes_ += make(form.data.get());
    return form.data.get();
  }

 private:
  static constexpr int64_t kBytes = 2 << 20;  // in the second cache

  struct Form {
    std::vector<const float*> tokens;
    std::unique_ptr<char[], Free> data;
    int64_t bytes = 0;
  };
  std::vector<Form> forms_;
  int64_t used_ = 0, bytes_ = 0, last_ = 0;  // of forms_
};

}  // namespace moe_metal
