// `attention` of some queries over some keys, chunk by chunk, with an online softmax.
//
// A row is one query of one head. A tile has rows of all heads that share a key head, so a chunk of keys and values is
// read once for all of them. Rows are along the lanes of vectors: queries are transposed once, keys and values are used
// in place, and nothing is summed across lanes.
#pragma once
#include "contract/attention.h"
#include "cpu/attention/float_products.h"

namespace moe_metal {

// Some rows of one sequence and key head, and a range of keys.
struct Span {
  int64_t sequence, head;
  int64_t first_row, rows;
  int64_t first_key, last_key;
};

// The state of a row: its greatest score, the sum of e^(score - greatest), and the sum of values times these weights.
struct Sums {
  float greatest, total;
  const float* values;
};

// Each thread has its own. Products: see FloatProducts.
template <class Products>
class AttentionTile {
  using Scalar = typename Products::Scalar;
  using Key = typename Products::Key;

 public:
  explicit AttentionTile(const Attention& call)
      : call_(call),
        group_(call.A / call.J),
        lanes_(Products::lanes_of(std::min(kTileRows, group_ * call.T))),
        words_(Products::words_of(call.D, lanes_)),
        period_(std::max(lanes_, kLanes)),
        width_(at::divup(call.V, 2 * kLanes) * 2 * kLanes),
        queries_(scratch<float>(words_ * lanes_)),
        scores_(scratch<float>(kKeys * lanes_)),
        weights_(scratch<float>(kKeys * lanes_)),
        added_(scratch<float>(call.mask.defined() ? kKeys * lanes_ : 0)),
        out_(scratch<float>(lanes_ * width_)),
        of_rows_(scratch<float>(5 * period_)),
        keys_(scratch<Key>(kKeys * key_size())),
        values_(scratch<Scalar>(call.v.stride(3) == 1 ? 0 : kKeys * call.V)) {}

  // Prefetches the first keys and values of a span, with few rows.
  void prefetch(const Span& span) const {
    if (lanes_ > kLanes) return;
    for (const Tensor* tensor : {&call_.k, &call_.v}) {
      const int64_t bytes = tensor->size(3) * sizeof(Scalar);
      for (int64_t key = span.first_key; key < std::min(span.first_key + kKeys, span.last_key); ++key) {
        const auto* row = reinterpret_cast<const char*>(address(*tensor, span, key));
        for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(row + at, 0, 2);
      }
    }
  }

  // The keys and values of `next` are prefetched meanwhile.
  void operator()(const Span& span, const Span& next) {
    span_ = span;
    read_queries();
    std::fill_n(greatest(), period_, -kInfinity);
    std::fill_n(totals(), period_, 0.0f);
    std::fill_n(out_.get(), span.rows * width_, 0.0f);
    for (int64_t key = span.first_key; key < span.last_key; key += kKeys) {
      const int64_t count = std::min(kKeys, span.last_key - key);
      if (key + kKeys >= span.last_key) prefetch(next);
      multiply_keys(key, count);
      const bool some_barred = weigh(key, count);
      multiply_values(key, count, some_barred);
    }
    Products::order(out_.get(), span.rows * width_);
  }

  Sums sums(int64_t r) const {
    float total = 0;
    for (int64_t i = r; i < period_; i += lanes_) total += totals()[i];
    return {greatest()[r], total, out_.get() + r * width_};
  }

 private:
  int64_t key_size() const { return words_ * static_cast<int64_t>(sizeof(float) / sizeof(Key)); }
  int64_t query_of(int64_t r) const { return (span_.first_row + r) / group_; }
  int64_t head_of(int64_t r) const { return span_.head * group_ + (span_.first_row + r) % group_; }

  // One number per row; with fewer lanes than a vector has, they are repeated to fill it.
  float* greatest() const { return of_rows_.get(); }
  float* totals() const { return of_rows_.get() + period_; }
  float* factors() const { return of_rows_.get() + 2 * period_; }
  float* first_keys() const { return of_rows_.get() + 3 * period_; }  // the range of keys of a chunk that a row sees
  float* last_keys() const { return of_rows_.get() + 4 * period_; }

