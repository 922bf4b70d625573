// attention, simt path: every dtype, size and option on the CUDA cores.
// A block of 256 threads makes tiles of 64 queries x 64 keys, a thread 4 x 4 scores of them in registers; slices of 32
// of both operands lie in shared memory, in the accumulation type and with the rows as columns, so that a thread reads
// two elements at once. The exponentials go through shared memory to the second product, of which a block keeps 128
// columns in registers; wider rows are split over blocks, each of which computes the scores again. Backward is two
// kernels, by queries (grad_query) and by keys (grad_key and grad_value), so that nothing is added up between blocks.
// Bound by arithmetic: in float32 every four multiply-adds of a warp take one load from shared memory.
#include "attention/paths.h"
#include "attention/scores.cuh"

static constexpr int THREADS = 256;
static constexpr int TILE = 64;     // queries and keys of a tile
static constexpr int SLICE = 32;    // of the summed dimension, in shared memory at a time
static constexpr int PITCH = 66;    // between rows of shared memory: even, for pairs, and two-way conflicts at most
static constexpr int COLUMNS = 128; // of a result, that a block makes
static constexpr int HALVES = COLUMNS / TILE;

struct SimtWork {
    cuda_ops_attention p;
    const void *query, *key, *value, *output, *grad_output, *logsumexp, *delta;
    void *remainder; // of logsumexp (paths.h); NULL: 0
    void *result, *second_result, *logsumexp_result, *grad_mask;
    int64_t *state;
    int64_t tiles, chunks, blocks; // of a head; of columns; in all
};

template <typename A>
struct alignas(2 * sizeof(A)) Pair {
    A x, y;
};

// Rows and columns of the tile that are this thread's: rows 4 * y to 4 * y + 3, columns 2 x, 2 x + 1, and 32 further.
__device__ __forceinline__ int row_in_tile(int r)
{
    return threadIdx.x / 16 * 4 + r;
}
__device__ __forceinline__ int column_in_tile(int c)
{
    return threadIdx.x % 16 * 2 + c / 2 * 32 + c % 2;
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

// sum[r][c] += sum over d < SLICE of left[d][row] * right[d][column].
template <typename A>
__device__ __forceinline__ void multiply_slices(A (&sum)[4][4], const A *left, const A *right)
{
#pragma unroll 8
    for (int d = 0; d < SLICE; d++) {
        const Pair<A> *const l = reinterpret_cast<const Pair<A> *>(left + d * PITCH + row_in_tile(0));
        const Pair<A> *const r = reinterpret_cast<const Pair<A> *>(right + d * PITCH + column_in_tile(0));
        const Pair<A> l0 = l[0], l1 = l[1], r0 = r[0], r1 = r[16];
        const A rows[4] = {l0.x, l0.y, l1.x, l1.y}, columns[4] = {r0.x, r0.y, r1.x, r1.y};
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                sum[i][j] += rows[i] * columns[j];
    }
}

// to[d][row] = from[row][first + d], 0 beyond the rows and the elements that exist.
template <typename T>
__device__ __forceinline__ void load_transposed(accumulate_type<T> *to, const T *from, int64_t stride, int64_t rows,
                                                int64_t first, int64_t elements)
{
    typedef accumulate_type<T> A;
    const int d = threadIdx.x % SLICE;
#pragma unroll
    for (int i = 0; i < TILE * SLICE / THREADS; i++) {
        const int row = threadIdx.x / SLICE + i * (THREADS / SLICE);
        const bool there = row < rows && first + d < elements;
        to[d * PITCH + row] = there ? load_as_accumulate(from[row * stride + first + d]) : A(0);
    }
}

// sum[r][c] += left row r . right row c, over `elements` elements. left, right: the tile's first rows, of which so many
// exist. slices: two slices of shared memory.
template <typename T>
__device__ __forceinline__ void multiply_rows(accumulate_type<T> (&sum)[4][4], const T *left, int64_t left_stride,
                                              int64_t left_rows, const T *right, int64_t right_stride,
                                              int64_t right_rows, int64_t elements, accumulate_type<T> *slices)
{
    for (int64_t d = 0; d < elements; d += SLICE) {
        __syncthreads(); // the slices are read by what was before
        load_transposed(slices, left, left_stride, left_rows, d, elements);
        load_transposed(slices + SLICE * PITCH, right, right_stride, right_rows, d, elements);
        __syncthreads();
        multiply_slices(sum, slices, slices + SLICE * PITCH);
    }
}

// sum[half][r][c] += sum over k < TILE of weights[k][row] * rows[k][first + TILE * half + column].
template <typename T>
__device__ __forceinline__ void
multiply_weights(accumulate_type<T> (&sum)[HALVES][4][4], const accumulate_type<T> *weights, const T *rows,
                 int64_t stride, int64_t count, int64_t first, int64_t columns, accumulate_type<T> *slice)
{
    typedef accumulate_type<T> A;
    const int column = threadIdx.x % TILE;
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
        const int64_t at = first + half * TILE;
        if (at >= columns)
            break;
        for (int k = 0; k < TILE && k < count; k += SLICE) {
            __syncthreads(); // the weights are written, the slice is read
#pragma unroll
            for (int i = 0; i < TILE * SLICE / THREADS; i++) {
                const int row = threadIdx.x / TILE + i * (THREADS / TILE);
                const bool there = k + row < count && at + column < columns;
                slice[row * PITCH + column] = there ? load_as_accumulate(rows[(k + row) * stride + at + column]) : A(0);
            }
            __syncthreads();
            multiply_slices(sum[half], weights + k * PITCH, slice);
        }
    }
}

