// Ways to compute that only some processors have. The portable code asks once per call: a way that can compute the call
// does so, or makes what does; else it returns false or null, and has done nothing. The files of x86/ set these when
// the library is loaded. Without that folder they are null.
#pragma once
#include <memory>

#include "contract/attention.h"
#include "contract/experts.h"
#include "contract/router.h"
#include "contract/weights.h"

namespace moe_metal {

struct PreparedTokens;
struct Slots;
class WeightRows;

struct ProcessorWays {
  bool (*attention)(const Attention& call) = nullptr;
  bool (*experts)(const Experts& call, const Slots& slots) = nullptr;
  bool (*gate)(const Gate& call) = nullptr;
  bool (*linear)(const Linear& call) = nullptr;
  std::unique_ptr<WeightRows> (*rows)(const Weight& weight, bool bfloat16) = nullptr;          // see rows_of()
  std::unique_ptr<PreparedTokens> (*tokens)(const Weight& weight, const Tensor& x) = nullptr;  // see prepare_tokens()
};

inline ProcessorWays& processor_ways() {
  static ProcessorWays ways;
  return ways;
}

}  // namespace moe_metal
