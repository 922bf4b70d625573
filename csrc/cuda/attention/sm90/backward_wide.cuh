// attention's backward of rows of 129 to 256 elements on Hopper: its launcher, to be instantiated by dtype;
// attention/sm90/backward_wide_bfloat16.cu says how it works.
#ifndef CUDA_OPS_ATTENTION_SM90_BACKWARD_WIDE_CUH
#define CUDA_OPS_ATTENTION_SM90_BACKWARD_WIDE_CUH

#include "attention/sm90/prepare.cuh"
#include "attention/sm90/sm90.h"
#include "attention/sm90/wide_keys.cuh"
#include "attention/sm90/wide_queries.cuh"
#include "common/launch.cuh"

static_assert(WIDE_ROWS == attention_sm90_queries(false) && WIDE_STATISTICS == 4 * WIDE_ROWS * 2,
              "what attention_sm90_workspace counts with");

// Of heads that have so many rows, each of so many elements of two bytes, that every block of theirs reads.
static inline int wide_section(int64_t heads, int64_t rows, int64_t elements)
{
    return heads_of_section(heads, ((int64_t)44 << 20) / (rows * elements * 2));
}

template <typename T, int D, int VALUE_D>
static cuda_ops_status launch_backward_wide(const AttentionCall &call)
{
    const cuda_ops_attention &p = call.problem;
    CUtensorMap map_query, map_key, map_value, map_grad, map_grad_query, map_grad_key, map_grad_value;
    const auto make = [&](CUtensorMap *map, const void *tensor, const HeadsLayout &layout) {
        return make_heads_map(map, tensor, call.dtype, layout, WIDE_ROWS);
    };
    if (!make(&map_query, call.query, query_layout(p, p.head_dim, p.query)) ||
        !make(&map_key, call.key, key_layout(p, p.head_dim, p.key)) ||
        !make(&map_value, call.value, key_layout(p, p.value_dim, p.value)) ||
        !make(&map_grad, call.grad_output, query_layout(p, p.value_dim, p.grad_output)) ||
        !make(&map_grad_query, call.grad_query, query_layout(p, p.head_dim, p.grad_query)) ||
        !make(&map_grad_key, call.grad_key, key_layout(p, p.head_dim, p.grad_key)) ||
        !make(&map_grad_value, call.grad_value, key_layout(p, p.value_dim, p.grad_value)))
        return CUDA_OPS_INVALID_ARGUMENT;

    const Band band = band_of(cuda_ops_attention_only_sequence(&p));
    const BackwardPrepare prepare = prepare_of(call, (float *)call.workspace, band, ceil_div(p.queries, WIDE_ROWS));
    const dim3 grid((unsigned int)prepare.blocks_m, (unsigned int)(p.batch * p.heads));
    launch_dependent(attention_sm90_prepare_kernel<T, 32, WIDE_ROWS, false>, grid, dim3(256), 0, call.stream, prepare);

    WideWork work = {};
    work.statistics = prepare.statistics, work.band = band, work.blocks_m = prepare.blocks_m;
    work.heads = (int)p.heads, work.key_heads = (int)p.key_heads, work.group = (int)(p.heads / p.key_heads);
    work.scale = (float)p.scale, work.scale_log2 = (float)(p.scale * 1.4426950408889634);
    typedef WideKeysTile<T, D, VALUE_D> KeysTile;
    work.blocks = (int)ceil_div(p.keys, WIDE_ROWS), work.all_heads = (int)(p.batch * p.key_heads);
    work.section = wide_section(work.all_heads, p.queries * work.group, D + VALUE_D);
    launch_dependent_clusters(attention_sm90_wide_keys_kernel<KeysTile>, (int64_t)work.blocks * work.all_heads,
                              WIDE_THREADS, 1, KeysTile::SHARED_BYTES, call.stream, map_query, map_key, map_value,
                              map_grad, map_grad_key, map_grad_value, work);

    // It reads nothing that the kernel before writes, and may begin when that one's last blocks have: those have seen
    // the end of the first kernel.
    typedef WideQueriesTile<T, D, VALUE_D> QueriesTile;
    work.blocks = (int)ceil_div(p.queries, QueriesTile::M), work.all_heads = (int)(p.batch * p.heads);
    work.section = wide_section(work.all_heads, p.keys, D + VALUE_D);
    launch_dependent_clusters(attention_sm90_wide_queries_kernel<QueriesTile>, (int64_t)work.blocks * work.all_heads,
                              WIDE_THREADS, 1, QueriesTile::SHARED_BYTES, call.stream, map_query, map_key, map_value,
                              map_grad, map_grad_query, work);
    return launch_status();
}

template <typename T>
static cuda_ops_status launch_backward_wide_of(const AttentionCall &call)
{
    if (call.problem.head_dim > 192 || call.problem.value_dim > 192)
        return launch_backward_wide<T, 256, 256>(call);
    if (call.problem.value_dim > 128)
        return launch_backward_wide<T, 192, 192>(call);
    return launch_backward_wide<T, 192, 128>(call);
}

#endif
