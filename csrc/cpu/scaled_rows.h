// What products of packed numbers with few tokens share.
#pragma once
#include <vector>

#include "dots.h"

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
  // along for as much as it has under way at a time.
  int64_t left;
  const uint8_t* next;
  const uint8_t* ahead(int64_t r) const { return r < left ? data + r * row : next + (r - left) * row; }
  int64_t later(int64_t R) const {
    constexpr int64_t kAhead = 4096;  // bytes, and up to whole R rows
    return at::divup(kAhead, std::max<int64_t>(R * row, 1)) * R;
  }
};

constexpr int64_t kLine = 64;  // bytes that memory hands out at a time
constexpr int64_t kFewTokens = 8;

// For numbers and processors that have no products of their own.
struct NoDots {
  static bool available() { return false; }
  // False where nothing was done.
  bool operator()(const ScaledRows&, const Tokens&) { return false; }
};

// Tokens in the form that a product wants them in, which each is given once: those of `down` come again with each block
// of the output. A token stays what it is as long as this lives.
class TokenForms {
 public:
  // forms[n] = that of tokens.x[n], of so many bytes, for which make(x, form) is called unless it was before.
  template <class Make>
  void look_up(const Tokens& tokens, int64_t bytes, const char** forms, Make&& make) {
    if (std::ssize(tokens_) + tokens.count > kMost) tokens_.clear();
    for (int64_t n = 0; n < tokens.count; ++n) {
      const auto found = std::find(tokens_.begin(), tokens_.end(), tokens.x[n]);
      const auto at = found - tokens_.begin();
      if (at == std::ssize(forms_)) forms_.push_back(scratch<char>(bytes));
      if (found == tokens_.end()) {
        tokens_.push_back(tokens.x[n]);
        make(tokens.x[n], forms_[at].get());
      }
      forms[n] = forms_[at].get();
    }
  }

 private:
  static constexpr int64_t kMost = 64;
  std::vector<const float*> tokens_;
  std::vector<std::unique_ptr<char[], Free>> forms_;
};

}  // namespace moe_metal
