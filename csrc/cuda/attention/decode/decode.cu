// attention, decode path: few queries and many keys, which are read once, by all queries of the heads that share them.
// A block has keys of one batch and key head after the other (decode.h tells how they are shared out), for up to 64
// rows (queries of the heads) on the tensor cores, where 16 rows are the left operand whether they exist or not, or 4
// on the CUDA cores. Where the keys of a batch and key head are several blocks', each makes a normalised result, its
// largest score and its sum, by which they are weighed, in order: results repeat bit by bit. A cluster's blocks weigh
// them in each other's shared memory; those of shares leave them in the workspace to a second kernel, which waits on
// the device until the first is done. No counters: they would have to be cleared before each call, which costs as much.
// Keys may lie in a cache, whose lengths and pages are read here (cuda_ops_attention_sequences).
// Bound by memory: bytes of keys and values.
#include "attention/decode/decode.h"

#include <math_constants.h>

#include "attention/decode/finish.cuh"
#include "common/aligned_vector.cuh"
#include "common/common.cuh"

static constexpr int THREADS = 256, WARPS = THREADS / WARP_SIZE, COLUMNS = 4 * WARP_SIZE, PARTS = 8;

// Weighs the parts of a batch and key head of which a share has the first and others have more. A block has columns of
// a row of a share and a chunk; its warps take every eighth part, so many at once that memory is waited for once or
// twice.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    attention_decode_combine_kernel(const __grid_constant__ DecodeAttention work, int keys_of_tile)
{
    typedef accumulate_type<T> A;
    __shared__ A sums[WARPS][COLUMNS], warp_maxima[WARPS], warp_totals[WARPS];
    const cuda_ops_attention &p = work.p;
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, value_dim = (int)p.value_dim;
    const uint32_t place = blockIdx.x / (uint32_t)work.rows_at_once;
    const int row = (int)(blockIdx.x - place * (uint32_t)work.rows_at_once);
    const int share = (int)work.by_chunks.of(place), chunk = (int)place - share * work.chunks;
    if (p.sequences.key_lengths)
        wait_for_predecessor(); // lengths are read
    DecodeGroup group(work, keys_of_tile);
    const DecodeShares shares(group.all_tiles(), work.shares);
    const int begin = shares.begin(share), end = shares.begin(share + 1);
    wait_for_predecessor();
    release_successor();
    const uint32_t r = (uint32_t)(chunk * work.rows_at_once + row);
    if (begin == end || r >= (uint32_t)work.rows)
        return;
    const int group_begin = end - 1 - group.find(end - 1), group_end = group_begin + group.tiles;
    if (group_begin < begin || group_end == end)
        return;
    const int parts = shares.of(group_end - 1) - share + 1;
    // Where the row of part s is; the share's first part comes before its second one.
    const auto part_at = [&](int s) {
        const bool is_second = s == 0 && group_begin > begin;
        return (((int64_t)(share + s) * work.chunks + chunk) * 2 + is_second) * work.rows_at_once + row;
    };
    const A *const maxima = (const A *)work.partial_maximum, *const totals = (const A *)work.partial_total;
    const uint32_t head_of_group = work.by_queries.of(r);
    const int64_t i = (int)(r - head_of_group * (uint32_t)p.queries);
    const int64_t head = group.key_head * work.heads_of_group + (int)head_of_group, batch = group.batch;
    T *const to = (T *)work.output + batch * p.output.batch + head * p.output.head + i * p.output.row;
    const int first = (int)blockIdx.y * COLUMNS;
    A largest = -A(CUDART_INF), total = 0, sum[4] = {};
    for (int base = warp; base < parts; base += WARPS * WARP_SIZE) {
        // A lane has a part's numbers, and columns of all; the first columns are asked for together with the numbers.
        A values[PARTS][4];
        const auto load = [&](int j) {
#pragma unroll
            for (int u = 0; u < PARTS; u++) {
                const int s = base + (j + u) * WARPS;
                const A *const partial = (const A *)work.partial + part_at(s) * value_dim;
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    const int column = first + c * WARP_SIZE + lane;
                    values[u][c] = s < parts && column < value_dim ? partial[column] : A(0);
                }
            }
        };
        load(0);
        const int mine = base + lane * WARPS;
        const A maximum = mine < parts ? maxima[part_at(mine)] : -A(CUDART_INF);
        const A total_of_part = mine < parts ? totals[part_at(mine)] : A(0);
        A larger = fmax(largest, maximum);
#pragma unroll
        for (int offset = WARP_SIZE / 2; offset > 0; offset /= 2)
            larger = fmax(larger, __shfl_xor_sync(FULL_WARP, larger, offset));
        const A factor = exp(largest - decode_base(larger));
        const A weight = total_of_part * exp(maximum - decode_base(larger));
        largest = larger;
        total = total * factor + warp_sum(weight);
#pragma unroll
        for (int c = 0; c < 4; c++)
            sum[c] *= factor;
        for (int j = 0; j < WARP_SIZE && base + j * WARPS < parts; j += PARTS) {
            if (j > 0)
                load(j);
#pragma unroll
            for (int u = 0; u < PARTS; u++) {
                const A w = __shfl_sync(FULL_WARP, weight, j + u);
#pragma unroll
                for (int c = 0; c < 4; c++)
                    sum[c] += w * values[u][c];
            }
        }
    }