  // Transposes the queries for the products: a vector has the same columns of all rows.
  void read_queries() {
    const int64_t together = Products::columns_together(lanes_);
    const int64_t row = lanes_ * together, step = call_.q.stride(3);
    auto* const queries = reinterpret_cast<Key*>(queries_.get());
    std::fill_n(queries_.get(), words_ * lanes_, 0.0f);
    for (int64_t r = 0; r < span_.rows; ++r) {
      const auto* from = elements<Scalar>(call_.q) + span_.sequence * call_.q.stride(0) +
                         head_of(r) * call_.q.stride(1) + query_of(r) * call_.q.stride(2);
      Key* to = queries + r * together;
      int64_t d = 0;
      for (; d + 4 <= call_.D && together == 4 && step == 1; d += 4, to += row)
        std::memcpy(to, from + d, 4 * sizeof(Key));
      for (; d < call_.D; to += row) {
        for (int64_t i = 0; i < together && d < call_.D; ++i, ++d) to[i] = static_cast<Key>(from[d * step]);
      }
    }
  }

  // Rows with contiguous elements, and their stride.
  template <class Element>
  struct Chunk {
    const Element* data;
    int64_t step;
  };
  static const Scalar* address(const Tensor& tensor, const Span& span, int64_t key) {
    return elements<Scalar>(tensor) + span.sequence * tensor.stride(0) + span.head * tensor.stride(1) +
           key * tensor.stride(2);
  }

  // Keys in place if they consist of words and are multiplied without a remainder; otherwise a copy, padded with 0.
  Chunk<Key> keys_of(int64_t key, int64_t count) {
    const int64_t size = key_size(), step = call_.k.stride(2), column = call_.k.stride(3), D = call_.D;
    const auto* from = address(call_.k, span_, key);
    if constexpr (std::is_same_v<Key, Scalar>) {
      if (column == 1 && size == D && count % (2 * kSumsAtOnce) == 0) return {from, step};
    }
    std::fill_n(keys_.get(), kKeys * size, Key(0));
    for (int64_t n = 0; n < count; ++n) {
      if constexpr (std::is_same_v<Key, float>) {
        if (column == 1) {
          for_each_vector(D, [&](int64_t d, auto columns) {
            store(&keys_[n * size + d], load(from + n * step + d, columns), columns);
          });
          continue;
        }
      }
      for (int64_t d = 0; d < D; ++d) keys_[n * size + d] = static_cast<Key>(from[n * step + d * column]);
    }
    return {keys_.get(), size};
  }

  Chunk<Scalar> values_of(int64_t key, int64_t count) {
    const int64_t step = call_.v.stride(2), column = call_.v.stride(3), V = call_.V;
    const auto* from = address(call_.v, span_, key);
    if (column == 1) return {from, step};
    for (int64_t n = 0; n < count; ++n) {
      for (int64_t v = 0; v < V; ++v) values_[n * V + v] = from[n * step + v * column];
    }
    return {values_.get(), V};
  }

  void multiply_keys(int64_t key, int64_t count) {
    const Chunk<Key> chunk = keys_of(key, count);
    const int64_t next = key + kKeys < span_.last_key ? kKeys * chunk.step : 0;
    for (int64_t first = 0; first < count; first += 2 * kSumsAtOnce) {
      const Key* keys = chunk.data + first * chunk.step;
      Products::multiply_keys(queries_.get(), words_, lanes_, keys, chunk.step, keys + next,
                              scores_.get() + first * lanes_);
    }
  }

  // Converts scores to weights relative to the greatest score so far. -> whether any key is masked for any row
  bool weigh(int64_t key, int64_t count) {
    const int64_t last_query = query_of(span_.rows - 1);
    const bool at_an_edge =
        count < kKeys || call_.first_key(last_query) > key || call_.last_key(query_of(0)) < key + kKeys;
    if (at_an_edge) find_edges(key, count);
    masked_ = call_.mask.defined() && !sees_all(key, count);
    if (masked_) read_mask(key, count);
    bool some_barred = false;
    for (int64_t lane = 0; lane < period_; lane += kLanes) {
      const Vec greatest_of_chunk = bend_and_bar(lane, at_an_edge);
      some_barred |= softmax(lane, greatest_of_chunk);
    }
    return some_barred;
  }

