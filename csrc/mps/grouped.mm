#include "mps/grouped.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include "mps/weights.h"

namespace moe_metal {
namespace {

using c10::OperatorHandle;

// The arguments that we pass. All later ones must have a default, since a newer torch may add some.
constexpr const char* kGiven[] = {"self", "mat2", "offs"};

bool takes_what_is_given(const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  if (arguments.size() < std::size(kGiven) || schema.returns().size() != 1) return false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool fits =
        i < std::size(kGiven) ? arguments[i].name() == kGiven[i] : arguments[i].default_value().has_value();
    if (!fits) return false;
  }
  return true;
}

// Up to torch 2.14 mps has no kernel of its own, and with the generic kernel the host waits for each expert.
std::optional<OperatorHandle> grouped_mm() {
  const auto op = c10::Dispatcher::singleton().findSchema({"aten::_grouped_mm", ""});
  const bool fits = op && op->hasKernelForDispatchKey(c10::DispatchKey::MPS) && takes_what_is_given(op->schema());
  return fits ? op : std::nullopt;
}

// The weight as the op needs it: [E, columns, rows].
Tensor transposed(const Weight& weight) {
  const Tensor& data = weight.data;
  return data.as_strided({data.size(0), weight.columns, weight.rows}, {weight.expert, weight.column, weight.row},
                         data.storage_offset());
}

// The op rejects overlapping rows, and strides that are not multiples of 16 bytes.
bool fits_grouped_mm(const Weight& weight) {
  if (!weight.format->is_dense() || weight.data.element_size() != 2 || weight.gap != 0) return false;
  const int64_t piece = 16 / weight.data.element_size(), offset = weight.data.storage_offset();
  const bool by_rows = weight.column == 1 && weight.row >= weight.columns;
  const bool by_columns = weight.row == 1 && weight.column >= weight.rows;
  return (by_rows || by_columns) && all_multiples(piece, {offset, weight.expert, weight.rows, weight.columns,
                                                          by_rows ? weight.row : weight.column});
}

}  // namespace

bool has_grouped_product(const Weight& weight) { return fits_grouped_mm(weight) && grouped_mm(); }

Tensor grouped_product(const Tensor& x, const Weight& weight, const Tensor& ends) {
  if (x.is_meta()) return at::empty({x.size(0), weight.rows}, x.options());  // only compiles kernels, see launch.h
  const at::AutoDispatchBelowADInplaceOrView below;
  const OperatorHandle op = *grouped_mm();
  torch::jit::Stack stack = {x, transposed(weight), ends};
  const auto& arguments = op.schema().arguments();
  for (size_t i = stack.size(); i < arguments.size(); ++i) stack.push_back(*arguments[i].default_value());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::MPS), &stack);  // without autograd and autocast
  return stack.back().toTensor().contiguous();
}

}  // namespace moe_metal
