// Checks an op's arguments. Error messages name the op, the argument, the expected value and the given one.
//
// Shapes are checked by letters: the first argument with a letter binds it, and later ones must agree.
// torch_moe_metal/arguments.py lists the letters; here * also stands for any leading dimensions, whose product is T.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_ops.h>

#include <array>
#include <cmath>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common.h"

namespace moe_metal {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// The name in Python.
inline std::string dtype_name(at::ScalarType dtype) { return std::string(c10::getDtypeNames(dtype).first); }

// tensor.const_data_ptr<T>(), but inline: torch's is a call into its library.
template <typename T>
const T* elements(const Tensor& tensor) {
  TORCH_INTERNAL_ASSERT(tensor.scalar_type() == c10::CppTypeToScalarType<T>::value);
  return static_cast<const T*>(tensor.const_data_ptr());
}

// at::empty. Its own header includes ATen/Context.h, which takes longer to compile than the rest of an op.
inline Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::_ops::empty_memory_format::call(c10::fromIntArrayRefSlow(sizes),
                                             c10::optTypeMetaToScalarType(options.dtype_opt()), options.layout_opt(),
                                             options.device_opt(), options.pinned_memory_opt(), std::nullopt);
}

// While it exists, checks on this thread use these outputs instead of new ones, in the order in which they allocate
// them: a call that is made again (recorded.h) writes the tensors that later calls read. Undefined ones are allocated.
class GivenOutputs {
 public:
  explicit GivenOutputs(const std::vector<Tensor>& outputs) : outputs_(outputs) { current = this; }
  GivenOutputs(const GivenOutputs&) = delete;
  ~GivenOutputs() { current = nullptr; }

  static Tensor next(at::IntArrayRef sizes, const at::TensorOptions& options) {
    if (current && current->next_ < current->outputs_.size()) {
      const Tensor& given = current->outputs_[current->next_++];
      if (given.defined() && given.sizes() == sizes) return given;
    }
    return empty(sizes, options);
  }
  // Called before a check copies an argument.
  static void note_copy() {
    if (current) current->copies_ = true;
  }
  bool copies() const { return copies_; }

 private:
  const std::vector<Tensor>& outputs_;
  size_t next_ = 0;
  bool copies_ = false;
  static inline thread_local GivenOutputs* current = nullptr;
};

// A view, without PyTorch's dispatcher. It is only for kernels: it has no version that PyTorch could compare.
inline Tensor view_of(const Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  auto view = c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(tensor.storage()),
                                                   tensor.key_set(), tensor.dtype());
  view->set_sizes_and_strides(sizes, strides, offset);
  return Tensor(std::move(view));
}

// Call it after all checks: copying an expanded tensor of a wrong shape could run out of memory.
inline void make_contiguous(std::initializer_list<Tensor*> tensors) {
  for (Tensor* tensor : tensors) {
    if (!tensor->defined() || tensor->is_contiguous()) continue;
    GivenOutputs::note_copy();
    *tensor = tensor->contiguous();
  }
}

struct Format;
struct Weight;
struct WeightNames;

class Arguments {
 public:
  // The first argument determines the device, the dtype of the activations and, by its letters, the leading dimensions.
  Arguments(const char* op, const char* name, const Tensor& first)
      : Arguments(op, name, first, name, first.scalar_type()) {}
  // For an op without activations; `dtype` is the dtype of its output.
  Arguments(const char* op, const char* name, const Tensor& first, at::ScalarType dtype)
      : Arguments(op, name, first, "dtype", dtype) {}

  int64_t operator[](char letter) const { return sizes_[letter - 'A']; }
  void bind(char letter, int64_t size) { sizes_[letter - 'A'] = size; }
  int64_t tokens() const { return c10::multiply_integers(leading_); }