// weights[column][row] = tile[row][column].
template <typename A>
__device__ __forceinline__ void store_weights(A *weights, const A (&tile)[4][4])
{
#pragma unroll
    for (int c = 0; c < 4; c++)
#pragma unroll
        for (int r = 0; r < 4; r++)
            weights[column_in_tile(c) * PITCH + row_in_tile(r)] = tile[r][c];
}

template <typename T>
__device__ __forceinline__ void store_result(T *to, int64_t stride, int64_t rows, int64_t first, int64_t columns,
                                             const accumulate_type<T> (&sum)[HALVES][4][4], accumulate_type<T> factor)
{
#pragma unroll
    for (int half = 0; half < HALVES; half++)
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int64_t column = first + half * TILE + column_in_tile(c);
                if (row_in_tile(r) < rows && column < columns)
                    to[row_in_tile(r) * stride + column] = store_from_accumulate<T>(sum[half][r][c] * factor);
            }
}

// Which tile a block works on. The last queries come first: where a mask is causal, they have the most keys.
struct SimtPosition {
    int64_t batch, head, first, chunk;
    __device__ SimtPosition(const SimtWork &work, int64_t index, int64_t heads)
        : batch(index / work.chunks / work.tiles / heads), head(index / work.chunks / work.tiles % heads),
          first((work.tiles - 1 - index / work.chunks % work.tiles) * TILE), chunk(index % work.chunks)
    {
    }
};

template <typename T>
__device__ __forceinline__ const T *rows_of(const void *tensor, const cuda_ops_attention_strides &strides,
                                            int64_t batch, int64_t head)
{
    return (const T *)tensor + batch * strides.batch + head * strides.head;
}
template <typename T>
__device__ __forceinline__ T *rows_of(void *tensor, const cuda_ops_attention_strides &strides, int64_t batch,
                                      int64_t head)
{
    return (T *)tensor + batch * strides.batch + head * strides.head;
}

// The factors of query i and keys j to j + 1, j even.
template <typename A>
__device__ __forceinline__ void dropout_factors(A (&factors)[2], const cuda_ops_attention &p, int64_t head_index,
                                                int64_t i, int64_t j, uint64_t seed, uint64_t offset)
{
    uint32_t words[4];
    const uint64_t row = cuda_ops_attention_dropout_row(head_index, p.queries, i) + (uint64_t)(j % 8 / 2);
    cuda_ops_attention_dropout_words(words, row, (uint32_t)(j / 16), seed, offset);
    const uint32_t near = i & 8 ? words[1] : words[0], far = i & 8 ? words[3] : words[2], word = j & 8 ? far : near;
    const uint32_t dropped = cuda_ops_attention_dropped_of_65536(p.dropout);
    const A kept = A(cuda_ops_attention_dropout_scale(p.dropout));
    factors[0] = (word & 0xffff) >= dropped ? kept : A(0);
    factors[1] = word >> 16 >= dropped ? kept : A(0);
}

