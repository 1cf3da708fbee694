// The stored keys and values of a layer of the KV cache: rows of larger memory with space for more.
//
// rope_into writes new rows and attention_over reads the stored ones, so no call has views of them, and a recorded call
// (tape.h) stays valid when rows are cropped, when the batch is reordered and when the memory is replaced. The Python
// class of the cache's layers (transformers/fusing/cache.py) keeps its rows in the same object.
//
// Everything is inline, because the libraries of the backends use it as well.
#pragma once
#include <ATen/core/ivalue.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "arguments.h"

namespace moe_metal {

class Room : public torch::CustomClassHolder {
 public:
  using Parts =
      std::pair<Tensor, Tensor>;  // keys and values, or views of their rows: [B, J, rows, D] and [B, J, rows, V]

  // The first rows are copied when more are appended. A row of memory is a key and its value if they are `side_by_side`
  // (latents), else keys and values have memory of their own. Of a sliding window only the last `window` rows stay
  // stored, unless it keeps_past; -1: all.
  Room(Tensor keys, Tensor values, bool side_by_side, int64_t window)
      : given_{std::move(keys), std::move(values)},
        side_by_side_(side_by_side),
        window_(window),
        end_(rows(given_[0])) {}

  // The stored rows.
  Parts shown() const { return between(first_, end_); }
  int64_t stored() const { return end_ - first_; }
  bool side_by_side() const { return side_by_side_; }
  // The keys and values that the last tokens see. Latents are values, and whole rows their keys.
  Parts seen() const {
    TORCH_CHECK(memory_[0].defined(), "moe_metal::Room: expected rows that rope_into has written, got none");
    Parts seen = for_kernels(seen_, end_);
    if (side_by_side_) seen = {rows_of_memory(memory_[0], seen_, end_, 0, memory_[0].size(-1)), seen.first};
    return seen;
  }

  // The free rows for the next tokens, whose keys and values are like these. They are stored after advance().
  Parts reserve(int64_t more, const Tensor& like) {
    make_space(more, like);
    return for_kernels(end_, end_ + more);
  }
  void advance(int64_t more) {
    end_ += more, total_ += more;
    seen_ = keeps_past_ ? std::max(first_, end_ - more - window_) : first_;
    if (!keeps_past_ && window_ > 0) first_ = std::max(first_, end_ - window_);
  }
  int64_t total() const { return total_; }
  void set_total(int64_t total) { total_ = total; }

  // Copies rows of keys and values. -> what their queries see
  Parts append(const Tensor& keys, const Tensor& values) {
    const int64_t more = rows(keys);
    make_space(more, keys);
    const Parts to = between(end_, end_ + more);
    to.first.copy_(keys), to.second.copy_(values);
    advance(more);
    return between(seen_, end_);
  }
  // Makes these keys, a view of the memory, the last that are stored. Later ones will be overwritten.
  void show(const Tensor& keys) {
    if (!memory_[0].defined()) return;
    first_ = (keys.storage_offset() - memory_[0].storage_offset()) / memory_[0].stride(-2);
    const int64_t removed = end_ - first_ - rows(keys);
    end_ -= removed, total_ -= removed;
  }
  // Copies the whole memory, so that the next token does not copy it again.
  void reorder(const Tensor& batch) {
    for (Tensor& part : memory_) {
      if (part.defined()) part = part.index_select(0, batch.to(part.device()));
    }
    for (Tensor& part : given_) {
      if (part.defined()) part = part.index_select(0, batch.to(part.device()));
    }
  }
  void keep_past(bool keeps) { keeps_past_ = keeps; }

  // After an error: what was stored before the last tokens. State is stored() and total().
  using State = std::pair<int64_t, int64_t>;
  State state() const { return {stored(), total_}; }
  void go_back(const State& before) {
    end_ -= total_ - before.second;
    first_ = end_ - before.first;
    total_ = before.second;
  }

