// Selects the experts of a token from its logits and computes their weights; shared by route and gate.
#pragma once
#include <array>
#include <bit>
#include <cmath>

#include "common.h"
#include "cpu/vector/vec.h"

namespace moe_metal {

// A sort key: larger values first, then lower ids. No key is 0, so 0 can mean "taken".
// Ranks of values: 0 for experts outside the best groups, 1 for NaN, then -inf to +inf.
using Key = uint64_t;
constexpr Key kTaken = 0;

inline Key key_of(float value, uint32_t id) {
  const auto bits = std::bit_cast<uint32_t>(value + 0.0f);  // + 0 makes -0 tie with +0
  const uint32_t rank = value != value ? 1 : bits ^ (bits >> 31 ? 0xffffffff : 0x80000000);
  return Key{rank} << 32 | ~id;
}
inline int32_t id_of(Key key) { return static_cast<int32_t>(~static_cast<uint32_t>(key)); }
inline Key barred(Key key) { return key & 0xffffffff; }

inline Key best_of(const Key* keys, int64_t count) {
  Key best = keys[0];
  for (int64_t i = 1; i < count; ++i) best = std::max(best, keys[i]);
  return best;
}

// Repeatedly selects the largest of up to kMaxExperts keys. It keeps the largest of each chunk, so a selection takes a
// pass over the chunks and one over the chunk of the selected key.
class Chooser {
 public:
  void fill(const float* values, int64_t count) {
    count_ = count;
    for (int64_t i = 0; i < count; ++i) keys_[i] = key_of(values[i], i);
  }
  Key* keys() { return keys_.data(); }

  // The ids of the k best, best first.
  void best(int64_t k, int32_t* ids) {
    const int64_t chunks = at::divup(count_, kChunk);
    std::fill(keys_.begin() + count_, keys_.begin() + chunks * kChunk, kTaken);
    for (int64_t b = 0; b < chunks; ++b) chunk_best_[b] = best_of(&keys_[b * kChunk], kChunk);
    for (int64_t i = 0; i < k; ++i) {
      ids[i] = id_of(best_of(chunk_best_.data(), chunks));
      const int64_t chunk = ids[i] / kChunk;
      keys_[ids[i]] = kTaken;
      chunk_best_[chunk] = best_of(&keys_[chunk * kChunk], kChunk);
    }
  }

 private:
  static constexpr int kChunk = 16, kChunks = kMaxExperts / kChunk;

  int64_t count_ = 0;
  alignas(64) std::array<Key, kMaxExperts> keys_;
  alignas(64) std::array<Key, kChunks> chunk_best_;
};

// Each thread has its own, which contains the scratch memory of a row.
class Router {
 public:
  Router(const RoutingParams& params, const float* select_bias, const float* per_expert_scale)
      : params_(params), select_bias_(select_bias), per_expert_scale_(per_expert_scale) {}

  void operator()(const float* logits, float* weights, int32_t* ids) {
    const int64_t E = params_.experts, K = params_.top_k;
    if (select_bias_ || params_.n_group > 1) {
      all_scores(logits);
      choose_by_scores(logits, ids);
      for (int64_t k = 0; k < K; ++k) weights[k] = scores_[ids[k]];
    } else {
      chooser_.fill(logits, E);
      chooser_.best(K, ids);
      chosen_scores(logits, ids, weights);
    }
    scale(weights, ids);
  }

 private:
  Vec capped(const Vec& logits) const {
    return params_.softcap ? Vec(params_.softcap) * (logits / Vec(params_.softcap)).tanh() : logits;
  }

  // The scores that depend on a single logit: sigmoid and sqrt_softplus.
  Vec score(const Vec& logit) const {
    const Vec x = capped(logit);
    if (params_.scoring == Scoring::sigmoid) return Vec(1) / (Vec(1) + x.neg().exp());
    const Vec root = Vec::blendv(x.exp().log1p(), x, x > Vec(20)).sqrt();  // softplus(x) = x, where exp may overflow
    return Vec::blendv(root, (x * Vec(0.5f)).exp(), x < Vec(-20));         // softplus(x) = exp(x), which may underflow
  }

  // The largest logit, or NaN if any logit is NaN: then the whole softmax is NaN.
  static float largest(const float* logits, int64_t E) {
    Vec most(-INFINITY);
    for_each_vector(E, [&](int64_t e, auto count) {
      most = at::vec::maximum(most, Vec::set(Vec(-INFINITY), load(logits + e, count), count));
    });
    return at::vec::vec_reduce_all<float>([](const Vec& a, const Vec& b) { return at::vec::maximum(a, b); }, most);
  }

