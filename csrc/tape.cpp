#include "tape.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <string_view>

namespace moe_metal {
namespace {

constexpr std::string_view kOurs = "moe_metal::";
// Ops that make a view, or memory that nothing has written.
constexpr std::string_view kHarmless[] = {
    "alias",     "as_strided", "chunk",     "detach",    "empty",       "expand",         "flatten",          "mT",
    "narrow",    "permute",    "reshape",   "select",    "slice",       "split",          "split_with_sizes", "squeeze",
    "t",         "transpose",  "unflatten", "unsqueeze", "view",        "_reshape_alias", "_unsafe_view",     "unbind",
    "new_empty", "movedim",    "real",      "imag",      "view_as_real"};

bool is_harmless(std::string_view name) {
  if (!name.starts_with("aten::")) return false;
  return std::find(std::begin(kHarmless), std::end(kHarmless), name.substr(6)) != std::end(kHarmless);
}

thread_local Tape* recording = nullptr;

const void* memory_of(const Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

bool same_layout(const Tensor& a, const Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() && a.storage_offset() == b.storage_offset();
}

// The layout of a tensor whose memory begins at this offset of another one's.
Tensor layout_of(const Tensor& tensor, int64_t offset) {
  Tensor layout = empty({0}, tensor.options().device(at::kMeta));
  layout.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), offset);
  return layout;
}

}  // namespace

struct Tape::Observed : at::ObserverContext {
  std::vector<c10::IValue> arguments;
};

Tape::Tape(std::vector<OptionalTensor> inputs, std::vector<int64_t> positions, const std::vector<Tensor>& constants)
    : inputs_(std::move(inputs)), positions_(std::move(positions)) {
  TORCH_CHECK(inputs_.size() == kInputs && positions_.size() == 2,
              "moe_metal::Tape: expected x, cos, sin, mask, state, rows and log, and two positions");
  for (const Tensor& constant : constants) {
    constants_.emplace_back(constant, constant.const_data_ptr());
    known_.insert(memory_of(constant));
  }
}

Tape::~Tape() {
  if (observer_) at::removeCallback(*observer_);
  if (recording == this) recording = nullptr;
}

void Tape::refuse(const std::string& reason) {
  if (refusal_.empty()) refusal_ = reason;
}

void Tape::begin() {
  if (recording) return refuse("another layer is being recorded");
  recording = this;
  observer_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&Tape::op_begins, &Tape::op_ends)
                                             .needsInputs(true)
                                             .needsOutputs(true)
                                             .scopes({at::RecordScope::FUNCTION}));
}

std::unique_ptr<at::ObserverContext> Tape::op_begins(const at::RecordFunction& op) {
  Tape* tape = recording;
  if (!tape) return nullptr;
  const std::string_view name = op.name();
  if (name.starts_with("moe_metal_tape::")) return nullptr;
  if (tape->inside_) {  // our own op calls PyTorch
    const bool on_mps = tape->inputs_[kX] && tape->inputs_[kX]->is_mps();
    if (on_mps && !is_harmless(name)) tape->refuse(c10::str("an op of ours calls ", name));
    return nullptr;
  }
  if (!name.starts_with(kOurs)) {
    if (!is_harmless(name)) tape->refuse(std::string(name));
    return nullptr;
  }
  auto observed = std::make_unique<Observed>();
  observed->arguments.assign(op.inputs().begin(), op.inputs().end());
  ++tape->inside_;
  return observed;
}

void Tape::op_ends(const at::RecordFunction& op, at::ObserverContext* context) {
  Tape* tape = recording;
  if (!tape || !context) return;
  --tape->inside_;
  const auto* observed = static_cast<Observed*>(context);
  const auto name = op.operator_name();
  if (!name || !tape->refusal_.empty()) return;
  try {
    tape->add(*name, observed->arguments, op.outputs());
  } catch (const std::exception& error) {  // an observer must not raise
    tape->refuse(error.what());
  }
}