template <typename T>
__global__ void __launch_bounds__(THREADS) attention_simt_forward_kernel(const __grid_constant__ SimtWork work)
{
    typedef accumulate_type<T> A;
    extern __shared__ __align__(16) char shared[];
    A *const slices = (A *)shared, *const weights = slices + 2 * SLICE * PITCH;
    const cuda_ops_attention &p = work.p;
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
        A sum[HALVES][4][4] = {}, maximum[4], total[4] = {};
#pragma unroll
        for (int r = 0; r < 4; r++)
            maximum[r] = -A(CUDART_INF);
        for (int64_t j = cuda_ops_attention_sequence_first_key(&s, at.first) / TILE * TILE; j < end; j += TILE) {
            A tile[4][4] = {};
            multiply_rows(tile, query, p.query.row, queries, key + j * p.key.row, p.key.row, s.keys - j, p.head_dim,
                          slices);
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const int64_t i = at.first + row_in_tile(r);
                A largest = maximum[r];
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    A cap;
                    tile[r][c] = scores.score(tile[r][c] * A(p.scale), i, j + column_in_tile(c), cap);
                    largest = fmax(largest, tile[r][c]);
                }
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
                if (p.dropout > 0 && i < s.queries)
#pragma unroll
                    for (int c = 0; c < 4; c += 2) {
                        A factors[2];
                        dropout_factors(factors, p, scores.head_index, i, j + column_in_tile(c), seed, offset);
                        tile[r][c] *= factors[0];
                        tile[r][c + 1] *= factors[1];
                    }
            }
            store_weights(weights, tile);
            multiply_weights(sum, weights, value + j * p.value.row, p.value.row, s.keys - j, at.chunk * COLUMNS,
                             p.value_dim, slices);
            __syncthreads(); // the weights are read
        }
#pragma unroll
        for (int r = 0; r < 4; r++) {
            total[r] = sum_over_columns(total[r]);
            const int64_t i = at.first + row_in_tile(r);
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
        store_result(rows_of<T>(work.result, p.output, at.batch, at.head) + (s.first_query + at.first) * p.output.row,
                     p.output.row, queries, at.chunk * COLUMNS, p.value_dim, sum, A(1));
    }
}

// The remainder of logsumexp: log of the sum of exp(score - logsumexp), where that is large.
template <typename T>
__global__ void __launch_bounds__(THREADS) attention_simt_remainder_kernel(const __grid_constant__ SimtWork work)
{
    typedef accumulate_type<T> A;
    extern __shared__ __align__(16) char shared[];
    A *const slices = (A *)shared;
    const cuda_ops_attention &p = work.p;
    for (int64_t index = blockIdx.x; index < work.blocks; index += gridDim.x) {
        const SimtPosition at(work, index, p.heads);
        const AttentionScores<A> scores(p, at.batch, at.head);
        const cuda_ops_attention_sequence &s = scores.s;
        const int64_t queries = s.queries - at.first;
        A logsumexp[4], total[4] = {};
        bool large[4], any = false;
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const int64_t i = at.first + row_in_tile(r);
            logsumexp[r] = i < s.queries ? ((const A *)work.logsumexp)[scores.first_row + i] : A(0);
            large[r] = is_large_logsumexp(logsumexp[r]);
            any = any || large[r];
        }
        if (__syncthreads_or(any)) {
            const T *const query = rows_of<T>(work.query, p.query, at.batch, at.head) + at.first * p.query.row;
            const T *const key = rows_of<T>(work.key, p.key, at.batch, at.head / (p.heads / p.key_heads));
            const int64_t last_query = at.first + (queries < TILE ? queries : TILE) - 1;
            const int64_t end = cuda_ops_attention_sequence_last_key(&s, last_query);
            for (int64_t j = cuda_ops_attention_sequence_first_key(&s, at.first) / TILE * TILE; j < end; j += TILE) {
                A tile[4][4] = {}, cap;
                multiply_rows(tile, query, p.query.row, queries, key + j * p.key.row, p.key.row, s.keys - j, p.head_dim,
                              slices);
#pragma unroll
                for (int r = 0; r < 4; r++)
#pragma unroll
                    for (int c = 0; c < 4; c++)
                        total[r] += exp(scores.score(tile[r][c] * A(p.scale), at.first + row_in_tile(r),
                                                     j + column_in_tile(c), cap) -
                                        logsumexp[r]);
            }
        }
#pragma unroll
        for (int r = 0; r < 4; r++) {
            total[r] = sum_over_columns(total[r]);
            const int64_t i = at.first + row_in_tile(r);
            if (threadIdx.x % 16 == 0 && i < s.queries)
                ((A *)work.remainder)[scores.first_row + i] = large[r] ? log(total[r]) : A(0);
        }
    }
}