  // The softmax over E logits, of the `count` logits in `from`, which may be `logits` itself.
  void softmax(const float* logits, int64_t E, const float* from, int64_t count, bool divide, float* to) const {
    const Vec most = capped(Vec(largest(logits, E)));
    const auto power = [&](const float* x, auto n) { return (capped(load(x, n)) - most).exp(); };
    for_each_vector(count, [&](int64_t i, auto n) { store(to + i, power(from + i, n), n); });
    if (!divide) return;
    Vec total(0);
    for_each_vector(E, [&](int64_t e, auto n) {
      const Vec p = from == logits ? load(to + e, n) : power(logits + e, n);
      total = total + Vec::set(Vec(0), p, n);
    });
    const Vec whole(sum(total));
    for_each_vector(count, [&](int64_t i, auto n) { store(to + i, load(to + i, n) / whole, n); });
  }

  void all_scores(const float* logits) {
    const int64_t E = params_.experts;
    if (params_.scoring == Scoring::softmax) return softmax(logits, E, logits, E, true, scores_.data());
    for_each_vector(E, [&](int64_t e, auto n) { store(&scores_[e], score(load(logits + e, n)), n); });
  }

  static constexpr float kNegligible = 1e-20f;  // in a sum of powers, one of which is 1
  // The scores of the K selected experts, which include the largest logit. If they are divided by their sum afterwards,
  // the denominator of the softmax cancels, and K exponentials are enough.
  void chosen_scores(const float* logits, const int32_t* ids, float* weights) const {
    const int64_t E = params_.experts, K = params_.top_k;
    std::array<float, kMaxExperts> chosen;
    for (int64_t k = 0; k < K; ++k) chosen[k] = logits[ids[k]];
    if (params_.scoring == Scoring::softmax) {
      const bool divided = params_.renormalize == Renormalize::before_scale ||
                           (params_.renormalize == Renormalize::after_scale && !per_expert_scale_);
      const bool cancels = divided && params_.sum_eps <= kNegligible;
      return softmax(logits, E, chosen.data(), K, !cancels, weights);
    }
    for_each_vector(K, [&](int64_t k, auto n) { store(weights + k, score(load(&chosen[k], n)), n); });
  }

  // Selects by score: with a selection bias, or among the best groups only.
  void choose_by_scores(const float* logits, int32_t* ids) {
    const int64_t E = params_.experts;
    std::array<float, kMaxExperts> biased = scores_;
    if (select_bias_) {
      for (int64_t e = 0; e < E; ++e) biased[e] += select_bias_[e];
    }
    std::array<bool, kMaxExperts> kept;
    if (params_.n_group > 1) best_groups(biased.data(), kept.data());
    chooser_.fill(select_bias_ ? biased.data() : logits, E);
    if (params_.n_group > 1) {
      const int64_t size = E / params_.n_group;
      for (int64_t e = 0; e < E; ++e) {
        if (!kept[e / size]) chooser_.keys()[e] = barred(chooser_.keys()[e]);
      }
    }
    chooser_.best(params_.top_k, ids);
  }

  void best_groups(const float* biased, bool* kept) {
    const int64_t groups = params_.n_group, size = params_.experts / groups;
    std::array<float, kMaxExperts> group_scores;
    for (int64_t g = 0; g < groups; ++g) {
      Key first = kTaken, second = kTaken;
      for (int64_t e = g * size; e < (g + 1) * size; ++e) {
        const Key key = key_of(biased[e], e);
        second = std::max(second, std::min(first, key));
        first = std::max(first, key);
      }
      group_scores[g] = biased[id_of(first)];
      if (params_.group_score == GroupScore::top2_sum && size > 1) group_scores[g] += biased[id_of(second)];
    }
    std::array<int32_t, kMaxExperts> best;
    chooser_.fill(group_scores.data(), groups);
    chooser_.best(params_.topk_group, best.data());
    std::fill(kept, kept + groups, false);
    for (int64_t i = 0; i < params_.topk_group; ++i) kept[best[i]] = true;
  }

  void scale(float* weights, const int32_t* ids) const {
    const int64_t K = params_.top_k;
    const auto scale_each = [&] {
      for (int64_t k = 0; per_expert_scale_ && k < K; ++k) weights[k] *= per_expert_scale_[ids[k]];
    };
    if (params_.renormalize == Renormalize::after_scale) scale_each();
    if (params_.renormalize != Renormalize::none) {
      double total = params_.sum_eps;
      for (int64_t k = 0; k < K; ++k) total += weights[k];
      for (int64_t k = 0; k < K; ++k) weights[k] = static_cast<float>(weights[k] / total);
    }
    if (params_.renormalize != Renormalize::after_scale) scale_each();
    for (int64_t k = 0; k < K; ++k) weights[k] *= params_.scaling_factor;
  }

  const RoutingParams params_;
  const float *select_bias_, *per_expert_scale_;
  Chooser chooser_;
  std::array<float, kMaxExperts> scores_;
};

}  // namespace moe_metal