  void find_edges(int64_t key, int64_t count) {
    for (int64_t i = 0; i < period_; ++i) {
      const int64_t t = query_of(std::min(i % lanes_, span_.rows - 1));
      first_keys()[i] = static_cast<float>(std::clamp<int64_t>(call_.first_key(t) - key, 0, kKeys));
      last_keys()[i] = static_cast<float>(std::clamp<int64_t>(call_.last_key(t) - key, 0, count));
    }
  }

  // The offset of the mask of row `r` for a key.
  int64_t mask_of(int64_t r, int64_t key) const {
    const Tensor& mask = call_.mask;
    return span_.sequence * mask.stride(0) + head_of(r) * mask.stride(1) + query_of(r) * mask.stride(2) +
           key * mask.stride(3);
  }

  // Whether a bool mask excludes nothing here. In decoding it is one row for all heads, and usually only excludes
  // padding before a prompt.
  bool sees_all(int64_t key, int64_t count) const {
    if (call_.mask.scalar_type() != at::kBool) return false;
    const auto* seen = elements<bool>(call_.mask);
    const int64_t step = call_.mask.stride(3);
    const int64_t rows = call_.T == 1 && call_.mask.stride(1) == 0 ? 1 : span_.rows;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = mask_of(r, key);
      if (step == 1) {
        if (std::memchr(seen + at, false, count) != nullptr) return false;
      } else {
        for (int64_t n = 0; n < count; ++n) {
          if (!seen[at + n * step]) return false;
        }
      }
    }
    return true;
  }

  void read_mask(int64_t key, int64_t count) {
    const Tensor& mask = call_.mask;
    const int64_t step = mask.stride(3);
    const auto read = [&](auto number) {
      for (int64_t r = 0; r < span_.rows; ++r) {
        const int64_t at = mask_of(r, key);
        for (int64_t n = 0; n < count; ++n) added_[n * lanes_ + r] = number(at + n * step);
      }
    };
    if (mask.scalar_type() == at::kBool) {
      return read([seen = elements<bool>(mask)](int64_t i) { return seen[i] ? 0.0f : -kInfinity; });
    }
    with_dtype(mask.scalar_type(), [&](auto scalar) {
      read([from = elements<decltype(scalar)>(mask)](int64_t i) { return static_cast<float>(from[i]); });
    });
  }

  // Applies scale, softcap, mask and causality to scores of some rows. Masked scores become -inf, even if they are NaN.
  // -> the greatest scores
  Vec bend_and_bar(int64_t lane, bool at_an_edge) {
    const Vec softcap(call_.softcap), none(-kInfinity), first = load(first_keys() + lane, Whole()),
                                                        last = load(last_keys() + lane, Whole());
    const Vec scale(call_.scale);
    alignas(64) float key_of_lane[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) key_of_lane[i] = static_cast<float>(i / lanes_);
    Vec key = load(key_of_lane, Whole()), greatest = none;
    const Vec keys_at_once(static_cast<float>(period_ / lanes_));
    for (int64_t at = lane; at < kKeys * lanes_; at += period_, key = key + keys_at_once) {
      Vec score = load(scores_.get() + at, Whole()) * scale;
      if (call_.softcap != 0) score = softcap * (score / softcap).tanh();
      if (masked_) {
        const Vec added = load(added_.get() + at, Whole());
        score = Vec::blendv(score + added, none, added == none);
      }
      if (at_an_edge) score = Vec::blendv(score, none, (key < first) | (key >= last));
      store(scores_.get() + at, score, Whole());
      greatest = at::vec::maximum(greatest, score);
    }
    return greatest;
  }

