// The declarations are in ../../shim/mpp.h and ../../opencl/mpp.h, which translate.py includes for this pragma.
#pragma metal_sim mpp
