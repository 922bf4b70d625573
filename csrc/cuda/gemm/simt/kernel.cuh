// The simt path's kernel, for any dtype, storage order and tile; gemm/simt/simt.cu says what it is for and chooses.
// - cp.async copies slices of A and B into a pipeline of STAGES in shared memory, while older ones are multiplied.
// - The registers for the next k are loaded while the present one is multiplied.
// - A warp's tile is compact (ladder/09_warp_tile.cu). Of the SLICES groups of warps in a block each sums its round of
//   every slice's k, which fills an SM where D has few tiles.
#ifndef CUDA_OPS_GEMM_SIMT_KERNEL_CUH
#define CUDA_OPS_GEMM_SIMT_KERNEL_CUH

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "gemm/epilogue.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared_memory.cuh"

// Copies COUNT elements from global to shared memory by cp.async, zeros where `inside` is false. Before sm_80 (and for
// fp16 and bf16, which are widened on the way) by a load and a store.
template <typename T, typename A, int COUNT>
__device__ __forceinline__ void copy_elements(A *shared, const T *global, bool inside)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    constexpr bool asynchronous = sizeof(T) == sizeof(A);
#else
    constexpr bool asynchronous = false;
#endif
    if constexpr (asynchronous)
        cp_async<(int)sizeof(T) * COUNT>(shared_address(shared), global, inside ? (int)sizeof(T) * COUNT : 0);
    else
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            shared[e] = inside ? load_as_accumulate(global[e]) : A(0);
}

// A tile configuration. BLOCKS: that an SM holds at once. THROUGH_SHARED: the epilogue goes through shared memory. A
// warp has LANES_M x LANES_N lanes, a thread THREAD_M x THREAD_N sums, in vectors of 16 bytes that lie a warp's width
// apart, so that the lanes of a warp read adjacent 16-byte words.
template <int WARPS_M_, int WARPS_N_, int SLICES_, int LANES_M_, int THREAD_M_, int THREAD_N_, int DEPTH_, int STAGES_,
          int BLOCKS_, bool THROUGH_SHARED_ = false>
struct SimtTile {
    static constexpr int WARPS_M = WARPS_M_, WARPS_N = WARPS_N_, SLICES = SLICES_, LANES_M = LANES_M_,
                         LANES_N = 32 / LANES_M_, THREAD_M = THREAD_M_, THREAD_N = THREAD_N_, DEPTH = DEPTH_,
                         STAGES = STAGES_, BLOCKS = BLOCKS_;
    static constexpr bool THROUGH_SHARED = THROUGH_SHARED_;
    static constexpr int WARP_M = LANES_M * THREAD_M, WARP_N = LANES_N * THREAD_N;
    static constexpr int M = WARPS_M * WARP_M, N = WARPS_N * WARP_N;
    static constexpr int THREADS = WARPS_M * WARPS_N * SLICES * 32;
};

// Pitch of a row of LINES in shared memory: where a warp writes 4 lines at 8 values of k, 4 words of padding spread
// them over all 32 banks.
template <int LINES, bool K_MAJOR>
static constexpr int simt_pitch = K_MAJOR ? LINES + 4 : LINES;

static constexpr int power_of_two_within(int count)
{
    return count < 2 ? 1 : 2 * power_of_two_within(count / 2);
}

// What a thread copies of a slice of LINES x DEPTH of one operand. K_MAJOR: stored as operand[line][k], and transposed
// on the way element by element; else operand[k][line], VECTOR elements at a time. Lines out of bounds are replaced by
// the last one, whose products are never stored, so that the loop tests k alone.
template <typename T, int LINES, int DEPTH, int THREADS, bool K_MAJOR, int VECTOR>
struct SimtSource {
    static constexpr int PITCH = simt_pitch<LINES, K_MAJOR>;
    static constexpr int POINTERS = K_MAJOR ? LINES * 8 / THREADS : 1;
    static constexpr int ROW = LINES / VECTOR;                      // copies for one k
    static constexpr int ROWS = power_of_two_within(THREADS / ROW); // k that the threads copy at once
    static constexpr bool SOME_IDLE = ROWS * ROW < THREADS;
    const T *pointer[POINTERS > 0 ? POINTERS : 1];
    int shared_offset, depth;
    int64_t step; // elements between two k
};

