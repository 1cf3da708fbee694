// Shared by the products of packed numbers with few tokens.
#pragma once
#include <array>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "cpu/vector/dots.h"

namespace moe_metal {

// Prefetches the first cache lines of each page that begins in `count` bytes from `from` on. The processor's own
// prefetcher stops at the end of a page and starts in the next one after some misses, so memory would be idle there.
[[gnu::always_inline]] inline void prefetch_page_starts(const uint8_t* from, int64_t count) {
  const uint8_t* page = from + (-reinterpret_cast<uintptr_t>(from) & (kPage - 1));
  for (; page < from + count; page += kPage) {
    for (int64_t line = 0; line < 4 * kLine; line += kLine) __builtin_prefetch(page + line, 0, 2);
  }
}

// Rows of packed numbers, with their scales and their offsets, if any.
struct ScaledRows {
  const uint8_t* data;
  int64_t row, rows, columns;  // bytes from one row to the next
  const float *scales = nullptr, *offsets = nullptr;
  int64_t groups;  // of a row
  int shift;       // of a column, to its group

  // Prefetching. First `left` more rows from `data` on are read, then those at `next`. While R rows are multiplied, R
  // rows later on (distance later(R)) are prefetched, a cache line at a time, which keeps the number of loads in flight
  // constant. Remaining single rows prefetch at the same distance, so that no row is left out.
  int64_t left;
  const uint8_t* next;
  const uint8_t* ahead(int64_t r) const { return r < left ? data + r * row : next + (r - left) * row; }
  int64_t later(int64_t R) const { return at::divup(distance, std::max<int64_t>(R * row, 1)) * R; }
  int64_t distance = 4096;  // how far ahead to prefetch, in bytes; rounded up to a multiple of R rows

  // Calls multiply(integral_constant R, first, ahead) for each block of R rows, and with 1 for each of the last rows.
  template <int R, class Multiply>
  void for_blocks(Multiply&& multiply) const {
    const int64_t prefetched = R + later(R);
    int64_t first = 0;
    for (; first + R <= rows; first += R) {
      const uint8_t* from = ahead(first + prefetched);
      prefetch_page_starts(from + kPage, R * row);
      multiply(std::integral_constant<int, R>(), first, from);
    }
    for (; first < rows; ++first) multiply(std::integral_constant<int, 1>(), first, ahead(first + prefetched));
  }
};

// The sum over a group's columns, a multiple of a vector's.
inline float sum_of(const float* x, int64_t columns) {
  Vec all(0);
  for (int64_t c = 0; c < columns; c += kLanes) all = all + Vec::loadu(x + c);
  return sum(all);
}

// Prefetches the cache lines that begin in `count` bytes from `begin` on.
[[gnu::always_inline]] inline void prefetch_lines(const uint8_t* from, int64_t begin, int64_t count) {
  for (int64_t at = at::divup(begin, kLine) * kLine; at < begin + count; at += kLine) {
    __builtin_prefetch(from + at, 0, 2);
  }
}

inline bool all_finite(const float* values, int64_t count) {
  Vec differences(0);  // becomes NaN if a value is not finite
  for_each_vector(count, [&](int64_t i, auto n) {
    const Vec vec = load(values + i, n);
    differences = differences + (vec - vec);
  });
  return sum(differences) == 0;
}

// Dot products with special instructions, where a format or a processor has none.
struct NoDots {
  static bool takes(const ScaledRows&, int64_t) { return false; }
  void operator()(const ScaledRows&, const Tokens&) {}
};

// A cache of tokens in the one layout that a product needs: tokens of `down` are used again for each block of the
// output, and those of `gate_up` by each of their experts. Tokens must not change during the lifetime of this object.
class PreparedTokenCache {
 public:
  // Returns the form of these tokens together, which is valid until the next call. If it is not in the cache,
  // make(form) writes it, to at most `bytes` bytes, and returns the number of bytes used.
  template <class Make>
  const char* look_up(const float* const* x, int64_t count, int64_t bytes, Make&& make) {
    forget_if_full();
    return find(x, count, bytes, make);
  }
  // Returns a form for each of up to `most` tokens. lay_out(x, form) writes that of one token, to at most `bytes`
  // bytes, and returns the number of bytes used.
  template <int64_t most, class LayOut>
  std::array<const char*, most> look_up_each(const Tokens& tokens, int64_t bytes, LayOut&& lay_out) {
    forget_if_full();
    std::array<const char*, most> forms;
    for (int64_t n = 0; n < tokens.count; ++n) {
      const float* const* x = tokens.x + n;
      forms[n] = find(x, 1, bytes, [&](char* form) { return lay_out(*x, form); });
    }
    return forms;
  }

 private:
  static constexpr int64_t kBytes = 2 << 20;  // fits in an L2 cache

  void forget_if_full() {
    if (bytes_ > kBytes) forms_.clear(), bytes_ = 0;
  }
  // The key is the address of the first token. A new call with it replaces the entry.
  template <class Make>
  const char* find(const float* const* x, int64_t count, int64_t bytes, Make&& make) {
    Form& form = forms_[reinterpret_cast<uintptr_t>(*x)];
    if (!std::equal(x, x + count, form.tokens.begin(), form.tokens.end())) {
      form.tokens.assign(x, x + count);
      form.data = scratch<char>(bytes);
      bytes_ += make(form.data.get());
    }
    return form.data.get();
  }

  struct Form {
    std::vector<const float*> tokens;
    std::unique_ptr<char[], Free> data;
  };
  // By the address of their first token, as an integer: the hash of a pointer needs a newer libc++ than macOS 14's.
  std::unordered_map<uintptr_t, Form> forms_;
  int64_t bytes_ = 0;  // of all forms
};

}  // namespace moe_metal
