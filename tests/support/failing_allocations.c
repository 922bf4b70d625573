/* Makes one of PyTorch's allocations on the CPU fail, which are calls of posix_memalign: for LD_PRELOAD. */
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

static _Atomic long left; /* until the one that fails; 0: none does */

void fail_allocation(long number)
{
    atomic_store(&left, number);
}

long allocations_left(void)
{
    return atomic_load(&left);
}

int posix_memalign(void **memory, size_t alignment, size_t size)
{
    if (atomic_load(&left) > 0 && atomic_fetch_sub(&left, 1) == 1)
        return ENOMEM;
    *memory = memalign(alignment, size);
    return *memory ? 0 : ENOMEM;
}
