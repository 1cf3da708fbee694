// The op linear_attention_. A thread computes a key head of a sequence with some of its value heads, in blocks of
// tokens: convolution, norms and gates of a block, then the recurrence, then the gated norm. linear_attention/ has
// these parts.
#include "cpu/linear_attention/convolution.h"
#include "cpu/linear_attention/gates.h"
#include "cpu/linear_attention/recurrence.h"
#include "cpu/vector/rows.h"
#include "ops.h"

#include <cstring>

namespace moe_metal {
namespace {

// The tokens of a sequence, and its index in state, past and kept.
struct Sequence {
  int64_t index, b, begin, end;
  int64_t length() const { return end - begin; }
};

std::vector<Sequence> sequences_of(const LinearAttention& call) {
  std::vector<Sequence> sequences;
  if (!call.offsets.defined()) {
    for (int64_t b = 0; b < call.B; ++b) sequences.push_back({b, b, 0, call.T});
    return sequences;
  }
  int64_t end = 0;
  for (int64_t i = 0; i <= call.S; ++i) {
    const bool is_long = call.offsets.scalar_type() == at::kLong;
    const int64_t offset = is_long ? elements<int64_t>(call.offsets)[i] : elements<int32_t>(call.offsets)[i];
    const int64_t begin = end;
    end = std::max(begin, std::clamp<int64_t>(offset, 0, call.T));
    if (i > 0) sequences.push_back({i - 1, 0, begin, end});
  }
  return sequences;
}

// q, k or v of one head: its numbers for each token, and its channels of the convolution.
template <class Scalar>
struct Channels {
  const Tensor& tensor;  // [B, T, J, D] or [B, T, J, A/J, V]
  int64_t head_offset;   // in elements
  int64_t first, count;  // channels

  const Scalar* token(int64_t b, int64_t t) const {
    return elements<Scalar>(tensor) + head_offset + b * tensor.stride(0) + t * tensor.stride(1);
  }
  int64_t stride() const { return tensor.stride(-1); }
};

template <class Scalar>
struct Parts {
  const LinearAttention& call;

  int64_t first_channel(char name) const {
    const int64_t keys = call.J * call.D, values = call.A * call.V;
    if (call.options.order == ChannelOrder::qkv) return name == 'q' ? 0 : name == 'k' ? keys : 2 * keys;
    return name == 'v' ? 0 : name == 'k' ? values : values + keys;
  }
  Channels<Scalar> q(int64_t j) const { return keys(call.q, 'q', j); }
  Channels<Scalar> k(int64_t j) const { return keys(call.k, 'k', j); }
  Channels<Scalar> v(int64_t j, int64_t g) const {
    const int64_t head = j * call.group() + g;
    return {call.v, j * call.v.stride(2) + g * call.v.stride(3), first_channel('v') + head * call.V, call.V};
  }

