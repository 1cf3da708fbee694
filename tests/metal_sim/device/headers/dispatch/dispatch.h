// The part of libdispatch that an MPS extension uses. The cross build uses the system's own header.
#pragma once
#ifdef __APPLE__
#include_next <dispatch/dispatch.h>
#else

#ifdef __OBJC__
#import <Foundation/Foundation.h>
// As on macOS: the mangled names of functions that take a queue depend on this protocol.
@protocol OS_dispatch_queue <NSObject>
@end
typedef NSObject<OS_dispatch_queue>* dispatch_queue_t;
#else
typedef struct dispatch_queue_s* dispatch_queue_t;
#endif

#ifdef __cplusplus
extern "C" {
#endif
typedef void (^dispatch_block_t)(void);
void dispatch_sync(dispatch_queue_t queue, dispatch_block_t block);
#ifdef __cplusplus
}
#endif
#endif
