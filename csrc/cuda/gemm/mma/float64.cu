// gemm, mma path in float64: D = activation(alpha * op(A) op(B) + bias) by mma.sync, m16n8k8 and m16n8k4 on Hopper,
// m8n8k4 before.
//
// A block makes a tile of 64 x 128 or 128 x 64, of small D 32 x 64 or 32 x 32, from a pipeline of slices of 32 or 16 of
// k, which cp.async copies several ahead (16 bytes at a time, or 8, which any alignment allows). Fragments are read
// while the previous ones are multiplied, each element straight to the register the instruction wants; padding avoids
// bank conflicts in both storage orders. Where the last wave has few tiles, their k is split so that they fill the GPU,
// and a second kernel adds the parts in order.
//
// Bound by the tensor cores (128 multiply-adds a cycle and SM). Measured on an H200 against cuBLAS: 1024^3 1.00, 2048^3
// 0.95, 4096^3 0.90 to 0.96, 5120 x 256 x 5120 1.02 to 1.06, 5120 x 5120 x 256 0.81; small D 0.93 to 1.30.
#include "gemm/mma/kernel.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared_memory.cuh"

// M x N: a block's tile, made by WARPS_M x WARPS_N warps; K: of a slice, DEPTH: k of an instruction; BLOCKS: that share
// a multiprocessor.
template <int M_, int N_, int K_, int WARPS_M_, int WARPS_N_, int STAGES_, int BLOCKS_, int DEPTH_>
struct Float64Tile {
    static constexpr int M = M_, N = N_, K = K_, STAGES = STAGES_, BLOCKS = BLOCKS_, DEPTH = DEPTH_;
    static constexpr int WARPS_ACROSS = WARPS_N_, THREADS = 32 * WARPS_M_ * WARPS_N_;
    static constexpr int WARP_M = M / WARPS_M_, WARP_N = N / WARPS_N_, ROWS = WARP_M / 16, COLUMNS = WARP_N / 8;
};
// Hopper: with few tiles, one block of eight warps a multiprocessor (Deep); with many, two blocks of four warps with 64
// x 32 a warp (Paired), which read shared memory least, and of which one works while the other waits. Their sums leave
// registers for fragments of k = 4 only. Small D: tiles of a fourth and an eighth, of which several blocks share a
// multiprocessor (Hopper, 16-byte copies): tiles 1 and 2 of the choice. Before Hopper: the stages that every GPU from
// sm_80 on has shared memory for (Shallow). Each is compiled for its devices only.
typedef Float64Tile<64, 128, 32, 2, 4, 4, 1, 8> DeepTile;
typedef Float64Tile<128, 64, 16, 2, 2, 3, 2, 4> PairedTile;
typedef Float64Tile<64, 128, 16, 2, 4, 2, 1, 8> ShallowTile;
typedef Float64Tile<32, 64, 32, 2, 4, 4, 2, 8> SmallTile;
typedef Float64Tile<32, 32, 32, 2, 2, 4, 3, 8> SmallestTile;
template <typename C>
__host__ __device__ constexpr bool is_compiled()
{
#if defined(__CUDA_ARCH__)
    return (__CUDA_ARCH__ >= 900) == (C::STAGES > ShallowTile::STAGES);
#else
    return true;
#endif
}

// One operand's slice in shared memory, in its storage order, padded.
template <typename C, int LINES_, bool MN_MAJOR>
struct Float64Slice {
    static constexpr int LINES = LINES_, ROWS = MN_MAJOR ? C::K : LINES, WIDTH = MN_MAJOR ? LINES : C::K;
    static constexpr int PITCH = WIDTH + 4, SIZE = ROWS * PITCH;
};

