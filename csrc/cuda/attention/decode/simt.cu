// attention's decode path on the CUDA cores: every dtype, rows of up to 256 elements, aligned or not.
// A block of four warps takes 4 rows. A row of keys or values is 16 bytes a lane, so a warp has one to four of them at
// once. Each lane copies what it needs itself, two rounds ahead, so that nothing waits for other warps. Products are
// summed over a group's lanes so that each lane is left with those of one row and a key or two, whose exponentials it
// makes for all. Every group of lanes has maxima and sums of its own keys, which are put together at the end.
#include "attention/decode/finish.cuh"
#include "common/aligned_vector.cuh"
#include "ptx/cp_async.cuh"

static constexpr int THREADS = 128, WARPS = THREADS / WARP_SIZE, ROWS = DECODE_SIMT_ROWS;

template <typename T, int HEAD>
struct SimtShape {
    static constexpr int SIZE = 16 / sizeof(T), LANES = HEAD / SIZE < WARP_SIZE ? HEAD / SIZE : WARP_SIZE;
    static constexpr int CHUNKS = HEAD / SIZE / LANES, GROUPS = WARP_SIZE / LANES; // of a row; in a warp
    static constexpr int KEYS = CHUNKS == 1 ? 4 : CHUNKS == 2 ? 2 : 1;             // of a group at once
    // Scores of a group at once, those that a lane keeps, and the lanes that keep the same ones; lanes of a row.
    static constexpr int SCORES = ROWS * KEYS, KEPT = SCORES > LANES ? SCORES / LANES : 1;
    static constexpr int COPIES = SCORES < LANES ? LANES / SCORES : 1, ROW_LANES = LANES / ROWS;
    // A ring of what each thread copies, then the warps' results.
    static constexpr int STAGES = 3, STAGE_VECTORS = KEYS * CHUNKS * 2 * THREADS,
                         RING_BYTES = STAGES * STAGE_VECTORS * 16;
    static constexpr int SUMS_BYTES = WARPS * ROWS * HEAD * (int)sizeof(accumulate_type<T>);
    static constexpr int BYTES = RING_BYTES > SUMS_BYTES ? RING_BYTES : SUMS_BYTES;
};

// Sums values over groups of LANES lanes; each lane is left with those from its number / COPIES * KEPT on.
template <int LANES, typename A, int COUNT>
__device__ __forceinline__ void sum_and_scatter(A (&values)[COUNT])
{
    int count = COUNT;
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) {
        const bool upper = threadIdx.x & offset;
        if (count > 1) {
            count /= 2;
#pragma unroll
            for (int i = 0; i < COUNT / 2; i++)
                if (i < count) {
                    const A sent = upper ? values[i] : values[i + count], kept = upper ? values[i + count] : values[i];
                    values[i] = kept + __shfl_xor_sync(FULL_WARP, sent, offset);
                }
        } else {
            values[0] += __shfl_xor_sync(FULL_WARP, values[0], offset);
        }
    }
}

// Elements from `column` on of a row, zeros beyond `elements`.
template <typename T>
__device__ __forceinline__ void load_part(vector16<T> &part, const T *row, int column, int elements, bool vectors)
{
    if (vectors) {
        if (column < elements)
            part = *reinterpret_cast<const vector16<T> *>(row + column);
    } else {
#pragma unroll
        for (int e = 0; e < vector16<T>::size; e++)
            if (column + e < elements)
                part.element[e] = row[column + e];
    }
}

// The same into shared memory, where the thread sees it once it has waited for its copies.
template <typename T>
__device__ __forceinline__ void copy_part(vector16<T> *to, const T *row, int column, int elements, bool vectors)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    if (vectors) {
        const bool there = column < elements;
        cp_async<16>(shared_address(to), there ? row + column : row, there ? 16 : 0);
        return;
    }
#endif
    vector16<T> part = {};
    load_part(part, row, column, elements, vectors);
    *to = part;
}

template <typename T>
[[maybe_unused]] static __device__ __noinline__ accumulate_type<T>
decode_general_score(const AttentionScores<accumulate_type<T>> &scores, accumulate_type<T> x, int64_t i, int64_t j)
{
    accumulate_type<T> cap;
    return scores.score(x, i, j, cap);
}

