// The simt path's kernel, for any dtype, storage order and tile; gemm/simt/simt.cu says what it is for and chooses.
// - cp.async copies slices of A and B into a pipeline of STAGES in shared memory, while older ones are multiplied.
// - The registers for the next k are loaded while the present one is multiplied.
// - A warp's tile is compact (ladder/09_warp_tile.cu). Of the SLICES groups of warps in a block each sums its part of
//   every slice's k, which fills an SM where D has few tiles.
#ifndef CUDA_OPS_GEMM_SIMT_KERNEL_CUH
#define CUDA_OPS_GEMM_SIMT_KERNEL_CUH

#include "gemm/epilogue.cuh"
#include "gemm/simt/load.cuh"
#include "gemm/simt/store.cuh"

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
        const SimtPosition at = {row,    column,     split,     batch,    lane,       lane_m,
                                 lane_n, warp_slice, warp_tile, warp_row, warp_column};
        store_through_shared<T, Tile, simt_rounds<T, Tile, A_K_MAJOR, B_K_MAJOR>>(d, preactivation, partial, shared,
                                                                                  sum, s, at, epilogue);
    } else { // from registers; in a function of its own the machine code differs
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
// then takes a second pass, as splits do, and so do the others but relu.
static inline bool simt_wants_shared_memory(const cuda_ops_gemm_problem &p)
{
    return p.preactivation || p.activation > CUDA_OPS_GEMM_RELU;
}

template <typename Tile>
static bool simt_uses_partial(const cuda_ops_gemm_problem &p, int64_t splits)
{
    return splits > 1 || (!Tile::THROUGH_SHARED && simt_wants_shared_memory(p));
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

static constexpr int64_t SIMT_MOST_SPLITS = 64; // of k

// What the choice knows of a tile: the rate of an SM that holds one block (`alone`) or several (`full`), relative to
// its best.
struct SimtChoice {
    int m, n;
    double alone, full;
    bool through_shared; // its epilogue, which then has all activations
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
    constexpr int64_t START = 64, SMALLEST_SPLIT = 128;
    // With more tiles k stays whole: the SMs are busy, and splits would only add traffic.
    const int64_t full_tiles = 4 * device.multiprocessors;
    constexpr double SECOND_LAUNCH = 6e5, ADD_SPLIT = 0.5; // for an element of a split
    SimtPlan best = {0, 1, 0};
    double least = 0;
    for (int tile = 0; tile < COUNT; tile++) {
        const SimtChoice c = choices[tile];
        const int64_t tiles = ceil_div(p.m, c.m) * ceil_div(p.n, c.n) * p.batch;
        for (int64_t splits = 1; splits <= SIMT_MOST_SPLITS; splits++) {
            if (splits > 1 && (p.k / splits < SMALLEST_SPLIT || p.batch > MAX_GRID || tiles > full_tiles))
                break;
            const int64_t busiest = ceil_div(tiles * splits, device.multiprocessors);
            const double together = c.alone * (double)busiest, speed = together < c.full ? together : c.full;
            double time = (double)busiest * c.m * c.n * (double)(ceil_div(p.k, splits) + START) / speed;
            if (splits > 1 || (!c.through_shared && simt_wants_shared_memory(p)))
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