void Tape::add(const c10::OperatorName& name, const std::vector<c10::IValue>& arguments,
               const std::vector<c10::IValue>& outputs) {
  const auto op = c10::Dispatcher::singleton().findSchema({"moe_metal_tape::" + name.name.substr(kOurs.size()), ""});
  if (!op) return refuse(name.name);
  torch::jit::Stack stack = arguments;
  op->callBoxed(&stack);
  Call call = {.recorded = std::shared_ptr<Recorded>(reinterpret_cast<Recorded*>(stack[0].toInt()))};
  for (const auto& output : outputs) call.outputs.push_back(output.toTensor());
  const auto& names = op->schema().arguments();
  for (size_t i = 0; i < arguments.size() && refusal_.empty(); ++i) {
    const auto& argument = arguments[i];
    if (argument.isTensor()) {
      bind(call, i, name.name + ": " + names[i].name(), argument.toTensor());
    } else if (argument.isCustomClass()) {
      call.changes = true;
      call.rooms.push_back(argument.toCustomClass<Room>());
    }
  }
  if (!refusal_.empty()) return;
  if (!call.changes) {  // the others are checked at each replay
    call.recorded->check(call.outputs);
    if (call.recorded->copies()) return refuse(name.name + " copies an argument");
  }
  for (const Tensor& output : call.outputs) {
    held_.push_back(output);
    made_[memory_of(output)] = calls_.size();
  }
  calls_.push_back(std::move(call));
}

void Tape::bind(Call& call, size_t index, const std::string& name, const Tensor& argument) {
  if (!argument.defined()) return;
  if (argument.is_meta()) return refuse("a tensor without memory");
  const void* memory = memory_of(argument);
  held_.push_back(argument);
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if (!inputs_[i] || memory_of(*inputs_[i]) != memory) continue;
    Input input = {index, i, std::nullopt};
    const int64_t offset = argument.storage_offset() - inputs_[i]->storage_offset();
    if (offset < 0) return refuse(name + " begins before the layer's input");
    if (i >= kRows) {
      bind_rows(input, name, argument);
    } else if (!same_layout(*inputs_[i], argument)) {
      input.view = layout_of(argument, offset);
    }
    call.inputs.push_back(std::move(input));
    call.changes = true;
    return;
  }
  if (!made_.contains(memory) && !known_.contains(memory)) refuse(name + " is neither a weight nor of this layer");
}

void Tape::bind_rows(Input& input, const std::string& name, const Tensor& argument) {
  const Tensor& memory = *inputs_[input.input];
  const int64_t offset = argument.storage_offset() - memory.storage_offset();
  const bool alike = argument.dim() == 3 && argument.size(0) == memory.size(0) && argument.size(2) == memory.size(2) &&
                     argument.strides() == memory.strides();
  if (!alike || offset % memory.stride(1) != 0) return refuse(name + " is not some rows of the cache");
  input.first = offset / memory.stride(1) - positions_[input.input - kRows];
  input.rows = argument.size(1);
}

// From now on the output is the caller's. Each replay makes a new one.
void Tape::take_output(const Tensor& output) {
  const auto found = made_.find(memory_of(output));
  if (found == made_.end() || found->second + 1 != calls_.size())
    return refuse("its output is not that of its last op");
  Call& last = calls_.back();
  const auto same = [&](const Tensor& each) { return memory_of(each) == memory_of(output); };
  which_ = std::find_if(last.outputs.begin(), last.outputs.end(), same) - last.outputs.begin();
  Tensor& made = last.outputs[which_];
  output_ = made.options();
  shape_ = made.sizes().vec(), sizes_ = output.sizes().vec();
  const bool whole = c10::multiply_integers(shape_) == c10::multiply_integers(sizes_);
  if (!whole || !output.is_contiguous()) return refuse("its output is a part of that of an op");
  made = Tensor();
  if (!last.changes) last.changes = !last.recorded->set_output(Tensor());
}

void Tape::end(const OptionalTensor& output) {
  if (recording == this) recording = nullptr;
  if (observer_) at::removeCallback(*observer_);
  observer_.reset();
  if (!output) refuse("the layer raised an error");
  if (refusal_.empty()) take_output(*output);
  // From here on, only the layouts of the inputs are needed, and the memory of nothing.
  for (auto& input : inputs_) {
    if (input) input = layout_of(*input, 0);
  }
  viewed_.assign(inputs_.size(), false);
  for (const Call& call : calls_) {
    for (const Input& input : call.inputs) viewed_[input.input] = viewed_[input.input] || input.view;
  }
  made_.clear(), known_.clear(), held_.clear();
  if (!refusal_.empty()) calls_.clear(), constants_.clear();
}

