// The current settings of tuning.h, their names in Python and their valid values.
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

// The names of the settings in Python, and their valid values.
struct Setting {
  const char* name;
  int64_t Tuning::* value;
  int64_t least, most;
  enum { any, power_of_two, whole_simdgroups } kind = any;
};

constexpr int64_t kLargest = 1 << 30;
constexpr Setting kSettings[] = {
    {"decode_simdgroups", &Tuning::decode_simdgroups, 1, kRowSimdgroups, Setting::power_of_two},
    {"target_simdgroups", &Tuning::target_simdgroups, 1, kLargest},
    {"decode_max_slots_percent", &Tuning::decode_max_slots_percent, 0, kLargest},
    {"gate_up_pairs_percent", &Tuning::gate_up_pairs_percent, 0, kLargest},
    {"down_pairs_percent", &Tuning::down_pairs_percent, 0, kLargest},
    {"few_tokens", &Tuning::few_tokens, 0, kLargest},
    {"tokens_together", &Tuning::tokens_together, 1, 4, Setting::power_of_two},
    {"tile32_min_rows", &Tuning::tile32_min_rows, 1, kLargest},
    {"tile64_min_rows", &Tuning::tile64_min_rows, 1, kLargest},
    {"tiles_per_band", &Tuning::tiles_per_band, 1, 64},
    {"tensor_ops", &Tuning::tensor_ops, 0, kLargest},
    {"gate_min_tiles", &Tuning::gate_min_tiles, 0, kLargest},
    {"row_threads", &Tuning::row_threads, kSimdgroup, 1024, Setting::whole_simdgroups},
    {"attention_keys", &Tuning::attention_keys, 1, kLargest},
    {"commit_dispatches", &Tuning::commit_dispatches, 1, kLargest},
    {"commit_threads", &Tuning::commit_threads, 1, kLargest},
    {"dispatch_mflops", &Tuning::dispatch_mflops, 1, kLargest},
};
static_assert(sizeof(Tuning) == std::size(kSettings) * sizeof(int64_t), "every setting has a name");

// Lists instead of a dictionary, whose hash of strings needs a function of libc++ that macOS 14 lacks.
using Names = c10::List<std::string>;
using Values = c10::List<int64_t>;

const Setting& setting_named(const std::string& name) {
  for (const Setting& setting : kSettings) {
    if (name == setting.name) return setting;
  }
  TORCH_CHECK_VALUE(false, "moe_metal: expected the name of a setting, got ", name);
}

void check(const Setting& setting, int64_t value) {
  TORCH_CHECK_VALUE(setting.least <= value && value <= setting.most, "moe_metal: expected ", setting.name, " from ",
                    setting.least, " to ", setting.most, ", got ", value);
  TORCH_CHECK_VALUE(setting.kind != Setting::power_of_two || std::has_single_bit(static_cast<uint64_t>(value)),
                    "moe_metal: expected a power of two as ", setting.name, ", got ", value);
  TORCH_CHECK_VALUE(setting.kind != Setting::whole_simdgroups || value % kSimdgroup == 0,
                    "moe_metal: expected a multiple of ", kSimdgroup, " as ", setting.name, ", got ", value);
}

std::tuple<Names, Values> settings(bool defaults) {
  const Tuning from = defaults ? Tuning() : tuning();
  Names names;
  Values values;
  for (const Setting& setting : kSettings) {
    names.push_back(setting.name);
    values.push_back(from.*setting.value);
  }
  return {names, values};
}

// Settings that are not named get their defaults.
void set_settings(const Names& names, const Values& values) {
  TORCH_CHECK_VALUE(names.size() == values.size(), "moe_metal: expected a value for each name");
  Tuning next;
  for (size_t i = 0; i < names.size(); ++i) {
    const Setting& setting = setting_named(names.get(i));
    check(setting, values.get(i));
    next.*setting.value = values.get(i);
  }
  TORCH_CHECK_VALUE(next.tile32_min_rows <= next.tile64_min_rows,
                    "moe_metal: expected tile32_min_rows up to tile64_min_rows, got ", next.tile32_min_rows, " and ",
                    next.tile64_min_rows);
  set_tuning(next);
}

}  // namespace

const Tuning& tuning() { return *current.load(std::memory_order_acquire); }
void set_tuning(const Tuning& tuning) { current.store(new Tuning(tuning), std::memory_order_release); }

}  // namespace moe_metal

// Only for torch_moe_metal/tuning.py.
TORCH_LIBRARY_FRAGMENT(moe_metal, m) {
  m.def("_tuning(*, bool defaults=False) -> (str[], int[])", &moe_metal::settings);
  m.def("_set_tuning(str[] names, int[] values) -> ()", &moe_metal::set_settings);
}