#pragma unroll
    for (int c = 0; c < 4; c++)
        sums[warp][c * WARP_SIZE + lane] = sum[c];
    if (lane == 0)
        warp_maxima[warp] = largest, warp_totals[warp] = total;
    __syncthreads();
    const int column = first + (int)threadIdx.x;
    if (threadIdx.x >= COLUMNS || column >= value_dim)
        return;
    largest = warp_maxima[0];
#pragma unroll
    for (int w = 1; w < WARPS; w++)
        largest = fmax(largest, warp_maxima[w]);
    A x = 0;
    total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        const A factor = exp(warp_maxima[w] - decode_base(largest));
        x += sums[w][threadIdx.x] * factor;
        total += warp_totals[w] * factor;
    }
    to[column] = store_from_accumulate<T>(total == A(0) ? A(0) : x / total);
    if (column == 0)
        ((A *)work.logsumexp)[(batch * p.heads + head) * p.queries + i] =
            total == A(0) ? -A(CUDART_INF) : largest + log(total);
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

static int keys_of_tile(const AttentionCall &call, bool tensor_cores)
{
    const int head = padded_head(call.problem);
    return tensor_cores ? decode_mma_keys(head) : decode_simt_keys(head, dtype_size(call.dtype));
}

Answer attention_decode_supports(const AttentionCall &call, const Device &device)
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
    // With room for a tile beyond the last key.
    if (p.keys >= INT32_MAX - 1024)
        return no("numbers its keys by 31 bits");
    const int64_t heads = p.batch * p.key_heads, keys = keys_of_tile(call, takes_tensor_cores(call, device));
    if (heads > INT32_MAX / (p.keys / keys + 1))
        return no("numbers its tiles of keys by 31 bits");
    // Keys are split where there are fewer blocks than the device takes.
    return rows_of_key_head(p) > INT32_MAX / heads ? no("more blocks than a launch may have") : YES;
}

Answer attention_decode_is_fast(const AttentionCall &call, const Device &device)
{
    const cuda_ops_attention &p = call.problem;
    if (p.sequences.key_lengths || p.sequences.block_table)
        return YES;
    const int64_t most = takes_tensor_cores(call, device) ? 64 : 16;
    return p.queries > 16 || rows_of_key_head(p) > most ? no("is for few queries") : YES;
}

// ---- how tiles are shared out ----

// Microseconds of an H200, by which the ways are compared (benchmarks/notes/attention.md): of a multiprocessor for a
// tile of 32 KiB where all of them read; of what follows where parts are weighed, by a cluster and by a second kernel,
// and there for each part; of a further round of blocks.
static constexpr double SHARED_TILE = 1.0, CLUSTER_PARTS = 1.1, SHARES_PARTS = 4.0, SHARES_PART = 0.1, ROUND = 1.0;
// Clusters of 16, which not every device has, are not spread evenly over the multiprocessors.
static constexpr double LARGE_CLUSTER_PARTS = 3.2, LARGE_CLUSTER_MEMORY = 1.12;

// Of a tile: of a multiprocessor where all read; of a block that has one for itself; and the least of a multiprocessor.
struct DecodeTile {
    double shared, own, least;
};

struct DecodeTimes {
    DecodeTile tile;
    double tiles; // of all batches and key heads
    int64_t multiprocessors, at_once;