 private:
  Channels<Scalar> keys(const Tensor& tensor, char name, int64_t j) const {
    return {tensor, j * tensor.stride(2), first_channel(name) + j * call.D, call.D};
  }
};

// The last rows of past and inputs, which are copied to `kept`.
template <class Scalar>
void write_kept(const LinearAttention& call, const std::vector<Sequence>& sequences) {
  if (call.R == 0) return;
  const Parts<Scalar> parts{call};
  const auto copy = [](const Scalar* from, int64_t step, int64_t n, Scalar* to, int64_t to_step) {
    for (int64_t i = 0; i < n; ++i) to[i * to_step] = from ? from[i * step] : Scalar(0);
  };
  for_each_row(call.S * call.R, 2 * call.C, 0, [&](int64_t item, float*) {
    const Sequence& sequence = sequences[item / call.R];
    const int64_t r = item % call.R, token = sequence.length() - call.R + r;
    Scalar* to = call.kept.mutable_data_ptr<Scalar>() + sequence.index * call.kept.stride(0) + r * call.kept.stride(1);
    const int64_t to_step = call.kept.stride(2);
    if (token < 0) {
      const Tensor& past = call.past;
      const Scalar* from = nullptr;
      if (past.defined()) {
        from = elements<Scalar>(past) + sequence.index * past.stride(0) + (call.W - 1 + token) * past.stride(1);
      }
      return copy(from, past.defined() ? past.stride(2) : 0, call.C, to, to_step);
    }
    const auto copy_part = [&](const Channels<Scalar>& part) {
      copy(part.token(sequence.b, sequence.begin + token), part.stride(), part.count, to + part.first * to_step,
           to_step);
    };
    for (int64_t j = 0; j < call.J; ++j) {
      copy_part(parts.q(j));
      copy_part(parts.k(j));
      for (int64_t g = 0; g < call.group(); ++g) copy_part(parts.v(j, g));
    }
  });
}

// float32 copies of the small parameters.
struct Parameters {
  Tensor log_rate, decay_bias, norm_weight, skip, conv_weight, conv_bias;
  explicit Parameters(const LinearAttention& call)
      : log_rate(as_float(call.log_rate)),
        decay_bias(as_float(call.decay_bias)),
        norm_weight(as_float(call.norm_weight)),
        skip(as_float(call.skip)),
        conv_weight(as_float(call.conv_weight)),
        conv_bias(as_float(call.conv_bias)) {}
};

constexpr int64_t kBlockTokens = 64;  // a multiple of kChunkTokens
constexpr int64_t kHeadsAtOnce = 8;

// Some value heads of a key head of a sequence.
struct Item {
  Sequence sequence;
  int64_t j, first, last;
};

std::vector<Item> items_of(const LinearAttention& call, const std::vector<Sequence>& sequences) {
  const int64_t enough = 4 * at::get_num_threads(), group = call.group();
  const int64_t heads = std::clamp<int64_t>(call.S * call.A / enough, 1, std::min(group, kHeadsAtOnce));
  std::vector<Item> items;
  for (const Sequence& sequence : sequences) {
    for (int64_t j = 0; j < call.J; ++j) {
      for (int64_t g = 0; g < group; g += heads) items.push_back({sequence, j, g, std::min(g + heads, group)});
    }
  }
  return items;
}

// What one thread computes. Its memory is used again for each item.
template <class Scalar>
class Worker {
 public:
  Worker(const LinearAttention& call, const Parameters& parameters, const Tensor& state, const Tensor& ungrouped)
      : call_(call),
        parameters_(parameters),
        state_(state),
        ungrouped_(ungrouped),
        memory_(scratch<float>(floats())),
        factors_(memory_.get(), call.D) {
    std::fill_n(memory_.get(), floats(), 0.f);  // the ends of rows stay 0
    float* next = memory_.get() + ChunkFactors::floats(call.D);
    const auto take = [&](int64_t count) { return std::exchange(next, next + count); };
    tokens_ = {.D = call.D, .V = call.V};
    for (float** rows : {&tokens_.q, &tokens_.k, &tokens_.a}) *rows = take(block_ * key_);
    for (float** rows : {&tokens_.v, &tokens_.u, &tokens_.o}) *rows = take(block_ * value_);
    tokens_.b = take(whole_vectors(block_));
    rows_ = take(input_floats());
    gate_ = take(value_);
    transposed_ = take(call.D * value_);
    logged_ = take(logged_heads() * key_ * value_);
  }

  void compute(const Item& item) {
    read_taps(item);
    for (int64_t g = item.first; g < item.last; ++g) replay(item, g);
    const int64_t T = item.sequence.length();
    for (int64_t t = 0; t < T; t += block_) {
      const int64_t n = std::min(block_, T - t);
      read_keys(item, t, n);
      for (int64_t g = item.first; g < item.last; ++g) {
        read(item.sequence, t, n, parts_.v(item.j, g), 2 + g - item.first, tokens_.v, value_);
        clear_masked(item.sequence, t, n, tokens_.v, value_);
        gates_.compute(item.sequence.b, item.sequence.begin + t, n, item.j, g, tokens_.a, tokens_.b);
        recur(item, g, t, n);
        for (int64_t i = 0; i < n; ++i) finish(item, g, t + i, tokens_.from(i));
      }
    }
  }

 private:
  int64_t input_floats() const { return (block_ + call_.W - 1) * std::max(key_, value_); }
  int64_t logged_heads() const { return call_.L > 0 ? std::min(kHeadsAtOnce, call_.group()) : 0; }
  int64_t floats() const {
    return ChunkFactors::floats(call_.D) + 3 * block_ * (key_ + value_) + whole_vectors(block_) + input_floats() +
           value_ + (call_.D + logged_heads() * key_) * value_;
  }
  int64_t head(const Item& item, int64_t g) const { return item.j * call_.group() + g; }

  void read_taps(const Item& item) {
    taps_.clear();
    if (!call_.conv_weight.defined()) return;
    const auto add = [&](const Channels<Scalar>& part) {
      taps_.emplace_back(parameters_.conv_weight, parameters_.conv_bias, part.first, part.count);
    };
    add(parts_.q(item.j));
    add(parts_.k(item.j));
    for (int64_t g = item.first; g < item.last; ++g) add(parts_.v(item.j, g));
  }