  // An activation: the dtype of the first argument.
  const Tensor& activation(const char* name, const Tensor& tensor, const char* letters) {
    check_dense(name, tensor);
    TORCH_CHECK(tensor.scalar_type() == first_.scalar_type(), prefix(name), "expected ",
                dtype_name(first_.scalar_type()), ", the dtype of ", first_name_, "; got ",
                dtype_name(tensor.scalar_type()));
    check_shape(name, tensor, letters);
    return tensor;
  }
  Tensor activation(const char* name, const OptionalTensor& tensor, const char* letters) {
    return given(tensor) ? activation(name, *tensor, letters) : Tensor();
  }
  // A parameter or a routing weight: float32 or the dtype of the first argument.
  const Tensor& parameter(const char* name, const Tensor& tensor, const char* letters) {
    check_parameter(name, tensor);
    check_shape(name, tensor, letters);
    return tensor;
  }
  Tensor parameter(const char* name, const OptionalTensor& tensor, const char* letters) {
    return given(tensor) ? parameter(name, *tensor, letters) : Tensor();
  }
  // An attention mask: bool, or values that are added to the scores. The first two dimensions may be 1.
  // -> a view of the full shape
  Tensor mask(const char* name, const OptionalTensor& tensor, const char* letters) {
    if (!given(tensor)) return Tensor();
    check_dense(name, *tensor);
    const auto dtype = tensor->scalar_type(), own = first_.scalar_type();
    TORCH_CHECK(dtype == at::kBool || dtype == at::kFloat || dtype == own, prefix(name), "expected bool",
                own == at::kFloat ? " or float32" : ", float32 or ", own == at::kFloat ? "" : dtype_name(own),
                ", the dtype of ", first_name_, "; got ", dtype_name(dtype));
    return expanded(name, *tensor, letters, 2);
  }
  Tensor bools(const char* name, const OptionalTensor& tensor, const char* letters) {
    return of_dtype(name, tensor, letters, at::kBool);
  }
  Tensor float32(const char* name, const OptionalTensor& tensor, const char* letters) {
    return of_dtype(name, tensor, letters, at::kFloat);
  }
  // Cosines or sines of angles. The first dimension may be 1. -> a view of the full shape
  Tensor angles(const char* name, const Tensor& tensor, const char* letters) {
    check_parameter(name, tensor);
    return expanded(name, tensor, letters, 1);
  }
  const Tensor& ids(const char* name, const Tensor& tensor, const char* letters) {
    check_dense(name, tensor);
    TORCH_CHECK(tensor.scalar_type() == at::kInt || tensor.scalar_type() == at::kLong, prefix(name),
                "expected int32 or int64, got ", dtype_name(tensor.scalar_type()));
    check_shape(name, tensor, letters);
    return tensor;
  }

  // Defined in weight.h.
  const Format& format(const char* name, std::string_view value) const;
  Weight weight(const WeightNames& names, const Tensor& data, const OptionalTensor& scale, const OptionalTensor& offset,
                const Format& format, int64_t group_size = 0, bool transposed = false);

  void at_least_one(char letter, const char* name) const {
    TORCH_CHECK((*this)[letter] >= 1, prefix(name), "expected ", spelled(letter), " >= 1, got ", (*this)[letter]);
  }
  void in_range(const char* name, int64_t value, int64_t low, int64_t high, const char* high_is) const {
    TORCH_CHECK(low <= value && value <= high, prefix(name), "expected ", low, " to ", high, " (", high_is, "), got ",
                value);
  }
  // Kernels get options as float32, where a large double becomes infinite and a small one 0.
  float finite(const char* name, double value) const {
    const auto used = static_cast<float>(value);
    TORCH_CHECK(std::isfinite(used), prefix(name), "expected a finite number, got ", as_float32(value));
    return used;
  }
  float not_negative(const char* name, double value) const {
    const auto used = static_cast<float>(value);
    TORCH_CHECK(std::isfinite(used) && value >= 0, prefix(name), "expected a finite number >= 0, got ",
                as_float32(value));
    return used;
  }
  // Scores become softcap * tanh(score / softcap); 0 disables this.
  float softcap(const char* name, double value) const {
    const float used = not_negative(name, value);
    TORCH_CHECK(used > 0 || value == 0, prefix(name), "expected 0 or a finite number > 0, got ", as_float32(value));
    return used;
  }
  // One of the enums of options in common.h.
  template <class Choice>
  Choice one_of(const char* name, std::string_view value) const {
    for (size_t i = 0; i < kNames<Choice>.size(); ++i) {
      if (value == kNames<Choice>[i]) return static_cast<Choice>(i);
    }
    TORCH_CHECK(false, prefix(name), "expected one of ", names_of(Choice()), "; got ", quoted(value));
  }