    // blocks of so many tiles each
    double of(int64_t blocks, double tiles_of_block) const
    {
        const double rounds = (double)ceil_div(blocks, at_once), full = (double)blocks / (rounds * (double)at_once);
        const double memory = tiles * tile.shared / (double)multiprocessors / (rounds > 1 ? full : 1);
        const double own = tiles_of_block * rounds * tile.own;
        const double least = tiles_of_block * (double)ceil_div(blocks, multiprocessors) * tile.least;
        const double most = memory > own ? memory : own;
        return (most > least ? most : least) + (rounds - 1) * ROUND;
    }
};

// As many shares as the device takes blocks at once, a chunk each, or some rounds of it that are nearly full.
static int64_t shares_of(int64_t chunks, int64_t tiles, int64_t at_once)
{
    const int64_t one_round = at_once / chunks;
    if (one_round >= 8)
        return one_round < tiles ? one_round : tiles;
    const int64_t most = cuda_ops_attention_clamp(8 * at_once / chunks, 1, tiles);
    const auto full = [&](int64_t shares) {
        return (double)(chunks * shares) / (double)(ceil_div(chunks * shares, at_once) * at_once);
    };
    double best = 0;
    for (int64_t shares = 1; shares <= most; shares++)
        best = full(shares) > best ? full(shares) : best;
    int64_t shares = 1;
    while (full(shares) < 0.97 * best)
        shares++;
    return shares;
}

static void share_out(DecodeAttention &work, const Device &device, int at_once, const DecodeTile &tile,
                      int most_cluster)
{
    const cuda_ops_attention &p = work.p;
    const int64_t groups = p.batch * p.key_heads, tiles = work.tiles, chunks = work.chunks;
    const DecodeTimes times = {tile, (double)(groups * tiles), device.multiprocessors,
                               (int64_t)at_once * device.multiprocessors};
    double best = times.of(groups * chunks, (double)tiles);
    work.cluster = 1;
    // Clusters whose blocks have a multiprocessor each: with more of them it is as if some found no room at once.
    for (int64_t cluster = 2; cluster <= most_cluster && cluster < 2 * tiles; cluster *= 2) {
        const int64_t blocks = groups * chunks * cluster;
        if (blocks > device.multiprocessors)
            break;
        const bool large = cluster > DECODE_PORTABLE_CLUSTER;
        const double time = times.of(blocks, (double)ceil_div(tiles, cluster)) * (large ? LARGE_CLUSTER_MEMORY : 1) +
                            (large ? LARGE_CLUSTER_PARTS : CLUSTER_PARTS);
        if (time < best)
            best = time, work.cluster = (int)cluster;
    }
    const int64_t shares = shares_of(chunks, groups * tiles, times.at_once);
    const double time = times.of(shares * chunks, (double)(groups * tiles) / (double)shares) + SHARES_PARTS +
                        SHARES_PART * (double)shares / (double)groups;
    // Of lengths that the kernel reads, which may differ, shares have as many tiles each.
    const bool may_differ = p.sequences.key_lengths && p.batch > 1 && chunks == 1 && best > 2 * SHARES_PARTS;
    if (shares > 1 && (time < best || may_differ))
        work.shares = (int)shares, work.cluster = 1;
}

