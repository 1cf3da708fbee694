#include "mps/tuning.h"

#include <c10/util/Exception.h>
#include <torch/library.h>

#include <atomic>
#include <bit>
#include <string>
#include <tuple>

#include "common.h"

namespace moe_metal {
namespace {

std::atomic<const Tuning*> current = new Tuning;

// The names of the numbers in Python, and their valid values.
struct Number {
  const char* name;
  int64_t Tuning::* value;
  int64_t least, most;
  enum { any, power_of_two, whole_simdgroups } kind = any;
};

constexpr int64_t kLargest = 1 << 30;
constexpr Number kNumbers[] = {
    {"decode_simdgroups", &Tuning::decode_simdgroups, 1, kChunkSimdgroups, Number::power_of_two},
    {"enough_simdgroups", &Tuning::enough_simdgroups, 1, kLargest},
    {"decode_slots", &Tuning::decode_slots, 0, kLargest},
    {"few_tokens", &Tuning::few_tokens, 0, kLargest},
    {"tokens_together", &Tuning::tokens_together, 1, 4, Number::power_of_two},
    {"tile32_share", &Tuning::tile32_share, 1, kLargest},
    {"tile64_share", &Tuning::tile64_share, 1, kLargest},
    {"band", &Tuning::band, 1, 64},
    {"matrix_units", &Tuning::matrix_units, 0, kLargest},
    {"tensor_ops", &Tuning::tensor_ops, 0, kLargest},
    {"gate_tiles", &Tuning::gate_tiles, 0, kLargest},
    {"row_threads", &Tuning::row_threads, kSimdgroup, 1024, Number::whole_simdgroups},
    {"attention_keys", &Tuning::attention_keys, 1, kLargest},
    {"commit_dispatches", &Tuning::commit_dispatches, 1, kLargest},
    {"commit_threads", &Tuning::commit_threads, 1, kLargest},
    {"dispatch_mflops", &Tuning::dispatch_mflops, 1, kLargest},
};
static_assert(sizeof(Tuning) == std::size(kNumbers) * sizeof(int64_t), "every number has a name");

// Lists instead of a dictionary, whose hash of strings needs a function of libc++ that macOS 14 lacks.
using Names = c10::List<std::string>;
using Values = c10::List<int64_t>;

const Number& number_named(const std::string& name) {
  for (const Number& number : kNumbers) {
    if (name == number.name) return number;
  }
  TORCH_CHECK_VALUE(false, "moe_metal: no number for the GPU is called ", name);
}

void check(const Number& number, int64_t value) {
  TORCH_CHECK_VALUE(number.least <= value && value <= number.most, "moe_metal: expected ", number.name, " from ",
                    number.least, " to ", number.most, ", got ", value);
  TORCH_CHECK_VALUE(number.kind != Number::power_of_two || std::has_single_bit(static_cast<uint64_t>(value)),
                    "moe_metal: expected a power of two as ", number.name, ", got ", value);
  TORCH_CHECK_VALUE(number.kind != Number::whole_simdgroups || value % kSimdgroup == 0,
                    "moe_metal: expected a multiple of ", kSimdgroup, " as ", number.name, ", got ", value);
}

std::tuple<Names, Values> numbers(bool defaults) {
  const Tuning from = defaults ? Tuning() : tuning();
  Names names;
  Values values;
  for (const Number& number : kNumbers) {
    names.push_back(number.name);
    values.push_back(from.*number.value);
  }
  return {names, values};
}

// Numbers that are not named get their defaults.
void set_numbers(const Names& names, const Values& values) {
  TORCH_CHECK_VALUE(names.size() == values.size(), "moe_metal: expected a value for each name");
  Tuning next;
  for (size_t i = 0; i < names.size(); ++i) {
    const Number& number = number_named(names.get(i));
    check(number, values.get(i));
    next.*number.value = values.get(i);
  }
  TORCH_CHECK_VALUE(next.tile32_share <= next.tile64_share, "moe_metal: expected tile32_share up to tile64_share, got ",
                    next.tile32_share, " and ", next.tile64_share);
  set_tuning(next);
}

}  // namespace

const Tuning& tuning() { return *current.load(std::memory_order_acquire); }
void set_tuning(const Tuning& tuning) { current.store(new Tuning(tuning), std::memory_order_release); }

}  // namespace moe_metal

// Only for torch_moe_metal/tuning.py.
TORCH_LIBRARY_FRAGMENT(moe_metal, m) {
  m.def("_tuning(*, bool defaults=False) -> (str[], int[])", &moe_metal::numbers);
  m.def("_set_tuning(str[] names, int[] values) -> ()", &moe_metal::set_numbers);
}
