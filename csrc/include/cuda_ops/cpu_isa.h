/* Which instruction set the CPU kernels with explicit vectors run on (gemm, and with it linear; conv2d; conv_block):
 * the widest that processor, operating system and build have between them, found out once. The environment variable
 * CUDA_OPS_CPU_ISA, read at the first call, names another: portable, avx2, avx512, avx512_bf16 or amx. It is for tests
 * and for comparisons; results of two sets differ by rounding. The last two differ from avx512 for bfloat16 alone
 * (gemm_cpu.h); where avx512_bf16 would be the widest, it is taken of itself on AMD's processors alone: on the one of
 * Intel's that both were timed on, avx512, which widens to float32, was faster.
 */
#ifndef CUDA_OPS_CPU_ISA_H
#define CUDA_OPS_CPU_ISA_H

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Each has what those before it have. */
typedef enum cuda_ops_cpu_isa {
    CUDA_OPS_CPU_PORTABLE = 0,    /* C alone, in vectors of 16 bytes */
    CUDA_OPS_CPU_AVX2 = 1,        /* with FMA */
    CUDA_OPS_CPU_AVX512 = 2,      /* F, VL, DQ, BW */
    CUDA_OPS_CPU_AVX512_BF16 = 3, /* and pairs of bfloat16 */
    CUDA_OPS_CPU_AMX = 4          /* and tiles of bfloat16 */
} cuda_ops_cpu_isa;

/* The widest there is here. */
cuda_ops_cpu_isa cuda_ops_cpu_isa_widest(void);

/* The one in use. Where CUDA_OPS_CPU_ISA is not the name of one that there is here: the default (see _check). */
cuda_ops_cpu_isa cuda_ops_cpu_isa_current(void);

/* CUDA_OPS_INVALID_ARGUMENT if CUDA_OPS_CPU_ISA is set (and not empty) to anything but the name of one there is here.
 */
cuda_ops_status cuda_ops_cpu_isa_check(void);

/* Uses the set of that name (NULL: the default, as above) from the next call on.
 * CUDA_OPS_INVALID_ARGUMENT, and no change, where there is none of that name here. Not while a kernel runs, nor between
 * the plan of a convolution and its execution. */
cuda_ops_status cuda_ops_cpu_isa_select(const char *name);

/* "portable", "avx2", "avx512", "avx512_bf16", "amx"; NULL for another number. */
const char *cuda_ops_cpu_isa_name(cuda_ops_cpu_isa isa);

#ifdef __cplusplus
}
#endif

#endif