static DecodeAttention work_of(const AttentionCall &call, const Device &device, bool tensor_cores)
{
    const cuda_ops_attention &p = call.problem;
    const int head = padded_head(p);
    DecodeAttention work = {};
    work.p = p;
    work.query = call.query, work.key = call.key, work.value = call.value;
    work.output = call.output, work.logsumexp = call.logsumexp;
    work.heads_of_group = (int)(p.heads / p.key_heads);
    work.rows = (int)rows_of_key_head(p);
    const int most_rows = tensor_cores ? decode_mma_rows(head) : DECODE_SIMT_ROWS;
    work.rows_at_once = work.rows < most_rows ? work.rows : most_rows;
    work.chunks = (int)ceil_div(work.rows, work.rows_at_once);
    work.general = p.softcap > 0 || p.mask_kind != CUDA_OPS_ATTENTION_MASK_NONE || p.alibi_slopes || !(p.scale > 0);
    work.vectors = attention_rows_are_aligned(call);
    if (p.sequences.block_table)
        work.by_page_size = divider_by((uint32_t)p.sequences.page_size);
    work.by_chunks = divider_by((uint32_t)work.chunks), work.by_key_heads = divider_by((uint32_t)p.key_heads);
    work.by_queries = divider_by((uint32_t)p.queries);
    const int keys = keys_of_tile(call, tensor_cores);
    // Of lengths in memory: as if all were the longest.
    const int64_t seen = cuda_ops_attention_last_key(&p, p.queries - 1) - cuda_ops_attention_first_key(&p, 0);
    int64_t tiles = ceil_div(seen, keys);
    if (p.sequences.key_lengths) {
        const int64_t in_windows =
            p.window_left < p.keys && p.window_right < p.keys ? p.window_left + p.window_right + p.queries : p.keys;
        tiles = ceil_div(in_windows < p.keys ? in_windows : p.keys, keys);
    }
    work.tiles = tiles > 1 ? (int)tiles : 1;
    const int at_once = !tensor_cores                     ? decode_simt_blocks(head, call.dtype)
                        : call.dtype == CUDA_OPS_BFLOAT16 ? decode_mma_bfloat16_blocks(head)
                                                          : decode_mma_float16_blocks(head);
    const double shared = SHARED_TILE * 2 * (double)keys * head * (double)dtype_size(call.dtype) / (32 << 10);
    const DecodeTile tile = !tensor_cores             ? DecodeTile{shared, 1.2, 0.2}
                            : work.rows_at_once <= 16 ? DecodeTile{shared, 0.8, 0.4}
                            : work.rows_at_once <= 32 ? DecodeTile{shared, 2.0, 1.2}
                                                      : DecodeTile{shared, 2.5, 2.3};
    const int most_cluster = device.capability < 90 ? 1
                             : tensor_cores         ? 2 * DECODE_PORTABLE_CLUSTER
                                                    : DECODE_PORTABLE_CLUSTER;
    share_out(work, device, at_once, tile, most_cluster);
    return work;
}

// Rows of parts.
static int64_t partial_rows(const DecodeAttention &work)
{
    return (int64_t)work.shares * work.chunks * 2 * work.rows_at_once;
}

static int64_t bytes_of(const DecodeAttention &work, cuda_ops_dtype dtype)
{
    return partial_rows(work) * (work.p.value_dim + 2) * (dtype == CUDA_OPS_FLOAT64 ? 8 : 4);
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
static cuda_ops_status combine(const DecodeAttention &work, int keys, cudaStream_t stream)
{
    const int64_t blocks = (int64_t)(work.shares - 1) * work.chunks * work.rows_at_once;
    const dim3 grid((unsigned int)blocks, (unsigned int)ceil_div(work.p.value_dim, COLUMNS));
    launch_dependent(attention_decode_combine_kernel<T>, grid, dim3(THREADS), 0, stream, work, keys);
    return launch_status();
}

cuda_ops_status attention_decode(const AttentionCall &call, const Device &device)
{
    const bool tensor_cores = takes_tensor_cores(call, device);
    DecodeAttention work = work_of(call, device, tensor_cores);
    const cuda_ops_attention &p = call.problem;
    const int64_t size = call.dtype == CUDA_OPS_FLOAT64 ? 8 : 4, partial = partial_rows(work);
    work.partial = call.workspace;
    work.partial_maximum = (char *)call.workspace + partial * p.value_dim * size;
    work.partial_total = (char *)work.partial_maximum + partial * size;
    const int64_t blocks = work.chunks * (work.shares > 0 ? work.shares : p.batch * p.key_heads * work.cluster);
    const int head = padded_head(p);
    cuda_ops_status status;
    if (!tensor_cores)
        status = decode_simt(head, call.dtype, work, blocks, call.stream);
    else if (call.dtype == CUDA_OPS_BFLOAT16)
        status = decode_mma_bfloat16(head, work, blocks, call.stream);
    else
        status = decode_mma_float16(head, work, blocks, call.stream);
    // Whether shares end where batches and key heads do.
    const int64_t tiles = p.batch * p.key_heads * work.tiles;
    const bool are_whole = !p.sequences.key_lengths && work.shares > 0 && tiles % work.shares == 0 &&
                           tiles / work.shares % work.tiles == 0;
    if (status != CUDA_OPS_SUCCESS || work.shares == 0 || are_whole)
        return status;
    CUDA_OPS_DISPATCH(call.dtype, T, return combine<T>(work, keys_of_tile(call, tensor_cores), call.stream));
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}