template <typename T, int LINES, int DEPTH, int THREADS, bool K_MAJOR, int VECTOR>
__device__ __forceinline__ void start_source(SimtSource<T, LINES, DEPTH, THREADS, K_MAJOR, VECTOR> &source,
                                             const T *operand, int64_t stride, int64_t first, int64_t lines,
                                             int64_t begin)
{
    typedef SimtSource<T, LINES, DEPTH, THREADS, K_MAJOR, VECTOR> S;
    const int thread = threadIdx.x;
    if constexpr (K_MAJOR) {
        static_assert(VECTOR == 1 && DEPTH % 8 == 0 && LINES * 8 % THREADS == 0, "whole rounds of copies");
        source.depth = thread % 8;
        source.shared_offset = source.depth * S::PITCH + thread / 8;
#pragma unroll
        for (int r = 0; r < S::POINTERS; r++) {
            const int64_t line = first + thread / 8 + r * (THREADS / 8);
            source.pointer[r] = operand + (line < lines ? line : lines - 1) * stride + begin + source.depth;
        }
    } else {
        static_assert(THREADS >= S::ROW && DEPTH % S::ROWS == 0, "whole rounds of copies");
        source.depth = thread / S::ROW;
        const int offset = thread % S::ROW * VECTOR;
        source.shared_offset = source.depth * S::PITCH + offset;
        const int64_t line = first + offset <= lines - VECTOR ? first + offset : lines - VECTOR;
        source.pointer[0] = operand + (begin + source.depth) * stride + line;
        source.step = stride;
    }
}

// Starts the copies of one slice, of which `depths` are in bounds, and advances the source to the next one.
template <typename T, typename A, int LINES, int DEPTH, int THREADS, bool K_MAJOR, int VECTOR>
__device__ __forceinline__ void copy_slice(SimtSource<T, LINES, DEPTH, THREADS, K_MAJOR, VECTOR> &source, A *shared,
                                           int depths)
{
    typedef SimtSource<T, LINES, DEPTH, THREADS, K_MAJOR, VECTOR> S;
    constexpr int ROUNDS = DEPTH / (K_MAJOR ? 8 : S::ROWS), COPIES = ROUNDS * S::POINTERS;
    A *const target = shared + source.shared_offset;
    if (!K_MAJOR && S::SOME_IDLE && source.depth >= S::ROWS)
        return;
#pragma unroll
    for (int c = 0; c < COPIES; c++) {
        const int d = c / S::POINTERS * (K_MAJOR ? 8 : S::ROWS), r = c % S::POINTERS;
        const bool inside = source.depth + d < depths;
        if constexpr (K_MAJOR)
            copy_elements<T, A, 1>(target + d * S::PITCH + r * (THREADS / 8), source.pointer[r] + d, inside);
        else
            copy_elements<T, A, VECTOR>(target + d * S::PITCH, source.pointer[0] + d * source.step, inside);
    }
#pragma unroll
    for (int r = 0; r < S::POINTERS; r++)
        source.pointer[r] += K_MAJOR ? (int64_t)DEPTH : DEPTH * source.step;
}

// Loads a thread's COUNT elements at one k: 16 bytes at a time, LANES * 16 bytes apart.
template <typename A, int COUNT, int LANES>
__device__ __forceinline__ void load_fragment(A (&fragment)[COUNT], const A *shared)
{
    constexpr int V = vector16<A>::size;
#pragma unroll
    for (int i = 0; i < COUNT / V; i++) {
        const vector16<A> v = *reinterpret_cast<const vector16<A> *>(shared + i * LANES * V);
#pragma unroll
        for (int e = 0; e < V; e++)
            fragment[i * V + e] = v.element[e];
    }
}

// Tiles are numbered in bands of GROUP rows of tiles, column by column inside a band, so that the blocks which run at
// the same time share their rows of a and columns of b in the L2.
__device__ __forceinline__ void tile_position(int64_t tile, int64_t tiles_m, int64_t tiles_n, int64_t group,
                                              int64_t &tile_m, int64_t &tile_n)
{
    const int64_t band = tile / (group * tiles_n), first = band * group;
    const int64_t height = tiles_m - first < group ? tiles_m - first : group;
    const int64_t inside = tile - first * tiles_n;
    tile_m = first + inside % height;
    tile_n = inside / height;
}

