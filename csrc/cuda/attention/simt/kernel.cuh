// attention, simt path's kernels: every dtype, size and option on the CUDA cores. The float32 path takes what it can.
// A block makes tiles of 64 queries x 64 keys, a thread 8 x 4 scores of them in registers (4 x 4 of doubles). Slices of
// 32 elements of both operands' rows lie in shared memory as in global memory, in the accumulation type; four elements
// are read at once. The exponentials go through shared memory to the second product, of which a block keeps 128
// columns in registers; wider rows are split over blocks, each of which computes the scores again. Backward is two
// kernels, by queries (grad_query) and by keys (grad_key and grad_value), so that nothing is added up between blocks.
// Bound by arithmetic: in float32 128 multiply-adds of a warp take 12 loads, 16 wavefronts, from shared memory.
#ifndef CUDA_OPS_ATTENTION_SIMT_KERNEL_CUH
#define CUDA_OPS_ATTENTION_SIMT_KERNEL_CUH

#include "attention/simt/simt.h"
#include "attention/tile_scores.cuh"
#include "common/aligned_vector.cuh"

static constexpr int TILE = 64;         // queries and keys of a tile
static constexpr int SLICE = 32;        // of the summed dimension, in shared memory at a time
static constexpr int PITCH = SLICE + 4; // between rows of a slice: eight rows' four elements are in banks of their own
static constexpr int WEIGHT_PITCH = 68; // between rows of a tile in shared memory
static constexpr int SLICES = 2 * TILE * PITCH; // elements of both slices, which a tile has room in, too
static_assert(SLICES >= TILE * WEIGHT_PITCH, "a tile has room in the slices");

// Of a row's elements that a result has; more are chunks, of blocks of their own.
static constexpr int HALVES = 2, COLUMNS = HALVES * TILE;

// A thread's rows of a tile; its columns are four.
template <typename A>
static constexpr int ROWS = sizeof(A) == 8 ? 4 : 8;
template <typename A>
static constexpr int THREADS = 16 * TILE / ROWS<A>;

// Blocks of a multiprocessor at a time, for which registers are kept: they hide each other's waits.
template <typename A>
static constexpr int resident_blocks(int of_float)
{
    return sizeof(A) == 8 ? 1 : of_float;
}

struct SimtWork {
    cuda_ops_attention p;
    const void *query, *key, *value, *output, *grad_output, *logsumexp, *delta, *grad_logsumexp;
    void *result, *second_result, *logsumexp_result, *grad_mask;
    // delta and the remainder of logsumexp as grad_query's kernel has found them (RowOfWeights).
    void *mended_delta, *remainder;
    int64_t *state;
    int64_t tiles, chunks, blocks; // of a head; of columns; in all
    bool vectors;                  // four elements of a row are aligned
};

template <typename A>
using Four = aligned_vector<A, 4>;

// Rows and columns of the tile that are this thread's: two neighbours each, and further ones. The columns of what is
// made of weights are four neighbours.
template <typename A>
__device__ __forceinline__ int row_in_tile(int r)
{
    return threadIdx.x / 16 * 2 + r / 2 * (2 * TILE / ROWS<A>)+r % 2;
}
__device__ __forceinline__ int column_in_tile(int c)
{
    return threadIdx.x % 16 * 2 + c / 2 * 32 + c % 2;
}
__device__ __forceinline__ int column_of_result(int c)
{
    return threadIdx.x % 16 * 4 + c;
}

// The 16 threads that share rows.
template <typename A>
__device__ __forceinline__ A sum_over_columns(A value)
{
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2)
        value += __shfl_xor_sync(FULL_WARP, value, offset);
    return value;
}
template <typename A>
__device__ __forceinline__ A max_over_columns(A value)
{
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2)
        value = fmax(value, __shfl_xor_sync(FULL_WARP, value, offset));
    return value;
}

// Four neighbours of which `there` exist; 0 beyond.
template <typename T>
__device__ __forceinline__ Four<accumulate_type<T>> load_four(const T *from, int64_t there, bool vectors)
{
    typedef accumulate_type<T> A;
    Four<A> four = {};
    if (vectors && there >= 4) {
        const Four<T> raw = *reinterpret_cast<const Four<T> *>(from);
#pragma unroll
        for (int e = 0; e < 4; e++)
            four.element[e] = element_of(raw, e);
    } else {
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (e < there)
                four.element[e] = load_as_accumulate(from[e]);
    }
    return four;
}

