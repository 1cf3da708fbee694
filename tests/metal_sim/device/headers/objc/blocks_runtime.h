// GNUstep includes this file, which belongs to another Objective-C runtime; here blocks come from libBlocksRuntime.
#pragma once
#include <Block.h>