template <typename T, int HEAD>
__global__ void __launch_bounds__(THREADS) attention_decode_simt_kernel(const __grid_constant__ DecodeAttention work)
{
    typedef accumulate_type<T> A;
    typedef SimtShape<T, HEAD> S;
    constexpr int SIZE = S::SIZE, LANES = S::LANES, CHUNKS = S::CHUNKS, KEYS = S::KEYS;
    extern __shared__ __align__(16) char shared[];
    __shared__ A maxima[WARPS][ROWS], totals[WARPS][ROWS], row_maxima[ROWS], row_totals[ROWS];
    A(*const sums)[ROWS][HEAD] = reinterpret_cast<A(*)[ROWS][HEAD]>(shared);
    const cuda_ops_attention &p = work.p;
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, lane_of_row = lane % LANES;
    if (p.sequences.key_lengths)
        wait_for_predecessor(); // lengths are read
    DecodeWalk walk(work, THREADS / LANES * KEYS);
    wait_for_predecessor();
    release_successor();
    if (walk.left == 0)
        return;
    const DecodeRows rows(work, walk.chunk);
    const int head_dim = (int)p.head_dim, value_dim = (int)p.value_dim;
    // The row and the first of the keys at once of which this lane keeps scores.
    const int my_row = lane_of_row / S::ROW_LANES, my_key = lane_of_row / S::COPIES * S::KEPT % KEYS;
    const int first_lane = lane - lane_of_row;
    const bool is_there = my_row < rows.count;
    do {
        const int64_t batch = walk.group.batch;
        const int first_head = walk.group.key_head * work.heads_of_group;
        const CachedRows cached(work, batch);
        const T *const key = (const T *)work.key + walk.group.key_head * p.key.head;
        const T *const value = (const T *)work.value + walk.group.key_head * p.value.head;
        check_length(walk);
        A query[ROWS][CHUNKS][SIZE], sum[ROWS][CHUNKS][SIZE] = {};
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const uint32_t row = (uint32_t)(rows.first_row + (r < rows.count ? r : 0)), head = work.by_queries.of(row);
            const int64_t i = (int)(row - head * (uint32_t)p.queries);
            const T *const from = (const T *)work.query + batch * p.query.batch +
                                  (first_head + (int64_t)head) * p.query.head + i * p.query.row;
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                vector16<T> part = {};
                load_part(part, from, (c * LANES + lane_of_row) * SIZE, head_dim, work.vectors);
#pragma unroll
                for (int e = 0; e < SIZE; e++)
                    query[r][c][e] = element_of(part, e);
            }
        }
        const uint32_t row = (uint32_t)(rows.first_row + (is_there ? my_row : 0)), head = work.by_queries.of(row);
        const int64_t i = (int)(row - head * (uint32_t)p.queries);
        const AttentionScores<A> scores(p, batch, first_head + (int64_t)head);
        const int first = (int)cuda_ops_attention_sequence_first_key(&scores.s, i);
        const int seen = (int)cuda_ops_attention_sequence_last_key(&scores.s, i);
        const int last = !is_there ? 0 : seen < walk.to ? seen : walk.to;
        A maximum = -A(CUDART_INF), total = 0;
        const auto slot = [&](int stage, int u, int c, int of_value) {
            return (vector16<T> *)shared + ((stage * KEYS + u) * CHUNKS + c) * 2 * THREADS + of_value * THREADS +
                   threadIdx.x;
        };
        const auto load = [&](int base, int stage) {
#pragma unroll
            for (int u = 0; u < KEYS; u++) {
                const int j = base + lane / LANES * KEYS + u;
                int64_t page = batch, row_of_cache = j;
                bool there = j < walk.to;
                if (cached.table && there) {
                    int row_of_page;
                    const int32_t found = cached.page_of(j, true, row_of_page);
                    there = cached.has(found);
                    if (!there)
                        record_bad_page(work, batch, j, found);
                    page = found, row_of_cache = row_of_page;
                }
                const T *const k_row = there ? key + page * p.key.batch + row_of_cache * p.key.row : key;
                const T *const v_row = there ? value + page * p.value.batch + row_of_cache * p.value.row : value;
#pragma unroll
                for (int c = 0; c < CHUNKS; c++) {
                    const int column = (c * LANES + lane_of_row) * SIZE;
                    copy_part(slot(stage, u, c, 0), k_row, column, there ? head_dim : 0, work.vectors);
                    copy_part(slot(stage, u, c, 1), v_row, column, there ? value_dim : 0, work.vectors);
                }
            }
            cp_async_commit_group();
        };
        constexpr int STEP = WARPS * S::GROUPS * KEYS;
        const int first_base = walk.from + warp * S::GROUPS * KEYS;
        int stage = 0, stage_to_load = 0;
        // The first rounds only load, so that there is one copy of that in the code.
        for (int base = first_base - (S::STAGES - 1) * STEP; base < walk.to; base += STEP) {
            load(base + (S::STAGES - 1) * STEP, stage_to_load); // beyond the last key: zeros
            stage_to_load = stage_to_load + 1 < S::STAGES ? stage_to_load + 1 : 0;
            if (base < first_base)
                continue;
            cp_async_wait_group<S::STAGES - 1>();
            const int j = base + lane / LANES * KEYS;
            A weights[S::SCORES] = {};
#pragma unroll
            for (int u = 0; u < KEYS; u++)
#pragma unroll
                for (int c = 0; c < CHUNKS; c++) {
                    const vector16<T> k = *slot(stage, u, c, 0);
#pragma unroll
                    for (int e = 0; e < SIZE; e++) {
                        const A x = element_of(k, e);
#pragma unroll
                        for (int r = 0; r < ROWS; r++)
                            weights[r * KEYS + u] += query[r][c][e] * x;
                    }
                }
            sum_and_scatter<LANES>(weights);
            A largest = maximum;
#pragma unroll
            for (int kept = 0; kept < S::KEPT; kept++) {
                const int at_key = j + my_key + kept;
                A &x = weights[kept];
                x *= A(p.scale);
                if (at_key < first || at_key >= last)
                    x = -A(CUDART_INF);
                else if (work.general)
                    x = decode_general_score<T>(scores, x, i, at_key);
                largest = fmax(largest, x);
            }
#pragma unroll
            for (int offset = 1; offset < S::ROW_LANES; offset *= 2)
                largest = fmax(largest, __shfl_xor_sync(FULL_WARP, largest, offset));
            const A base_of_row = decode_base(largest), factor = exp(maximum - base_of_row);
            maximum = largest;
            total *= factor;
#pragma unroll
            for (int kept = 0; kept < S::KEPT; kept++) {
                weights[kept] = exp(weights[kept] - base_of_row);
                total += weights[kept];
            }
            // The largest score seldom changes.
            if (__any_sync(FULL_WARP, factor != A(1)))
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    const A f = __shfl_sync(FULL_WARP, factor, first_lane + r * S::ROW_LANES);
#pragma unroll
                    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
                        for (int e = 0; e < SIZE; e++)
                            sum[r][c][e] *= f;
                }