// to[place(row)][d] = from[row][first + d], 0 beyond the rows and the elements that exist. As the right operand, row
// 2 x of 32 is in place x and row 2 x + 1 in place 16 + x, so that a thread's columns are 16 places apart.
template <typename T>
__device__ __forceinline__ void load_slice(accumulate_type<T> *to, const T *from, int64_t stride, int64_t rows,
                                           int64_t first, int64_t elements, bool is_right, bool vectors)
{
    typedef accumulate_type<T> A;
    constexpr int FOURS = SLICE / 4, STEP = THREADS<A> / FOURS;
    const int d = threadIdx.x % FOURS * 4;
#pragma unroll
    for (int i = 0; i < TILE / STEP; i++) {
        const int row = threadIdx.x / FOURS + i * STEP;
        const int place = is_right ? row % 2 * 16 + row % 32 / 2 + row / 32 * 32 : row;
        const int64_t there = row < rows ? elements - first - d : 0;
        *reinterpret_cast<Four<A> *>(to + place * PITCH + d) =
            load_four(from + row * stride + first + d, there, vectors);
    }
}

// sum[r][c] += left row r . right row c, over `elements` elements. left, right: the tile's first rows, of which so many
// exist. slices: two slices of shared memory.
template <typename T>
__device__ __forceinline__ void multiply_rows(accumulate_type<T> (&sum)[ROWS<accumulate_type<T>>][4], const T *left,
                                              int64_t left_stride, int64_t left_rows, const T *right,
                                              int64_t right_stride, int64_t right_rows, int64_t elements,
                                              accumulate_type<T> *slices, bool vectors)
{
    typedef accumulate_type<T> A;
    const A *const left_slice = slices + row_in_tile<A>(0) * PITCH;
    const A *const right_slice = slices + TILE * PITCH + threadIdx.x % 16 * PITCH;
    for (int64_t first = 0; first < elements; first += SLICE) {
        __syncthreads(); // the slices are read by what was before
        load_slice(slices, left, left_stride, left_rows, first, elements, false, vectors);
        load_slice(slices + TILE * PITCH, right, right_stride, right_rows, first, elements, true, vectors);
        __syncthreads();
#pragma unroll 1
        for (int d = 0; d < SLICE; d += 4) {
            Four<A> columns[4];
#pragma unroll
            for (int c = 0; c < 4; c++)
                columns[c] = *reinterpret_cast<const Four<A> *>(right_slice + c * 16 * PITCH + d);
#pragma unroll
            for (int r = 0; r < ROWS<A>; r++) {
                const int below = row_in_tile<A>(r) - row_in_tile<A>(0);
                const Four<A> row = *reinterpret_cast<const Four<A> *>(left_slice + below * PITCH + d);
#pragma unroll
                for (int e = 0; e < 4; e++)
#pragma unroll
                    for (int c = 0; c < 4; c++)
                        sum[r][c] += row.element[e] * columns[c].element[e];
            }
        }
    }
}

// sum[half][r][c] += sum over k < TILE of weights[row][k] * rows[k][first + TILE * half + column]. The weights are
// written by what was before, and read when it returns. room: for a tile of the rows.
template <typename T>
__device__ __forceinline__ void multiply_weights(accumulate_type<T> (&sum)[HALVES][ROWS<accumulate_type<T>>][4],
                                                 const accumulate_type<T> *weights, const T *rows, int64_t stride,
                                                 int64_t count, int64_t first, int64_t columns,
                                                 accumulate_type<T> *room, bool vectors)
{
    typedef accumulate_type<T> A;
    constexpr int FOURS = TILE / 4, STEP = THREADS<A> / FOURS;
    const A *const weight_rows = weights + row_in_tile<A>(0) * WEIGHT_PITCH, *const right = room + column_of_result(0);
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
        const int64_t at = first + half * TILE;
        if (at >= columns)
            break;
        __syncthreads(); // the weights are written, the room is read
        const int column = threadIdx.x % FOURS * 4;
#pragma unroll
        for (int i = 0; i < TILE / STEP; i++) {
            const int k = threadIdx.x / FOURS + i * STEP;
            const int64_t there = k < count ? columns - at - column : 0;
            *reinterpret_cast<Four<A> *>(room + k * TILE + column) =
                load_four(rows + k * stride + at + column, there, vectors);
        }
        __syncthreads();
#pragma unroll 1
        for (int k = 0; k < TILE; k += 4) {
            Four<A> of_key[4];
#pragma unroll
            for (int e = 0; e < 4; e++)
                of_key[e] = *reinterpret_cast<const Four<A> *>(right + (k + e) * TILE);
#pragma unroll
            for (int r = 0; r < ROWS<A>; r++) {
                const int below = row_in_tile<A>(r) - row_in_tile<A>(0);
                const Four<A> weight = *reinterpret_cast<const Four<A> *>(weight_rows + below * WEIGHT_PITCH + k);
#pragma unroll
                for (int e = 0; e < 4; e++)
#pragma unroll
                    for (int c = 0; c < 4; c++)
                        sum[half][r][c] += weight.element[e] * of_key[e].element[c];
            }
        }
    }
    __syncthreads();
}