struct SimtArguments {
    int64_t m, n, k, lda, ldb, ldd, stride_a, stride_b, stride_d;
    int64_t tiles_m, tiles_n, band;
    int64_t chunk;   // the k of a split; the last one has less
    bool to_partial; // sums go to `partial` as they are, and gemm_add_splits finishes them
    bool vectors;    // rows of what is written are aligned to 16 bytes
};

// One outer product. Odd rows go backwards, so that each multiply-add shares a factor with the previous one and reads
// two words, not three, from the register file, whose two banks give one word a clock each.
template <typename A, int TM, int TN>
__device__ __forceinline__ void add_outer_product(A (&sum)[TM][TN], const A (&left)[TM], const A (&right)[TN])
{
#pragma unroll
    for (int i = 0; i < TM; i++)
#pragma unroll
        for (int j = 0; j < TN; j++) {
            const int c = i % 2 ? TN - 1 - j : j;
            sum[i][c] += left[i] * right[c];
        }
}

template <typename T, typename Tile, bool A_K_MAJOR, bool B_K_MAJOR>
static constexpr int simt_ring =
    Tile::STAGES * Tile::DEPTH * (simt_pitch<Tile::M, A_K_MAJOR> + simt_pitch<Tile::N, B_K_MAJOR>);
// The epilogue through shared memory takes as many rounds as the pipeline's memory requires.
template <typename T, typename Tile, bool A_K_MAJOR, bool B_K_MAJOR>
static constexpr int simt_rounds = Tile::M * Tile::N > simt_ring<T, Tile, A_K_MAJOR, B_K_MAJOR> &&Tile::THREAD_M /
                                                           vector16<accumulate_type<T>>::size % 2 ==
                                           0
                                       ? 2
                                       : 1;

template <typename T, typename Tile, bool A_K_MAJOR, bool B_K_MAJOR>
static constexpr int simt_shared_bytes()
{
    constexpr int ring = simt_ring<T, Tile, A_K_MAJOR, B_K_MAJOR>;
    constexpr int sums = Tile::THROUGH_SHARED ? Tile::M * Tile::N / simt_rounds<T, Tile, A_K_MAJOR, B_K_MAJOR>
                         : Tile::SLICES > 1   ? Tile::M * Tile::N
                                              : 0;
    return (ring > sums ? ring : sums) * (int)sizeof(accumulate_type<T>);
}

// Stores adjacent elements of a row, of which `left` are in bounds; whole: all are, and aligned to be written at once.
template <typename To, typename A, int COUNT>
__device__ __forceinline__ void store_row(To *to, const A (&value)[COUNT], int left, bool whole)
{
    typedef aligned_vector<To, COUNT> Vector;
    Vector vector;
#pragma unroll
    for (int e = 0; e < COUNT; e++)
        vector.element[e] = store_from_accumulate<To>(value[e]);
    if (whole)
        *reinterpret_cast<Vector *>(to) = vector;
    else
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            if (e < left)
                to[e] = vector.element[e];
}

// The epilogue through shared memory: the sums go there one by one, and a rolled loop finishes them and writes rows of
// the warp's tile. A 16-byte store would want four sums in consecutive registers, in the very banks of their factors of
// B, and the main loop would lose a quarter of its speed and more. The position of an element in its 16 bytes is XORed
// with the row, so that a warp's stores meet each bank once. Rows [from, from + COUNT) of the thread's; added to what
// is there if `add`.
template <int LANES_M, int WARP_N, int COUNT, typename A, int TM, int TN>
__device__ __forceinline__ void put_sums(A *mine, int lane_m, const A (&sum)[TM][TN], int from, bool add)
{
    constexpr int V = vector16<A>::size, LANES_N = 32 / LANES_M;
#pragma unroll
    for (int e = 0; e < V; e++) {
        volatile A *const to = mine + (e ^ lane_m % V);
#pragma unroll
        for (int i = 0; i < COUNT; i++)
#pragma unroll
            for (int j = e; j < TN; j += V) {
                const int at = (i / V * LANES_M * V + i % V) * WARP_N + j / V * LANES_N * V;
                to[at] = add ? to[at] + sum[from + i][j] : sum[from + i][j];
            }
    }
}

