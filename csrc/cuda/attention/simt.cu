// attention, simt path: every dtype, size and option on the CUDA cores.
// A block makes tiles of 64 queries x 64 keys, a thread 8 x 4 scores of them in registers (4 x 4 of doubles). Slices of
// 32 elements of both operands' rows lie in shared memory as in global memory, in the accumulation type; four elements
// are read at once. The exponentials go through shared memory to the second product, of which a block keeps 64 or 128
// columns in registers; wider rows are split over blocks, each of which computes the scores again. Backward is two
// kernels, by queries (grad_query) and by keys (grad_key and grad_value), so that nothing is added up between blocks.
// Bound by arithmetic: in float32 128 multiply-adds of a warp take 12 loads, 16 wavefronts, from shared memory.
#include "attention/paths.h"
#include "attention/scores.cuh"
#include "common/aligned_vector.cuh"

static constexpr int TILE = 64;         // queries and keys of a tile
static constexpr int SLICE = 32;        // of the summed dimension, in shared memory at a time
static constexpr int PITCH = SLICE + 4; // between rows of a slice: eight rows' four elements are in banks of their own
static constexpr int WEIGHT_PITCH = 68; // between rows of a tile in shared memory
static constexpr int SLICES = 2 * TILE * PITCH; // elements of both slices, which a tile has room in, too
static_assert(SLICES >= TILE * WEIGHT_PITCH, "a tile has room in the slices");

// Of a row's elements that a result has; more are chunks, of blocks of their own.
template <int HALVES>
static constexpr int COLUMNS = HALVES * TILE;

// A thread's rows of a tile; its columns are four.
template <typename A>
static constexpr int ROWS = sizeof(A) == 8 ? 4 : 8;
template <typename A>
static constexpr int THREADS = 16 * TILE / ROWS<A>;

// Blocks of a multiprocessor at a time, for which registers are kept: they hide each other's waits.
template <typename A, int HALVES>
static constexpr int resident_blocks(int of_one_half, int of_two)
{
    return sizeof(A) == 8 ? 1 : HALVES == 1 ? of_one_half : of_two;
}

struct SimtWork {
    cuda_ops_attention p;
    const void *query, *key, *value, *output, *grad_output, *logsumexp, *delta, *grad_logsumexp;
    void *result, *second_result, *logsumexp_result, *grad_mask;
    // delta and the remainder of logsumexp as grad_query's kernel has found them (SimtRow).
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
template <typename T, int HALVES>
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

template <typename T, int HALVES>
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

// Whether queries [i, i + TILE) are there and see all keys [j, j + TILE).
__device__ __forceinline__ bool sees_whole_tile(const cuda_ops_attention_sequence &s, int64_t i, int64_t j)
{
    return i + TILE <= s.queries && cuda_ops_attention_sequence_first_key(&s, i + TILE - 1) <= j &&
           j + TILE <= cuda_ops_attention_sequence_last_key(&s, i);
}

// Of keys [j, j + TILE) those that windows let query i see, of which there may be none.
struct SimtSeen {
    int begin, end;
    __device__ __forceinline__ SimtSeen(const cuda_ops_attention_sequence &s, int64_t i, int64_t j, bool whole)
        : begin(0), end(whole ? TILE : 0)
    {
        if (!whole && i < s.queries) {
            begin = (int)cuda_ops_attention_clamp(cuda_ops_attention_sequence_first_key(&s, i) - j, 0, TILE);
            end = (int)cuda_ops_attention_clamp(cuda_ops_attention_sequence_last_key(&s, i) - j, 0, TILE);
        }
    }
    __device__ __forceinline__ bool has(int key) const
    {
        return begin <= key && key < end;
    }
};

// Whether scores are scaled products of the keys seen: those are made in registers. All others go through shared
// memory, one after the other, so that what makes them stands once in the kernel.
__device__ __forceinline__ bool has_plain_scores(const cuda_ops_attention &p)
{
    return !(p.softcap > 0) && !p.alibi_slopes && p.mask_kind == CUDA_OPS_ATTENTION_MASK_NONE;
}

template <typename T, int HALVES>
__global__ void __launch_bounds__(THREADS<accumulate_type<T>>, (resident_blocks<accumulate_type<T>, HALVES>(4, 3)))
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
                const bool whole = sees_whole_tile(s, at.first, j);
#pragma unroll
                for (int r = 0; r < ROWS<A>; r++) {
                    const SimtSeen seen(s, at.first + row_in_tile<A>(r), j, whole);
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
            multiply_weights<T, HALVES>(sum, weights, value + j * p.value.row, p.value.row, s.keys - j,
                                        at.chunk * COLUMNS<HALVES>, p.value_dim, slices, work.vectors);
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
        store_result<T, HALVES>(rows_of<T>(work.result, p.output, at.batch, at.head) +
                                    (s.first_query + at.first) * p.output.row,
                                p.output.row, queries, at.chunk * COLUMNS<HALVES>, p.value_dim, sum, A(1));
    }
}

