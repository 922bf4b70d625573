// attention, decode path: few queries and many keys, which are read once, by all queries of the heads that share them.
// A block takes a part of the keys of one key head, for up to 64 rows (queries of its heads) on the tensor cores, where
// 16 rows are the left operand whether they exist or not, or 4 on the CUDA cores. Where keys are split, each part leaves
// a normalised result, its largest score and its sum, by which a second kernel weighs the parts, in order: results
// repeat bit by bit.
// Keys may lie in a cache, whose lengths and pages are read here (cuda_ops_attention_sequences).
// Bound by memory: bytes of keys and values, of which an H200 gets 3.5 to 4.1 TB/s where there are 256 MB or more.
#include "attention/decode/decode.h"

#include <math_constants.h>

#include "common/aligned_vector.cuh"
#include "common/common.cuh"

static constexpr int THREADS = 128, WARPS = THREADS / WARP_SIZE, COLUMNS = 4 * WARP_SIZE;
static constexpr int MOST_SPLITS = 512;

// A block a row; its warps take every fourth part.
template <typename T>
__global__ void __launch_bounds__(THREADS) attention_decode_combine_kernel(const __grid_constant__ DecodeAttention work)
{
    typedef accumulate_type<T> A;
    __shared__ A sums[WARPS][COLUMNS];
    const cuda_ops_attention &p = work.p;
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, value_dim = (int)p.value_dim;
    wait_for_predecessor();
    release_successor();
    for (int64_t row = blockIdx.x; row < work.all_rows; row += gridDim.x) {
        const A *const maxima = (const A *)work.partial_maximum + row, *const totals =
                                                                           (const A *)work.partial_total + row;
        A largest = -A(CUDART_INF);
        for (int s = lane; s < work.splits; s += WARP_SIZE)
            largest = fmax(largest, maxima[s * work.all_rows]);
#pragma unroll
        for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2)
            largest = fmax(largest, __shfl_xor_sync(FULL_WARP, largest, offset));
        const A base = largest == -A(CUDART_INF) ? A(0) : largest;
        A total = 0;
        for (int s = lane; s < work.splits; s += WARP_SIZE)
            total += totals[s * work.all_rows] * exp(maxima[s * work.all_rows] - base);
        total = warp_sum(total);
        const A factor = total == A(0) ? A(0) : A(1) / total;
        const int64_t i = row % p.queries, head = row / p.queries % p.heads, batch = row / p.queries / p.heads;
        T *const to = (T *)work.output + batch * p.output.batch + head * p.output.head + i * p.output.row;
        for (int first = 0; first < value_dim; first += COLUMNS) {
            A sum[4] = {};
#pragma unroll 4
            for (int s = warp; s < work.splits; s += WARPS) {
                const A weight = totals[s * work.all_rows] * exp(maxima[s * work.all_rows] - base);
                const A *const partial = (const A *)work.partial + (s * work.all_rows + row) * value_dim;
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    const int column = first + c * WARP_SIZE + lane;
                    if (column < value_dim)
                        sum[c] += weight * partial[column];
                }
            }
            __syncthreads(); // the sums before have been read
#pragma unroll
            for (int c = 0; c < 4; c++)
                sums[warp][c * WARP_SIZE + lane] = sum[c];
            __syncthreads();
            const int column = first + threadIdx.x;
            if (column < value_dim) {
                A x = 0;
#pragma unroll
                for (int w = 0; w < WARPS; w++)
                    x += sums[w][threadIdx.x];
                to[column] = store_from_accumulate<T>(x * factor);
            }
        }
        if (threadIdx.x == 0)
            ((A *)work.logsumexp)[row] = total == A(0) ? -A(CUDART_INF) : largest + log(total);
    }
}

// 64, 128 or 256; 0: longer.
static int padded_head(const cuda_ops_attention &p)
{
    const int64_t longest = p.head_dim > p.value_dim ? p.head_dim : p.value_dim;
    return longest <= 64 ? 64 : longest <= 128 ? 128 : longest <= 256 ? 256 : 0;
}

static bool takes_tensor_cores(const AttentionCall &call, const Device &device)
{
    return device.capability >= 80 && (call.dtype == CUDA_OPS_FLOAT16 || call.dtype == CUDA_OPS_BFLOAT16) &&
           attention_rows_are_aligned(call);
}

static int64_t rows_of_key_head(const cuda_ops_attention &p)
{
    return p.heads / p.key_heads * p.queries;
}

Answer attention_decode_supports(const AttentionCall &call, const Device &)
{
    const cuda_ops_attention &p = call.problem;
    if (call.backward)
        return no("has no backward");
    if (padded_head(p) == 0)
        return no("rows of more than 256 elements");
    if (p.head_dim == 0 || p.value_dim == 0 || p.heads == 0 || p.batch == 0 || p.queries == 0)
        return no("rows without elements");
    if (p.dropout > 0)
        return no("has no dropout");
    if (p.sequences.query_starts)
        return no("takes no packed sequences");
    if (p.keys >= INT32_MAX)
        return no("numbers its keys by 31 bits");
    const int64_t heads = p.batch * p.key_heads;
    // Keys are split where there are fewer blocks than the device takes.
    return ceil_div(rows_of_key_head(p), DECODE_SIMT_ROWS) > INT32_MAX / heads
               ? no("more blocks than a launch may have")
               : YES;
}