  // [leading dimensions..., last...]
  Tensor output(at::IntArrayRef last, std::optional<at::ScalarType> dtype = std::nullopt) const {
    c10::SmallVector<int64_t, 6> shape(leading_.begin(), leading_.end());
    shape.append(last.begin(), last.end());
    return GivenOutputs::next(shape, first_.options().dtype(dtype.value_or(first_.scalar_type())));
  }

  static bool given(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }
  void check_given(const char* name, const Tensor& tensor) const {
    TORCH_CHECK(tensor.defined(), prefix(name), "expected a tensor, got None");
  }
  void check_dense(const char* name, const Tensor& tensor) const {
    check_given(name, tensor);
    TORCH_CHECK(tensor.layout() == at::kStrided, prefix(name), "expected a dense tensor, got layout ", tensor.layout());
    TORCH_CHECK(tensor.device() == first_.device(), prefix(name), "expected device ", first_.device(),
                ", the device of ", first_name_, "; got ", tensor.device());
    check_memory(name, tensor);
  }

  void check_parameter(const char* name, const Tensor& tensor) const {
    check_dense(name, tensor);
    const auto dtype = tensor.scalar_type(), own = first_.scalar_type();
    TORCH_CHECK(dtype == at::kFloat || dtype == own, prefix(name), "expected float32", own == at::kFloat ? "" : " or ",
                own == at::kFloat ? "" : dtype_name(own), ", the dtype of ", first_name_, "; got ", dtype_name(dtype));
  }

  void check_shape(const char* name, const Tensor& tensor, std::string_view letters) {
    check_shape(name, tensor, letters, tensor.dim(), "");
  }
  // Checks only the first `dims` dimensions. `after` describes the others in the message.
  void check_shape(const char* name, const Tensor& tensor, std::string_view letters, int64_t dims,
                   const std::string& after) {
    const bool leading = letters.starts_with('*');
    const std::string_view fixed = letters.substr(leading);
    const int64_t count = static_cast<int64_t>(fixed.size());
    const int64_t extra = dims - count;
    bool fits = leading ? extra >= 0 : extra == 0;
    if (fits && leading) {
      const auto dims = tensor.sizes().slice(0, extra);
      if (!leading_bound_) leading_.assign(dims.begin(), dims.end());
      leading_bound_ = true;
      fits = dims.equals(leading_);
    }
    for (int64_t i = 0; fits && i < count; ++i) {
      int64_t& bound = sizes_[fixed[i] - 'A'];
      if (bound < 0) bound = tensor.size(extra + i);
      fits = bound == tensor.size(extra + i);
    }
    if (!fits) wrong_shape(name, tensor, letters, after);
  }

  // A view of the full shape of a tensor whose first `ones` dimensions may have size 1.
  Tensor expanded(const char* name, const Tensor& tensor, std::string_view letters, int64_t ones) {
    const int64_t dims = static_cast<int64_t>(letters.size());
    c10::SmallVector<int64_t, 4> shape;
    bool fits = tensor.dim() == dims;
    for (int64_t i = 0; fits && i < dims; ++i) {
      int64_t& bound = sizes_[letters[i] - 'A'];
      if (bound < 0) bound = tensor.size(i);
      shape.push_back(bound);
      fits = tensor.size(i) == bound || (i < ones && tensor.size(i) == 1);
    }
    if (!fits) {
      std::string choices = "1 for ";
      for (int64_t i = 0; i < ones; ++i) choices += (i > 0 ? " or " : "") + spelled(letters[i]);
      wrong_shape(name, tensor, letters, "", 0, choices);
    }
    return tensor.sizes().equals(shape) ? tensor : tensor.expand(shape);
  }

