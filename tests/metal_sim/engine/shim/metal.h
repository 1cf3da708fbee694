// Everything a translated shader needs.
#pragma once

#include "runtime.h"  // first: the other headers are shared with other back ends and use what it defines

#include "math.h"
#include "simd.h"