// Where a lane stores its 16 bytes of each row.
template <typename T>
struct SimtRows {
    void *d, *preactivation;     // preactivation: or null
    accumulate_type<T> *partial; // or null: where the sums go as they are instead
    int64_t to, pitch, column;   // offset of row 0, from row to row, and the column in D
    int left;                    // columns in bounds from there on
    bool vectors;                // rows are aligned to 16 bytes
};

// Finishes and stores rows begin, begin + step, ... below `count` of what put_sums left at `results`; row 0 is row
// `first` of D.
template <typename T, int LANES_M, int WARP_N>
__device__ __forceinline__ void finish_rows(const SimtRows<T> &rows, const accumulate_type<T> *results, int64_t first,
                                            int count, int begin, int step, const Epilogue &epilogue)
{
    typedef accumulate_type<T> A;
    constexpr int V = vector16<A>::size;
    const bool vectors = rows.vectors && rows.left == V;
    A bias[V] = {};
    if (epilogue.bias)
#pragma unroll
        for (int e = 0; e < V; e++)
            if (e < rows.left)
                bias[e] = bias_at<T>(epilogue, rows.column + e);
    if (rows.left <= 0)
        return;
#pragma unroll 1
    for (int r = begin; r < count; r += step) {
        const vector16<A> found = *reinterpret_cast<const vector16<A> *>(results + r * WARP_N);
        A value[V];
#pragma unroll
        for (int e = 0; e < V; e++)
            value[e] = found.element[e];
#pragma unroll
        for (int bit = 1; bit < V; bit *= 2)
            if (r / V % LANES_M & bit)
#pragma unroll
                for (int e = 0; e < V; e++)
                    if (!(e & bit)) {
                        const A other = value[e];
                        value[e] = value[e | bit], value[e | bit] = other;
                    }
        const int64_t at = rows.to + (first + r) * rows.pitch;
        if (rows.partial) {
            store_row(rows.partial + at, value, rows.left, vectors);
            continue;
        }
#pragma unroll
        for (int e = 0; e < V; e++)
            value[e] = value[e] * (A)epilogue.alpha + bias[e];
        const bool wide = sizeof(T) == 2 && epilogue.output_float32;
        if (rows.preactivation) {
            if (wide)
                store_row(static_cast<float *>(rows.preactivation) + at, value, rows.left, vectors);
            else
                store_row(static_cast<T *>(rows.preactivation) + at, value, rows.left, vectors);
            if (!wide)
#pragma unroll
                for (int e = 0; e < V; e++) // as it was rounded
                    value[e] = load_as_accumulate(store_from_accumulate<T>(value[e]));
        }
#pragma unroll
        for (int e = 0; e < V; e++)
            value[e] = activate(value[e], opaque(epilogue.activation));
        if (wide)
            store_row(static_cast<float *>(rows.d) + at, value, rows.left, vectors);
        else
            store_row(static_cast<T *>(rows.d) + at, value, rows.left, vectors);
    }
}

