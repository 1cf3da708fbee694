// Reading the chosen experts ahead, of weights in the pages of a file that is larger than memory.
//
// Page faults read a few pages at a time, and wait for each. On 2 cores of a virtual machine, random experts of a file
// on its disk came at 0.18 GB/s by faults, at 1.1 GB/s after MADV_WILLNEED for all of them, and at 0.8 GB/s by `pread`
// with 8 threads (a limit of 3 GB for a file of 6.1 GB).
#pragma once
#include "contract/experts.h"

namespace moe_metal {

// Asks the system to read these experts of a call, if its weights are known to be in such a file. Returns at once.
void read_ahead(const Experts& call, const std::vector<int64_t>& experts);

}  // namespace moe_metal
