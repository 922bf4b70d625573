// What attention's sm90 kernels share: which keys a query sees, as 32-bit numbers, and the layouts of a call's tensors.
#ifndef CUDA_OPS_ATTENTION_SM90_BAND_H
#define CUDA_OPS_ATTENTION_SM90_BAND_H

#include "attention/paths.h"
#include "common/tensor_map.h"

// Query i sees keys i + low to i + high of 0 to keys - 1.
struct Band {
    int queries, keys, low, high;
};

// Sizes are below 2^29 (attention_sm90_supports), so that sums of two such numbers and a tile are ints, and a bound
// beyond all rows is as good as none.
static constexpr int64_t BAND_LIMIT = (int64_t)1 << 29;

static inline int band_bound(int64_t diagonal, int64_t window)
{
    const int64_t most = BAND_LIMIT * 4, d = diagonal < -most ? -most : diagonal > most ? most : diagonal;
    const int64_t w = window < -most ? -most : window > most ? most : window, sum = d + w;
    const int64_t edge = BAND_LIMIT + 1024;
    return (int)(sum < -edge ? -edge : sum > edge ? edge : sum);
}

static inline Band band_of(const cuda_ops_attention &p)
{
    return {(int)p.queries, (int)p.keys, band_bound(p.diagonal, -p.window_left),
            p.window_right == CUDA_OPS_ATTENTION_UNBOUNDED ? (int)BAND_LIMIT + 1024
                                                           : band_bound(p.diagonal, p.window_right)};
}

static inline HeadsLayout heads_layout(int64_t batch, int64_t heads, int64_t rows, int64_t elements,
                                       const cuda_ops_attention_strides &strides)
{
    return {batch, heads, rows, elements, strides.batch, strides.head, strides.row};
}

#endif