#pragma unroll
            for (int u = 0; u < KEYS; u++) {
                A w[ROWS];
#pragma unroll
                for (int r = 0; r < ROWS; r++)
                    w[r] = __shfl_sync(FULL_WARP, weights[(r * KEYS + u) % S::KEPT],
                                       first_lane + (r * KEYS + u) / S::KEPT * S::COPIES);
#pragma unroll
                for (int c = 0; c < CHUNKS; c++) {
                    const vector16<T> v = *slot(stage, u, c, 1);
#pragma unroll
                    for (int e = 0; e < SIZE; e++) {
                        const A x = element_of(v, e);
#pragma unroll
                        for (int r = 0; r < ROWS; r++)
                            sum[r][c][e] += w[r] * x;
                    }
                }
            }
            stage = stage + 1 < S::STAGES ? stage + 1 : 0;
        }
        cp_async_wait_all();
        __syncthreads(); // results lie where copies were
        // The groups of a warp, then the warps of the block.
        A largest = maximum;
#pragma unroll
        for (int offset = LANES; offset < WARP_SIZE; offset *= 2)
            largest = fmax(largest, __shfl_xor_sync(FULL_WARP, largest, offset));
        const A factor = exp(maximum - decode_base(largest));
        total *= factor;
#pragma unroll
        for (int offset = S::COPIES; offset < S::ROW_LANES; offset *= 2)
            total += __shfl_xor_sync(FULL_WARP, total, offset);