// From scores and the products of grad_output and value: tile becomes D P, gradient dS times the cap's derivative.
// grad_mask: where dS goes, or NULL. i, j: of one element.
template <typename T>
__device__ __forceinline__ void gradient_of_score(accumulate_type<T> &weight, accumulate_type<T> &gradient,
                                                  const AttentionScores<accumulate_type<T>> &scores, int64_t i,
                                                  int64_t j, accumulate_type<T> logsumexp, accumulate_type<T> remainder,
                                                  accumulate_type<T> delta, accumulate_type<T> dropout, T *grad_mask)
{
    typedef accumulate_type<T> A;
    A cap;
    const A score = scores.score(weight * A(scores.p.scale), i, j, cap);
    // What is not seen adds nothing, whatever its value is.
    const bool seen = score != -A(CUDART_INF);
    const A weight_of_key = seen ? exp(score - logsumexp - remainder) : A(0);
    const A gradient_of_key = seen ? weight_of_key * (gradient * dropout - delta) : A(0);
    if (grad_mask && i < scores.s.queries && j < scores.s.keys)
        grad_mask[((int64_t)scores.row + i) * scores.p.keys + j] = store_from_accumulate<T>(gradient_of_key);
    weight = weight_of_key * dropout;
    gradient = gradient_of_key * cap;
}

template <typename T>
__global__ void __launch_bounds__(THREADS) attention_simt_grad_query_kernel(const __grid_constant__ SimtWork work)
{
    typedef accumulate_type<T> A;
    extern __shared__ __align__(16) char shared[];
    A *const slices = (A *)shared, *const weights = slices + 2 * SLICE * PITCH;
    const cuda_ops_attention &p = work.p;
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
        A logsumexp[4], remainder[4], delta[4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const int64_t i = at.first + row_in_tile(r);
            logsumexp[r] = i < s.queries ? ((const A *)work.logsumexp)[scores.first_row + i] : A(0);
            remainder[r] = work.remainder && i < s.queries ? ((const A *)work.remainder)[scores.first_row + i] : A(0);
            delta[r] = i < s.queries ? ((const A *)work.delta)[scores.first_row + i] : A(0);
        }
        // Of a gradient for the mask every element is written.
        const int64_t last_query = at.first + (queries < TILE ? queries : TILE) - 1;
        const int64_t begin = work.grad_mask ? 0 : cuda_ops_attention_sequence_first_key(&s, at.first) / TILE * TILE;
        const int64_t end = work.grad_mask ? s.keys : cuda_ops_attention_sequence_last_key(&s, last_query);
        A sum[HALVES][4][4] = {};
        for (int64_t j = begin; j < end; j += TILE) {
            A tile[4][4] = {}, gradient[4][4] = {};
            multiply_rows(tile, query, p.query.row, queries, key + j * p.key.row, p.key.row, s.keys - j, p.head_dim,
                          slices);
            multiply_rows(gradient, grad_output, p.grad_output.row, queries, value + j * p.value.row, p.value.row,
                          s.keys - j, p.value_dim, slices);
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int c = 0; c < 4; c += 2) {
                    const int64_t i = at.first + row_in_tile(r), column = j + column_in_tile(c);
                    A factors[2] = {A(1), A(1)};
                    if (p.dropout > 0 && i < s.queries)
                        dropout_factors(factors, p, scores.head_index, i, column, seed, offset);
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        gradient_of_score<T>(tile[r][c + e], gradient[r][c + e], scores, i, column + e, logsumexp[r],
                                             remainder[r], delta[r], factors[e], grad_mask);
                }
            store_weights(weights, gradient);
            multiply_weights(sum, weights, key + j * p.key.row, p.key.row, s.keys - j, at.chunk * COLUMNS, p.head_dim,
                             slices);
            __syncthreads(); // the weights are read
        }
        store_result(rows_of<T>(work.result, p.grad_query, at.batch, at.head) +
                         (s.first_query + at.first) * p.grad_query.row,
                     p.grad_query.row, queries, at.chunk * COLUMNS, p.head_dim, sum, A(p.scale));
    }
}

