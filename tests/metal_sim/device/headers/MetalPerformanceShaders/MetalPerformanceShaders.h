// The only class of MetalPerformanceShaders whose definition ATen/mps/MPSStream.h needs.
#pragma once
#import <Metal/Metal.h>

NS_ASSUME_NONNULL_BEGIN
@interface MPSCommandBuffer : NSObject <MTLCommandBuffer>
@property(readonly, nonatomic, nonnull, retain) id<MTLCommandBuffer> commandBuffer;
@property(readonly, nonatomic, nonnull, retain) id<MTLCommandBuffer> rootCommandBuffer;
+ (instancetype)commandBufferFromCommandQueue:(id<MTLCommandQueue>)commandQueue;
- (void)commitAndContinue;
@end
NS_ASSUME_NONNULL_END
