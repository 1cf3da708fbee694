// Everything a translated shader needs.
#pragma once

#include "abi.h"
#include "math.h"
#include "runtime.h"
#include "simd.h"
#include "types.h"
