// norm, norm_add and residual_norm. norm has no residual, and its weight is optional.
#include "cpu/vector/rows.h"
#include "ops.h"

namespace moe_metal {
namespace {

// The scalar of each column as float, or an undefined tensor.
Tensor scalars_of(const Norm& call) {
  return call.scalar.defined() ? as_float(call.scalar).expand({call.H}).contiguous() : Tensor();
}

template <class Scalar>
void norm_rows(const Norm& call) {
  const auto H = call.H, input_row = call.input_row;
  const auto eps = call.eps;
  const Tensor weights = as_float(call.weight), scalars = scalars_of(call);
  const auto* residual = call.residual.defined() ? elements<Scalar>(call.residual) : nullptr;
  const auto* input = elements<Scalar>(call.input);
  const auto* weight = weights.defined() ? elements<float>(weights) : nullptr;
  const auto* scalar = scalars.defined() ? elements<float>(scalars) : nullptr;
  auto* output = call.output.mutable_data_ptr<Scalar>();
  for_each_row(call.T, 3 * H, 0, [=](int64_t t, float*) {
    const auto* row = input + t * input_row;
    const Vec scale(inv_rms(row, H, eps));
    for_each_vector(H, [=](int64_t h, auto count) {
      const Vec normed = load(row + h, count) * scale;
      const Vec weighted = weight ? normed * load(weight + h, count) : normed;
      const Vec total = residual ? load(residual + t * H + h, count) + weighted : weighted;
      store(output + t * H + h, scalar ? total * load(scalar + h, count) : total, count);
    });
  });
}

template <class Scalar>
void sum_and_norm_rows(const ResidualNorm& call) {
  const auto H = call.H;
  const auto eps = call.eps;
  const Tensor weights = as_float(call.weight), scalars = scalars_of(call);
  const auto* residual = elements<Scalar>(call.residual);
  const auto* input = elements<Scalar>(call.input);
  const auto* weight = elements<float>(weights);
  const auto* scalar = scalars.defined() ? elements<float>(scalars) : nullptr;
  auto* output = call.output.mutable_data_ptr<Scalar>();
  auto* sum = call.sum.mutable_data_ptr<Scalar>();
  const bool past = past_caches(call.output, H);
  for_each_row(call.T, 4 * H, H, [=](int64_t t, float* exact) {
    for_each_vector(H, [=](int64_t h, auto count) {
      const Vec total = load(residual + t * H + h, count) + load(input + t * H + h, count);
      store(exact + h, total, count);
      store(sum + t * H + h, total, count, past);
    });
    const Vec scale(inv_rms(exact, H, eps));
    for_each_vector(H, [=](int64_t h, auto count) {
      const Vec normed = load(exact + h, count) * scale * load(weight + h, count);
      store(output + t * H + h, scalar ? normed * load(scalar + h, count) : normed, count, past);
    });
  });
}

}  // namespace

void cpu::run_norm(const Norm& call) { run_norm_add(call); }

void cpu::run_norm_add(const Norm& call) {
  with_dtype(call.input.scalar_type(), [&](auto scalar) { norm_rows<decltype(scalar)>(call); });
}

void cpu::run_residual_norm(const ResidualNorm& call) {
  with_dtype(call.input.scalar_type(), [&](auto scalar) { sum_and_norm_rows<decltype(scalar)>(call); });
}

}  // namespace moe_metal
