// macOS's fstatfs, as far as it says whether a volume is on this machine. The simulated Metal implements it. The cross
// build uses the system's own header.
#pragma once
#ifdef __APPLE__
#include_next <sys/mount.h>
#else
#include <stdint.h>

#define MNT_LOCAL 0x1000
struct statfs {
  uint32_t f_flags;
};
#ifdef __cplusplus
extern "C"
#endif
    int
    fstatfs(int file, struct statfs* found) __asm__("metal_sim_fstatfs");  // Linux's own has another struct
#endif
