/* Philox on neighbouring counters, side by side, so that the compiler vectorises its ten rounds. */
#ifndef CUDA_OPS_CPU_COMMON_PHILOX_BLOCK_H
#define CUDA_OPS_CPU_COMMON_PHILOX_BLOCK_H

#include "common/common.h"
#include "cuda_ops/philox.h"

/* Counters at a time. More than the compiler would unroll instead of vectorising. */
enum { PHILOX_BLOCK = 32 };

/* words[4 * i + j] = word j of Philox at counter (low, quadruple + i). */
CUDA_OPS_INLINE void philox_block(uint32_t words[4 * PHILOX_BLOCK], uint64_t low, uint64_t quadruple, uint64_t seed)
{
    for (int i = 0; i < PHILOX_BLOCK; i++) {
        const uint64_t high = quadruple + (uint64_t)i;
        uint32_t c0 = (uint32_t)low, c1 = (uint32_t)(low >> 32), c2 = (uint32_t)high, c3 = (uint32_t)(high >> 32);
        uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
        /* Only a body without a loop is vectorised over i. */
#pragma GCC unroll 10
        for (int round = 0; round < CUDA_OPS_PHILOX_ROUNDS; round++) {
            cuda_ops_philox_round(&c0, &c1, &c2, &c3, key0, key1);
            key0 += CUDA_OPS_PHILOX_WEYL_0;
            key1 += CUDA_OPS_PHILOX_WEYL_1;
        }
        words[4 * i] = c0;
        words[4 * i + 1] = c1;
        words[4 * i + 2] = c2;
        words[4 * i + 3] = c3;
    }
}

#endif