  // -> whether any key is masked
  bool softmax(int64_t lane, const Vec& greatest_of_chunk) {
    const Vec none(-kInfinity), before = load(greatest() + lane, Whole());
    const Vec now = at::vec::maximum(before, over_lanes(greatest_of_chunk));
    // The score whose weight is 1. Rows without keys get weights of 0.
    const Vec one = Vec::blendv(now, Vec(0), now == none);
    bool some_barred = false;
    const Vec sums = Products::weigh(scores_.get() + lane, lanes_, one, weights_.get() + lane, some_barred);
    const Vec power = exp2((before - one) * Vec(1.44269504f)), factor = Vec::blendv(power, Vec(1), before == now);
    store(factors() + lane, factor, Whole());
    store(greatest() + lane, now, Whole());
    store(totals() + lane, at::vec::fmadd(load(totals() + lane, Whole()), factor, sums), Whole());
    return some_barred;
  }

  // The greatest of the lanes of each row.
  Vec over_lanes(const Vec& vec) const {
    if (lanes_ >= kLanes) return vec;
    alignas(64) float two[2 * kLanes];
    store(two, vec, Whole());
    store(two + kLanes, vec, Whole());
    return at::vec::maximum(vec, Vec::loadu(two + lanes_));
  }

  void multiply_values(int64_t key, int64_t count, bool some_barred) {
    const Chunk<Scalar> chunk = values_of(key, count);
    if (some_barred && !is_finite(chunk, count)) return add_seen_values(chunk, count);
    int64_t r = 0;
    for (; r + kSumsAtOnce <= span_.rows; r += kSumsAtOnce) add_values_of_rows<kSumsAtOnce>(r, chunk, count);
    if constexpr (kSumsAtOnce > 4) {
      for (; r + 4 <= span_.rows; r += 4) add_values_of_rows<4>(r, chunk, count);
    }
    for (; r + 2 <= span_.rows; r += 2) add_values_of_rows<2>(r, chunk, count);
    for (; r < span_.rows; ++r) add_values_of_rows<1>(r, chunk, count);
  }

  template <int R>
  void add_values_of_rows(int64_t r, const Chunk<Scalar>& chunk, int64_t count) {
    Products::template add_values<R>(chunk.data, chunk.step, count, weights_.get() + r, lanes_, factors() + r,
                                     out_.get() + r * width_, width_, r == 0, call_.V);
  }

  bool is_finite(const Chunk<Scalar>& chunk, int64_t count) const {
    Vec zero(0);
    for (int64_t n = 0; n < count; ++n) {
      for_each_vector(call_.V, [&](int64_t v, auto columns) {
        zero = at::vec::fmadd(load(chunk.data + n * chunk.step + v, columns), Vec(0), zero);
      });
    }
    return sum(zero) == 0;
  }

  // If a value is infinite or NaN, a weight of 0 would give NaN, so masked keys are skipped.
  void add_seen_values(const Chunk<Scalar>& chunk, int64_t count) {
    for (int64_t r = 0; r < span_.rows; ++r) {
      float* out = out_.get() + r * width_;
      for (int64_t v = 0; v < width_; ++v) out[v] *= factors()[r];
      for (int64_t n = 0; n < count; ++n) {
        if (scores_[n * lanes_ + r] == -kInfinity) continue;
        const auto* value = chunk.data + n * chunk.step;
        const float weight = Products::weight(weights_.get() + r, lanes_, n);
        for (int64_t v = 0; v < call_.V; ++v) out[Products::index_of(v)] += weight * static_cast<float>(value[v]);
      }
    }
  }

  const Attention& call_;
  const int64_t group_;
  const int64_t lanes_;   // lanes of the scores of a key
  const int64_t words_;   // words of a query, and of a key
  const int64_t period_;  // lanes after which rows repeat: at least a vector
  const int64_t width_;   // of a row of the output sums
  const std::unique_ptr<float[], Free> queries_, scores_, weights_, added_, out_, of_rows_;
  const std::unique_ptr<Key[], Free> keys_;
  const std::unique_ptr<Scalar[], Free> values_;
  Span span_ = {};
  bool masked_ = false;  // whether the mask affects this chunk
};

}  // namespace moe_metal
