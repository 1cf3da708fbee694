// The calls of one fused layer for one new token, to be made again without Python and PyTorch's dispatcher.
//
// A tape records what the layer calls once: an observer sees every op. At a replay, a call whose arguments are the same
// tensors as then (weights, and outputs of earlier calls, which the tape owns) runs as it was checked. A call with one
// of the layer's inputs or with the rows of a cache is checked again, and so is the call whose output leaves the layer:
// that output is a new tensor each time. An op that is not ours, a copy, or a tensor of unknown origin refuses the
// tape; views are allowed, since calls hold their results. The state of a linear mixer and the memory of its rows are
// inputs, so they may be replaced. A view of some of these rows moves with the position of the next token.
#pragma once
#include <ATen/record_function.h>

#include <array>
#include <atomic>
#include <exception>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "recorded.h"
#include "room.h"

namespace moe_metal {

class Tape : public torch::CustomClassHolder {
 public:
  // The tensors that change with each token (absent ones are undefined), the positions in `rows` and `log`, and the
  // tensors that a call may read.
  Tape(std::vector<OptionalTensor> inputs, std::vector<int64_t> positions, const std::vector<Tensor>& constants);
  ~Tape() override;

  // Between them, the ops of this thread are recorded. After the end, `refusal` says why the tape cannot be replayed,
  // or nothing.
  void begin();
  void end(const OptionalTensor& output);
  std::string refusal() const { return refusal_; }

  // The layer's output for these inputs; nothing if they are not like the recorded ones, if a constant has other
  // memory, or if another thread replays.
  OptionalTensor replay(const Tensor& x, const OptionalTensor& cos, const OptionalTensor& sin,
                        const OptionalTensor& mask, const OptionalTensor& state, const OptionalTensor& rows,
                        const OptionalTensor& log, int64_t row, int64_t log_row);

 private:
  enum : size_t { kX, kCos, kSin, kMask, kState, kRows, kLog, kInputs };

  // An argument of a call that is the layer's input, or a view of it.
  struct Input {
    size_t argument, input;
    std::optional<Tensor> view;   // its layout relative to the input, if it is not the input itself
    int64_t first = 0, rows = 0;  // of kRows and kLog: rows from this one on, relative to the position
  };
  struct Call {
    std::shared_ptr<Recorded> recorded;
    std::vector<Tensor> outputs;
    std::vector<Input> inputs;
    bool changes = false;  // it is checked again
    std::vector<c10::intrusive_ptr<Room>> rooms;
  };
  struct Observed;
  struct Inputs {
    std::array<const Tensor*, kInputs> tensors;  // null: absent
    std::array<int64_t, 2> positions;            // in kRows and kLog
  };

  static std::unique_ptr<at::ObserverContext> op_begins(const at::RecordFunction& op);
  static void op_ends(const at::RecordFunction& op, at::ObserverContext* context);
  void add(const c10::OperatorName& name, const std::vector<c10::IValue>& arguments,
           const std::vector<c10::IValue>& outputs);
  void bind(Call& call, size_t index, const std::string& name, const Tensor& argument);
  void bind_rows(Input& input, const std::string& name, const Tensor& argument);
  void refuse(const std::string& reason);
  void take_output(const Tensor& output);
  bool fit(const Inputs& inputs) const;
  static Tensor argument(const Input& input, const Inputs& inputs);
  void run(const Inputs& inputs);

  std::vector<OptionalTensor> inputs_;  // after the recording, their layouts
  std::vector<int64_t> positions_;
  std::vector<bool> viewed_;  // whether a call reads a view of this input, so its shape must not change
  std::vector<std::pair<Tensor, const void*>> constants_;  // and where their elements were
  std::unordered_set<const void*> known_;                  // memory of constants, while recording
  std::unordered_map<const void*, size_t> made_;           // memory of outputs -> call
  std::vector<Tensor> held_;                               // while recording, so that no address is used twice
  std::vector<Call> calls_;
  at::TensorOptions output_;            // of the last call's output, which is the layer's
  std::vector<int64_t> shape_, sizes_;  // the sizes of both
  size_t which_ = 0;                    // of its outputs
  std::string refusal_;
  std::optional<at::CallbackHandle> observer_;
  int inside_ = 0;  // ops of ours that are running
  std::atomic_flag busy_;
};

}  // namespace moe_metal