// A_K_MAJOR: A is stored m x k, else k x m; B_K_MAJOR: B is stored n x k, else k x n. VECTOR: elements that are copied
// at once of an MN-major operand.
template <typename T, typename Tile, bool A_K_MAJOR, bool B_K_MAJOR, int VECTOR>
__global__ void __launch_bounds__(Tile::THREADS, Tile::BLOCKS)
    gemm_simt_kernel(void *d, void *preactivation, accumulate_type<T> *partial, const T *a, const T *b,
                     const __grid_constant__ SimtArguments s, const __grid_constant__ Epilogue epilogue)
{
    typedef accumulate_type<T> A;
    constexpr int V = vector16<A>::size, DEPTH = Tile::DEPTH, STAGES = Tile::STAGES, THREADS = Tile::THREADS;
    constexpr int A_PITCH = simt_pitch<Tile::M, A_K_MAJOR>, B_PITCH = simt_pitch<Tile::N, B_K_MAJOR>;
    constexpr int STAGE = DEPTH * (A_PITCH + B_PITCH);
    constexpr int TM = Tile::THREAD_M, TN = Tile::THREAD_N;
    constexpr int STEPS = DEPTH / Tile::SLICES;
    static_assert(STEPS % 2 == 0, "double-buffered registers");
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    A *const shared = reinterpret_cast<A *>(shared_bytes);

    int64_t tile_m, tile_n;
    const int64_t tiles = s.tiles_m * s.tiles_n, split = blockIdx.x / tiles, batch = blockIdx.y;
    tile_position(blockIdx.x - split * tiles, s.tiles_m, s.tiles_n, s.band, tile_m, tile_n);
    const int64_t row = tile_m * Tile::M, column = tile_n * Tile::N, begin = split * s.chunk;
    const int64_t depth = s.k - begin < s.chunk ? s.k - begin : s.chunk;
    const int slices = (int)ceil_div(depth, DEPTH);

    // Bit 0 of the lane runs along n, bit 1 along m: see ladder/09_warp_tile.cu.
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_slice = warp / (Tile::WARPS_M * Tile::WARPS_N), warp_tile = warp % (Tile::WARPS_M * Tile::WARPS_N);
    const int lane_m = (lane >> 1 & 1) | lane >> 4 << 1, lane_n = (lane & 1) | (lane >> 2 & 3) << 1;
    const int warp_row = warp_tile / Tile::WARPS_N * Tile::WARP_M;
    const int warp_column = warp_tile % Tile::WARPS_N * Tile::WARP_N;
    const int my_row = warp_row + lane_m * V, my_column = warp_column + lane_n * V;

    wait_for_predecessor();
    release_successor();
    SimtSource<T, Tile::M, DEPTH, THREADS, A_K_MAJOR, A_K_MAJOR ? 1 : VECTOR> a_source;
    SimtSource<T, Tile::N, DEPTH, THREADS, B_K_MAJOR, B_K_MAJOR ? 1 : VECTOR> b_source;
    start_source(a_source, a + batch * s.stride_a, s.lda, row, s.m, begin);
    start_source(b_source, b + batch * s.stride_b, s.ldb, column, s.n, begin);
    const auto existing = [depth](int slice) {
        const int64_t rest = depth - (int64_t)slice * DEPTH;
        return (int)(rest < DEPTH ? rest : DEPTH);
    };
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) {
        copy_slice(a_source, shared + stage * STAGE, existing(stage));
        copy_slice(b_source, shared + stage * STAGE + DEPTH * A_PITCH, existing(stage));
        cp_async_commit_group();
    }

    A sum[TM][TN] = {};
    A left[2][TM], right[2][TN];
    const int a_offset = my_row + warp_slice * STEPS * A_PITCH;
    const int b_offset = my_column + warp_slice * STEPS * B_PITCH + DEPTH * A_PITCH;
    int read_stage = 0, write_stage = STAGES - 1;
    const A *read = shared;
    cp_async_wait_group<STAGES - 2>();
    __syncthreads();
    load_fragment<A, TM, Tile::LANES_M>(left[0], read + a_offset);
    load_fragment<A, TN, Tile::LANES_N>(right[0], read + b_offset);
    for (int slice = 0; slice < slices; slice++) {
        // Copies beyond the last slice write zeros that nobody reads; a test for it would cost a branch a step.
        const int depths = existing(slice + STAGES - 1);
#pragma unroll
        for (int p = 0; p < STEPS; p++) {
            if (p == STEPS - 1) {
                // The next slice has landed, and all threads have read the stage that the next copies overwrite.
                cp_async_wait_group<STAGES - 2>();
                __syncthreads();
                read_stage = read_stage == STAGES - 1 ? 0 : read_stage + 1;
                read = shared + read_stage * STAGE;
            }
            const int next = (p + 1) % STEPS;
            load_fragment<A, TM, Tile::LANES_M>(left[next % 2], read + a_offset + next * A_PITCH);
            load_fragment<A, TN, Tile::LANES_N>(right[next % 2], read + b_offset + next * B_PITCH);
            if (p == 0) {
                copy_slice(a_source, shared + write_stage * STAGE, depths);
                copy_slice(b_source, shared + write_stage * STAGE + DEPTH * A_PITCH, depths);
                cp_async_commit_group();
                write_stage = write_stage == STAGES - 1 ? 0 : write_stage + 1;
            }
            add_outer_product(sum, left[p % 2], right[p % 2]);
        }
    }
    cp_async_wait_group<0>();

    if constexpr (Tile::THROUGH_SHARED) {
        __syncthreads();
        // Through shared memory, where the stages were.
        constexpr int OUT_ROUNDS = simt_rounds<T, Tile, A_K_MAJOR, B_K_MAJOR>, ROUND_M = TM / V / OUT_ROUNDS * V;
        constexpr int ROUND_ROWS = Tile::LANES_M * ROUND_M; // of a warp, in a round
        static_assert(TM % (V * OUT_ROUNDS) == 0, "a round has whole vectors");
        constexpr int ACROSS = Tile::WARP_N / V, ROWS = 32 / ACROSS; // lanes for a row, rows at once
        A *const results = shared + warp_tile * ROUND_ROWS * Tile::WARP_N;
        A *const mine = results + lane_m * V * Tile::WARP_N + lane_n * V;
        const bool whole = !s.to_partial;
        const int64_t c = column + warp_column + lane % ACROSS * V;
        const SimtRows<T> rows = {d,
                                  preactivation,
                                  whole ? nullptr : partial,
                                  (whole ? batch * s.stride_d : (split * gridDim.y + batch) * s.m * s.n) + c,
                                  whole ? s.ldd : s.n,
                                  c,
                                  s.n - c < V ? (int)(s.n - c) : V,
                                  s.vectors};
#pragma unroll 1
        for (int round = 0; round < OUT_ROUNDS; round++) {
#pragma unroll 1
            for (int group = 0; group < Tile::SLICES; group++) {
                // The groups' sums are added in order.
                if (group == warp_slice)
#pragma unroll
                    for (int p = 0; p < OUT_ROUNDS; p++)
                        if (p == round)
                            put_sums<Tile::LANES_M, Tile::WARP_N, ROUND_M>(mine, lane_m, sum, p * ROUND_M,
                                                                           Tile::SLICES > 1 && group > 0);
                if (Tile::SLICES > 1)
                    __syncthreads();
            }
            __syncwarp();
            const int64_t first = row + warp_row + round * ROUND_ROWS, left = s.m - first;
            finish_rows<T, Tile::LANES_M, Tile::WARP_N>(
                rows, results + lane % ACROSS * V, first, left < ROUND_ROWS ? (int)left : ROUND_ROWS,
                lane / ACROSS + warp_slice * ROWS, ROWS * Tile::SLICES, epilogue);
            if (Tile::SLICES > 1)
                __syncthreads();
            __syncwarp();
        }
    } else {
        if constexpr (Tile::SLICES > 1) {
            // The groups' sums are added in order through shared memory, which the main loop no longer needs.
            __syncthreads();
            A *const mine = shared + warp_tile * 32 * TM * TN + lane;
#pragma unroll 1
            for (int other = 1; other < Tile::SLICES; other++) {
                if (warp_slice == other)
#pragma unroll
                    for (int i = 0; i < TM * TN; i++)
                        mine[i * 32] = sum[i / TN][i % TN];
                __syncthreads();
                if (warp_slice == 0)
#pragma unroll
                    for (int i = 0; i < TM * TN; i++)
                        sum[i / TN][i % TN] += mine[i * 32];
                __syncthreads();
            }
            if (warp_slice > 0)
                return;
        }

        // For partial sums `epilogue` is the identity, yet must not be left out: a sum that is stored as it is would be
        // kept in one of four consecutive registers, the bank of its factor of B, and the main loop would lose a
        // quarter of its speed.
        const bool whole = !s.to_partial;
        const int64_t to_row = whole ? s.ldd : s.n;
        const int64_t to = whole ? batch * s.stride_d : (split * gridDim.y + batch) * s.m * s.n;
        const bool vectors = sizeof(T) == sizeof(A) && to_row % V == 0 && to % V == 0 &&
                             reinterpret_cast<uintptr_t>(whole ? d : (void *)partial) % 16 == 0;
#pragma unroll
        for (int i = 0; i < TM; i++) {
            const int64_t r = row + my_row + i / V * Tile::LANES_M * V + i % V;
            if (r >= s.m)
                break;
#pragma unroll
            for (int j = 0; j < TN; j += V) {
                const int64_t c = column + my_column + j * Tile::LANES_N;
                vector16<A> v;
#pragma unroll
                for (int e = 0; e < V; e++)
                    if (c + e < s.n)
                        v.element[e] = finish_simply<T>(sum[i][j + e], epilogue, c + e);
                if (vectors && c + V <= s.n) {
                    A *const target = whole ? static_cast<A *>(d) : partial;
                    *reinterpret_cast<vector16<A> *>(target + to + r * to_row + c) = v;
                    continue;
                }
#pragma unroll
                for (int e = 0; e < V; e++) {
                    if (c + e >= s.n)
                        break;
                    if (whole)
                        store_output<T>(d, to + r * to_row + c + e, v.element[e], epilogue);
                    else
                        partial[to + r * to_row + c + e] = v.element[e];
                }
            }
        }
    }
}

