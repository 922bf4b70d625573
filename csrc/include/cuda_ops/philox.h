/* Philox-4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw (SC 2011): ten rounds that turn a
 * 128-bit counter and a 64-bit key into four random 32-bit words. It has no state, so that any thread computes any
 * number of the sequence on its own.
 */
#ifndef CUDA_OPS_PHILOX_H
#define CUDA_OPS_PHILOX_H

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CUDA_OPS_PHILOX_ROUNDS 10
#define CUDA_OPS_PHILOX_MULTIPLIER_0 0xD2511F53u
#define CUDA_OPS_PHILOX_MULTIPLIER_1 0xCD9E8D57u
/* Added to the key after each round: the golden ratio and the square root of 3, less 1, times 2^32. */
#define CUDA_OPS_PHILOX_WEYL_0 0x9E3779B9u
#define CUDA_OPS_PHILOX_WEYL_1 0xBB67AE85u

/* Where a call's random numbers begin. On CUDA under graph capture the host does not know the values, since every
 * replay has new ones; then the pointers (to device memory) are not NULL, the seed is *seed_pointer and the offset is
 * *offset_pointer + offset. */
typedef struct cuda_ops_philox_state {
    uint64_t seed, offset;
    const int64_t *seed_pointer, *offset_pointer;
} cuda_ops_philox_state;

CUDA_OPS_HOST_DEVICE uint64_t cuda_ops_philox_seed(cuda_ops_philox_state state)
{
    return state.seed_pointer ? (uint64_t)*state.seed_pointer : state.seed;
}

CUDA_OPS_HOST_DEVICE uint64_t cuda_ops_philox_offset(cuda_ops_philox_state state)
{
    return state.offset_pointer ? (uint64_t)*state.offset_pointer + state.offset : state.offset;
}

/* One round on the four words of the counter with the two of the key. */
CUDA_OPS_HOST_DEVICE void cuda_ops_philox_round(uint32_t *c0, uint32_t *c1, uint32_t *c2, uint32_t *c3, uint32_t key0,
                                                uint32_t key1)
{
    const uint64_t product0 = (uint64_t)CUDA_OPS_PHILOX_MULTIPLIER_0 * *c0;
    const uint64_t product1 = (uint64_t)CUDA_OPS_PHILOX_MULTIPLIER_1 * *c2;
    *c0 = (uint32_t)(product1 >> 32) ^ *c1 ^ key0;
    *c1 = (uint32_t)product1;
    *c2 = (uint32_t)(product0 >> 32) ^ *c3 ^ key1;
    *c3 = (uint32_t)product0;
}

CUDA_OPS_HOST_DEVICE void cuda_ops_philox(uint32_t counter[4], uint32_t key0, uint32_t key1)
{
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int round = 0; round < CUDA_OPS_PHILOX_ROUNDS; round++) {
        cuda_ops_philox_round(&counter[0], &counter[1], &counter[2], &counter[3], key0, key1);
        key0 += CUDA_OPS_PHILOX_WEYL_0;
        key1 += CUDA_OPS_PHILOX_WEYL_1;
    }
}

#ifdef __cplusplus
}
#endif

#endif