// What backward knows of a query: P = exp((score - logsumexp) - remainder), dS = P (dP - delta).
template <typename A>
struct SimtRow {
    A logsumexp, remainder, delta;
};

// Sums over keys, by which these are mended: of P, of dS and of P |dP|.
template <typename A>
struct SimtSums {
    A weights, gradients, sizes;
    __device__ __forceinline__ void add(A weight, A gradient, A gradient_of_weight)
    {
        weights += weight, gradients += gradient, sizes += weight * fabs(gradient_of_weight);
    }
};

// Logsumexp and delta are rounded, and forward may have summed in another order: the sum of P is not 1, and that of dS
// not grad_logsumexp. Where a row has nearly all of its weight on a key, or keys that are alike, its gradient is a
// small difference of large sums, and most of its error is that of delta. What is off is mended, so that it is right
// for the very P and dP that the kernels make; that takes all sums over the keys once more. Of few queries, whose
// forward may be the decode path's, nearly all rows are mended; of more only what is far off, since forward adds up
// scores as backward does. What is off by much more than that is no rounding, but a logsumexp of other keys too.
template <typename T>
__device__ __forceinline__ bool mend(SimtRow<accumulate_type<T>> &row, const SimtSums<accumulate_type<T>> &sums,
                                     accumulate_type<T> grad_logsumexp, const cuda_ops_attention &p)
{
    typedef accumulate_type<T> A;
    const A slack = (sizeof(A) == 8 ? A(0x1p-53) : A(0x1p-24)) * (p.queries <= TILE ? 1 : 64), most = A(0x1p-12);
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

// From scores and the products of grad_output and value: tile becomes D P, gradient dS times the cap's derivative.
// grad_mask: where dS goes, or NULL. i, j: of one element. sums: of the query, or NULL.
template <typename T>
__device__ __forceinline__ void gradient_of_score(accumulate_type<T> &weight, accumulate_type<T> &gradient,
                                                  const AttentionScores<accumulate_type<T>> &scores, int64_t i,
                                                  int64_t j, const SimtRow<accumulate_type<T>> &row,
                                                  accumulate_type<T> dropout, T *grad_mask,
                                                  SimtSums<accumulate_type<T>> *sums)
{
    typedef accumulate_type<T> A;
    A cap;
    const A score = scores.score(weight * A(scores.p.scale), i, j, cap);
    // What is not seen adds nothing, whatever its value is.
    const bool seen = score != -A(CUDART_INF);
    const A weight_of_key = seen ? exp(score - row.logsumexp - row.remainder) : A(0);
    const A gradient_of_key = seen ? weight_of_key * (gradient * dropout - row.delta) : A(0);
    if (grad_mask && i < scores.s.queries && j < scores.s.keys)
        grad_mask[((int64_t)scores.row + i) * scores.p.keys + j] = store_from_accumulate<T>(gradient_of_key);
    if (sums && seen)
        sums->add(weight_of_key, gradient_of_key, gradient * dropout);
    weight = weight_of_key * dropout;
    gradient = gradient_of_key * cap;
}

// The same of a key that is seen or not, of plain scores without dropout.
template <typename A>
__device__ __forceinline__ void plain_gradient(A &weight, A &gradient, bool seen, A scale, const SimtRow<A> &row,
                                               SimtSums<A> *sums)
{
    const A score = weight * scale;
    seen = seen && score != -A(CUDART_INF);
    weight = seen ? exp(score - row.logsumexp - row.remainder) : A(0);
    const A gradient_of_weight = gradient;
    gradient = seen ? weight * (gradient - row.delta) : A(0);
    if (sums && seen)
        sums->add(weight, gradient, gradient_of_weight);
}

template <typename T, int HALVES>
__global__ void __launch_bounds__(THREADS<accumulate_type<T>>, (resident_blocks<accumulate_type<T>, HALVES>(3, 2)))
    attention_simt_grad_query_kernel(const __grid_constant__ SimtWork work)
{
    typedef accumulate_type<T> A;
    extern __shared__ __align__(16) char shared[];
    A *const slices = (A *)shared, *const weights = slices + SLICES;
    SimtRow<A> *const rows = (SimtRow<A> *)(weights + TILE * WEIGHT_PITCH);
    // Of this thread's columns; a row's are THREADS apart, so that no two threads meet in a bank.
    SimtSums<A> *const sums = (SimtSums<A> *)(rows + TILE) + threadIdx.x;
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
                    const bool whole = sees_whole_tile(s, at.first, j);
#pragma unroll
                    for (int r = 0; r < ROWS<A>; r++) {
                        const SimtSeen seen(s, at.first + row_in_tile<A>(r), j, whole);
                        const SimtRow<A> row = rows[row_in_tile<A>(r)];
                        SimtSums<A> sums_of_row = sums[r * THREADS<A>];
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
                multiply_weights<T, HALVES>(sum, weights, key + j * p.key.row, p.key.row, s.keys - j,
                                            at.chunk * COLUMNS<HALVES>, p.head_dim, slices, work.vectors);
            }
            bool mended = false;
            if (turn == 0) {
                __syncthreads(); // the rows are written, where there was no key
#pragma unroll 1
                for (int r = 0; r < ROWS<A>; r++) {
                    const SimtSums<A> mine = sums[r * THREADS<A>];
                    const SimtSums<A> all = {sum_over_columns(mine.weights), sum_over_columns(mine.gradients),
                                             sum_over_columns(mine.sizes)};
                    const int i = row_in_tile<A>(r);
                    const int64_t row_of_all = scores.first_row + at.first + i;
                    if (threadIdx.x % 16 == 0 && i < queries) {
                        SimtRow<A> row = rows[i];
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
        store_result<T, HALVES>(rows_of<T>(work.result, p.grad_query, at.batch, at.head) +
                                    (s.first_query + at.first) * p.grad_query.row,
                                p.grad_query.row, queries, at.chunk * COLUMNS<HALVES>, p.head_dim, sum, A(p.scale));
    }
}

// Tiles have keys as rows and queries as columns.
template <typename T, int HALVES>
__global__ void __launch_bounds__(THREADS<accumulate_type<T>>, (resident_blocks<accumulate_type<T>, HALVES>(3, 2)))
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
                    SimtRow<A> of_query = {};
                    if (at_query < s.queries)
                        of_query = {((const A *)work.logsumexp)[row], ((const A *)work.remainder)[row],
                                    ((const A *)work.delta)[row]};
                    return of_query;
                };
                if (plain) {
                    const bool whole = sees_whole_tile(s, i, at.first);
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        const int64_t at_query = i + column_in_tile(c);
                        const SimtSeen seen(s, at_query, at.first, whole);
                        const SimtRow<A> row = row_of_query(at_query);
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
                                             e % 2 ? factors[1] : factors[0], (T *)nullptr, (SimtSums<A> *)nullptr);
                    }
                    load_tile(gradient, slices);
                }
                multiply_weights<T, HALVES>(sum_value, weights, grad_output + i * p.grad_output.row, p.grad_output.row,
                                            s.queries - i, at.chunk * COLUMNS<HALVES>, p.value_dim, slices,
                                            work.vectors);
                store_tile(weights, gradient);
                multiply_weights<T, HALVES>(sum_key, weights, query + i * p.query.row, p.query.row, s.queries - i,
                                            at.chunk * COLUMNS<HALVES>, p.head_dim, slices, work.vectors);
            }
        }
        store_result<T, HALVES>(rows_of<T>(work.result, p.grad_key, at.batch, at.head) +
                                    (s.first_key + at.first) * p.grad_key.row,
                                p.grad_key.row, keys, at.chunk * COLUMNS<HALVES>, p.head_dim, sum_key, A(p.scale));
        store_result<T, HALVES>(rows_of<T>(work.second_result, p.grad_value, at.batch, at.head) +
                                    (s.first_key + at.first) * p.grad_value.row,
                                p.grad_value.row, keys, at.chunk * COLUMNS<HALVES>, p.value_dim, sum_value, A(1));
    }
}