// The first row and column of tile `index`, and its matrix. Tiles are walked in bands of 8 rows of tiles, so that
// blocks that run together share what they read.
__device__ __forceinline__ void tile_coordinates(const MmaWork &work, int64_t index, int tile_m, int tile_n, int64_t &m,
                                                 int64_t &n, int64_t &outer)
{
    const int64_t tiles = work.tiles_m * work.tiles_n, in = index % tiles;
    const int64_t band = in / (8 * work.tiles_n), rest = in % (8 * work.tiles_n);
    const int64_t rows = work.tiles_m - 8 * band < 8 ? work.tiles_m - 8 * band : 8;
    outer = index / tiles, m = (8 * band + rest % rows) * tile_m, n = rest / rows * tile_n;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

// What a thread copies of an operand's slices: one or two adjacent elements of every APART-th row.
template <typename C, int LINES, bool MN_MAJOR, bool ALIGNED>
struct Float64Copy {
    typedef Float64Slice<C, LINES, MN_MAJOR> S;
    static constexpr int COUNT = ALIGNED ? 2 : 1, PER_ROW = S::WIDTH / COUNT, APART = C::THREADS / PER_ROW;
    const double *from;   // in the next slice
    int64_t apart, slice; // elements from one of its rows to the next, and to the next slice
    int row, column;      // in the slice
    int lines_left;       // from there to the operand's end
};

template <typename C, int LINES, bool MN_MAJOR, bool ALIGNED>
__device__ __forceinline__ void start_copy(Float64Copy<C, LINES, MN_MAJOR, ALIGNED> &copy, const double *matrix,
                                           int64_t pitch, int64_t first_line, int64_t lines, int64_t k)
{
    typedef Float64Copy<C, LINES, MN_MAJOR, ALIGNED> Copy;
    copy.row = threadIdx.x / Copy::PER_ROW, copy.column = threadIdx.x % Copy::PER_ROW * Copy::COUNT;
    const int64_t left = lines - first_line - (MN_MAJOR ? copy.column : copy.row);
    copy.lines_left = left < LINES ? (int)left : LINES;
    copy.from = matrix + ((MN_MAJOR ? k : first_line) + copy.row) * pitch + (MN_MAJOR ? first_line : k) + copy.column;
    copy.apart = Copy::APART * pitch;
    copy.slice = MN_MAJOR ? C::K * pitch : C::K;
}

// Copies the next slice, of which `k_left` (> 0) are in bounds.
template <typename C, int LINES, bool MN_MAJOR, bool ALIGNED>
__device__ __forceinline__ void copy_slice(double *to, Float64Copy<C, LINES, MN_MAJOR, ALIGNED> &copy, int64_t k_left)
{
    typedef Float64Copy<C, LINES, MN_MAJOR, ALIGNED> Copy;
    typedef typename Copy::S S;
    const int depth_left = (k_left < C::K ? (int)k_left : C::K) - (MN_MAJOR ? copy.row : copy.column);
    const int across = MN_MAJOR ? copy.lines_left : depth_left, down = MN_MAJOR ? depth_left : copy.lines_left;
    const int bytes = across <= 0 ? 0 : across < Copy::COUNT ? 8 * across : 8 * Copy::COUNT;
    const uint32_t there = shared_address(to + copy.row * S::PITCH + copy.column);
    const double *from = copy.from;
#pragma unroll
    for (int i = 0; i < S::ROWS / Copy::APART; i++, from += copy.apart) {
        const uint32_t target = there + i * Copy::APART * S::PITCH * 8;
        const int valid = i * Copy::APART < down ? bytes : 0; // the rest is written as zeros
        cp_async<ALIGNED ? 16 : 8>(target, from, valid);
    }
    copy.from += copy.slice;
}

// An element of a slice. A warp's lanes ask for lines g = 0..7 at k = t = 0..3; a pitch of a multiple of 16 plus 4 lets
// each half-warp meet every bank once, in both storage orders.
template <typename C, int LINES, bool MN_MAJOR>
__device__ __forceinline__ double element_of(const double *slice, int line, int k)
{
    constexpr int PITCH = Float64Slice<C, LINES, MN_MAJOR>::PITCH;
    return slice[MN_MAJOR ? k * PITCH + line : line * PITCH + k];
}

// d (16 x 8) += a * b over 4 or 8 of k. a: lines g and g + 8 at t, then at t + 4; b: line g at t and t + 4. Each
// element is read into its register of the instruction's operand: a move would have to wait until the previous products
// have read theirs.
template <int DEPTH>
__device__ __forceinline__ void multiply_add(double (&d)[4], const double (&a)[DEPTH / 2], const double (&b)[DEPTH / 4])
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if constexpr (DEPTH == 8)
        mma_sync_m16n8k8_f64(d, a, b);
    else
        mma_sync_m16n8k4_f64(d, a, b[0]);
#else
#pragma unroll
    for (int i = 0; i < DEPTH / 4; i++) {
        mma_sync_m8n8k4_f64(d[0], d[1], a[2 * i], b[i]);
        mma_sync_m8n8k4_f64(d[2], d[3], a[2 * i + 1], b[i]);
    }
#endif
}
#endif

