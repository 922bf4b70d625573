/* The choice of the instruction set. __builtin_cpu_supports also checks that the operating system saves the wide
 * registers. It does not know AMX, for which this file reads the bits of cpuid and xgetbv and asks Linux for
 * permission. */
#define _GNU_SOURCE /* syscall */
#include "cuda_ops/cpu_isa.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "common/common.h"

#if CUDA_OPS_WITH_TARGETS
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

static bool has_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("fma");
}

static bool has_amx(void)
{
#if defined(__linux__) && CUDA_OPS_WITH_AMX
    enum { AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24, OSXSAVE = 1u << 27, TILE_STATES = 3u << 17 };
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    unsigned a, b, c, d;
    if (!has_avx512() || !__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE))
        return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (AMX_BF16 | AMX_TILE)) != (AMX_BF16 | AMX_TILE))
        return false;
    unsigned states, high;
    __asm__ volatile("xgetbv" : "=a"(states), "=d"(high) : "c"(0));
    return (states & TILE_STATES) == TILE_STATES && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return false;
#endif
}

static bool has_avx512_bf16(void)
{
    unsigned a, b, c, d;
    return CUDA_OPS_WITH_AVX512_BF16 && has_avx512() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}

static bool has_fast_products_of_pairs(void)
{
    return __builtin_cpu_is("amd");
}

static cuda_ops_cpu_isa find_widest(void)
{
    if (has_avx512_bf16() && has_amx())
        return CUDA_OPS_CPU_AMX;
    if (has_avx512_bf16())
        return CUDA_OPS_CPU_AVX512_BF16;
    if (has_avx512())
        return CUDA_OPS_CPU_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return CUDA_OPS_CPU_AVX2;
    return CUDA_OPS_CPU_PORTABLE;
}
#else
static bool has_fast_products_of_pairs(void)
{
    return false;
}

static cuda_ops_cpu_isa find_widest(void)
{
    return CUDA_OPS_CPU_PORTABLE;
}
#endif

/* One more than the set, so that zero means "not yet determined". Threads that race to determine it store the same. */
static _Atomic int widest, current;

const char *cuda_ops_cpu_isa_name(cuda_ops_cpu_isa isa)
{
    static const char *const names[] = {"portable", "avx2", "avx512", "avx512_bf16", "amx"};
    return (int)isa >= 0 && isa <= CUDA_OPS_CPU_AMX ? names[isa] : NULL;
}

cuda_ops_cpu_isa cuda_ops_cpu_isa_widest(void)
{
    int known = atomic_load_explicit(&widest, memory_order_relaxed);
    if (!known) {
        known = 1 + (int)find_widest();
        atomic_store_explicit(&widest, known, memory_order_relaxed);
    }
    return (cuda_ops_cpu_isa)(known - 1);
}

/* -1 if this processor has no set of that name. */
static int find_by_name(const char *name)
{
    for (int isa = 0; isa <= (int)cuda_ops_cpu_isa_widest(); isa++)
        if (strcmp(name, cuda_ops_cpu_isa_name((cuda_ops_cpu_isa)isa)) == 0)
            return isa;
    return -1;
}

cuda_ops_status cuda_ops_cpu_isa_check(void)
{
    const char *const name = getenv("CUDA_OPS_CPU_ISA");
    return !name || !*name || find_by_name(name) >= 0 ? CUDA_OPS_SUCCESS : CUDA_OPS_INVALID_ARGUMENT;
}

cuda_ops_status cuda_ops_cpu_isa_select(const char *name)
{
    const int found = (int)cuda_ops_cpu_isa_widest();
    /* avx512_bf16's products are twice as fast as float32's on AMD's processors (Zen 4 on), and slower on the one of Intel's
     * on which they were timed. */
    const int standard =
        found == CUDA_OPS_CPU_AVX512_BF16 && !has_fast_products_of_pairs() ? (int)CUDA_OPS_CPU_AVX512 : found;
    const int isa = name ? find_by_name(name) : standard;
    if (isa < 0)
        return CUDA_OPS_INVALID_ARGUMENT;
    atomic_store_explicit(&current, 1 + isa, memory_order_relaxed);
    return CUDA_OPS_SUCCESS;
}

cuda_ops_cpu_isa cuda_ops_cpu_isa_current(void)
{
    int known = atomic_load_explicit(&current, memory_order_relaxed);
    if (!known) {
        const char *const name = getenv("CUDA_OPS_CPU_ISA");
        if (!name || cuda_ops_cpu_isa_select(name) != CUDA_OPS_SUCCESS)
            cuda_ops_cpu_isa_select(NULL);
        known = atomic_load_explicit(&current, memory_order_relaxed);
    }
    return (cuda_ops_cpu_isa)(known - 1);
}
