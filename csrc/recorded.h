// A call of an op that can be made again, with its checked arguments: what a tape (tape.h) consists of.
#pragma once
#include <c10/util/FunctionRef.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cache_ops.h"

namespace moe_metal {

class Recorded {
 public:
  virtual ~Recorded() = default;
  virtual void set(size_t argument, const Tensor& tensor) = 0;
  // Checks the arguments again. The outputs are these tensors, or new ones where they are undefined.
  virtual void check(const std::vector<Tensor>& outputs) = 0;
  virtual std::vector<Tensor> outputs() const = 0;
  // Whether a check has copied an argument.
  virtual bool copies() const = 0;
  virtual void run() const = 0;
  // Replaces the output of an op that has one, with an undefined tensor too. Returns whether it could.
  virtual bool set_output(const Tensor& output) = 0;
  // Frees the outputs and temporary tensors of the last check.
  virtual void forget() = 0;
  // Runs `all`, which runs calls of this device, so that the device gets them at once.
  virtual void together(c10::function_ref<void()> all) const = 0;
};

inline std::vector<Tensor> listed(const Tensor& output) { return {output}; }
inline std::vector<Tensor> listed(const std::tuple<Tensor, Tensor>& outputs) {
  return {std::get<0>(outputs), std::get<1>(outputs)};
}
inline std::vector<Tensor> listed(const std::tuple<>&) { return {}; }

// An argument as it is kept.
template <class T>
using Kept = std::conditional_t<std::is_same_v<std::decay_t<T>, std::string_view>, std::string, std::decay_t<T>>;

template <class Operator, void (*kernel)(const typename Operator::Call&), auto encode_together, class... Args>
class RecordedCall final : public Recorded {
 public:
  explicit RecordedCall(Args... args) : args_(args...) {}

  void set(size_t argument, const Tensor& tensor) override {
    set(argument, tensor, std::index_sequence_for<Args...>());
  }
  void check(const std::vector<Tensor>& outputs) override {
    const GivenOutputs given(outputs);
    call_.emplace(std::apply(Operator::checked, args_));
    copies_ = given.copies();
  }
  std::vector<Tensor> outputs() const override {
    if constexpr (std::is_void_v<decltype(call_->outputs())>) {
      return {};
    } else {
      return listed(call_->outputs());
    }
  }
  bool copies() const override { return copies_; }
  void run() const override { Operator::template run<kernel>(*call_); }
  bool set_output(const Tensor& output) override {
    if constexpr (requires { call_->output; } && std::is_same_v<decltype(call_->outputs()), Tensor>) {
      call_->output = output;
      return true;
    } else {
      return false;
    }
  }
  void forget() override { call_.reset(); }
  void together(c10::function_ref<void()> all) const override { encode_together(all); }

 private:
  template <size_t... i>
  void set(size_t argument, const Tensor& tensor, std::index_sequence<i...>) {
    (set_one(argument == i, std::get<i>(args_), tensor), ...);
  }
  template <class Kept>
  static void set_one(bool chosen, Kept& argument, const Tensor& tensor) {
    if constexpr (std::is_assignable_v<Kept&, Tensor>) {
      if (chosen) argument = tensor;
    }
  }

  std::tuple<Kept<Args>...> args_;
  std::optional<typename Operator::Call> call_;
  bool copies_ = false;
};

// Recording<check_gate>::call<cpu::run_gate, cpu::together> records a call of gate on the CPU. The result is the
// address of a new Recorded.
template <auto check>
struct Recording;

template <class Checked, class... Args, Checked (*check)(Args...)>
struct Recording<check> {
  template <void (*kernel)(const Checked&), auto together>
  static int64_t call(Args... args) {
    Recorded* recorded = new RecordedCall<Op<check>, kernel, together, Args...>(args...);
    return reinterpret_cast<int64_t>(recorded);
  }
};

}  // namespace moe_metal