// Tiles have keys as rows and queries as columns.
template <typename T>
__global__ void __launch_bounds__(THREADS) attention_simt_grad_key_value_kernel(const __grid_constant__ SimtWork work)
{
    typedef accumulate_type<T> A;
    extern __shared__ __align__(16) char shared[];
    A *const slices = (A *)shared, *const weights = slices + 2 * SLICE * PITCH;
    const cuda_ops_attention &p = work.p;
    const uint64_t seed = cuda_ops_philox_seed(p.philox), offset = cuda_ops_philox_offset(p.philox);
    const int64_t group = p.heads / p.key_heads;
    for (int64_t index = blockIdx.x; index < work.blocks; index += gridDim.x) {
        const SimtPosition at(work, index, p.key_heads);
        const cuda_ops_attention_sequence s = cuda_ops_attention_sequence_of(&p, at.batch);
        const int64_t keys = s.keys - at.first, last_key = at.first + (keys < TILE ? keys : TILE) - 1;
        if (keys <= 0)
            continue; // of a sequence that is shorter than others
        const T *const key = rows_of<T>(work.key, p.key, at.batch, at.head) + (s.first_key + at.first) * p.key.row;
        const T *const value =
            rows_of<T>(work.value, p.value, at.batch, at.head) + (s.first_key + at.first) * p.value.row;
        A sum_key[HALVES][4][4] = {}, sum_value[HALVES][4][4] = {};
        for (int64_t head = at.head * group; head < (at.head + 1) * group; head++) {
            const AttentionScores<A> scores(p, at.batch, head);
            const T *const query = rows_of<T>(work.query, p.query, at.batch, head) + s.first_query * p.query.row;
            const T *const grad_output =
                rows_of<T>(work.grad_output, p.grad_output, at.batch, head) + s.first_query * p.grad_output.row;
            const int64_t end = cuda_ops_attention_sequence_last_query(&s, last_key);
            for (int64_t i = cuda_ops_attention_sequence_first_query(&s, at.first) / TILE * TILE; i < end; i += TILE) {
                A tile[4][4] = {}, gradient[4][4] = {};
                multiply_rows(tile, key, p.key.row, keys, query + i * p.query.row, p.query.row, s.queries - i,
                              p.head_dim, slices);
                multiply_rows(gradient, value, p.value.row, keys, grad_output + i * p.grad_output.row,
                              p.grad_output.row, s.queries - i, p.value_dim, slices);
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    const int64_t at_query = i + column_in_tile(c);
                    const bool there = at_query < s.queries;
                    const A logsumexp = there ? ((const A *)work.logsumexp)[scores.first_row + at_query] : A(0);
                    const bool has_remainder = there && work.remainder;
                    const A remainder = has_remainder ? ((const A *)work.remainder)[scores.first_row + at_query] : A(0);
                    const A delta = there ? ((const A *)work.delta)[scores.first_row + at_query] : A(0);
#pragma unroll
                    for (int r = 0; r < 4; r += 2) {
                        const int64_t at_key = at.first + row_in_tile(r);
                        A factors[2] = {A(1), A(1)};
                        if (p.dropout > 0 && there)
                            dropout_factors(factors, p, scores.head_index, at_query, at_key, seed, offset);
#pragma unroll
                        for (int e = 0; e < 2; e++)
                            gradient_of_score<T>(tile[r + e][c], gradient[r + e][c], scores, at_query, at_key + e,
                                                 logsumexp, remainder, delta, factors[e], nullptr);
                    }
                }
                store_weights(weights, tile);
                multiply_weights(sum_value, weights, grad_output + i * p.grad_output.row, p.grad_output.row,
                                 s.queries - i, at.chunk * COLUMNS, p.value_dim, slices);
                __syncthreads(); // the weights are read
                store_weights(weights, gradient);
                multiply_weights(sum_key, weights, query + i * p.query.row, p.query.row, s.queries - i,
                                 at.chunk * COLUMNS, p.head_dim, slices);
                __syncthreads();
            }
        }
        store_result(rows_of<T>(work.result, p.grad_key, at.batch, at.head) + (s.first_key + at.first) * p.grad_key.row,
                     p.grad_key.row, keys, at.chunk * COLUMNS, p.head_dim, sum_key, A(p.scale));
        store_result(rows_of<T>(work.second_result, p.grad_value, at.batch, at.head) +
                         (s.first_key + at.first) * p.grad_value.row,
                     p.grad_value.row, keys, at.chunk * COLUMNS, p.value_dim, sum_value, A(1));
    }
}