  // moe_metal::gate: router_weight: expected shape [E, H] with H = 2048, got [128, 1024]
  // The message gives the size of `column`, which is not one of the dimensions. `choices` describes other valid sizes.
  [[noreturn]] void wrong_shape(const char* name, const Tensor& tensor, std::string_view letters,
                                const std::string& after = "", char column = 0, const std::string& choices = "") const {
    std::string shape, bound;
    for (const char letter : std::string(letters) + (column ? std::string(1, column) : "")) {
      const bool leading = letter == '*', known = leading ? leading_bound_ : (*this)[letter] >= 0;
      if (letter != column) shape += (shape.empty() ? "" : ", ") + spelled(letter);
      if (!known) continue;
      bound += (bound.empty() ? "" : ", ") + spelled(letter) + " = ";
      bound += leading ? c10::str(at::IntArrayRef(leading_)) : c10::str((*this)[letter]);
    }
    if (!after.empty()) shape += (shape.empty() ? "" : ", ") + after;
    TORCH_CHECK(false, prefix(name), "expected shape [", shape, "]", bound.empty() ? "" : " with ", bound,
                choices.empty() ? ", got " : ", and " + choices + "; got ", tensor.sizes());
  }

  // A storage may be resized while tensors use it, as FSDP does between two layers. Kernels read through untyped
  // pointers, which PyTorch does not check. Tensors on meta have no memory.
  void check_memory(const char* name, const Tensor& tensor) const {
    if (tensor.is_meta() || tensor.numel() == 0) return;
    const auto sizes = tensor.sizes(), strides = tensor.strides();
    uint64_t elements = tensor.storage_offset() + 1;
    for (size_t d = 0; d < sizes.size(); ++d) elements += (sizes[d] - 1) * strides[d];
    const uint64_t bytes = elements * tensor.element_size(), there = tensor.storage().nbytes();
    TORCH_CHECK(bytes <= there, prefix(name), "expected a tensor of ", bytes, " bytes of memory, got one of ", there,
                ": its storage was freed or cut");
  }

  static std::string spelled(char letter) {
    return letter == 'G' ? "2I" : letter == 'Q' ? "A/J" : std::string(1, letter);
  }
  std::string prefix(const char* name) const { return c10::str("moe_metal::", op_, ": ", name, ": "); }

  // 1e+39, which is inf as float32
  static std::string as_float32(double value) {
    const auto used = static_cast<float>(value);
    const bool beyond = std::isinf(used) ? std::isfinite(value) : used == 0 && value != 0;
    return beyond ? c10::str(value, ", which is ", used, " as float32") : c10::str(value);
  }

 private:
  Arguments(const char* op, const char* name, const Tensor& first, const char* dtype_of, at::ScalarType dtype)
      : op_(op), first_name_(name), first_(first) {
    sizes_.fill(-1);
    check_given(name, first);
    TORCH_CHECK(is_activation(dtype), prefix(dtype_of), "expected float32, float16 or bfloat16, got ",
                dtype_name(dtype));
  }
  Tensor of_dtype(const char* name, const OptionalTensor& tensor, const char* letters, at::ScalarType dtype) {
    if (!given(tensor)) return Tensor();
    check_dense(name, *tensor);
    TORCH_CHECK(tensor->scalar_type() == dtype, prefix(name), "expected ", dtype_name(dtype), ", got ",
                dtype_name(tensor->scalar_type()));
    check_shape(name, *tensor, letters);
    return *tensor;
  }
  static bool is_activation(at::ScalarType dtype) {
    return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
  }
  // A NUL character would end the message.
  static std::string quoted(std::string_view value) {
    std::string shown = "'";
    for (const char c : value) shown += c ? std::string(1, c) : "\\x00";
    return shown + "'";
  }

  const char* op_;
  const char* first_name_;
  const Tensor& first_;
  std::array<int64_t, 26> sizes_;
  c10::SmallVector<int64_t, 5> leading_;
  bool leading_bound_ = false;
};

}  // namespace moe_metal
