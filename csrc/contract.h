#pragma once
#include "contract/attention.h"
#include "contract/combine.h"
#include "contract/experts.h"
#include "contract/router.h"
#include "contract/weights.h"
