// The five weighted sums. Each adds the K slots of a token as float, and then writes the token's rows in its own way.
#include "cpu/vector/rows.h"
#include "ops.h"

namespace moe_metal {
namespace {

// row = sum_k weights[k] * slots[k], for the K rows of one token.
template <class Scalar>
void weighted_slots(const Scalar* slots, const float* weights, int64_t K, int64_t H, float* row) {
  int64_t h = 0;
  for (; h + kUnroll * kLanes <= H; h += kUnroll * kLanes) {
    Vec total[kUnroll] = {Vec(0), Vec(0), Vec(0), Vec(0)};
    for (int64_t k = 0; k < K; ++k) {
      const Vec weight(weights[k]);
      for (int v = 0; v < kUnroll; ++v) {
        total[v] = at::vec::fmadd(weight, load(slots + k * H + h + v * kLanes, Whole()), total[v]);
      }
    }
    for (int v = 0; v < kUnroll; ++v) store(row + h + v * kLanes, total[v], Whole());
  }
  for_each_vector(H - h, [&](int64_t i, auto count) {
    Vec total(0);
    for (int64_t k = 0; k < K; ++k) {
      total = at::vec::fmadd(Vec(weights[k]), load(slots + k * H + h + i, count), total);
    }
    store(row + h + i, total, count);
  });
}

// The elements of an optional tensor, or a null pointer.
template <class Scalar>
const Scalar* elements_if_given(const Tensor& tensor) {
  return tensor.defined() ? elements<Scalar>(tensor) : nullptr;
}

// Calls finish(t, sum) for each token, where sum[h] = sum_k weights[t, k] * slots[t, k, h]. `others` is how many more
// rows of H it reads and writes.
template <class Scalar, class Finish>
void for_each_sum(const WeightedSum& call, int64_t others, const Finish& finish) {
  const auto K = call.K, H = call.H;
  const Tensor floats = as_float(call.weights);
  const auto* slots = elements<Scalar>(call.slots);
  const auto* weights = elements<float>(floats);
  for_each_row(call.T, (K + others) * H, H, [=](int64_t t, float* sum) {
    weighted_slots(slots + t * K * H, weights + t * K, K, H, sum);
    finish(t, sum);
  });
}

template <class Scalar>
void sum_rows(const WeightedSum& call) {
  const auto H = call.H;
  const Tensor gates = as_float(call.shared_gate);
  const auto* shared = elements_if_given<Scalar>(call.shared);
  const auto* shared_gate = elements_if_given<float>(gates);
  const auto* residual = elements_if_given<Scalar>(call.residual);
  auto* output = call.output.mutable_data_ptr<Scalar>();
  for_each_sum<Scalar>(call, 2, [=](int64_t t, float* sum) {
    const Vec factor(shared_gate ? 1 / (1 + std::exp(-shared_gate[t])) : 1.0f);
    for_each_vector(H, [=](int64_t h, auto count) {
      Vec total = load(sum + h, count);
      if (shared) total = at::vec::fmadd(factor, load(shared + t * H + h, count), total);
      if (residual) total = total + load(residual + t * H + h, count);
      store(output + t * H + h, total, count);
    });
  });
}

template <class Scalar>
void add_to_residual(const WeightedSum& call) {
  const auto H = call.H;
  auto* residual = call.residual.mutable_data_ptr<Scalar>();
  for_each_sum<Scalar>(call, 2, [=](int64_t t, float* sum) {
    auto* row = residual + t * H;
    for_each_vector(H,
                    [=](int64_t h, auto count) { store(row + h, load(sum + h, count) + load(row + h, count), count); });
  });
}

template <class Scalar>
void add_to_residual_and_norm(const WeightedSum& call) {
  const auto H = call.H;
  const auto eps = call.eps;
  const Tensor norm_weights = as_float(call.norm_weight);
  const auto* norm_weight = elements<float>(norm_weights);
  auto* residual = call.residual.mutable_data_ptr<Scalar>();
  auto* output = call.output.mutable_data_ptr<Scalar>();
  for_each_sum<Scalar>(call, 3, [=](int64_t t, float* sum) {
    auto* row = residual + t * H;
    for_each_vector(H, [=](int64_t h, auto count) {
      const Vec total = load(sum + h, count) + load(row + h, count);
      store(row + h, total, count);
      store(sum + h, total, count);
    });
    const Vec scale(inv_rms(sum, H, eps));
    for_each_vector(H, [=](int64_t h, auto count) {
      store(output + t * H + h, load(sum + h, count) * scale * load(norm_weight + h, count), count);
    });
  });
}

template <class Scalar>
void norm_and_add(const WeightedSum& call) {
  const auto H = call.H;
  const auto eps = call.eps;
  const Tensor norm_weights = as_float(call.norm_weight);
  const auto* residual = elements<Scalar>(call.residual);
  const auto* norm_weight = elements<float>(norm_weights);
  auto* output = call.output.mutable_data_ptr<Scalar>();
  for_each_sum<Scalar>(call, 2, [=](int64_t t, float* sum) {
    const Vec scale(inv_rms(sum, H, eps));
    for_each_vector(H, [=](int64_t h, auto count) {
      const Vec moe = load(sum + h, count) * scale * load(norm_weight + h, count);
      store(output + t * H + h, load(residual + t * H + h, count) + moe, count);
    });
  });
}

template <class Scalar>
void norm_both_and_add(const WeightedSum& call) {
  const auto H = call.H;
  const auto eps = call.eps;
  const Tensor residual_norm_weights = as_float(call.residual_norm_weight);
  const Tensor moe_norm_weights = as_float(call.norm_weight);
  const auto* residual = elements<Scalar>(call.residual);
  const auto* residual_norm_weight = elements<float>(residual_norm_weights);
  const auto* moe_norm_weight = elements<float>(moe_norm_weights);
  auto* output = call.output.mutable_data_ptr<Scalar>();
  for_each_sum<Scalar>(call, 2, [=](int64_t t, float* sum) {
    const Vec scale(inv_rms(sum, H, eps)), residual_scale(inv_rms(residual + t * H, H, eps));
    for_each_vector(H, [=](int64_t h, auto count) {
      const Vec moe = load(sum + h, count) * scale * load(moe_norm_weight + h, count);
      const Vec normed = load(residual + t * H + h, count) * residual_scale * load(residual_norm_weight + h, count);
      store(output + t * H + h, normed + moe, count);
    });
  });
}

}  // namespace

void cpu::run_weighted_sum(const WeightedSum& call) {
  with_dtype(call.slots.scalar_type(), [&](auto scalar) { sum_rows<decltype(scalar)>(call); });
}

void cpu::run_weighted_sum_residual_(const WeightedSumResidual& call) {
  with_dtype(call.slots.scalar_type(), [&](auto scalar) { add_to_residual<decltype(scalar)>(call); });
}

void cpu::run_weighted_sum_residual_norm_(const WeightedSumResidualNorm& call) {
  with_dtype(call.slots.scalar_type(), [&](auto scalar) { add_to_residual_and_norm<decltype(scalar)>(call); });
}

void cpu::run_weighted_sum_norm_add(const WeightedSum& call) {
  with_dtype(call.slots.scalar_type(), [&](auto scalar) { norm_and_add<decltype(scalar)>(call); });
}

void cpu::run_weighted_sum_dual_norm_add(const WeightedSum& call) {
  with_dtype(call.slots.scalar_type(), [&](auto scalar) { norm_both_and_add<decltype(scalar)>(call); });
}

}  // namespace moe_metal
