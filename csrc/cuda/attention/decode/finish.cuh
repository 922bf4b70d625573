// attention's decode path: where a block's results go once it has all keys that it takes of a batch and key head.
#ifndef CUDA_OPS_ATTENTION_DECODE_FINISH_CUH
#define CUDA_OPS_ATTENTION_DECODE_FINISH_CUH

#include "attention/decode/walk.cuh"
#include "ptx/cluster.cuh"

// Where shared results have column c of row r: groups of `SPREAD` columns are permuted by the row's number.
template <int HEAD, int SPREAD>
__device__ __forceinline__ int decode_result_at(int row, int column)
{
    return row * HEAD + (column ^ ((row & 3) * SPREAD));
}

// What a row's exponentials are less than, of the largest of its scores: of -inf alone they are 0.
template <typename A>
__device__ __forceinline__ A decode_base(A largest)
{
    return largest == -A(CUDART_INF) ? A(0) : largest;
}

// By all threads, after a barrier. results, maxima and totals are the block's, in shared memory: normalised results,
// largest scores and sums. Parts of a cluster are weighed here, in their order, those of shares go to the workspace.
// The caller puts a barrier before they are overwritten.
template <typename T, int HEAD, int SPREAD, int THREADS>
__device__ __forceinline__ void decode_finish(const DecodeWalk &walk, const DecodeRows &rows,
                                              const accumulate_type<T> *results, const accumulate_type<T> *maxima,
                                              const accumulate_type<T> *totals)
{
    typedef accumulate_type<T> A;
    const DecodeAttention &work = walk.group.work;
    const cuda_ops_attention &p = work.p;
    const int value_dim = (int)p.value_dim;
    if (!walk.is_whole) {
        const int64_t first =
            (((int64_t)walk.share * work.chunks + walk.chunk) * 2 + !walk.is_first) * work.rows_at_once;
        for (int index = threadIdx.x; index < rows.count * HEAD; index += THREADS) {
            const int row = index / HEAD, column = index % HEAD;
            if (column < value_dim)
                ((A *)work.partial)[(first + row) * value_dim + column] =
                    results[decode_result_at<HEAD, SPREAD>(row, column)];
        }
        for (int row = threadIdx.x; row < rows.count; row += THREADS) {
            ((A *)work.partial_maximum)[first + row] = maxima[row];
            ((A *)work.partial_total)[first + row] = totals[row];
        }
        return;
    }
    const int cluster = work.cluster, rank = cluster > 1 ? (int)(blockIdx.x % (unsigned int)cluster) : 0;
    if (cluster > 1)
        cluster_sync();
    const int first_head = walk.group.key_head * work.heads_of_group;
    for (int index = rank * THREADS + threadIdx.x; index < rows.count * HEAD; index += cluster * THREADS) {
        const int row = index / HEAD, column = index % HEAD, at = decode_result_at<HEAD, SPREAD>(row, column);
        if (column >= value_dim)
            continue;
        A x = results[at], largest = maxima[row], total = totals[row];
        if (cluster > 1) {
            for (int other = 0; other < cluster; other++)
                largest = fmax(largest, *mapa(maxima + row, other));
            const A base = decode_base(largest);
            x = 0, total = 0;
#pragma unroll 4
            for (int other = 0; other < cluster; other++) {
                const A weight = *mapa(totals + row, other) * exp(*mapa(maxima + row, other) - base);
                x += weight * *mapa(results + at, other);
                total += weight;
            }
            x = total == A(0) ? A(0) : x / total;
        }
        const uint32_t r = (uint32_t)(rows.first_row + row), head_of_group = work.by_queries.of(r);
        const int64_t head = first_head + (int)head_of_group;
        const int64_t query = (int)(r - head_of_group * (uint32_t)p.queries);
        ((T *)work.output)[walk.group.batch * p.output.batch + head * p.output.head + query * p.output.row + column] =
            store_from_accumulate<T>(x);
        if (column == 0)
            ((A *)work.logsumexp)[(walk.group.batch * p.heads + head) * p.queries + query] =
                total == A(0) ? -A(CUDART_INF) : largest + log(total);
    }
    if (cluster > 1) {
        __syncthreads(); // whole warps, as the next wants them
        cluster_sync();  // the others have read this block's
    }
}

#endif