template <typename C, bool A_MN_MAJOR, bool B_MN_MAJOR>
static constexpr int float64_stage = Float64Slice<C, C::M, A_MN_MAJOR>::SIZE + Float64Slice<C, C::N, B_MN_MAJOR>::SIZE;

// One function from the loads to the epilogue: with the epilogue in one of its own the machine code differs.
template <typename C, bool A_MN_MAJOR, bool B_MN_MAJOR, bool ALIGNED>
__device__ __forceinline__ void multiply_float64(const MmaWork &work)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    extern __shared__ __align__(16) double float64_ring[];
    constexpr int STAGE = float64_stage<C, A_MN_MAJOR, B_MN_MAJOR>, A_SIZE = Float64Slice<C, C::M, A_MN_MAJOR>::SIZE;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int my_m = warp / C::WARPS_ACROSS * C::WARP_M, my_n = warp % C::WARPS_ACROSS * C::WARP_N;
    const int64_t tiles = work.tiles_m * work.tiles_n * work.batch * work.splits;
    const int64_t items = work.whole + (tiles - work.whole) * work.parts;
    wait_for_predecessor();
    release_successor();
    for (int64_t index = blockIdx.x; index < items; index += gridDim.x) {
        const bool is_part = index >= work.whole;
        const int64_t part = is_part ? (index - work.whole) % work.parts : 0;
        int64_t m, n, outer;
        tile_coordinates(work, is_part ? work.whole + (index - work.whole) / work.parts : index, C::M, C::N, m, n,
                         outer);
        const int64_t split = outer / work.batch, batch = outer % work.batch;
        const double *const a = (const double *)work.a + batch * work.stride_a;
        const double *const b = (const double *)work.b + batch * work.stride_b;
        const int64_t chunk = is_part ? ceil_div(ceil_div(work.k, work.parts), C::K) * C::K : work.chunk;
        const int64_t k_begin = is_part ? part * chunk : split * chunk;
        const int64_t k_end = k_begin + chunk < work.k ? k_begin + chunk : work.k;
        const int steps = (int)((k_end - k_begin + C::K - 1) / C::K);
        double sum[C::ROWS][C::COLUMNS][4] = {};

        Float64Copy<C, C::M, A_MN_MAJOR, ALIGNED> copy_a;
        Float64Copy<C, C::N, B_MN_MAJOR, ALIGNED> copy_b;
        start_copy(copy_a, a, work.lda, m, work.m, k_begin);
        start_copy(copy_b, b, work.ldb, n, work.n, k_begin);
        int filling = 0, reading = 0; // stages
        auto load = [&](int step) {
            if (step < steps) {
                double *const stage = float64_ring + filling * STAGE;
                const int64_t left = k_end - k_begin - (int64_t)step * C::K;
                copy_slice(stage, copy_a, left);
                copy_slice(stage + A_SIZE, copy_b, left);
            }
            filling = filling + 1 == C::STAGES ? 0 : filling + 1;
            // One group a step even where nothing is loaded, so that the number of pending groups tells the step.
            cp_async_commit_group();
        };
        // Double-buffered fragments: the next ones are read while the present ones are multiplied.
        double left[2][C::ROWS][C::DEPTH / 2], right[2][C::COLUMNS][C::DEPTH / 4];
        auto fetch = [&](int to, int stage, int k) {
            const double *const a_slice = float64_ring + stage * STAGE, *const b_slice = a_slice + A_SIZE;
#pragma unroll
            for (int j = 0; j < C::COLUMNS; j++)
#pragma unroll
                for (int e = 0; e < C::DEPTH / 4; e++)
                    right[to][j][e] = element_of<C, C::N, B_MN_MAJOR>(b_slice, my_n + 8 * j + g, k + t + 4 * e);
#pragma unroll
            for (int i = 0; i < C::ROWS; i++)
#pragma unroll
                for (int e = 0; e < C::DEPTH / 2; e++)
                    left[to][i][e] =
                        element_of<C, C::M, A_MN_MAJOR>(a_slice, my_m + 16 * i + g + e % 2 * 8, k + t + e / 2 * 4);
        };
        auto multiply = [&](int from) {
#pragma unroll
            for (int i = 0; i < C::ROWS; i++)
#pragma unroll
                for (int j = 0; j < C::COLUMNS; j++)
                    multiply_add<C::DEPTH>(sum[i][j], left[from][i], right[from][j]);
        };
        // All threads see the next step's slices, and have read the stage that is loaded next.
        auto wait = [&]() {
            cp_async_wait_group<C::STAGES - 2>();
            __syncthreads();
        };
        for (int step = 0; step < C::STAGES - 1; step++)
            load(step);
        wait();
        fetch(0, 0, 0);
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
#pragma unroll
            for (int part = 0; part < C::K / C::DEPTH; part++) {
                if (part + 1 < C::K / C::DEPTH) {
                    fetch((part + 1) % 2, reading, C::DEPTH * (part + 1));
                } else {
                    reading = reading + 1 == C::STAGES ? 0 : reading + 1;
                    wait();
                    if (step + 1 < steps)
                        fetch(0, reading, 0);
                }
                if (part == 0)
                    load(step + C::STAGES - 1);
                multiply(part % 2);
            }
        }
        // To D through shared memory, so that rows are written whole and the activation's code exists once.
        __syncthreads(); // the stages have been read
        constexpr int PITCH = C::N + 8, ROWS_AT_ONCE = C::THREADS / C::N, BATCH = 8;