// Of the kernels without tiles.
static constexpr int PLAIN_THREADS = 256;

// Of all weights: a thread has two keys, j even and j + 1, of a query.
template <typename T>
__global__ void __launch_bounds__(PLAIN_THREADS)
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
    CUDA_OPS_DISPATCH(
        dtype, T,
        attention_dropout_factors_kernel<T>
        <<<clamp_grid(ceil_div(pairs, PLAIN_THREADS)), PLAIN_THREADS, 0, (cudaStream_t)stream>>>((T *)factors, p);
        return launch_status());
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}

// A warp a row.
template <typename T>
__global__ void __launch_bounds__(PLAIN_THREADS)
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
    attention_delta_kernel<T><<<clamp_grid(ceil_div(rows, PLAIN_THREADS / WARP_SIZE)), PLAIN_THREADS, 0, call.stream>>>(
        (A *)delta, (const T *)call.grad_output, (const T *)call.output, (const A *)call.grad_logsumexp, p.grad_output,
        p.output, rows, p.heads, queries, p.value_dim);
    return launch_status();
}

cuda_ops_status attention_delta(void *delta, const AttentionCall &call)
{
    CUDA_OPS_DISPATCH(call.dtype, T, return launch_delta<T>(delta, call));
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}

// Three numbers a row: delta, and what grad_query's kernel has mended for that of grad_key and grad_value.
int64_t attention_simt_workspace(const AttentionCall &call, const Device &)
{
    return call.backward ? attention_rows(call.problem) * (call.dtype == CUDA_OPS_FLOAT64 ? 8 : 4) * 3 : 0;
}