// This thread's elements of a tile in shared memory, [row][column].
template <typename A>
__device__ __forceinline__ void store_tile(A *to, const A (&tile)[ROWS<A>][4])
{
#pragma unroll
    for (int r = 0; r < ROWS<A>; r++)
#pragma unroll
        for (int c = 0; c < 4; c += 2)
            *reinterpret_cast<aligned_vector<A, 2> *>(to + row_in_tile<A>(r) * WEIGHT_PITCH +
                                                      column_in_tile(c)) = {{tile[r][c], tile[r][c + 1]}};
}
template <typename A>
__device__ __forceinline__ void load_tile(A (&tile)[ROWS<A>][4], const A *from)
{
#pragma unroll
    for (int r = 0; r < ROWS<A>; r++)
#pragma unroll
        for (int c = 0; c < 4; c++)
            tile[r][c] = from[row_in_tile<A>(r) * WEIGHT_PITCH + column_in_tile(c)];
}

template <typename T>
__device__ __forceinline__ void store_result(T *to, int64_t stride, int64_t rows, int64_t first, int64_t columns,
                                             const accumulate_type<T> (&sum)[HALVES][ROWS<accumulate_type<T>>][4],
                                             accumulate_type<T> factor)
{
    typedef accumulate_type<T> A;
#pragma unroll
    for (int half = 0; half < HALVES; half++)
#pragma unroll
        for (int r = 0; r < ROWS<A>; r++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int64_t column = first + half * TILE + column_of_result(c);
                if (row_in_tile<A>(r) < rows && column < columns)
                    to[row_in_tile<A>(r) * stride + column] = store_from_accumulate<T>(sum[half][r][c] * factor);
            }
}

// Which tile a block works on. The last queries come first, and the first keys: where a mask is causal, they have the
// most keys and queries.
struct SimtPosition {
    int64_t batch, head, first, chunk;
    __device__ SimtPosition(const SimtWork &work, int64_t index, int64_t heads, bool is_of_keys = false)
        : batch(index / work.chunks / work.tiles / heads), head(index / work.chunks / work.tiles % heads),
          first(index / work.chunks % work.tiles * TILE), chunk(index % work.chunks)
    {
        if (!is_of_keys)
            first = (work.tiles - 1) * TILE - first;
    }
};

