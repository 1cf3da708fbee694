// GCC's Objective-C runtime gives every Objective-C++ function a personality routine that does not support C++
// exceptions: throwing through one would terminate. This one is linked into each library before libobjc's, and uses
// C++'s. As a consequence, @catch does not work in simulated code; on macOS one runtime supports both.
#include <unwind.h>

extern "C" {
_Unwind_Reason_Code __gxx_personality_v0(int, _Unwind_Action, _Unwind_Exception_Class, _Unwind_Exception*,
                                         _Unwind_Context*);

__attribute__((visibility("hidden"))) _Unwind_Reason_Code __gnu_objc_personality_v0(int version, _Unwind_Action actions,
                                                                                    _Unwind_Exception_Class kind,
                                                                                    _Unwind_Exception* exception,
                                                                                    _Unwind_Context* context) {
  return __gxx_personality_v0(version, actions, kind, exception, context);
}
}