  // The input of the convolution before or in a sequence, as float.
  void read_input(const Sequence& sequence, int64_t t, const Channels<Scalar>& part, float* to) const {
    if (t >= 0) {
      const Scalar* from = part.token(sequence.b, sequence.begin + t);
      return read_floats(from, part.stride(), part.count, to);
    }
    const Tensor& past = call_.past;
    if (!past.defined()) return static_cast<void>(std::fill_n(to, part.count, 0.f));
    const Scalar* from = elements<Scalar>(past) + sequence.index * past.stride(0) + (call_.W - 1 + t) * past.stride(1) +
                         part.first * past.stride(2);
    read_floats(from, past.stride(2), part.count, to);
  }

  // n tokens of q, k or v, after the convolution with these taps.
  void read(const Sequence& sequence, int64_t t, int64_t n, const Channels<Scalar>& part, int64_t tap, float* to,
            int64_t stride) {
    if (taps_.empty()) {
      for (int64_t i = 0; i < n; ++i) read_input(sequence, t + i, part, to + i * stride);
      return;
    }
    const int64_t before = call_.W - 1;
    for (int64_t i = 0; i < n + before; ++i) read_input(sequence, t + i - before, part, rows_ + i * part.count);
    taps_[tap].convolve(rows_, n, 1, call_.options.activation, to, stride);
  }

  void clear_masked(const Sequence& sequence, int64_t t, int64_t n, float* rows, int64_t stride) const {
    const Tensor& mask = call_.mask;
    if (!mask.defined()) return;
    const bool* from = elements<bool>(mask) + sequence.b * mask.stride(0) + (sequence.begin + t) * mask.stride(1);
    for (int64_t i = 0; i < n; ++i) {
      if (!from[i * mask.stride(1)]) std::fill_n(rows + i * stride, stride, 0.f);
    }
  }

  void read_keys(const Item& item, int64_t t, int64_t n) {
    read(item.sequence, t, n, parts_.q(item.j), 0, tokens_.q, key_);
    read(item.sequence, t, n, parts_.k(item.j), 1, tokens_.k, key_);
    clear_masked(item.sequence, t, n, tokens_.k, key_);
    const float eps = call_.options.qk_eps;
    const auto scale = [&](float* row, float factor) {
      if (eps >= 0) factor = factor * (1 / std::sqrt(sum_of_squares(row, call_.D) + eps));
      for_each_vector(call_.D,
                      [&](int64_t d, auto count) { store(row + d, load(row + d, count) * Vec(factor), count); });
    };
    for (int64_t i = 0; i < n; ++i) {
      scale(tokens_.q + i * key_, call_.options.scale);
      if (eps >= 0) scale(tokens_.k + i * key_, 1);
    }
  }

  HeadState state_of(const Item& item, int64_t g) const {
    float* data =
        state_.mutable_data_ptr<float>() + item.sequence.index * state_.stride(0) + head(item, g) * state_.stride(1);
    return {data, state_.stride(2), state_.stride(3)};
  }
  HeadState logged_state_of(const Item& item, int64_t g) const {
    HeadState state = state_of(item, g);
    state.data = logged_ + (g - item.first) * key_ * value_;
    if (state.column == 1) return {state.data, value_, 1};
    return {state.data, 1, whole_vectors(call_.D)};
  }

  float* log_row(const Item& item, int64_t row) const {
    return call_.log.mutable_data_ptr<float>() + item.sequence.b * call_.log.stride(0) + row * call_.log.stride(1);
  }

  // Calls body(first column, count, numbers of a token) for the three parts of a log's row that a value head has.
  template <class Body>
  void for_log_parts(const Item& item, int64_t g, const HeadTokens& token, Body&& body) const {
    const int64_t values = call_.A * call_.V, keys = call_.J * call_.D, decays = call_.decays_channels() ? call_.D : 1;
    body(head(item, g) * call_.V, call_.V, token.u);
    body(values + item.j * call_.D, call_.D, token.k);
    body(values + keys + head(item, g) * decays, decays, token.a);
  }

  void replay(const Item& item, int64_t g) {
    for (int64_t r = 0; r < call_.replay; ++r) {
      const float* row = log_row(item, r);
      const int64_t step = call_.log.stride(2);
      for_log_parts(item, g, tokens_,
                    [&](int64_t first, int64_t count, float* to) { read_floats(row + first * step, step, count, to); });
      if (!call_.decays_channels()) std::fill_n(tokens_.a, call_.D, tokens_.a[0]);
      replay_token(state_of(item, g), tokens_);
    }
  }