template <typename T>
__global__ void __launch_bounds__(THREADS<accumulate_type<T>>, resident_blocks<accumulate_type<T>>(3))
    attention_simt_forward_kernel(const __grid_constant__ SimtWork work)
{
    typedef accumulate_type<T> A;
    extern __shared__ __align__(16) char shared[];
    A *const slices = (A *)shared, *const weights = slices + SLICES;
    const cuda_ops_attention &p = work.p;
    const bool plain = has_plain_scores(p);
    const uint64_t seed = cuda_ops_philox_seed(p.philox), offset = cuda_ops_philox_offset(p.philox);
    if (work.state && blockIdx.x == 0 && threadIdx.x == 0) {
        work.state[0] = (int64_t)seed;
        work.state[1] = (int64_t)offset;
    }
    for (int64_t index = blockIdx.x; index < work.blocks; index += gridDim.x) {
        const SimtPosition at(work, index, p.heads);
        const cuda_ops_attention_sequence s = cuda_ops_attention_sequence_of(&p, at.batch);
        const int64_t key_head = at.head / (p.heads / p.key_heads), queries = s.queries - at.first;
        if (queries <= 0)
            continue; // of a sequence that is shorter than others
        const AttentionScores<A> scores(p, at.batch, at.head);
        const T *const query =
            rows_of<T>(work.query, p.query, at.batch, at.head) + (s.first_query + at.first) * p.query.row;
        const T *const key = rows_of<T>(work.key, p.key, at.batch, key_head) + s.first_key * p.key.row;
        const T *const value = rows_of<T>(work.value, p.value, at.batch, key_head) + s.first_key * p.value.row;
        const int64_t last_query = at.first + (queries < TILE ? queries : TILE) - 1;
        const int64_t end = cuda_ops_attention_sequence_last_key(&s, last_query);
        A sum[HALVES][ROWS<A>][4] = {}, maximum[ROWS<A>], total[ROWS<A>] = {};
#pragma unroll
        for (int r = 0; r < ROWS<A>; r++)
            maximum[r] = -A(CUDART_INF);
        for (int64_t j = cuda_ops_attention_sequence_first_key(&s, at.first) / TILE * TILE; j < end; j += TILE) {
            A tile[ROWS<A>][4] = {};
            multiply_rows(tile, query, p.query.row, queries, key + j * p.key.row, p.key.row, s.keys - j, p.head_dim,
                          slices, work.vectors);
            if (plain) {
                const bool whole = sees_whole_tile(s, at.first, TILE, j, TILE);
#pragma unroll
                for (int r = 0; r < ROWS<A>; r++) {
                    const SeenKeys seen(s, at.first + row_in_tile<A>(r), j, TILE, whole);
#pragma unroll
                    for (int c = 0; c < 4; c++)
                        tile[r][c] = seen.has(column_in_tile(c)) ? tile[r][c] * A(p.scale) : -A(CUDART_INF);
                }
            } else {
                store_tile(weights, tile);
#pragma unroll 1
                for (int e = 0; e < ROWS<A> * 4; e++) {
                    const int row = row_in_tile<A>(e / 4), column = column_in_tile(e % 4);
                    A &score = weights[row * WEIGHT_PITCH + column], cap;
                    score = scores.score(score * A(p.scale), at.first + row, j + column, cap);
                }
                load_tile(tile, weights);
            }
#pragma unroll
            for (int r = 0; r < ROWS<A>; r++) {
                A largest = maximum[r];
#pragma unroll
                for (int c = 0; c < 4; c++)
                    largest = fmax(largest, tile[r][c]);
                largest = max_over_columns(largest);
                const A base = largest == -A(CUDART_INF) ? A(0) : largest;
                const A factor = exp(maximum[r] - base);
                maximum[r] = largest;
                A added = 0;
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    tile[r][c] = exp(tile[r][c] - base);
                    added += tile[r][c];
                }
                total[r] = total[r] * factor + added; // of this thread's columns; added up at the end
#pragma unroll
                for (int half = 0; half < HALVES; half++)
#pragma unroll
                    for (int c = 0; c < 4; c++)
                        sum[half][r][c] *= factor;
            }
            store_tile(weights, tile);
            if (p.dropout > 0)
#pragma unroll 1
                for (int e = 0; e < ROWS<A> * 2; e++) {
                    const int row = row_in_tile<A>(e / 2), column = column_in_tile(e % 2 * 2);
                    if (at.first + row >= s.queries)
                        continue;
                    A factors[2], *const pair = weights + row * WEIGHT_PITCH + column;
                    dropout_factors(factors, p, scores.head_index, at.first + row, j + column, seed, offset);
                    pair[0] *= factors[0];
                    pair[1] *= factors[1];
                }
            multiply_weights<T>(sum, weights, value + j * p.value.row, p.value.row, s.keys - j, at.chunk * COLUMNS,
                                p.value_dim, slices, work.vectors);
        }
#pragma unroll
        for (int r = 0; r < ROWS<A>; r++) {
            total[r] = sum_over_columns(total[r]);
            const int64_t i = at.first + row_in_tile<A>(r);
            const A factor = total[r] == A(0) ? A(0) : A(1) / total[r];
#pragma unroll
            for (int half = 0; half < HALVES; half++)
#pragma unroll
                for (int c = 0; c < 4; c++)
                    sum[half][r][c] *= factor;
            if (at.chunk == 0 && threadIdx.x % 16 == 0 && i < s.queries)
                ((A *)work.logsumexp_result)[scores.first_row + i] =
                    total[r] == A(0) ? -A(CUDART_INF) : maximum[r] + log(total[r]);
        }
        store_result<T>(rows_of<T>(work.result, p.output, at.batch, at.head) +
                            (s.first_query + at.first) * p.output.row,
                        p.output.row, queries, at.chunk * COLUMNS, p.value_dim, sum, A(1));
    }
}

