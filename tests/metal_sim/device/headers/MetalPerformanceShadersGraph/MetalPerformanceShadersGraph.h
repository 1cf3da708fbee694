// ATen/mps/MPSStream.h only uses pointers to these.
#pragma once
#import <MetalPerformanceShaders/MetalPerformanceShaders.h>

@class MPSGraph;
@class MPSGraphExecutionDescriptor;
@class MPSGraphCompilationDescriptor;
