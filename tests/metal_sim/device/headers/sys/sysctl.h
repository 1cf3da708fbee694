// macOS's sysctlbyname, which the simulated Metal implements for the macOS version that it plays. The cross build uses
// the system's own header.
#pragma once
#ifdef __APPLE__
#include_next <sys/sysctl.h>
#else
#include <stddef.h>

#ifdef __cplusplus
extern "C"
#endif
    int
    sysctlbyname(const char* name, void* value, size_t* size, void* next, size_t next_size);
#endif