// Without shared memory in between, gelu would be inlined for each of a thread's sums and be most of the kernel. It
// then takes a second pass, as splits do.
template <typename Tile>
static bool simt_uses_partial(const cuda_ops_gemm_problem &p, int64_t splits)
{
    return splits > 1 || (!Tile::THROUGH_SHARED && (p.preactivation || p.activation == CUDA_OPS_GEMM_GELU ||
                                                    p.activation == CUDA_OPS_GEMM_GELU_TANH));
}

template <typename T, typename Tile, bool A_K_MAJOR, bool B_K_MAJOR, int VECTOR>
static cuda_ops_status simt_launch_kernel(const GemmCall &call, int64_t splits)
{
    const cuda_ops_gemm_problem &p = call.problem;
    const int64_t tiles_m = ceil_div(p.m, Tile::M), tiles_n = ceil_div(p.n, Tile::N);
    const int bytes =
        spread_bytes(simt_shared_bytes<T, Tile, A_K_MAJOR, B_K_MAJOR>(), tiles_m * tiles_n * splits * p.batch);
    const auto kernel = gemm_simt_kernel<T, Tile, A_K_MAJOR, B_K_MAJOR, VECTOR>;
    if (bytes > 48 * 1024) {
        const cudaError_t error = allow_shared_memory(kernel, bytes);
        if (error != cudaSuccess)
            return CUDA_OPS_CUDA_ERROR + (int)error;
    }
    const int64_t chunk = ceil_div(ceil_div(p.k, splits), Tile::DEPTH) * Tile::DEPTH;
    const bool to_partial = simt_uses_partial<Tile>(p, splits);
    constexpr int V = vector16<accumulate_type<T>>::size;
    const bool vectors = to_partial ? p.n % V == 0 && is_aligned_16(call.workspace)
                                    : p.ldd % V == 0 && (p.batch == 1 || p.stride_d % V == 0) &&
                                          is_aligned_16(call.d) && is_aligned_16(p.preactivation);
    const SimtArguments s = {p.m,
                             p.n,
                             p.k,
                             p.lda,
                             p.ldb,
                             p.ldd,
                             p.stride_a,
                             p.stride_b,
                             p.stride_d,
                             tiles_m,
                             tiles_n,
                             8,
                             splits > 1 ? chunk : p.k,
                             to_partial,
                             vectors};
    const Epilogue epilogue = to_partial ? Epilogue{1, nullptr, 0, 0, CUDA_OPS_GEMM_NONE} : epilogue_of(call);
    // A grid's second dimension ends at 65535; k is not split where the batch is larger.
    for (int64_t first = 0; first < p.batch; first += MAX_GRID) {
        const int64_t batch = p.batch - first < MAX_GRID ? p.batch - first : MAX_GRID;
        const int64_t output = first * p.stride_d * dtype_size(p.output_dtype);
        const int64_t sums = to_partial ? first * p.m * p.n : 0; // with splits there is one round
        void *const preactivation = p.preactivation ? static_cast<char *>(p.preactivation) + output : nullptr;
        launch_dependent(kernel, dim3((unsigned int)(tiles_m * tiles_n * splits), (unsigned int)batch), Tile::THREADS,
                         bytes, call.stream, static_cast<void *>(static_cast<char *>(call.d) + output), preactivation,
                         static_cast<accumulate_type<T> *>(call.workspace) + sums,
                         static_cast<const T *>(call.a) + first * p.stride_a,
                         static_cast<const T *>(call.b) + first * p.stride_b, s, epilogue);
    }
    return to_partial ? gemm_add_splits(call, splits) : launch_status();
}