// Logsumexp and delta are rounded, and forward may have summed in another order: the sum of P is not 1, and that of dS
// not grad_logsumexp. Where a row has nearly all of its weight on a key, or keys that are alike, its gradient is a
// small difference of large sums, and most of its error is that of delta. What is off is mended, so that it is right
// for the very P and dP that the kernels make; that takes all sums over the keys once more. Of few queries, whose
// forward may be the decode path's, nearly all rows are mended; of more only what is far off, since forward adds up
// scores as backward does. What is off by much more than that is no rounding, but a logsumexp of other keys too.
template <typename T>
__device__ __forceinline__ bool mend(RowOfWeights<accumulate_type<T>> &row, const RowSums<accumulate_type<T>> &sums,
                                     accumulate_type<T> grad_logsumexp, const cuda_ops_attention &p)
{
    typedef accumulate_type<T> A;
    const A slack =
                (sizeof(A) == 8 ? A(0x1p-53) : A(0x1p-24)) * (p.queries <= TILE && !p.sequences.query_starts ? 1 : 64),
            most = A(0x1p-12);
    if (!(sums.weights > A(0)))
        return false; // no key is seen
    const A excess = fabs(sums.weights - A(1)), size = sums.sizes / sums.weights;
    const A offset = sums.gradients / sums.weights - grad_logsumexp;
    const bool large = p.mask_kind == CUDA_OPS_ATTENTION_MASK_ADDITIVE && is_large_logsumexp(row.logsumexp);
    const bool weights_are_off = large || (excess > 16 * slack && excess < most);
    // The output of float16 and bfloat16 is rounded by more, and not worth another turn.
    const bool delta_is_off = sizeof(T) == sizeof(A) && fabs(offset) > slack * size && fabs(offset) < most * size;
    if (weights_are_off)
        row.remainder = log(sums.weights);
    if (delta_is_off)
        row.delta += offset;
    return weights_are_off || delta_is_off;
}