// Of all weights: a thread has two keys, j even and j + 1, of a query.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    attention_dropout_factors_kernel(T *factors, const __grid_constant__ cuda_ops_attention p)
{
    typedef accumulate_type<T> A;
    const uint64_t seed = cuda_ops_philox_seed(p.philox), offset = cuda_ops_philox_offset(p.philox);
    const int64_t pairs = ceil_div(p.keys, 2), rows = p.batch * p.heads * p.queries;
    for (int64_t at = global_thread_index(); at < rows * pairs; at += global_thread_count()) {
        const int64_t row = at / pairs, j = at % pairs * 2;
        A both[2];
        dropout_factors(both, p, row / p.queries, row % p.queries, j, seed, offset);
        T *const to = factors + row * p.keys + j;
        to[0] = store_from_accumulate<T>(both[0]);
        if (j + 1 < p.keys)
            to[1] = store_from_accumulate<T>(both[1]);
    }
}

extern "C" cuda_ops_status cuda_ops_attention_dropout_factors_cuda(void *factors, const cuda_ops_attention *call,
                                                                   cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    const cuda_ops_attention &p = *call;
    if (p.batch < 0 || p.heads < 0 || p.queries < 0 || p.keys < 0 || !(p.dropout >= 0 && p.dropout <= 1))
        return CUDA_OPS_INVALID_ARGUMENT;
    const int64_t pairs = p.batch * p.heads * p.queries * ceil_div(p.keys, 2);
    if (pairs == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T,
                      attention_dropout_factors_kernel<T>
                      <<<clamp_grid(ceil_div(pairs, THREADS)), THREADS, 0, (cudaStream_t)stream>>>((T *)factors, p);
                      return launch_status());
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}

// A warp a row.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    attention_delta_kernel(accumulate_type<T> *delta, const T *grad_output, const T *output,
                           const accumulate_type<T> *grad_logsumexp, cuda_ops_attention_strides grad_output_strides,
                           cuda_ops_attention_strides output_strides, int64_t rows, int64_t heads, int64_t queries,
                           int64_t elements)
{
    typedef accumulate_type<T> A;
    const int lane = threadIdx.x % WARP_SIZE;
    for (int64_t row = global_thread_index() / WARP_SIZE; row < rows; row += global_thread_count() / WARP_SIZE) {
        const int64_t i = row % queries, head = row / queries % heads, batch = row / queries / heads;
        const T *const g =
            rows_of<T>((const void *)grad_output, grad_output_strides, batch, head) + i * grad_output_strides.row;
        const T *const o = rows_of<T>((const void *)output, output_strides, batch, head) + i * output_strides.row;
        A sum = 0;
        for (int64_t d = lane; d < elements; d += WARP_SIZE)
            sum += load_as_accumulate(g[d]) * load_as_accumulate(o[d]);
        sum = warp_sum(sum);
        if (lane == 0)
            delta[row] = sum - (grad_logsumexp ? grad_logsumexp[row] : A(0));
    }
}