// Whether every row of the MN-major operands can be copied 16 bytes at a time: whole vectors, all aligned.
template <typename T>
static bool simt_takes_vectors(const GemmCall &call)
{
    constexpr int V = vector16<T>::size;
    const cuda_ops_gemm_problem &p = call.problem;
    const bool a_strides = p.m % V == 0 && p.lda % V == 0 && (p.batch == 1 || p.stride_a % V == 0);
    const bool b_strides = p.n % V == 0 && p.ldb % V == 0 && (p.batch == 1 || p.stride_b % V == 0);
    return (!p.transpose_a || (a_strides && is_aligned_16(call.a))) &&
           (p.transpose_b || (b_strides && is_aligned_16(call.b)));
}

template <typename T, typename Tile, int VECTOR>
static cuda_ops_status simt_launch(const GemmCall &call, int64_t splits)
{
    const cuda_ops_gemm_problem &p = call.problem;
    if (p.transpose_a && p.transpose_b)
        return simt_launch_kernel<T, Tile, false, true, VECTOR>(call, splits);
    if (p.transpose_a)
        return simt_launch_kernel<T, Tile, false, false, VECTOR>(call, splits);
    if (p.transpose_b)
        return simt_launch_kernel<T, Tile, true, true, 1>(call, splits);
    return simt_launch_kernel<T, Tile, true, false, VECTOR>(call, splits);
}

