// The emulated device, for tests: its memory, and how kernels run on it.
#ifndef EMULATION_EMULATOR_H
#define EMULATION_EMULATOR_H

#include <stddef.h>
#include <stdint.h>

namespace emulation
{
// Device memory of just so many bytes, `phase` bytes behind a multiple of 256; filled with `fill`. Freed by free_all().
void *device_memory(size_t bytes, size_t phase, int fill = 0xff);
void free_all();

// What a failure is reported with: the case that runs.
void describe(const char *format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Random numbers, below `bound`.
uint64_t random_below(uint64_t bound);
void seed_random(uint64_t seed);

// Blocks that run at once; a cluster's always do. The rest of a grid follows as they end.
extern int resident_blocks;
// Threads that have run since the start.
extern int64_t threads_run;
} // namespace emulation

#endif