static bool are_fours(const void *tensor, const cuda_ops_attention_strides &strides, int64_t size)
{
    return reinterpret_cast<uintptr_t>(tensor) % (4 * size < 16 ? 4 * size : 16) == 0 && strides.row % 4 == 0 &&
           strides.head % 4 == 0 && strides.batch % 4 == 0;
}

template <typename A>
static cuda_ops_status launch(void (*kernel)(SimtWork), SimtWork &work, int64_t heads, int64_t rows, int64_t columns,
                              int halves, size_t more_bytes, cudaStream_t stream)
{
    const size_t bytes = (SLICES + TILE * WEIGHT_PITCH) * sizeof(A) + more_bytes;
    work.tiles = ceil_div(rows, TILE);
    work.chunks = columns > halves * TILE ? ceil_div(columns, halves * TILE) : 1;
    work.blocks = work.p.batch * heads * work.tiles * work.chunks;
    if (work.blocks == 0)
        return CUDA_OPS_SUCCESS;
    if (bytes > 48 << 10)
        allow_shared_memory(kernel, bytes);
    kernel<<<(unsigned int)(work.blocks < INT32_MAX ? work.blocks : INT32_MAX), THREADS<A>, bytes, stream>>>(work);
    return launch_status();
}

template <typename T, int HALVES>
static cuda_ops_status forward(SimtWork &work, const AttentionCall &call)
{
    typedef accumulate_type<T> A;
    const cuda_ops_attention &p = call.problem;
    work.result = call.output, work.logsumexp_result = call.logsumexp, work.state = call.state;
    return launch<A>(attention_simt_forward_kernel<T, HALVES>, work, p.heads, p.queries, p.value_dim, HALVES, 0,
                     call.stream);
}

template <typename T, int HALVES>
static cuda_ops_status backward(SimtWork &work, const AttentionCall &call)
{
    typedef accumulate_type<T> A;
    const cuda_ops_attention &p = call.problem;
    const int64_t rows = attention_rows(p);
    work.grad_output = call.grad_output, work.logsumexp = call.logsumexp, work.grad_logsumexp = call.grad_logsumexp;
    work.delta = call.workspace;
    work.mended_delta = (A *)call.workspace + rows, work.remainder = (A *)call.workspace + 2 * rows;
    work.vectors = work.vectors && are_fours(call.grad_output, p.grad_output, sizeof(T));
    cuda_ops_status status = launch_delta<T>(call.workspace, call);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    work.result = call.grad_query, work.grad_mask = call.grad_mask;
    const size_t bytes = TILE * sizeof(SimtRow<A>) + THREADS<A> * ROWS<A> * sizeof(SimtSums<A>);
    status = launch<A>(attention_simt_grad_query_kernel<T, HALVES>, work, p.heads, p.queries, p.head_dim, HALVES, bytes,
                       call.stream);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    work.delta = work.mended_delta;
    work.result = call.grad_key, work.second_result = call.grad_value;
    return launch<A>(attention_simt_grad_key_value_kernel<T, HALVES>, work, p.key_heads, p.keys,
                     p.head_dim > p.value_dim ? p.head_dim : p.value_dim, HALVES, 0, call.stream);
}

template <typename T>
static cuda_ops_status simt(const AttentionCall &call)
{
    const cuda_ops_attention &p = call.problem;
    const bool is_float = sizeof(T) == 4;
    const int64_t columns = p.head_dim > p.value_dim ? p.head_dim : p.value_dim;
    SimtWork work = {};
    work.p = p;
    work.query = call.query, work.key = call.key, work.value = call.value;
    work.vectors = are_fours(call.query, p.query, sizeof(T)) && are_fours(call.key, p.key, sizeof(T)) &&
                   are_fours(call.value, p.value, sizeof(T));
    // Of up to 64 columns half of the sums: more blocks are resident. The other dtypes have faster paths.
    if constexpr (is_float)
        if (columns <= TILE)
            return call.backward ? backward<T, 1>(work, call) : forward<T, 1>(work, call);
    return call.backward ? backward<T, 2>(work, call) : forward<T, 2>(work, call);
}

cuda_ops_status attention_simt(const AttentionCall &call, const Device &)
{
    CUDA_OPS_DISPATCH(call.dtype, T, return simt<T>(call));
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}