// What the choice knows of a tile: the rate of an SM that holds one block (`alone`) or several (`full`), relative to
// its best.
struct SimtChoice {
    int m, n;
    double alone, full;
};

struct SimtPlan {
    int tile;       // index into the choices
    int64_t splits; // of k
    double time;    // estimated
};

// The tile and the splits of k with the least estimated time, in multiply-adds of one SM. Time goes by the busiest SM;
// a block costs START more k than it sums. Partial sums are written and read again, and cost a second launch.
template <int COUNT>
static SimtPlan simt_plan(const SimtChoice (&choices)[COUNT], const cuda_ops_gemm_problem &p, GemmDevice device)
{
    constexpr int64_t START = 64, SMALLEST_SPLIT = 128, MOST_SPLITS = 64;
    // With more tiles k stays whole: the SMs are busy, and splits would only add traffic.
    const int64_t full_tiles = 4 * device.multiprocessors;
    constexpr double SECOND_LAUNCH = 8e5, ADD_SPLIT = 1.0 / 100; // for an element of a split, shared by the SMs
    SimtPlan best = {0, 1, 0};
    double least = 0;
    for (int tile = 0; tile < COUNT; tile++) {
        const SimtChoice c = choices[tile];
        const int64_t tiles = ceil_div(p.m, c.m) * ceil_div(p.n, c.n) * p.batch;
        for (int64_t splits = 1; splits <= MOST_SPLITS; splits++) {
            if (splits > 1 && (p.k / splits < SMALLEST_SPLIT || p.batch > MAX_GRID || tiles > full_tiles))
                break;
            const int64_t busiest = ceil_div(tiles * splits, device.multiprocessors);
            const double together = c.alone * (double)busiest, speed = together < c.full ? together : c.full;
            double time = (double)busiest * c.m * c.n * (double)(ceil_div(p.k, splits) + START) / speed;
            if (splits > 1)
                time += SECOND_LAUNCH + ADD_SPLIT * (double)(p.batch * p.m * p.n) * (double)splits;
            if ((tile == 0 && splits == 1) || time < least) {
                least = time;
                best = {tile, splits, time};
            }
        }
    }
    return best;
}

template <typename Tile>
static int64_t simt_workspace(const cuda_ops_gemm_problem &p, int64_t splits)
{
    const int64_t sum = p.dtype == CUDA_OPS_FLOAT64 ? 8 : 4;
    return simt_uses_partial<Tile>(p, splits) ? splits * p.batch * p.m * p.n * sum : 0;
}

#endif
