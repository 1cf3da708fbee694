// GNUstep asks for this file of another Objective-C runtime; on Linux the blocks come from libBlocksRuntime.
#pragma once
#include <Block.h>