template <typename T>
static cuda_ops_status launch_delta(void *delta, const AttentionCall &call)
{
    typedef accumulate_type<T> A;
    const cuda_ops_attention &p = call.problem;
    const int64_t rows = attention_rows(p), queries = p.sequences.query_starts ? p.sequences.query_rows : p.queries;
    attention_delta_kernel<T><<<clamp_grid(ceil_div(rows, THREADS / WARP_SIZE)), THREADS, 0, call.stream>>>(
        (A *)delta, (const T *)call.grad_output, (const T *)call.output, (const A *)call.grad_logsumexp, p.grad_output,
        p.output, rows, p.heads, queries, p.value_dim);
    return launch_status();
}

cuda_ops_status attention_delta(void *delta, const AttentionCall &call)
{
    CUDA_OPS_DISPATCH(call.dtype, T, return launch_delta<T>(delta, call));
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}

int64_t attention_simt_workspace(const AttentionCall &call, const Device &)
{
    const cuda_ops_attention &p = call.problem;
    const int64_t size = call.dtype == CUDA_OPS_FLOAT64 ? 8 : 4;
    return call.backward ? attention_rows(p) * size * (attention_has_remainder(p) ? 2 : 1) : 0;
}

template <typename A>
static cuda_ops_status launch(void (*kernel)(SimtWork), SimtWork &work, int64_t heads, int64_t rows, int64_t columns,
                              cudaStream_t stream)
{
    const size_t bytes = (2 * SLICE + TILE) * PITCH * sizeof(A);
    work.tiles = ceil_div(rows, TILE);
    work.chunks = columns > COLUMNS ? ceil_div(columns, COLUMNS) : 1;
    work.blocks = work.p.batch * heads * work.tiles * work.chunks;
    if (work.blocks == 0)
        return CUDA_OPS_SUCCESS;
    if (bytes > 48 << 10)
        allow_shared_memory(kernel, bytes);
    kernel<<<(unsigned int)(work.blocks < INT32_MAX ? work.blocks : INT32_MAX), THREADS, bytes, stream>>>(work);
    return launch_status();
}

template <typename T>
static cuda_ops_status simt(const AttentionCall &call)
{
    typedef accumulate_type<T> A;
    const cuda_ops_attention &p = call.problem;
    SimtWork work = {};
    work.p = p;
    work.query = call.query, work.key = call.key, work.value = call.value;
    if (!call.backward) {
        work.result = call.output, work.logsumexp_result = call.logsumexp, work.state = call.state;
        return launch<A>(attention_simt_forward_kernel<T>, work, p.heads, p.queries, p.value_dim, call.stream);
    }
    work.grad_output = call.grad_output, work.logsumexp = call.logsumexp, work.delta = call.workspace;
    cuda_ops_status status = launch_delta<T>(call.workspace, call);
    if (status == CUDA_OPS_SUCCESS && attention_has_remainder(p)) {
        work.remainder = (A *)call.workspace + attention_rows(p);
        status = launch<A>(attention_simt_remainder_kernel<T>, work, p.heads, p.queries, 0, call.stream);
    }
    if (status != CUDA_OPS_SUCCESS)
        return status;
    work.result = call.grad_query, work.grad_mask = call.grad_mask;
    status = launch<A>(attention_simt_grad_query_kernel<T>, work, p.heads, p.queries, p.head_dim, call.stream);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    work.result = call.grad_key, work.second_result = call.grad_value;
    return launch<A>(attention_simt_grad_key_value_kernel<T>, work, p.key_heads, p.keys,
                     p.head_dim > p.value_dim ? p.head_dim : p.value_dim, call.stream);
}

cuda_ops_status attention_simt(const AttentionCall &call, const Device &)
{
    CUDA_OPS_DISPATCH(call.dtype, T, return simt<T>(call));
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}