bool Tape::fit(const Inputs& inputs) const {
  for (size_t i = 0; i < kInputs; ++i) {
    const Tensor* const input = inputs.tensors[i];
    if ((input != nullptr) != inputs_[i].has_value()) return false;
    if (!input) continue;
    const Tensor &now = *input, &then = *inputs_[i];
    if (now.scalar_type() != then.scalar_type() || now.dim() != then.dim()) return false;
    if (i >= kRows) {  // memory of any length
      if (now.size(0) != then.size(0) || now.size(2) != then.size(2)) return false;
      continue;
    }
    // A mask is longer with each token. Nothing may have to be copied that was not.
    const bool same = now.sizes() == then.sizes(), longer = i == kMask && now.size(-1) != then.size(-1) && !viewed_[i];
    if (same ? now.strides() != then.strides() : !longer) return false;
  }
  for (const Call& call : calls_) {
    for (const Input& input : call.inputs) {
      if (input.input < kRows) continue;
      const int64_t first = inputs.positions[input.input - kRows] + input.first;
      if (first < 0 || first + input.rows > inputs.tensors[input.input]->size(1)) return false;
    }
  }
  const auto stays = [](const auto& constant) { return constant.first.const_data_ptr() == constant.second; };
  return std::all_of(constants_.begin(), constants_.end(), stays);
}

Tensor Tape::argument(const Input& input, const Inputs& inputs) {
  const Tensor& now = *inputs.tensors[input.input];
  if (input.input >= kRows) {
    const int64_t first = inputs.positions[input.input - kRows] + input.first;
    const int64_t sizes[] = {now.size(0), input.rows, now.size(2)};
    return view_of(now, sizes, now.strides(), now.storage_offset() + first * now.stride(1));
  }
  const auto& view = input.view;
  if (!view) return now;
  return view_of(now, view->sizes(), view->strides(), now.storage_offset() + view->storage_offset());
}

void Tape::run(const Inputs& inputs) {
  for (Call& call : calls_) {
    for (const Input& input : call.inputs) call.recorded->set(input.argument, argument(input, inputs));
    if (call.changes) {
      call.recorded->check(call.outputs);
    } else if (&call == &calls_.back()) {
      call.recorded->set_output(empty(shape_, output_));
    }
    call.recorded->run();
  }
}

OptionalTensor Tape::replay(const Tensor& x, const OptionalTensor& cos, const OptionalTensor& sin,
                            const OptionalTensor& mask, const OptionalTensor& state, const OptionalTensor& rows,
                            const OptionalTensor& log, int64_t row, int64_t log_row) {
  const auto given = [](const OptionalTensor& input) { return Arguments::given(input) ? &*input : nullptr; };
  const Inputs inputs = {{&x, given(cos), given(sin), given(mask), given(state), given(rows), given(log)},
                         {row, log_row}};
  if (calls_.empty() || !fit(inputs) || busy_.test_and_set()) return std::nullopt;
  RECORD_FUNCTION("moe_metal::replay", std::vector<c10::IValue>());
  std::vector<std::pair<Room*, Room::State>> before;
  for (const Call& call : calls_) {
    for (const auto& room : call.rooms) before.emplace_back(room.get(), room->state());
  }
  try {
    calls_[0].recorded->together([&] { run(inputs); });
    const Call& last = calls_.back();
    const Tensor output = last.recorded->outputs()[which_];
    last.changes ? last.recorded->forget() : static_cast<void>(last.recorded->set_output(Tensor()));
    busy_.clear();
    return output.sizes() == at::IntArrayRef(sizes_) ? output : output.view(sizes_);
  } catch (...) {
    for (const auto& [room, state] : before) room->go_back(state);
    busy_.clear();
    throw;
  }
}

}  // namespace moe_metal
