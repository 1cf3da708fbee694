#include "cpu/item_rows.h"
#include "cpu/vector/rows.h"
#include "cpu/weights/weight_rows.h"
#include "ops.h"

namespace moe_metal {
namespace {

template <class Scalar>
void rows(const Weight& weight, int64_t matrices, Scalar* to) {
  const int64_t N = weight.rows, C = weight.columns, of_matrix = at::divup(N, kRows);
  parallel_work_queue(matrices * of_matrix, [&](auto next_item) {
    const auto reader = rows_of(weight);
    const auto floats = scratch<float>(C);
    for (int64_t item = next_item(); item < matrices * of_matrix; item = next_item()) {
      const int64_t matrix = item / of_matrix, first = item % of_matrix * kRows;
      const int64_t count = std::min(kRows, N - first);
      for (int64_t r = 0; r < count; ++r) {
        reader->dequantize(matrix, first + r, floats.get());
        Scalar* row = to + (matrix * N + first + r) * C;
        for_each_vector(C, [&](int64_t c, auto n) { store(row + c, load(&floats[c], n), n); });
      }
    }
  });
}

}  // namespace

void cpu::run_dequantize(const Dequantize& call) {
  with_dtype(call.output.scalar_type(), [&](auto scalar) {
    for_each_stack(call, [](const Dequantize& stack) {
      const int64_t matrices = stack.output.dim() == 3 ? stack.output.size(0) : 1;
      rows(stack.weight, matrices, stack.output.mutable_data_ptr<decltype(scalar)>());
    });
  });
}

}  // namespace moe_metal