  void write_log(const Item& item, int64_t g, int64_t t, const HeadTokens& token) const {
    float* row = log_row(item, call_.replay + t - (call_.T - call_.L));
    const int64_t step = call_.log.stride(2);
    for_log_parts(item, g, token, [&](int64_t first, int64_t count, const float* from) {
      if (from == token.k && g > 0) return;  // another item writes it
      for (int64_t i = 0; i < count; ++i) row[(first + i) * step] = from[i];
    });
  }

  void recur(const Item& item, int64_t g, int64_t t, int64_t n) {
    const int64_t T = item.sequence.length(), unlogged = T - call_.L;
    const int64_t chunked = std::clamp<int64_t>(unlogged / kChunkTokens * kChunkTokens - t, 0, n);
    const HeadState state = state_of(item, g);
    if (chunked > 0) {
      const HeadState rows = state.column == 1 ? state : HeadState{transposed_, value_, 1};
      if (state.column != 1) copy_state(state, rows, call_.D, call_.V);
      for (int64_t i = 0; i < chunked; i += kChunkTokens) one_chunk(rows, tokens_.from(i), delta_, factors_);
      if (state.column != 1) copy_state(rows, state, call_.D, call_.V);
    }
    for (int64_t i = chunked; i < n; ++i) {
      if (t + i < unlogged) {
        one_token(state, tokens_.from(i), delta_);
        continue;
      }
      const HeadState logged = logged_state_of(item, g);
      if (t + i == unlogged) copy_state(state, logged, call_.D, call_.V);
      one_token(logged, tokens_.from(i), delta_);
      write_log(item, g, t + i, tokens_.from(i));
    }
  }

  // The output of one token and head.
  void finish(const Item& item, int64_t g, int64_t t, const HeadTokens& token) {
    const LinearAttentionOptions& options = call_.options;
    const int64_t V = call_.V, h = head(item, g), b = item.sequence.b, at = item.sequence.begin + t;
    if (parameters_.skip.defined()) {
      const Vec skip(elements<float>(parameters_.skip)[h]);
      for_each_vector(V, [&](int64_t v, auto count) {
        store(token.o + v, at::vec::fmadd(skip, load(token.v + v, count), load(token.o + v, count)), count);
      });
    }
    if (call_.gate.defined()) {
      const Tensor& gate = call_.gate;
      const Scalar* from = elements<Scalar>(gate) + b * gate.stride(0) + at * gate.stride(1) + item.j * gate.stride(2) +
                           g * gate.stride(3);
      read_floats(from, gate.stride(4), V, gate_);
      for_each_vector(V, [&](int64_t v, auto count) {
        store(gate_ + v, pointwise(options.gate_activation, load(gate_ + v, count)), count);
      });
      if (options.gate_first) multiply(token.o, gate_, V);
    }
    if (ungrouped_.defined()) {
      std::copy_n(token.o, V, ungrouped_.mutable_data_ptr<float>() + ((b * call_.T + at) * call_.A + h) * V);
      return;
    }
    const int64_t out = options.tiled ? g * call_.J + item.j : h;
    Scalar* to = call_.output.mutable_data_ptr<Scalar>() + ((b * call_.T + at) * call_.A + out) * V;
    const float* weight = parameters_.norm_weight.defined() ? elements<float>(parameters_.norm_weight) : nullptr;
    write_normed(token.o, V, weight, weight ? inv_rms(token.o, V, options.eps) : 1, late_gate(), to);
  }

  const float* late_gate() const { return call_.gate.defined() && !call_.options.gate_first ? gate_ : nullptr; }

  static void multiply(float* row, const float* factors, int64_t n) {
    for_each_vector(
        n, [&](int64_t i, auto count) { store(row + i, load(row + i, count) * load(factors + i, count), count); });
  }
  static void write_normed(const float* row, int64_t n, const float* weight, float scale, const float* gate,
                           Scalar* to) {
    for_each_vector(n, [&](int64_t i, auto count) {
      Vec x = load(row + i, count) * Vec(scale);
      if (weight) x = x * load(weight + i, count);
      store(to + i, gate ? x * load(gate + i, count) : x, count);
    });
  }