#pragma unroll
        for (int i = 0; i < C::ROWS; i++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int j = 0; j < C::COLUMNS; j++)
                    *(double2 *)(float64_ring + (my_m + 16 * i + g + 8 * half) * PITCH + my_n + 8 * j + 2 * t) =
                        make_double2(sum[i][j][2 * half], sum[i][j][2 * half + 1]);
        __syncthreads();
        const int column = threadIdx.x % C::N;
        if (is_part) {
            double *const to = work.partial + (index - work.whole) * C::M * C::N + column;
#pragma unroll 4
            for (int row = threadIdx.x / C::N; row < C::M; row += ROWS_AT_ONCE)
                to[row * C::N] = float64_ring[row * PITCH + column];
        } else if (n + column < work.n) {
            const int rows_left = work.m - m < C::M ? (int)(work.m - m) : C::M;
            const double bias = work.bias ? ((const double *)work.bias)[n + column] : 0;
            double *const d =
                (double *)work.d + (split * work.batch + batch) * work.stride_d + m * work.ldd + n + column;
            const double *const from = float64_ring + column;
            if (work.activation == CUDA_OPS_GEMM_NONE) {
                for (int first = threadIdx.x / C::N; first < rows_left; first += BATCH * ROWS_AT_ONCE)
#pragma unroll
                    for (int i = 0; i < BATCH; i++) {
                        const int row = first + i * ROWS_AT_ONCE;
                        const double value = work.alpha * from[row * PITCH] + bias;
                        if (row < rows_left)
                            d[row * work.ldd] = value;
                    }
            } else {
#pragma unroll 1
                for (int row = threadIdx.x / C::N; row < rows_left; row += ROWS_AT_ONCE)
                    d[row * work.ldd] = activate(work.alpha * from[row * PITCH] + bias, work.activation);
            }
        }
        __syncthreads(); // the next tile refills the stages
    }
#endif
}

template <typename C, bool A_MN_MAJOR, bool B_MN_MAJOR, bool ALIGNED>
__global__ void __launch_bounds__(C::THREADS, C::BLOCKS) gemm_mma_float64_kernel(const __grid_constant__ MmaWork work)
{
    if constexpr (is_compiled<C>())
        multiply_float64<C, A_MN_MAJOR, B_MN_MAJOR, ALIGNED>(work);
}