template <typename T>
__global__ void __launch_bounds__(THREADS<accumulate_type<T>>, resident_blocks<accumulate_type<T>>(2))
    attention_simt_grad_query_kernel(const __grid_constant__ SimtWork work)
{
    typedef accumulate_type<T> A;
    extern __shared__ __align__(16) char shared[];
    A *const slices = (A *)shared, *const weights = slices + SLICES;
    RowOfWeights<A> *const rows = (RowOfWeights<A> *)(weights + TILE * WEIGHT_PITCH);
    // Of this thread's columns; a row's are THREADS apart, so that no two threads meet in a bank.
    RowSums<A> *const sums = (RowSums<A> *)(rows + TILE) + threadIdx.x;
    const cuda_ops_attention &p = work.p;
    const bool plain = has_plain_scores(p) && !(p.dropout > 0) && !work.grad_mask;
    const uint64_t seed = cuda_ops_philox_seed(p.philox), offset = cuda_ops_philox_offset(p.philox);
    for (int64_t index = blockIdx.x; index < work.blocks; index += gridDim.x) {
        const SimtPosition at(work, index, p.heads);
        const cuda_ops_attention_sequence s = cuda_ops_attention_sequence_of(&p, at.batch);
        const int64_t key_head = at.head / (p.heads / p.key_heads), queries = s.queries - at.first;
        if (queries <= 0)
            continue; // of a sequence that is shorter than others
        const AttentionScores<A> scores(p, at.batch, at.head);
        const T *const query =
            rows_of<T>(work.query, p.query, at.batch, at.head) + (s.first_query + at.first) * p.query.row;
        const T *const grad_output = rows_of<T>(work.grad_output, p.grad_output, at.batch, at.head) +
                                     (s.first_query + at.first) * p.grad_output.row;
        const T *const key = rows_of<T>(work.key, p.key, at.batch, key_head) + s.first_key * p.key.row;
        const T *const value = rows_of<T>(work.value, p.value, at.batch, key_head) + s.first_key * p.value.row;
        T *const grad_mask = at.chunk == 0 ? (T *)work.grad_mask : nullptr;
        __syncthreads(); // the rows are read
        for (int i = threadIdx.x; i < TILE; i += THREADS<A>) {
            const int64_t row = scores.first_row + at.first + i;
            rows[i] = {};
            if (i < queries)
                rows[i] = {((const A *)work.logsumexp)[row], A(0), ((const A *)work.delta)[row]};
        }
        // Of a gradient for the mask every element is written.
        const int64_t last_query = at.first + (queries < TILE ? queries : TILE) - 1;
        const int64_t begin = work.grad_mask ? 0 : cuda_ops_attention_sequence_first_key(&s, at.first) / TILE * TILE;
        const int64_t end = work.grad_mask ? s.keys : cuda_ops_attention_sequence_last_key(&s, last_query);
        A sum[HALVES][ROWS<A>][4];
#pragma unroll 1
        for (int turn = 0; turn < 2; turn++) {
#pragma unroll
            for (int r = 0; r < ROWS<A>; r++) {
                sums[r * THREADS<A>] = {};
#pragma unroll
                for (int half = 0; half < HALVES; half++)
#pragma unroll
                    for (int c = 0; c < 4; c++)
                        sum[half][r][c] = 0;
            }
            for (int64_t j = begin; j < end; j += TILE) {
                A tile[ROWS<A>][4] = {}, gradient[ROWS<A>][4] = {};
                multiply_rows(tile, query, p.query.row, queries, key + j * p.key.row, p.key.row, s.keys - j, p.head_dim,
                              slices, work.vectors);
                multiply_rows(gradient, grad_output, p.grad_output.row, queries, value + j * p.value.row, p.value.row,
                              s.keys - j, p.value_dim, slices, work.vectors);
                if (plain) {
                    const bool whole = sees_whole_tile(s, at.first, TILE, j, TILE);
#pragma unroll
                    for (int r = 0; r < ROWS<A>; r++) {
                        const SeenKeys seen(s, at.first + row_in_tile<A>(r), j, TILE, whole);
                        const RowOfWeights<A> row = rows[row_in_tile<A>(r)];
                        RowSums<A> sums_of_row = sums[r * THREADS<A>];
#pragma unroll
                        for (int c = 0; c < 4; c++)
                            plain_gradient(tile[r][c], gradient[r][c], seen.has(column_in_tile(c)), A(p.scale), row,
                                           &sums_of_row);
                        sums[r * THREADS<A>] = sums_of_row;
                    }
                    store_tile(weights, gradient);
                } else {
                    __syncthreads(); // the slices are read
                    store_tile(slices, tile);
                    store_tile(weights, gradient);
#pragma unroll 1
                    for (int e = 0; e < ROWS<A> * 4; e++) {
                        const int row = row_in_tile<A>(e / 4), column = column_in_tile(e % 4);
                        const int64_t i = at.first + row;
                        A factors[2] = {A(1), A(1)};
                        if (p.dropout > 0 && i < s.queries)
                            dropout_factors(factors, p, scores.head_index, i, j + column - e % 2, seed, offset);
                        gradient_of_score<T>(slices[row * WEIGHT_PITCH + column], weights[row * WEIGHT_PITCH + column],
                                             scores, i, j + column, rows[row], e % 2 ? factors[1] : factors[0],
                                             grad_mask, sums + e / 4 * THREADS<A>);
                    }
                }
                multiply_weights<T>(sum, weights, key + j * p.key.row, p.key.row, s.keys - j, at.chunk * COLUMNS,
                                    p.head_dim, slices, work.vectors);
            }
            bool mended = false;
            if (turn == 0) {
                __syncthreads(); // the rows are written, where there was no key
#pragma unroll 1
                for (int r = 0; r < ROWS<A>; r++) {
                    const RowSums<A> mine = sums[r * THREADS<A>];
                    const RowSums<A> all = {sum_over_columns(mine.weights), sum_over_columns(mine.gradients),
                                            sum_over_columns(mine.sizes)};
                    const int i = row_in_tile<A>(r);
                    const int64_t row_of_all = scores.first_row + at.first + i;
                    if (threadIdx.x % 16 == 0 && i < queries) {
                        RowOfWeights<A> row = rows[i];
                        const A grad_logsumexp =
                            work.grad_logsumexp ? ((const A *)work.grad_logsumexp)[row_of_all] : A(0);
                        if (mend<T>(row, all, grad_logsumexp, p)) {
                            mended = true;
                            rows[i] = row;
                        }
                        if (at.chunk == 0) {
                            ((A *)work.remainder)[row_of_all] = row.remainder;
                            ((A *)work.mended_delta)[row_of_all] = row.delta;
                        }
                    }
                }
            }
            if (!__syncthreads_or(mended))
                break;
        }
        store_result<T>(rows_of<T>(work.result, p.grad_query, at.batch, at.head) +
                            (s.first_query + at.first) * p.grad_query.row,
                        p.grad_query.row, queries, at.chunk * COLUMNS, p.head_dim, sum, A(p.scale));
    }
}

