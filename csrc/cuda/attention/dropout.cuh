// attention's dropout where the fragments of tensor cores' products lie (attention.h says which numbers are whose).
#ifndef CUDA_OPS_ATTENTION_DROPOUT_CUH
#define CUDA_OPS_ATTENTION_DROPOUT_CUH

#include "common/common.cuh"
#include "cuda_ops/attention.h"

// What a kernel is told.
struct DropoutWork {
    cuda_ops_philox_state philox;
    int64_t *state;     // forward's, set by one thread
    uint32_t threshold; // numbers below its upper half are dropped
    float scale;        // of the others
};

static inline DropoutWork dropout_work_of(const cuda_ops_attention &p, int64_t *state)
{
    const uint32_t dropped = cuda_ops_attention_dropped_of_65536(p.dropout);
    DropoutWork work = {};
    work.philox = p.philox, work.state = state;
    // Of p = 1, whose scale is 0, it does not matter what is kept.
    work.threshold = dropped < 65536 ? dropped << 16 : 0xffffffffu;
    work.scale = (float)cuda_ops_attention_dropout_scale(p.dropout);
    return work;
}

// Seed and offset, the same in all lanes: the compiler keeps what follows from them in uniform registers.
struct DropoutSeed {
    uint64_t seed, offset;
    __device__ __forceinline__ explicit DropoutSeed(const cuda_ops_philox_state &philox)
        : seed(uniform(cuda_ops_philox_seed(philox))), offset(uniform(cuda_ops_philox_offset(philox)))
    {
    }
    __device__ __forceinline__ void store(int64_t *state) const
    {
        state[0] = (int64_t)seed;
        state[1] = (int64_t)offset;
    }

  private:
    static __device__ __forceinline__ uint64_t uniform(uint64_t value)
    {
        const uint32_t low = (uint32_t)warp_uniform((int)(uint32_t)value);
        return (uint64_t)(uint32_t)warp_uniform((int)(uint32_t)(value >> 32)) << 32 | low;
    }
};

// Of a 16 x 16 tile of a product, whose rows are queries: words[x + 2 * y] has the numbers of this lane's two columns in
// rows 8 x and columns 8 y further, the first one's in the lower half. first_row: that of the tile's first query;
// column: the tile's.
__device__ __forceinline__ void dropout_words(uint32_t (&words)[4], const DropoutSeed &seed, uint64_t first_row,
                                              uint32_t column)
{
    cuda_ops_attention_dropout_words(words, first_row + threadIdx.x % WARP_SIZE, column, seed.seed, seed.offset);
}

// The same of a tile whose rows are keys: words[x + 2 * y] is of columns 8 x and rows 8 y further. A lane's two columns,
// queries, are of two blocks, of which it wants the halves that are of its key, even or odd: it makes one of them, and
// has those of the other from the lane of the neighbouring key.
__device__ __forceinline__ void dropout_words_of_keys(uint32_t (&words)[4], const DropoutSeed &seed, uint64_t first_row,
                                                      uint32_t column)
{
    const int lane = threadIdx.x % WARP_SIZE, odd = lane / 4 % 2;
    cuda_ops_attention_dropout_words(words, first_row + lane % 4 * 8 + odd * 4 + lane / 8, column, seed.seed,
                                     seed.offset);
    // Bytes of the halves that the other lane wants, and of a word of both: the even key's lane has made the numbers of
    // the first column, the odd one's those of the second.
    const uint32_t theirs = odd ? 0x5410 : 0x7632, first = odd ? 0x3254 : 0x5410, second = odd ? 0x3276 : 0x7610;
    uint32_t swapped[2];
#pragma unroll
    for (int y = 0; y < 2; y++)
        swapped[y] = __shfl_xor_sync(FULL_WARP, __byte_perm(words[2 * y], words[2 * y + 1], theirs), 4);
#pragma unroll
    for (int y = 0; y < 2; y++) {
        words[2 * y] = __byte_perm(words[2 * y], swapped[y], first);
        words[2 * y + 1] = __byte_perm(words[2 * y + 1], swapped[y], second);
    }
}

// Whether a word's lower or upper number keeps its weight.
__device__ __forceinline__ bool dropout_keeps(uint32_t word, int upper, uint32_t threshold)
{
    return (upper ? word : word << 16) >= threshold;
}

#endif