Answer attention_decode_is_fast(const AttentionCall &call, const Device &device)
{
    const cuda_ops_attention &p = call.problem;
    if (p.sequences.key_lengths || p.sequences.block_table)
        return YES;
    const int64_t most = takes_tensor_cores(call, device) ? DECODE_MMA_ROWS : 16;
    return p.queries > 16 || rows_of_key_head(p) > most ? no("is for few queries") : YES;
}

// The fewest parts of the keys by which the rounds of blocks are nearly as full as by any number: a block that has few
// keys is mostly its beginning and its end.
static int splits_of(int64_t blocks, int64_t tiles, int64_t at_once)
{
    const int64_t most = cuda_ops_attention_clamp(2 * at_once / blocks, 1, tiles < MOST_SPLITS ? tiles : MOST_SPLITS);
    double best = 0;
    for (int64_t splits = 1; splits <= most; splits++) {
        const double full = (double)(blocks * splits) / (double)(ceil_div(blocks * splits, at_once) * at_once);
        best = full > best ? full : best;
    }
    for (int64_t splits = 1; splits <= most; splits++)
        if ((double)(blocks * splits) >= 0.9 * best * (double)(ceil_div(blocks * splits, at_once) * at_once))
            return (int)splits;
    return 1;
}

static DecodeAttention work_of(const AttentionCall &call, const Device &device, bool tensor_cores)
{
    const cuda_ops_attention &p = call.problem;
    const int head = padded_head(p);
    DecodeAttention work = {};
    work.p = p;
    work.query = call.query, work.key = call.key, work.value = call.value;
    work.output = call.output, work.logsumexp = call.logsumexp;
    work.rows = rows_of_key_head(p);
    work.all_rows = p.batch * p.heads * p.queries;
    work.general = p.softcap > 0 || p.mask_kind != CUDA_OPS_ATTENTION_MASK_NONE || p.alibi_slopes || !(p.scale > 0);
    work.vectors = attention_rows_are_aligned(call);
    if (p.sequences.block_table)
        work.page_size = divider_by((uint32_t)p.sequences.page_size);
    work.chunks = (int)ceil_div(work.rows, tensor_cores ? DECODE_MMA_ROWS : DECODE_SIMT_ROWS);
    int64_t seen = p.keys;
    if (p.window_left < p.keys && p.window_right < p.keys && p.window_left + p.window_right + p.queries < p.keys)
        seen = p.window_left + p.window_right + p.queries;
    const int keys = tensor_cores ? decode_mma_keys(head) : decode_simt_keys(head, dtype_size(call.dtype));
    const int64_t blocks = p.batch * p.key_heads * work.chunks, tiles = ceil_div(seen, keys);
    const int at_once = !tensor_cores                     ? decode_simt_blocks(head, call.dtype)
                        : call.dtype == CUDA_OPS_BFLOAT16 ? decode_mma_bfloat16_blocks(head)
                                                          : decode_mma_float16_blocks(head);
    work.splits = splits_of(blocks, tiles, (int64_t)at_once * device.multiprocessors);
    return work;
}

static int64_t bytes_of(const DecodeAttention &work, cuda_ops_dtype dtype)
{
    return work.splits > 1 ? work.splits * work.all_rows * (work.p.value_dim + 2) * (dtype == CUDA_OPS_FLOAT64 ? 8 : 4)
                           : 0;
}

// The pointers may turn out not to be aligned.
int64_t attention_decode_workspace(const AttentionCall &call, const Device &device)
{
    const int64_t simt = bytes_of(work_of(call, device, false), call.dtype);
    if (!takes_tensor_cores(call, device))
        return simt;
    const int64_t mma = bytes_of(work_of(call, device, true), call.dtype);
    return mma > simt ? mma : simt;
}

template <typename T>
static cuda_ops_status combine(const DecodeAttention &work, cudaStream_t stream)
{
    launch_dependent(attention_decode_combine_kernel<T>, dim3(clamp_grid(work.all_rows)), dim3(THREADS), 0, stream,
                     work);
    return launch_status();
}

cuda_ops_status attention_decode(const AttentionCall &call, const Device &device)
{
    const bool tensor_cores = takes_tensor_cores(call, device);
    DecodeAttention work = work_of(call, device, tensor_cores);
    const cuda_ops_attention &p = call.problem;
    if (work.splits > 1) {
        work.partial = call.workspace;
        const int64_t size = call.dtype == CUDA_OPS_FLOAT64 ? 8 : 4;
        work.partial_maximum = (char *)call.workspace + work.splits * work.all_rows * p.value_dim * size;
        work.partial_total = (char *)work.partial_maximum + work.splits * work.all_rows * size;
    }
    const int64_t blocks = p.batch * p.key_heads * work.chunks * work.splits;
    const int head = padded_head(p);
    cuda_ops_status status;
    if (!tensor_cores)
        status = decode_simt(head, call.dtype, work, blocks, call.stream);
    else if (call.dtype == CUDA_OPS_BFLOAT16)
        status = decode_mma_bfloat16(head, work, blocks, call.stream);
    else
        status = decode_mma_float16(head, work, blocks, call.stream);
    if (status != CUDA_OPS_SUCCESS || work.splits == 1)
        return status;
    CUDA_OPS_DISPATCH(call.dtype, T, return combine<T>(work, call.stream));
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}