// Tiles have keys as rows and queries as columns.
template <typename T>
__global__ void __launch_bounds__(THREADS<accumulate_type<T>>, resident_blocks<accumulate_type<T>>(2))
    attention_simt_grad_key_value_kernel(const __grid_constant__ SimtWork work)
{
    typedef accumulate_type<T> A;
    extern __shared__ __align__(16) char shared[];
    A *const slices = (A *)shared, *const weights = slices + SLICES;
    const cuda_ops_attention &p = work.p;
    const bool plain = has_plain_scores(p) && !(p.dropout > 0);
    const uint64_t seed = cuda_ops_philox_seed(p.philox), offset = cuda_ops_philox_offset(p.philox);
    const int64_t group = p.heads / p.key_heads;
    for (int64_t index = blockIdx.x; index < work.blocks; index += gridDim.x) {
        const SimtPosition at(work, index, p.key_heads, true);
        const cuda_ops_attention_sequence s = cuda_ops_attention_sequence_of(&p, at.batch);
        const int64_t keys = s.keys - at.first, last_key = at.first + (keys < TILE ? keys : TILE) - 1;
        if (keys <= 0)
            continue; // of a sequence that is shorter than others
        const T *const key = rows_of<T>(work.key, p.key, at.batch, at.head) + (s.first_key + at.first) * p.key.row;
        const T *const value =
            rows_of<T>(work.value, p.value, at.batch, at.head) + (s.first_key + at.first) * p.value.row;
        A sum_key[HALVES][ROWS<A>][4] = {}, sum_value[HALVES][ROWS<A>][4] = {};
        for (int64_t head = at.head * group; head < (at.head + 1) * group; head++) {
            const AttentionScores<A> scores(p, at.batch, head);
            const T *const query = rows_of<T>(work.query, p.query, at.batch, head) + s.first_query * p.query.row;
            const T *const grad_output =
                rows_of<T>(work.grad_output, p.grad_output, at.batch, head) + s.first_query * p.grad_output.row;
            const int64_t end = cuda_ops_attention_sequence_last_query(&s, last_key);
            for (int64_t i = cuda_ops_attention_sequence_first_query(&s, at.first) / TILE * TILE; i < end; i += TILE) {
                A tile[ROWS<A>][4] = {}, gradient[ROWS<A>][4] = {};
                multiply_rows(tile, key, p.key.row, keys, query + i * p.query.row, p.query.row, s.queries - i,
                              p.head_dim, slices, work.vectors);
                multiply_rows(gradient, value, p.value.row, keys, grad_output + i * p.grad_output.row,
                              p.grad_output.row, s.queries - i, p.value_dim, slices, work.vectors);
                const auto row_of_query = [&](int64_t at_query) {
                    const int64_t row = scores.first_row + at_query;
                    RowOfWeights<A> of_query = {};
                    if (at_query < s.queries)
                        of_query = {((const A *)work.logsumexp)[row], ((const A *)work.remainder)[row],
                                    ((const A *)work.delta)[row]};
                    return of_query;
                };
                if (plain) {
                    const bool whole = sees_whole_tile(s, i, TILE, at.first, TILE);
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        const int64_t at_query = i + column_in_tile(c);
                        const SeenKeys seen(s, at_query, at.first, TILE, whole);
                        const RowOfWeights<A> row = row_of_query(at_query);
#pragma unroll
                        for (int r = 0; r < ROWS<A>; r++)
                            plain_gradient<A>(tile[r][c], gradient[r][c], seen.has(row_in_tile<A>(r)), A(p.scale), row,
                                              nullptr);
                    }
                    store_tile(weights, tile);
                } else {
                    __syncthreads(); // the slices are read
                    store_tile(weights, tile);
                    store_tile(slices, gradient);
#pragma unroll 1
                    for (int e = 0; e < ROWS<A> * 4; e++) {
                        const int row = row_in_tile<A>(e % ROWS<A>), column = column_in_tile(e / ROWS<A>);
                        const int64_t at_query = i + column, at_key = at.first + row;
                        A factors[2] = {A(1), A(1)};
                        if (p.dropout > 0 && at_query < s.queries)
                            dropout_factors(factors, p, scores.head_index, at_query, at_key - e % 2, seed, offset);
                        gradient_of_score<T>(weights[row * WEIGHT_PITCH + column], slices[row * WEIGHT_PITCH + column],
                                             scores, at_query, at_key, row_of_query(at_query),
                                             e % 2 ? factors[1] : factors[0], (T *)nullptr, (RowSums<A> *)nullptr);
                    }
                    load_tile(gradient, slices);
                }
                multiply_weights<T>(sum_value, weights, grad_output + i * p.grad_output.row, p.grad_output.row,
                                    s.queries - i, at.chunk * COLUMNS, p.value_dim, slices, work.vectors);
                store_tile(weights, gradient);
                multiply_weights<T>(sum_key, weights, query + i * p.query.row, p.query.row, s.queries - i,
                                    at.chunk * COLUMNS, p.head_dim, slices, work.vectors);
            }
        }
        store_result<T>(rows_of<T>(work.result, p.grad_key, at.batch, at.head) +
                            (s.first_key + at.first) * p.grad_key.row,
                        p.grad_key.row, keys, at.chunk * COLUMNS, p.head_dim, sum_key, A(p.scale));
        store_result<T>(rows_of<T>(work.second_result, p.grad_value, at.batch, at.head) +
                            (s.first_key + at.first) * p.grad_value.row,
                        p.grad_value.row, keys, at.chunk * COLUMNS, p.value_dim, sum_value, A(1));
    }
}

