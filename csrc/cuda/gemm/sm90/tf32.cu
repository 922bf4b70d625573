// gemm, sm90 path: TF32. wgmma reads it from shared memory only where it is K-major. By storage order (A stored m x k
// is K, k x m is MN; B stored n x k is K, k x n is MN):
//     A K, B K    both from shared memory
//     A MN, B K   A through registers
//     A K, B MN   D^T = B^T A^T is the case above
//     A MN, B MN  the smaller operand is transposed into the workspace, which leaves one of the first two cases; the
//                 tiles for batches (gemm/sm90/small_tf32.cu) take A through registers, and transpose the smaller
//                 operand, as B, in shared memory
#include "gemm/sm90/kernel.cuh"

static constexpr int TRANSPOSE_TILE = 32, TRANSPOSE_ROWS = 8;

// to[column][row] = from[row][column] for each matrix of a batch, through tiles in shared memory.
__global__ void __launch_bounds__(TRANSPOSE_TILE *TRANSPOSE_ROWS)
    gemm_transpose_kernel(float *to, const float *from, int64_t rows, int64_t columns, int64_t pitch, int64_t stride,
                          int64_t to_pitch, int64_t matrices)
{
    __shared__ float tile[TRANSPOSE_TILE][TRANSPOSE_TILE + 1];
    const int64_t across = ceil_div(columns, TRANSPOSE_TILE), tiles = across * ceil_div(rows, TRANSPOSE_TILE);
    const int x = threadIdx.x % TRANSPOSE_TILE, y = threadIdx.x / TRANSPOSE_TILE;
    wait_for_predecessor();
    release_successor();
    for (int64_t index = blockIdx.x; index < tiles * matrices; index += gridDim.x) {
        const int64_t matrix = index / tiles, row = index % tiles / across * TRANSPOSE_TILE;
        const int64_t column = index % tiles % across * TRANSPOSE_TILE;
        const float *const in = from + matrix * stride;
        float *const out = to + matrix * columns * to_pitch;
#pragma unroll
        for (int i = y; i < TRANSPOSE_TILE; i += TRANSPOSE_ROWS)
            if (row + i < rows && column + x < columns)
                tile[i][x] = in[(row + i) * pitch + column + x];
        __syncthreads();
#pragma unroll
        for (int i = y; i < TRANSPOSE_TILE; i += TRANSPOSE_ROWS)
            if (column + i < columns && row + x < rows)
                out[(column + i) * to_pitch + row + x] = tile[x][i];
        __syncthreads();
    }
}

static int64_t pitch_of(int64_t k)
{
    return ceil_div(k, 4) * 4; // TMA's 16 bytes
}

static bool transposes_a(const cuda_ops_gemm_problem &p)
{
    return p.m * (p.stride_a == 0 ? 1 : p.batch) < p.n * (p.stride_b == 0 ? 1 : p.batch);
}

// Whether the kernel makes D^T: where B is MN and A is K, or becomes K in the workspace.
bool gemm_sm90_tf32_transposes_d(const cuda_ops_gemm_problem &p)
{
    return !p.transpose_b && (!p.transpose_a || transposes_a(p));
}

static bool is_small(int tile)
{
    return tile >= 4;
}

// Bytes of the workspace before the partial sums of the splits.
int64_t gemm_sm90_tf32_bytes(const cuda_ops_gemm_problem &p, int tile)
{
    if (!p.transpose_a || p.transpose_b || is_small(tile))
        return 0;
    const int64_t lines = transposes_a(p) ? p.m : p.n;
    const int64_t matrices = (transposes_a(p) ? p.stride_a : p.stride_b) == 0 ? 1 : p.batch;
    return ceil_div(lines * pitch_of(p.k) * matrices * 4, 256) * 256;
}

#if defined(CUDA_OPS_SM90A)
// Makes the operand (k x lines) K-major, in the workspace.
static cuda_ops_status transpose(const void *&operand, int64_t &pitch, int64_t &stride, float *to, int64_t lines,
                                 int64_t k, int64_t batch, cudaStream_t stream)
{
    const int64_t matrices = stride == 0 ? 1 : batch,
                  tiles = ceil_div(lines, TRANSPOSE_TILE) * ceil_div(k, TRANSPOSE_TILE) * matrices;
    launch_dependent(gemm_transpose_kernel, dim3(clamp_grid(tiles)), TRANSPOSE_TILE * TRANSPOSE_ROWS, 0, stream, to,
                     (const float *)operand, k, lines, pitch, stride, pitch_of(k), matrices);
    operand = to;
    pitch = pitch_of(k);
    stride = stride == 0 ? 0 : lines * pitch;
    return launch_status();
}

static cuda_ops_status launch_registers(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    // clang-format off
    switch (plan.tile) {
    //                                          M    N   cluster ping-pong stages          TMA
    case 0: return launch<Tile<float, 128, 256, 2, 1, false, 4, true, false, true, true>>(call, device, plan);
    case 1: return launch<Tile<float, 128, 128, 2, 1, true, 5, true, false, true, true>>(call, device, plan);
    case 2: return launch<Tile<float, 128, 64, 2, 1, false, 8, true, false, false, true>>(call, device, plan);
    }
    // clang-format on
    return CUDA_OPS_INVALID_ARGUMENT;
}

static cuda_ops_status launch_shared(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    // clang-format off
    switch (plan.tile) {
    //                                          M    N   cluster ping-pong stages          TMA
    case 0: return launch<Tile<float, 128, 256, 2, 1, false, 4, false, false, true, true>>(call, device, plan);
    case 1: return launch<Tile<float, 128, 128, 2, 1, true, 5, false, false, true, true>>(call, device, plan);
    case 2: return launch<Tile<float, 128, 192, 2, 1, true, 4, false, false, true, true>>(call, device, plan);
    case 3: return launch<Tile<float, 128, 64, 2, 1, false, 8, false, false, false, true>>(call, device, plan);
    }
    // clang-format on
    return CUDA_OPS_INVALID_ARGUMENT;
}
#endif

cuda_ops_status gemm_sm90_tf32(const GemmCall &original, GemmDevice device, const GemmPlan &plan)
{
#if defined(CUDA_OPS_SM90A)
    GemmCall call = original;
    GemmPlan how = plan;
    cuda_ops_gemm_problem &p = call.problem;
    if (is_small(plan.tile)) {
        how.swapped = gemm_sm90_tf32_transposes_d(p);
        return gemm_sm90_small_tf32(how.swapped ? exchanged(call) : call, device, how);
    }
    if (p.transpose_a && !p.transpose_b) {
        const bool a = transposes_a(p);
        const cuda_ops_status status =
            a ? transpose(call.a, p.lda, p.stride_a, (float *)call.workspace, p.m, p.k, p.batch, call.stream)
              : transpose(call.b, p.ldb, p.stride_b, (float *)call.workspace, p.n, p.k, p.batch, call.stream);
        if (status != CUDA_OPS_SUCCESS)
            return status;
        call.workspace = (char *)call.workspace + gemm_sm90_tf32_bytes(original.problem, plan.tile);
        if (a)
            p.transpose_a = 0;
        else
            p.transpose_b = 1;
    }
    if (!p.transpose_a && p.transpose_b)
        return launch_shared(call, device, how);
    if (!p.transpose_a) {
        call = exchanged(call);
        how.swapped = 1;
    }
    return launch_registers(call, device, how);
#else
    (void)original, (void)device, (void)plan;
    return CUDA_OPS_INVALID_ARGUMENT;
#endif
}