  const LinearAttention& call_;
  const Parameters& parameters_;
  const Tensor &state_, &ungrouped_;
  const Parts<Scalar> parts_{call_};
  const int64_t key_ = whole_vectors(call_.D), value_ = whole_vectors(call_.V);
  const Gates<Scalar> gates_{call_, parameters_.log_rate, parameters_.decay_bias, key_};
  const int64_t block_ = std::min(kBlockTokens, std::max<int64_t>(call_.T, 1));
  const bool delta_ = call_.options.rule == Rule::delta;
  std::unique_ptr<float[], Free> memory_;
  ChunkFactors factors_;
  HeadTokens tokens_;
  float *rows_, *gate_, *transposed_, *logged_;
  std::vector<Taps> taps_;  // of q, k, and each value head
};

// The norm of groups of heads, from float32 [B, T, A, V] to the output.
template <class Scalar>
void norm_groups(const LinearAttention& call, const Tensor& weight, const Tensor& ungrouped) {
  const int64_t groups = weight.size(0), length = weight.size(1), row = call.A * call.V;
  const Tensor& gate = call.gate;
  const bool gates = gate.defined() && !call.options.gate_first;
  for_each_row(call.B * call.T * groups, 3 * length, call.V, [&](int64_t item, float* factors) {
    const int64_t token = item / groups, first = item % groups * length;
    const float* from = elements<float>(ungrouped) + token * row + first;
    Scalar* to = call.output.mutable_data_ptr<Scalar>() + token * row + first;
    const float scale = inv_rms(from, length, call.options.eps);
    for (int64_t i = 0; i < length; i += call.V) {
      const int64_t h = (first + i) / call.V;
      if (gates) {
        const Scalar* gate_row = elements<Scalar>(gate) + token / call.T * gate.stride(0) +
                                 token % call.T * gate.stride(1) + h / call.group() * gate.stride(2) +
                                 h % call.group() * gate.stride(3);
        read_floats(gate_row, gate.stride(4), call.V, factors);
      }
      for_each_vector(call.V, [&](int64_t v, auto count) {
        const Vec x = load(from + i + v, count) * Vec(scale) * load(elements<float>(weight) + first + i + v, count);
        store(to + i + v, gates ? x * pointwise(call.options.gate_activation, load(factors + v, count)) : x, count);
      });
    }
  });
}

// Tokens that belong to no sequence.
void clear_outside(const LinearAttention& call, const std::vector<Sequence>& sequences) {
  if (!call.offsets.defined()) return;
  const int64_t bytes = call.A * call.V * call.output.element_size();
  auto* output = static_cast<char*>(call.output.mutable_data_ptr());
  std::memset(output, 0, sequences.front().begin * bytes);
  std::memset(output + sequences.back().end * bytes, 0, (call.T - sequences.back().end) * bytes);
}

// The state as kernels read it, with contiguous rows or columns: the call's own, a copy, or zeros.
Tensor state_of(const LinearAttention& call) {
  if (!call.state.defined()) {
    const Tensor zeros = empty({call.S, call.A, call.D, call.V}, call.q.options().dtype(at::kFloat));
    std::memset(zeros.mutable_data_ptr(), 0, zeros.nbytes());
    return zeros;
  }
  const bool readable = call.state.stride(3) == 1 || call.state.stride(2) == 1;
  return readable ? call.state : call.state.contiguous();
}

template <class Scalar>
void compute(const LinearAttention& call) {
  for (const Tensor* written : {&call.state, &call.kept, &call.log}) {
    if (written->defined()) written->mutable_data_ptr();  // a lazy clone gets its own memory
  }
  const Parameters parameters(call);
  const std::vector<Sequence> sequences = sequences_of(call);
  const std::vector<Item> items = items_of(call, sequences);
  const Tensor state = state_of(call);
  Tensor ungrouped;
  if (call.norms_groups()) ungrouped = empty(call.output.sizes(), call.q.options().dtype(at::kFloat));
  const auto count = static_cast<int64_t>(items.size());
  parallel_work_queue(count, [&](auto&& next_item) {
    Worker<Scalar> worker(call, parameters, state, ungrouped);
    for_each_item(next_item, count, [&](int64_t item, int64_t) { worker.compute(items[item]); });
  });
  if (call.norms_groups()) norm_groups<Scalar>(call, parameters.norm_weight, ungrouped);
  clear_outside(call, sequences);
  if (call.state.defined() && !state.is_same(call.state)) call.state.copy_(state);
  write_kept<Scalar>(call, sequences);
}

}  // namespace

void cpu::run_linear_attention_(const LinearAttention& call) {
  with_dtype(call.q.scalar_type(), [&](auto scalar) { compute<decltype(scalar)>(call); });
}

}  // namespace moe_metal