#pragma unroll
        for (int offset = LANES; offset < WARP_SIZE; offset *= 2)
            total += __shfl_xor_sync(FULL_WARP, total, offset);
        if (lane == my_row * S::ROW_LANES)
            maxima[warp][my_row] = largest, totals[warp][my_row] = total;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const A f = __shfl_sync(FULL_WARP, factor, first_lane + r * S::ROW_LANES);
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
#pragma unroll
                for (int e = 0; e < SIZE; e++) {
                    A x = sum[r][c][e] * f;
#pragma unroll
                    for (int offset = LANES; offset < WARP_SIZE; offset *= 2)
                        x += __shfl_xor_sync(FULL_WARP, x, offset);
                    if (lane < LANES)
                        sums[warp][r][(c * LANES + lane) * SIZE + e] = x;
                }
        }
        __syncthreads();
        // The first warp's become the block's.
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            A largest_of_row = maxima[0][r], sum_of_row = 0, factors[WARPS];
            for (int w = 1; w < WARPS; w++)
                largest_of_row = fmax(largest_of_row, maxima[w][r]);
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                factors[w] = exp(maxima[w][r] - decode_base(largest_of_row));
                sum_of_row += totals[w][r] * factors[w];
            }
            for (int d = threadIdx.x; d < value_dim; d += THREADS) {
                A x = 0;
#pragma unroll
                for (int w = 0; w < WARPS; w++)
                    x += sums[w][r][d] * factors[w];
                sums[0][r][d] = sum_of_row == A(0) ? A(0) : x / sum_of_row;
            }
            if (threadIdx.x == 0)
                row_maxima[r] = largest_of_row, row_totals[r] = sum_of_row;
        }
        __syncthreads();
        decode_finish<T, HEAD, 0, THREADS>(walk, rows, &sums[0][0][0], row_maxima, row_totals);
        __syncthreads(); // what the next group's results overwrite has been read
    } while (walk.next());
}

template <typename T, int HEAD>
static cuda_ops_status launch(const DecodeAttention &work, int64_t blocks, cudaStream_t stream)
{
    const int bytes = SimtShape<T, HEAD>::BYTES;
    allow_shared_memory(attention_decode_simt_kernel<T, HEAD>, bytes);
    launch_dependent_clusters(attention_decode_simt_kernel<T, HEAD>, blocks, THREADS, work.cluster, bytes, stream,
                              work);
    return launch_status();
}

template <typename T>
static cuda_ops_status launch(int head, const DecodeAttention &work, int64_t blocks, cudaStream_t stream)
{
    return head == 64    ? launch<T, 64>(work, blocks, stream)
           : head == 128 ? launch<T, 128>(work, blocks, stream)
                         : launch<T, 256>(work, blocks, stream);
}

cuda_ops_status decode_simt(int head, cuda_ops_dtype dtype, const DecodeAttention &work, int64_t blocks,
                            cudaStream_t stream)
{
    CUDA_OPS_DISPATCH(dtype, T, return launch<T>(head, work, blocks, stream));
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}

template <typename T, int HEAD>
static int resident_blocks()
{
    const int bytes = SimtShape<T, HEAD>::BYTES;
    allow_shared_memory(attention_decode_simt_kernel<T, HEAD>, bytes);
    return active_blocks(attention_decode_simt_kernel<T, HEAD>, THREADS, bytes);
}

template <typename T>
static int resident_blocks(int head)
{
    return head == 64 ? resident_blocks<T, 64>() : head == 128 ? resident_blocks<T, 128>() : resident_blocks<T, 256>();
}

int decode_simt_blocks(int head, cuda_ops_dtype dtype)
{
    switch (dtype) {
    case CUDA_OPS_FLOAT64:
        return resident_blocks<double>(head);
    case CUDA_OPS_FLOAT32:
        return resident_blocks<float>(head);
    case CUDA_OPS_FLOAT16:
        return resident_blocks<__half>(head);
    default:
        return resident_blocks<__nv_bfloat16>(head);
    }
}