template <typename C, bool A_MN_MAJOR, bool B_MN_MAJOR, bool ALIGNED>
static cuda_ops_status launch_float64(const MmaWork &given, cudaStream_t stream)
{
    MmaWork work = given;
    work.tiles_m = ceil_div(work.m, C::M), work.tiles_n = ceil_div(work.n, C::N);
    const auto kernel = gemm_mma_float64_kernel<C, A_MN_MAJOR, B_MN_MAJOR, ALIGNED>;
    constexpr int ring = C::STAGES * float64_stage<C, A_MN_MAJOR, B_MN_MAJOR>, results = C::M * (C::N + 8);
    constexpr int bytes = (ring > results ? ring : results) * (int)sizeof(double);
    static_assert(bytes * C::BLOCKS <= (C::STAGES > ShallowTile::STAGES ? 227 << 10 : 99 << 10),
                  "an SM's shared memory");
    allow_shared_memory(kernel, bytes);
    const int64_t tiles = work.tiles_m * work.tiles_n * work.batch * work.splits;
    if (work.parts == 1)
        work.whole = tiles;
    const int64_t blocks = work.whole + (tiles - work.whole) * work.parts, most = INT32_MAX;
    launch_dependent(kernel, dim3((unsigned int)(blocks < most ? blocks : most)), C::THREADS, bytes, stream, work);
    return launch_status();
}

template <typename C, bool ALIGNED>
static cuda_ops_status launch_float64_transposed(const MmaWork &work, const cuda_ops_gemm_problem &p,
                                                 cudaStream_t stream)
{
    if (p.transpose_a)
        return p.transpose_b ? launch_float64<C, true, false, ALIGNED>(work, stream)
                             : launch_float64<C, true, true, ALIGNED>(work, stream);
    return p.transpose_b ? launch_float64<C, false, false, ALIGNED>(work, stream)
                         : launch_float64<C, false, true, ALIGNED>(work, stream);
}

static constexpr int ADD_THREADS = 256;

// The tiles whose k was split: adds their parts in order.
template <typename C>
__global__ void __launch_bounds__(ADD_THREADS) gemm_mma_float64_add_kernel(const __grid_constant__ MmaWork work)
{
    constexpr int BLOCKS = C::M * C::N / ADD_THREADS; // of a tile
    const int64_t tile = blockIdx.x / BLOCKS;
    const int element = (int)(blockIdx.x % BLOCKS) * ADD_THREADS + threadIdx.x;
    int64_t m, n, batch;
    tile_coordinates(work, work.whole + tile, C::M, C::N, m, n, batch);
    m += element / C::N, n += element % C::N;
    wait_for_predecessor();
    release_successor();
    if (m >= work.m || n >= work.n)
        return;
    const double *const from = work.partial + tile * work.parts * C::M * C::N + element;
    double sum = 0;
#pragma unroll 4
    for (int64_t part = 0; part < work.parts; part++)
        sum += from[part * C::M * C::N];
    sum = work.alpha * sum + (work.bias ? ((const double *)work.bias)[n] : 0);
    ((double *)work.d)[batch * work.stride_d + m * work.ldd + n] = activate(sum, work.activation);
}

// The launch plan where k is whole. Times are in units of one k of a tile of 64 x 128 alone on its multiprocessor.
struct Float64Plan {
    bool paired;
    int64_t whole, parts; // as in MmaWork
    double waves;         // of tiles of 64 x 128 that would take as long
};