  std::vector<Tensor> memory() const {
    if (!memory_[0].defined()) return {};
    return side_by_side_ ? std::vector<Tensor>{memory_[0]} : std::vector<Tensor>{memory_[0], memory_[1]};
  }
  // Whether keys [B, T, J, D] and values [B, T, J, V] can be stored.
  bool takes(const Tensor& keys, const Tensor& values) const {
    const auto fits = [&](const Tensor& stored, const Tensor& more) {
      return stored.scalar_type() == more.scalar_type() && stored.device() == more.device() && stored.dim() == 4 &&
             stored.size(0) == more.size(0) && stored.size(1) == more.size(2) && stored.size(3) == more.size(3);
    };
    return fits(given_[0], keys) && fits(given_[1], values);
  }

  // Some rows fewer than `most_rows`, so that some can be cropped before the memory counts as too large.
  static int64_t rows_to_allocate(int64_t stored) { return stored + stored / 4 + 192; }
  static int64_t most_rows(int64_t stored) { return stored + stored / 4 + 256; }

 private:
  static int64_t rows(const Tensor& part) { return part.size(-2); }
  Parts between(int64_t first, int64_t end) const {
    const auto of = [&](const Tensor& part) { return part.narrow(-2, first, end - first); };
    if (!memory_[0].defined()) return {of(given_[0]), of(given_[1])};
    if (!side_by_side_) return {of(memory_[0]), of(memory_[1])};
    const Tensor both = of(memory_[0]);
    const int64_t width = given_[0].size(-1);
    return {both.narrow(-1, 0, width), both.narrow(-1, width, both.size(-1) - width)};
  }
  // The same without PyTorch's dispatcher, for memory of the room.
  static Tensor rows_of_memory(const Tensor& memory, int64_t first, int64_t end, int64_t column, int64_t width) {
    const c10::SmallVector<int64_t, 5> sizes = {memory.size(0), memory.size(1), end - first, width};
    return view_of(memory, sizes, memory.strides(), memory.storage_offset() + first * memory.stride(2) + column);
  }
  Parts for_kernels(int64_t first, int64_t end) const {
    const auto of = [&](const Tensor& memory, int64_t column, int64_t width) {
      return rows_of_memory(memory, first, end, column, width);
    };
    const int64_t width = given_[0].size(-1), value_width = given_[1].size(-1);
    if (!side_by_side_) return {of(memory_[0], 0, width), of(memory_[1], 0, value_width)};
    return {of(memory_[0], 0, width), of(memory_[0], width, value_width)};
  }
  void make_space(int64_t more, const Tensor& like) {
    const int64_t total = stored() + more;
    if (!fits(more, total)) move(total, like);
  }
  // Whether more rows can be written in place. Memory of inference mode can only be written in inference mode.
  bool fits(int64_t more, int64_t total) const {
    const Tensor& memory = memory_[0];
    if (!memory.defined() || (memory.is_inference() && !c10::InferenceMode::is_enabled())) return false;
    return end_ + more <= rows(memory) && rows(memory) <= most_rows(total);
  }
  // To new memory. Never within the old memory, because other tensors may view its rows.
  void move(int64_t total, const Tensor& like) {
    const Parts stored = between(first_, end_);
    const int64_t count = end_ - first_;
    const auto allocate = [&](int64_t rows, int64_t width) {
      c10::SmallVector<int64_t, 5> sizes(given_[0].sizes().begin(), given_[0].sizes().end());
      sizes[sizes.size() - 2] = rows, sizes.back() = width;
      return empty(sizes, at::TensorOptions(like.device()).dtype(like.scalar_type()));
    };
    const int64_t rows = rows_to_allocate(total), width = given_[0].size(-1), value_width = given_[1].size(-1);
    if (side_by_side_) {
      memory_[0] = allocate(rows, width + value_width);
    } else {
      memory_ = {allocate(rows, width), allocate(rows, value_width)};
    }
    first_ = 0, end_ = count;
    const Parts to = between(0, count);
    to.first.copy_(stored.first), to.second.copy_(stored.second);
    given_ = {allocate(0, width), allocate(0, value_width)};  // from now on only their shapes are used
  }

  std::array<Tensor, 2> given_;   // the rows before the first memory
  std::array<Tensor, 2> memory_;  // keys and values; with both side by side only the first one
  bool side_by_side_, keeps_past_ = false;
  int64_t window_, first_ = 0, seen_ = 0, end_, total_ = 0;  // rows of the memory
};

}  // namespace moe_metal