static bool are_fours(const void *tensor, const cuda_ops_attention_strides &strides, int64_t size)
{
    return reinterpret_cast<uintptr_t>(tensor) % (4 * size < 16 ? 4 * size : 16) == 0 && strides.row % 4 == 0 &&
           strides.head % 4 == 0 && strides.batch % 4 == 0;
}

template <typename A>
static cuda_ops_status launch(void (*kernel)(SimtWork), SimtWork &work, int64_t heads, int64_t rows, int64_t columns,
                              size_t more_bytes, cudaStream_t stream)
{
    const size_t bytes = (SLICES + TILE * WEIGHT_PITCH) * sizeof(A) + more_bytes;
    work.tiles = ceil_div(rows, TILE);
    work.chunks = columns > COLUMNS ? ceil_div(columns, COLUMNS) : 1;
    work.blocks = work.p.batch * heads * work.tiles * work.chunks;
    if (work.blocks == 0)
        return CUDA_OPS_SUCCESS;
    if (bytes > 48 << 10)
        allow_shared_memory(kernel, bytes);
    kernel<<<(unsigned int)(work.blocks < INT32_MAX ? work.blocks : INT32_MAX), THREADS<A>, bytes, stream>>>(work);
    return launch_status();
}

template <typename T>
static cuda_ops_status forward(SimtWork &work, const AttentionCall &call)
{
    typedef accumulate_type<T> A;
    const cuda_ops_attention &p = call.problem;
    work.result = call.output, work.logsumexp_result = call.logsumexp, work.state = call.state;
    return launch<A>(attention_simt_forward_kernel<T>, work, p.heads, p.queries, p.value_dim, 0, call.stream);
}

template <typename T>
static cuda_ops_status backward(SimtWork &work, const AttentionCall &call)
{
    typedef accumulate_type<T> A;
    const cuda_ops_attention &p = call.problem;
    const int64_t rows = attention_rows(p);
    work.grad_output = call.grad_output, work.logsumexp = call.logsumexp, work.grad_logsumexp = call.grad_logsumexp;
    work.delta = call.workspace;
    work.mended_delta = (A *)call.workspace + rows, work.remainder = (A *)call.workspace + 2 * rows;
    work.vectors = work.vectors && are_fours(call.grad_output, p.grad_output, sizeof(T));
    cuda_ops_status status = attention_delta(call.workspace, call);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    work.result = call.grad_query, work.grad_mask = call.grad_mask;
    const size_t bytes = TILE * sizeof(RowOfWeights<A>) + THREADS<A> * ROWS<A> * sizeof(RowSums<A>);
    status = launch<A>(attention_simt_grad_query_kernel<T>, work, p.heads, p.queries, p.head_dim, bytes, call.stream);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    work.delta = work.mended_delta;
    work.result = call.grad_key, work.second_result = call.grad_value;
    return launch<A>(attention_simt_grad_key_value_kernel<T>, work, p.key_heads, p.keys,
                     p.head_dim > p.value_dim ? p.head_dim : p.value_dim, 0, call.stream);
}

template <typename T>
static cuda_ops_status launch_attention(const AttentionCall &call)
{
    const cuda_ops_attention &p = call.problem;
    SimtWork work = {};
    work.p = p;
    work.query = call.query, work.key = call.key, work.value = call.value;
    work.vectors = are_fours(call.query, p.query, sizeof(T)) && are_fours(call.key, p.key, sizeof(T)) &&
                   are_fours(call.value, p.value, sizeof(T));
    return call.backward ? backward<T>(work, call) : forward<T>(work, call);
}

#endif