static Float64Plan plan_float64(const cuda_ops_gemm_problem &p, GemmDevice device, bool aligned)
{
    // The overhead of a tile (less where another block of the multiprocessor works meanwhile), that of the kernel that
    // adds parts, and the least k of a part. Measured on an H200; a wave of paired tiles takes as long as two of the
    // others, less 3 %.
    constexpr int64_t REST = 110, PAIRED_REST = 40, ADD = 170, SMALLEST_PART = 256;
    constexpr double PAIRED_WAVE = 1.94;
    const int64_t size = device.multiprocessors;
    const int64_t tiles = ceil_div(p.m, DeepTile::M) * ceil_div(p.n, DeepTile::N) * p.batch;
    Float64Plan plan = {false, tiles, 1, 0};
    int64_t time = ceil_div(tiles, size) * (p.k + REST);
    const int64_t left_over = tiles % size;
    if (tiles > size && left_over > 0) {
        // The last wave's few tiles are split, so that they fill the GPU too.
        int64_t parts = size / left_over;
        parts = parts < p.k / SMALLEST_PART ? parts : p.k / SMALLEST_PART;
        const int64_t split_time = tiles / size * (p.k + REST) + (parts > 1 ? p.k / parts : p.k) + REST + ADD;
        if (parts > 1 && split_time < time)
            plan = {false, tiles - left_over, parts, 0}, time = split_time;
    }
    const int64_t paired_tiles = ceil_div(p.m, PairedTile::M) * ceil_div(p.n, PairedTile::N) * p.batch;
    const int64_t paired_waves = ceil_div(paired_tiles, PairedTile::BLOCKS * size);
    const double paired_time = PAIRED_WAVE * (double)(paired_waves * (p.k + PAIRED_REST));
    if (aligned && device.capability >= 90 && paired_time < (double)time)
        plan = {true, paired_tiles, 1, 0};
    plan.waves = (plan.paired ? paired_time : (double)time) / (double)(p.k + REST);
    return plan;
}

int64_t gemm_mma_float64_workspace(const cuda_ops_gemm_problem &p, GemmDevice device)
{
    // The pointers' alignment is unknown here: the plan that needs more.
    const Float64Plan plan = plan_float64(p, device, false);
    const int64_t tiles = ceil_div(p.m, DeepTile::M) * ceil_div(p.n, DeepTile::N) * p.batch;
    return plan.parts > 1 ? (tiles - plan.whole) * plan.parts * DeepTile::M * DeepTile::N * (int64_t)sizeof(double) : 0;
}

double gemm_mma_float64_waves(const cuda_ops_gemm_problem &p, GemmDevice device)
{
    return plan_float64(p, device, true).waves;
}

cuda_ops_status gemm_mma_float64(const MmaWork &given, const cuda_ops_gemm_problem &p, bool aligned, int tile,
                                 cudaStream_t stream)
{
    static_assert(ShallowTile::M == DeepTile::M && ShallowTile::N == DeepTile::N, "one launch plan for both");
    MmaWork work = given;
    work.parts = 1;
    if (aligned && work.capability >= 90 && tile > 0)
        return tile == 1 ? launch_float64_transposed<SmallTile, true>(work, p, stream)
                         : launch_float64_transposed<SmallestTile, true>(work, p, stream);
    if (tile == 0 && work.splits == 1) {
        // The plan looks at no other fact of the device.
        const Float64Plan plan = plan_float64(p, {work.capability, work.multiprocessors, 0}, aligned);
        if (plan.paired)
            return launch_float64_transposed<PairedTile, true>(work, p, stream);
        work.whole = plan.whole, work.parts = plan.parts;
    }
    cuda_ops_status status;
    if (work.capability < 90)
        status = aligned ? launch_float64_transposed<ShallowTile, true>(work, p, stream)
                         : launch_float64_transposed<ShallowTile, false>(work, p, stream);
    else
        status = aligned ? launch_float64_transposed<DeepTile, true>(work, p, stream)
                         : launch_float64_transposed<DeepTile, false>(work, p, stream);
    if (status != CUDA_OPS_SUCCESS || work.parts == 1)
        return status;
    work.tiles_m = ceil_div(work.m, DeepTile::M), work.tiles_n = ceil_div(work.n, DeepTile::N);
    const int64_t cut = work.tiles_m * work.tiles_n * work.batch - work.whole;
    launch_dependent(gemm_mma_float64_add_kernel<DeepTile>,
                     dim3((unsigned int)(cut * DeepTile::M * DeepTile::N / ADD_THREADS)), ADD_THREADS, 0, stream, work);
    return launch_status();
}
