// gemm: D = activation(alpha * op(A) op(B) + bias). The table of paths and the choice among them. A path's name is that
// of its folder or file here and of CUDA_OPS_GEMM_PATH; its number is that of its rung in the ladder of lessons. Paths
// that the choice never takes are in ladder/.
#include "cuda_ops/gemm.h"

#include <math.h>

#include "common/activation.cuh"
#include "common/common.cuh"
#include "gemm/known_plans.h"
#include "gemm/paths.h"
#include "gemm/simt/parts.h"
#include "gemm/sm90_3xtf32/sm90_3xtf32.h"
#include "gemm/sm90_unaligned/sm90_unaligned.h"
#include "gemm/times.h"

static const GemmPath PATHS[] = {
    // 4 to 10: CUDA cores. A second variant of path n has the number 10 * n + variant.
    {4, "naive", "gemm/ladder/04_naive.cu", "gemm_naive_kernel", gemm_naive_supports, nullptr, gemm_naive},
    {5, "coalesced", "gemm/ladder/05_coalesced.cu", "gemm_coalesced_kernel", gemm_coalesced_supports, nullptr,
     gemm_coalesced},
    {6, "shared_memory", "gemm/ladder/06_shared_memory.cu", "gemm_shared_static_kernel", gemm_shared_memory_supports,
     nullptr, gemm_shared_memory},
    {62, "shared_memory_dynamic", "gemm/ladder/06_shared_memory.cu", "gemm_shared_dynamic_kernel",
     gemm_shared_memory_supports, nullptr, gemm_shared_memory_dynamic},
    {71, "register_tile_1d", "gemm/ladder/07_register_tile.cu", "gemm_register_tile_kernel",
     gemm_register_tile_supports, nullptr, gemm_register_tile_1d},
    {7, "register_tile", "gemm/ladder/07_register_tile.cu", "gemm_register_tile_kernel", gemm_register_tile_supports,
     nullptr, gemm_register_tile},
    {8, "vectorised", "gemm/ladder/08_vectorised.cu", "gemm_vectorised_kernel", gemm_vectorised_supports, nullptr,
     gemm_vectorised},
    {9, "warp_tile", "gemm/ladder/09_warp_tile.cu", "gemm_warp_tile_kernel", gemm_warp_tile_supports, nullptr,
     gemm_warp_tile},
    {10, "simt", "gemm/simt/", "gemm_simt_kernel gemm_simt_wide_kernel", gemm_simt_supports, gemm_simt_workspace,
     gemm_simt},
    // 11 to 13: tensor cores.
    {11, "mma", "gemm/mma/", "gemm_mma_kernel gemm_mma_float64_kernel", gemm_mma_supports, gemm_mma_workspace,
     gemm_mma},
    {12, "tma_wgmma", "gemm/ladder/12_tma_wgmma_sm90.cu", "gemm_tma_wgmma_kernel", gemm_tma_wgmma_supports, nullptr,
     gemm_tma_wgmma},
    {13, "sm90", "gemm/sm90/", "gemm_sm90_kernel gemm_sm90_pair_kernel gemm_sm90_triple_kernel", gemm_sm90_supports,
     gemm_sm90_workspace, gemm_sm90},
    // 14 and 15: small and skinny products, which leave most of the GPU idle.
    {14, "sm90_skinny", "gemm/sm90_skinny/", "gemm_sm90_skinny_kernel", gemm_sm90_skinny_supports, nullptr,
     gemm_sm90_skinny},
    {15, "direct", "gemm/direct/", "gemm_direct_kernel gemm_direct_cores_kernel", gemm_direct_supports, nullptr,
     gemm_direct},
    // 16: 13 or 14 on copies of operands that TMA, or in TF32 wgmma, cannot read.
    {16, "padded", "gemm/padded.cu",
     "gemm_align_kernel gemm_sm90_kernel gemm_sm90_pair_kernel gemm_sm90_triple_kernel gemm_sm90_skinny_kernel",
     gemm_padded_supports, gemm_padded_workspace, gemm_padded},
    // 17: a long operand with few columns, or few of k and long rows of D.
    {17, "narrow", "gemm/narrow/", "gemm_narrow_rows_kernel gemm_narrow_columns_kernel gemm_narrow_outer_kernel",
     gemm_narrow_supports, gemm_narrow_workspace, gemm_narrow},
    // 18: float32 where TF32 is not allowed, in three products of TF32 that together have its accuracy.
    {18, "sm90_3xtf32", "gemm/sm90_3xtf32/", "gemm_split_kernel gemm_sm90_3xtf32_kernel", gemm_sm90_3xtf32_supports,
     gemm_sm90_3xtf32_workspace, gemm_sm90_3xtf32},
    // 19: rows of multiples of 4 or 8 bytes in 16 bits, which TMA cannot read either.
    {19, "sm90_unaligned", "gemm/sm90_unaligned/", "gemm_sm90_unaligned_kernel", gemm_sm90_unaligned_supports,
     gemm_sm90_unaligned_workspace, gemm_sm90_unaligned},
};

static const GemmPath *path_numbered(int number)
{
    for (const GemmPath &path : PATHS)
        if (path.number == number)
            return &path;
    return nullptr;
}

// Rows of cluster tiles in a band of the sm90 path (see tile_coordinates), as measured with large products in fp16 and
// bf16.
static int band_of(const cuda_ops_gemm_problem &p, const GemmTime &t)
{
    if (p.dtype == CUDA_OPS_FLOAT32)
        return 8;
    return t.n == 256 ? 16 : t.n == 192 ? 6 : 8;
}

// Used where no times are known: the paths from the fastest to the one that takes every problem.
static const int PREFERENCE[] = {GEMM_SM90, GEMM_MMA, GEMM_SIMT};

// The choice by shape: of all tiles (gemm/times.h) and splits of k, the one that the model there expects to be fastest,
// but never faster than its bytes can be moved. The model is within some 5 % of the measured time where D has many
// tiles.
static constexpr double BYTES_RATE = 4.9e6; // a microsecond
// And where a small D is summed over many rows of both operands, which are short; and how many times as long TF32's tile
// that shares nothing takes there, if it has several columns of tiles, which read the same rows at different times.
static constexpr double NARROW_BYTES_RATE = 3.3e6, READS_BY_ITSELF = 1.19;
static constexpr int TF32_BY_ITSELF = 4, TF32_SIDE_BY_SIDE = 6;
static constexpr int64_t LONG_K = 8192, FEW_SUMS = 65536;
static bool sums_many_rows(const cuda_ops_gemm_problem &p)
{
    return p.transpose_a && !p.transpose_b && p.k >= LONG_K && p.batch * p.m * p.n <= FEW_SUMS;
}
// Of the splits' partial sums, written and read again; they stay in the L2 cache as a rule.
static constexpr double PARTIAL_BYTES_RATE = 3.74e6, FLOAT64_PARTIAL_BYTES_RATE = 3e6;
// The kernel that adds the splits waits for memory once for as many of them as it has in flight.
static constexpr double ADDING_ROUND = 0.82; // microseconds
static constexpr double NOT_HIDDEN = 0.11;   // share of the shorter of arithmetic and copying that still shows
// The least k of a split.
static constexpr int64_t SMALLEST_SPLIT = 256, SMALLEST_TF32_SPLIT = 64, SMALLEST_FLOAT64_SPLIT = 128,
                         SMALLEST_DIRECT_SPLIT = 32, SMALLEST_SKINNY_SPLIT = 128, SMALLEST_3XTF32_SPLIT = 128;
static constexpr int64_t LONG_FLOAT64_SPLIT = 1024, LONG_HALVES_SPLIT = 4096;

// Paths that split k over the blocks of a cluster, by a power of two.
static bool splits_in_clusters(int path)
{
    return path == GEMM_SM90_SKINNY || path == GEMM_DIRECT;
}

// The number of splits to consider next: of many, a few more make no difference.
static int more_splits(int path, int splits)
{
    return splits_in_clusters(path) ? 2 * splits : splits + 1 + splits / 16;
}

// Two blocks make one of sm90's 16-bit tiles from the first to the last of these, each with half of k; three make the
// next, and four the one after.
static constexpr int FIRST_PAIR = 16, LAST_PAIR = 21, OF_THREE = 25, OF_FOUR = 26;

// The blocks that make a tile together.
static int blocks_of_tile(const GemmTime &t, const cuda_ops_gemm_problem &p)
{
    if (t.path != GEMM_SM90 || p.dtype == CUDA_OPS_FLOAT32)
        return 1;
    return t.tile >= FIRST_PAIR && t.tile <= LAST_PAIR ? 2 : t.tile == OF_THREE ? 3 : t.tile == OF_FOUR ? 4 : 1;
}

static bool is_pair(const GemmTime &t, const cuda_ops_gemm_problem &p)
{
    return blocks_of_tile(t, p) > 1;
}

// Tiles for a D of few of them, whose times do not hold for more than one wave: those that three or four blocks make, and
// those in clusters of eight.
static bool is_for_few(const GemmTime &t, const cuda_ops_gemm_problem &p)
{
    return blocks_of_tile(t, p) > 2 ||
           (t.path == GEMM_SM90 && p.dtype != CUDA_OPS_FLOAT32 && t.cluster_m * t.cluster_n > 2);
}

// A pair's rows in the table are half of its tile's.
static int64_t rows_of_tile(const GemmTime &t, const cuda_ops_gemm_problem &p)
{
    return blocks_of_tile(t, p) == 2 ? 2 * t.m : t.m;
}

// sm90's 16-bit tile of 128 x 192 with gelu and its preactivation kept is a kernel of its own (gemm/sm90/gelu.cuh).
static constexpr int GELU_TILE = 2;

static bool is_gelu_kernel(const GemmTime &t, const cuda_ops_gemm_problem &p)
{
    return t.path == GEMM_SM90 && p.dtype != CUDA_OPS_FLOAT32 && t.tile == GELU_TILE && p.preactivation &&
           is_gelu(p.activation) && !p.transpose_a && p.transpose_b;
}

// sm90's clusters of two tiles, one of each of two lines of tiles, that so many lines make. The last of an odd number of
// lines is taken two by two along it (OddGemmWork in gemm/sm90/tile.cuh).
static int64_t clusters_of_lines(int64_t lines, int64_t tiles)
{
    return lines / 2 * tiles + lines % 2 * ceil_div(tiles, 2);
}

// The clusters that make a product; m and n as the kernel sees them. gelu's kernel leaves half of the last ones idle.
static int64_t clusters_of(const GemmTime &t, const cuda_ops_gemm_problem &p, int64_t m, int64_t n)
{
    if (is_pair(t, p))
        return ceil_div(m, rows_of_tile(t, p)) * ceil_div(n, t.n) * p.batch;
    const int64_t rows = ceil_div(m, t.m), columns = ceil_div(n, t.n);
    int64_t clusters = ceil_div(rows, t.cluster_m) * ceil_div(columns, t.cluster_n);
    if ((t.path == GEMM_SM90 || t.path == GEMM_SM90_3XTF32) && t.cluster_m * t.cluster_n == 2 && !is_gelu_kernel(t, p))
        clusters = t.cluster_m == 2 ? clusters_of_lines(rows, columns) : clusters_of_lines(columns, rows);
    return clusters * p.batch;
}

// Waves of blocks that it takes.
static int64_t waves_of(const GemmTime &t, const cuda_ops_gemm_problem &p, int64_t m, int64_t n, int64_t splits,
                        GemmDevice device)
{
    // Of clusters of three 39 fit an H100 or H200, one less than clusters_at_once says.
    const int64_t room = clusters_at_once(device.multiprocessors * t.blocks, t.cluster_m * t.cluster_n) -
                         (t.cluster_m * t.cluster_n == 3);
    return ceil_div(clusters_of(t, p, m, n) * splits, room);
}

// direct's model, but in float64. The warps of a block take a step of k together, 64 bytes of each line a warp (lines
// are rows of A and columns of B), and wait for it: a step that is not full takes as long. One is longer where lines
// are no whole aligned vectors of 16 bytes, on the tensor cores for as many lines as there are. Blocks that share an SM
// add a start and an end each, and a share of their steps: on the tensor cores these hide in one another's waits.
static constexpr double DIRECT_ELEMENTS = 0.45, DIRECT_AROUND = 0.635;  // microseconds a step, for 16 lines of 16 bits
static constexpr double DIRECT_CORES_ELEMENTS = 0.27;                   // likewise, for 32 lines of float32
static constexpr double DIRECT_BLOCK = 0.35, DIRECT_CORES_BLOCK = 0.65; // microseconds
static constexpr double DIRECT_SHARED = 0.125, DIRECT_CORES_SHARED = 1.03;
static constexpr double DIRECT_SHARED_LOADS = 0.5; // of loads by elements, or around
static constexpr double DIRECT_MOST = 0.215;       // the weight of the SM with most blocks; the mean has the rest

static bool has_model_of_steps(const GemmTime &t, const cuda_ops_gemm_problem &p)
{
    return t.path == GEMM_DIRECT && p.dtype != CUDA_OPS_FLOAT64;
}

// What a step takes longer for an operand with `lines` lines, of which a tile has `tile`.
static double direct_loads(const cuda_ops_gemm_problem &p, bool cores, int64_t lines, int tile, bool k_contiguous,
                           bool aligned)
{
    if (cores)
        return aligned ? 0 : DIRECT_CORES_ELEMENTS * tile / 32;
    const double share = lines < tile ? (double)lines / tile : 1, size = (double)dtype_size(p.dtype);
    return share * (k_contiguous ? aligned ? 0 : DIRECT_AROUND : DIRECT_ELEMENTS) * 2 / size;
}

static double direct_microseconds(const GemmTime &t, const cuda_ops_gemm_problem &p, int64_t splits, GemmDevice device)
{
    const bool cores = gemm_direct_uses_cores(p, device);
    const int64_t size = dtype_size(p.dtype), warps = cores && t.tile == 3 ? 4 : 8, k_of_step = warps * 64 / size;
    const bool aligned_a = !p.unaligned_a && p.lda * size % 16 == 0 && (p.batch == 1 || p.stride_a * size % 16 == 0);
    const bool aligned_b = !p.unaligned_b && p.ldb * size % 16 == 0 && (p.batch == 1 || p.stride_b * size % 16 == 0);
    const double loads = direct_loads(p, cores, p.m, t.m, !p.transpose_a, aligned_a) +
                         direct_loads(p, cores, p.n, t.n, p.transpose_b, aligned_b);
    const double step = t.sum * (double)k_of_step / 1024 + loads;
    const double steps = (double)ceil_div(ceil_div(p.k, splits), k_of_step);
    const int64_t blocks = ceil_div(p.m, t.m) * ceil_div(p.n, t.n) * p.batch * splits;
    // Beside the first; on the tensor cores, which wait for memory, the mean counts for more than the SM that has most.
    const double most = (double)(ceil_div(blocks, device.multiprocessors) - 1);
    const double mean = (double)blocks / device.multiprocessors - 1;
    const double others = cores ? most : DIRECT_MOST * most + (1 - DIRECT_MOST) * (mean > 0 ? mean : 0);
    const double shared = (cores ? DIRECT_CORES_SHARED : DIRECT_SHARED) * step * (double)(p.k * size) / 512 +
                          (cores ? 0 : DIRECT_SHARED_LOADS * loads * steps);
    const double another = (cores ? DIRECT_CORES_BLOCK : DIRECT_BLOCK) + t.rest + shared;
    double time = steps * step + t.rest + others * another;
    for (int64_t parts = splits; parts > 1; parts /= 2)
        time += t.split;
    return time;
}

// In products of a few microseconds no copies are hidden by another tile's arithmetic: they show beside it, up to a
// bound.
static constexpr double NOT_OVERLAPPED = 0.71, MOST_NOT_OVERLAPPED = 3.05; // of the copies; microseconds
static constexpr double DIRECT_NOT_OVERLAPPED = 2.09, DIRECT_MOST_NOT_OVERLAPPED = 0.975;
static constexpr double DIRECT_CORES_NOT_OVERLAPPED = 2.18, DIRECT_CORES_MOST_NOT_OVERLAPPED = 0.84;
// The paths that keep tiles in shared memory and store them from there.
static constexpr double SHORT_TILE = 0.81; // of `rest`, what is not in proportion to D
// What 8192 elements of D take longer whose rows are no whole vectors of 16 bytes, in microseconds: by elements, by two
// of 16 bits (sm90), and in sm90's TF32 tiles for batches; how much longer by pairs in tile 2, which has registers for
// few loads, and how many times as long in tile 7, whose blocks share an SM.
static constexpr double STORED_BY_ELEMENTS = 2.31, STORED_BY_PAIRS = 1.21, STORED_BY_SMALL_TILES = 4.08;
static constexpr double STORED_BY_192 = 1.2, STORED_BY_64 = 2.69;
// And what a pair of blocks takes longer to store them, whatever their number.
static constexpr double STORED_BY_A_PAIR = 1.69;
static constexpr int TILE_OF_192_COLUMNS = 2, TILE_OF_64_COLUMNS = 6, TILE_OF_64_ROWS = 7;
// And what tiles whose blocks share an SM take longer where rows of D begin within sectors of 32 bytes.
static constexpr double STORED_IN_SECTORS = 0.31;

// Copies of operands, by padded and by sm90 in TF32, are a launch, and move each byte twice.
static constexpr double COPY_LAUNCH = 1.75, COPY_BYTES_RATE = 3.08e6; // microseconds, and bytes in one
// The copies of an operand in two parts are of twice its bytes.
static constexpr double SPLIT_BYTES = 1.5;

static double copy_microseconds(int64_t bytes)
{
    return bytes > 0 ? COPY_LAUNCH + 2 * (double)bytes / COPY_BYTES_RATE : 0;
}

static double split_microseconds(const cuda_ops_gemm_problem &p)
{
    return COPY_LAUNCH + SPLIT_BYTES * (double)gemm_sm90_3xtf32_split_bytes(p) / COPY_BYTES_RATE +
           copy_microseconds(gemm_sm90_3xtf32_copied_bytes(p));
}

// To start a block of sm90_skinny, which is not persistent: the GPU starts one after another.
static constexpr double SKINNY_BLOCK = 0.00754; // microseconds

static bool stores_tiles(const GemmTime &t, const cuda_ops_gemm_problem &p)
{
    return t.path == GEMM_SM90 || t.path == GEMM_SM90_SKINNY || t.path == GEMM_SM90_3XTF32 ||
           (t.path == GEMM_MMA && p.dtype != CUDA_OPS_FLOAT64);
}

// A tile's prologue and epilogue, by as much of it as D has.
static double rest_of(const GemmTime &t, const cuda_ops_gemm_problem &p, int64_t m, int64_t n)
{
    if (!stores_tiles(t, p))
        return t.rest;
    const bool tf32 = p.dtype == CUDA_OPS_FLOAT32, is_for_batches = t.cluster_m * t.cluster_n == 1;
    const int64_t row = p.ldd * dtype_size(p.output_dtype);
    const double elements = (double)(m < t.m ? m : t.m) * (double)(n < t.n ? n : t.n);
    const double unaligned = row % 16 == 0                                   ? 0
                             : t.path == GEMM_SM90 && tf32 && is_for_batches ? STORED_BY_SMALL_TILES
                             : t.path == GEMM_SM90 && !tf32 && row % 4 == 0  ? STORED_BY_PAIRS
                                                                             : STORED_BY_ELEMENTS;
    const bool halves = t.path == GEMM_SM90 && !tf32;
    const double stored = unaligned == 0                            ? 0
                          : halves && t.tile == TILE_OF_192_COLUMNS ? unaligned + STORED_BY_192
                          : halves && t.tile == TILE_OF_64_ROWS     ? unaligned * STORED_BY_64
                                                                    : unaligned;
    const bool sectors =
        halves && row % 16 == 0 && row % 32 != 0 && (t.tile == TILE_OF_64_COLUMNS || t.tile == TILE_OF_64_ROWS);
    const double share = t.path == GEMM_SM90_SKINNY ? 1 : SHORT_TILE + (1 - SHORT_TILE) * elements / (t.m * t.n);
    return share * t.rest + (stored + (sectors ? STORED_IN_SECTORS : 0)) * elements / 8192 +
           (unaligned > 0 && is_pair(t, p) ? STORED_BY_A_PAIR : 0);
}

// What an SM takes to load 128 bytes of an operand's row, from the L2 cache, by what its rows are multiples of: whole
// lines, or pieces that lie in two lines, or begin within a sector.
static constexpr double LINE_ROW = 1.34, HALF_LINE_ROW = 1.67, SECTOR_ROW = 1.85, OTHER_ROW = 2.43; // nanoseconds

static double row_nanoseconds(int64_t pitch)
{
    return pitch % 128 == 0 ? LINE_ROW : pitch % 64 == 0 ? HALF_LINE_ROW : pitch % 32 == 0 ? SECTOR_ROW : OTHER_ROW;
}

// From so many multiply-adds on the card's power is the limit, and 16-bit tiles that move more bytes for their products
// take longer than their times in short runs say; so does the tile of 80 columns where it loads 128, as it does of an
// operand that is stored along them.
static constexpr double LARGE = 6e10, MOVES_MORE = 1.11, LOADS_128_COLUMNS = 1.27;

// Gradients of weights of so many rows: both operands are stored along m and n, and come from device memory. There the
// tile of 192 columns, and the one of 128 whose blocks lie side by side, take longer than their times say, the latter
// most where the rows of neither operand are multiples of 512 bytes.
static constexpr int64_t MANY_ROWS = 8192;
static constexpr int TILE_SIDE_BY_SIDE = 10;
static constexpr double BY_192 = 1.07, SIDE_BY_SIDE = 1.03, SIDE_BY_SIDE_ODD_ROWS = 1.18;

static double slower_of_many_rows(const GemmTime &t, const cuda_ops_gemm_problem &p)
{
    const int64_t size = dtype_size(p.dtype);
    if (!p.transpose_a || p.transpose_b || p.k < MANY_ROWS)
        return 1;
    if (t.tile == TILE_SIDE_BY_SIDE)
        return p.lda * size % 512 != 0 && p.ldb * size % 512 != 0 ? SIDE_BY_SIDE_ODD_ROWS : SIDE_BY_SIDE;
    return t.tile == TILE_OF_192_COLUMNS ? BY_192 : 1;
}

static double slower_in_place(const GemmTime &t, const cuda_ops_gemm_problem &p, bool transposed)
{
    if (t.path != GEMM_SM90 || p.dtype == CUDA_OPS_FLOAT32)
        return 1;
    if (t.n == 80)
        return (transposed ? p.transpose_a : !p.transpose_b) ? LOADS_128_COLUMNS : 1;
    const double products = (double)p.batch * (double)p.m * (double)p.n * (double)p.k;
    return slower_of_many_rows(t, p) * (products >= LARGE && t.m * t.n <= 128 * 128 ? MOVES_MORE : 1);
}

// The rows that are loaded of a tile's `lines` of an operand, for 128 bytes of k. Stored along the lines, there is one
// for each k and 128 bytes of lines, which costs as much where it is shorter, if it begins within a sector.
static double rows_loaded(int64_t lines, int64_t tile, bool k_contiguous, int64_t pitch, int64_t size)
{
    const int64_t count = lines < tile ? lines : tile, line = 128 / size;
    return (double)(k_contiguous || pitch % 32 == 0 ? count : ceil_div(count, line) * line);
}

// 1024 of k of a tile: the table's time, which is of rows of whole lines, or that of its loads, where these are longer.
// transposed: the kernel makes D^T.
static double sum_of(const GemmTime &t, const cuda_ops_gemm_problem &p, int64_t m, int64_t n, bool transposed)
{
    const int64_t size = dtype_size(p.dtype), a = size * (transposed ? p.ldb : p.lda);
    const int64_t b = size * (transposed ? p.lda : p.ldb);
    const double sum = t.sum * slower_in_place(t, p, transposed);
    if ((t.path != GEMM_SM90 && t.path != GEMM_SM90_SKINNY) || (a % 128 == 0 && b % 128 == 0))
        return sum;
    const bool pair = is_pair(t, p);
    const int64_t rows = rows_of_tile(t, p);
    const bool a_along_k = transposed ? p.transpose_b : !p.transpose_a;
    const bool b_along_k = transposed ? !p.transpose_a : p.transpose_b;
    // A single line of tiles leaves the blocks of a cluster nothing to share.
    const double a_rows = rows_loaded(m, rows, a_along_k, a, size) / (pair || n <= t.n ? 1 : t.cluster_n);
    const double b_rows = rows_loaded(n, t.n, b_along_k, b, size) / (pair || m <= t.m ? 1 : t.cluster_m);
    const double stages = 1024.0 * (double)size / 128 / blocks_of_tile(t, p);
    const double loads = stages * t.blocks * (a_rows * row_nanoseconds(a) + b_rows * row_nanoseconds(b)) / 1000;
    return loads > sum ? loads : sum;
}

// k of a split, of which the paths with TMA load stages of 128 bytes a row, the last one as long as the others.
static int64_t whole_stages(const GemmTime &t, const cuda_ops_gemm_problem &p, int64_t k)
{
    const int64_t stage = 128 / dtype_size(p.dtype);
    return t.path == GEMM_SM90 || t.path == GEMM_SM90_SKINNY || t.path == GEMM_SM90_3XTF32 ? ceil_div(k, stage) * stage
                                                                                           : k;
}

// The last line of an odd number of lines of tiles comes after all others (OddGemmWork), and reads the operand that it
// shares with them once more: from device memory, if that is larger than the L2 cache.
static constexpr int64_t LARGE_OPERAND = 40 << 20;

static double bytes_read_again(const GemmTime &t, const cuda_ops_gemm_problem &p, int64_t m, int64_t n)
{
    if (t.path != GEMM_SM90 || t.cluster_m * t.cluster_n != 2 || is_pair(t, p))
        return 0;
    const int64_t lines = t.cluster_m == 2 ? ceil_div(m, t.m) : ceil_div(n, t.n);
    const int64_t bytes = (t.cluster_m == 2 ? n : m) * p.k * dtype_size(p.dtype);
    return lines > 1 && lines % 2 == 1 && bytes > LARGE_OPERAND ? (double)bytes : 0;
}

// A D of few rows or columns in one wave of sm90's tiles in 16 bits waits for the long operand to come from device memory: longer
// where several clusters ask for the same of it, and so at once.
static constexpr int64_t FEW_LINES = 256, LONG_OPERAND = 8 << 20;
static constexpr double ASKED_TWICE_RATE = 9e6; // bytes a microsecond

static double asked_twice_microseconds(const GemmTime &t, const cuda_ops_gemm_problem &p, int64_t m, int64_t n,
                                       double waves)
{
    const bool sums_over_rows = p.transpose_a && !p.transpose_b;
    if (t.path != GEMM_SM90 || p.dtype == CUDA_OPS_FLOAT32 || sums_over_rows || is_pair(t, p) || p.batch > 1 ||
        waves > 1 || (m < n ? m : n) > FEW_LINES)
        return 0;
    const int64_t bytes = (m < n ? n : m) * p.k * dtype_size(p.dtype);
    const bool again = m < n ? m > t.m * t.cluster_m : n > t.n * t.cluster_n;
    return again && bytes > LONG_OPERAND ? (double)bytes / ASKED_TWICE_RATE : 0;
}

// mma in 16 bits cuts vectors out of the two around them where rows are no whole vectors.
static constexpr double MMA_AROUND = 1.4;
// direct on the tensor cores keeps too little of memory under way for many bytes.
static constexpr double DIRECT_BYTES_RATE = 2.3e6;
static constexpr int64_t MANY_BYTES = 24 << 20;

static double estimate(const GemmTime &t, const cuda_ops_gemm_problem &p, int64_t m, int64_t n, int64_t splits,
                       bool transposed, GemmDevice device)
{
    const double bytes = (double)dtype_size(p.dtype) *
                         ((double)((p.stride_a == 0 ? 1 : p.batch) * p.m * p.k) +
                          (double)((p.stride_b == 0 ? 1 : p.batch) * p.n * p.k) + (double)(p.batch * p.m * p.n));
    const bool narrow = sums_many_rows(p);
    const bool by_itself =
        narrow && t.path == GEMM_SM90 && p.dtype == CUDA_OPS_FLOAT32 && t.tile == TF32_BY_ITSELF && n > t.n;
    const bool steps = has_model_of_steps(t, p), cores = steps && gemm_direct_uses_cores(p, device);
    const bool slowly = steps && !cores && bytes > MANY_BYTES;
    const double rate = slowly ? DIRECT_BYTES_RATE : narrow ? NARROW_BYTES_RATE : BYTES_RATE;
    const double copying = (bytes + bytes_read_again(t, p, m, n)) / rate * (by_itself ? READS_BY_ITSELF : 1);
    const int64_t sum_size = p.dtype == CUDA_OPS_FLOAT64 ? 8 : 4;
    const double partial_rate = p.dtype == CUDA_OPS_FLOAT64 ? FLOAT64_PARTIAL_BYTES_RATE : PARTIAL_BYTES_RATE;
    const bool splits_last_wave = t.path == GEMM_MMA && p.dtype == CUDA_OPS_FLOAT64 && t.tile == 0 && splits == 1;
    const double waves =
        splits_last_wave ? gemm_mma_float64_waves(p, device) : (double)waves_of(t, p, m, n, splits, device);
    const bool around = t.path == GEMM_MMA && dtype_size(p.dtype) == 2 && (p.lda % 8 != 0 || p.ldb % 8 != 0);
    double time = steps
                      ? direct_microseconds(t, p, splits, device)
                      : waves *
                            (sum_of(t, p, m, n, transposed) * (double)whole_stages(t, p, ceil_div(p.k, splits)) / 1024 +
                             rest_of(t, p, m, n)) *
                            (around ? MMA_AROUND : 1);
    if (t.path == GEMM_SM90_SKINNY)
        time += SKINNY_BLOCK * (double)(ceil_div(m, t.m) * ceil_div(n, t.n) * p.batch * splits);
    if (splits > 1 && !steps) // partial sums go from block to block, or through device memory
        time += t.path == GEMM_SM90_SKINNY ? t.split * log2((double)splits)
                : splits_in_clusters(t.path)
                    ? t.split * (double)(splits - 1)
                    : t.split + (double)(2 * sum_size * splits * p.batch * m * n) / partial_rate +
                          ADDING_ROUND * (double)((splits - 1) / gemm_splits_in_flight(p, splits));
    time += asked_twice_microseconds(t, p, m, n, waves);
    // The shorter of the two is not hidden altogether; adding a part of it also orders the tiles where bytes decide.
    const double both = time > copying ? time + NOT_HIDDEN * copying : copying + NOT_HIDDEN * time;
    if (!steps && !stores_tiles(t, p))
        return t.start + both;
    const double shows = copying * (cores   ? DIRECT_CORES_NOT_OVERLAPPED
                                    : steps ? DIRECT_NOT_OVERLAPPED
                                            : NOT_OVERLAPPED);
    const double most = cores   ? DIRECT_CORES_MOST_NOT_OVERLAPPED
                        : steps ? DIRECT_MOST_NOT_OVERLAPPED
                                : MOST_NOT_OVERLAPPED;
    const bool tf32 = t.path == GEMM_SM90 && p.dtype == CUDA_OPS_FLOAT32;
    return t.start + both + (shows < most ? shows : most) +
           (tf32                         ? copy_microseconds(gemm_sm90_tf32_bytes(p, t.tile))
            : t.path == GEMM_SM90_3XTF32 ? split_microseconds(p)
                                         : 0);
}

// How much slower a tile is that reads rows shorter than a cache line: sm90_skinny's n neighbouring values of B.
static constexpr double NARROW = 1.18;

// And one of sm90's that makes D or D^T where it makes D^T: that leaves in whole lines.
static constexpr double AS_D_TRANSPOSED = 0.975;

static bool leaves_transposed(const GemmTime &t, const cuda_ops_gemm_problem &p, bool swapped)
{
    return t.path == GEMM_SM90 && swapped && !is_pair(t, p) && !gemm_sm90_splits(p, t.tile, swapped);
}

// And one of a pair that makes D, not D^T, unless both operands are stored along m and n.
static constexpr double PAIR_AS_IT_IS = 1.04;

static bool reads_narrow_rows(const GemmTime &t, const cuda_ops_gemm_problem &p, bool swapped)
{
    const bool n_contiguous = swapped ? p.transpose_a : !p.transpose_b;
    return t.path == GEMM_SM90_SKINNY && n_contiguous && t.n * dtype_size(p.dtype) < 128;
}

// Whether every split has enough of k, and all blocks fit on the GPU at once.
static bool is_worth_splitting(const GemmTime &t, const cuda_ops_gemm_problem &p, int64_t m, int64_t n, int64_t splits,
                               GemmDevice device)
{
    const bool is_one_wave = waves_of(t, p, m, n, splits, device) == 1;
    // A k so long that splitting pays even if it only fills the last wave.
    const bool halves = p.dtype == CUDA_OPS_FLOAT16 || p.dtype == CUDA_OPS_BFLOAT16;
    const bool fills_waves =
        (t.path == GEMM_MMA && p.dtype == CUDA_OPS_FLOAT64 && p.k / splits >= LONG_FLOAT64_SPLIT) ||
        (t.path == GEMM_SM90 && halves && p.k / splits >= LONG_HALVES_SPLIT);
    const int64_t smallest = t.path == GEMM_DIRECT         ? SMALLEST_DIRECT_SPLIT
                             : t.path == GEMM_SM90_SKINNY  ? SMALLEST_SKINNY_SPLIT
                             : t.path == GEMM_SM90_3XTF32  ? SMALLEST_3XTF32_SPLIT
                             : p.dtype == CUDA_OPS_FLOAT64 ? SMALLEST_FLOAT64_SPLIT
                             : p.dtype == CUDA_OPS_FLOAT32 ? SMALLEST_TF32_SPLIT
                                                           : SMALLEST_SPLIT;
    return (t.path != GEMM_DIRECT || device.capability >= 90) && // clusters
           (t.path != GEMM_SM90_3XTF32 || !p.preactivation) && p.k / splits >= smallest && (is_one_wave || fills_waves);
}

// Whether the tile takes the problem as it is or, if `swapped`, with A and B exchanged, so that it makes D^T.
static bool takes(const GemmTime &t, const cuda_ops_gemm_problem &p, bool swapped, GemmDevice device)
{
    switch (t.path) {
    case GEMM_MMA: // float64's small tiles are Hopper's
        return !swapped && (t.tile == 0 || device.capability >= 90);
    case GEMM_SM90: // 128 x 80 makes one tile a block: for a D that is one wave of it
        if (p.dtype == CUDA_OPS_FLOAT32 && t.tile == TF32_SIDE_BY_SIDE && !sums_many_rows(p))
            return false;
        return gemm_sm90_takes(p, t.tile, swapped) &&
               (t.n != 80 || clusters_of(t, p, swapped ? p.n : p.m, swapped ? p.m : p.n) * 2 <= device.multiprocessors);
    case GEMM_SM90_SKINNY:
        return true;
    case GEMM_SM90_3XTF32:
        return swapped == gemm_sm90_3xtf32_swaps(p);
    default:
        return !swapped;
    }
}

// Whether the row was measured with one block an SM, of a tile whose blocks share an SM where there are many: its times
// do not hold for more than one wave. (direct's rows are fitted to several.)
template <int COUNT>
static bool is_for_one_wave(const GemmTime (&times)[COUNT], const GemmTime &t)
{
    if (t.path != GEMM_DIRECT && t.blocks == 1)
        for (const GemmTime &other : times)
            if (other.path == t.path && other.tile == t.tile && other.blocks > 1)
                return true;
    return false;
}

template <int COUNT>
static GemmPlan fastest_plan(const GemmTime (&times)[COUNT], const GemmCall &call, GemmDevice device, int only,
                             double *microseconds)
{
    const cuda_ops_gemm_problem &p = call.problem;
    const bool transposes = p.dtype == CUDA_OPS_FLOAT32 && gemm_sm90_tf32_transposes_d(p);
    const bool both_along = p.transpose_a && !p.transpose_b;
    GemmPlan best = {};
    double least = 0;
    for (const GemmTime &t : times) {
        if ((only && t.path != only) || !path_numbered(t.path)->supports(call, device))
            continue;
        for (int swapped = 0; swapped < 2; swapped++) {
            if (!takes(t, p, swapped, device))
                continue;
            const bool transposed = swapped || (transposes && t.path == GEMM_SM90);
            const int64_t m = transposed ? p.n : p.m, n = transposed ? p.m : p.n;
            for (int splits = 1; splits <= t.splits; splits = more_splits(t.path, splits)) {
                if (splits > 1 && ((t.path == GEMM_SM90 && !gemm_sm90_splits(p, t.tile, swapped)) ||
                                   !is_worth_splitting(t, p, m, n, splits, device)))
                    break;
                if (waves_of(t, p, m, n, splits, device) > 1 && (is_for_one_wave(times, t) || is_for_few(t, p)))
                    break;
                const double time = estimate(t, p, m, n, splits, transposed, device) *
                                    (reads_narrow_rows(t, p, swapped)           ? NARROW
                                     : leaves_transposed(t, p, swapped)         ? AS_D_TRANSPOSED
                                     : is_pair(t, p) && !swapped && !both_along ? PAIR_AS_IT_IS
                                                                                : 1);
                if (best.path == 0 || time < least) {
                    least = time;
                    best = {t.path, t.tile, splits, swapped, t.path == GEMM_SM90 ? band_of(p, t) : 8};
                }
            }
        }
    }
    *microseconds = least;
    return best;
}

// Two schedules of sm90's tile of 128 x 128: ping-pong, each consumer warpgroup with tiles of its own, and cooperative,
// both on one tile. They are equally fast at the product; but where a block has one tile, the cooperative one shares
// the epilogue, and gelu's is long.
static constexpr int PINGPONG = 1, COOPERATIVE = 5;

static bool has_long_epilogue(const GemmPlan &plan, const cuda_ops_gemm_problem &p, GemmDevice device)
{
    return plan.path == GEMM_SM90 && plan.tile == PINGPONG && plan.splits == 1 && !p.transpose_a &&
           is_gelu(p.activation) &&
           clusters_of_lines(ceil_div(p.m, 128), ceil_div(p.n, 128)) * p.batch <= device.multiprocessors / 2;
}

// Of what simt's model expects, in products of layers, as a median; and, beside sm90_3xtf32's times, where rows of A or
// B are no whole 16 bytes.
static constexpr double SIMT_TAKES = 0.92, SIMT_TAKES_UNALIGNED = 1.15;

static double simt_microseconds(const cuda_ops_gemm_problem &p, GemmDevice device, const GemmPlan &other)
{
    const bool whole = p.lda % 4 == 0 && p.ldb % 4 == 0 && !p.unaligned_a && !p.unaligned_b;
    return (whole || other.path != GEMM_SM90_3XTF32 ? SIMT_TAKES : SIMT_TAKES_UNALIGNED) *
           gemm_simt_microseconds(p, device);
}

// Products with times of their own: of many multiply-adds, and the gradients of weights of many rows.
static constexpr double LONG = 1.6e10;

static bool is_long(const cuda_ops_gemm_problem &p)
{
    return (double)p.batch * (double)p.m * (double)p.n * (double)p.k >= LONG ||
           (p.transpose_a && !p.transpose_b && p.k >= LONG_K);
}

// By the tables. path 0: none has a row for the problem. only: the path that is wanted, or 0.
static GemmPlan tabled_plan(const GemmCall &call, GemmDevice device, int only, double *microseconds)
{
    const cuda_ops_gemm_problem &p = call.problem;
    if (p.dtype == CUDA_OPS_FLOAT16 || p.dtype == CUDA_OPS_BFLOAT16) {
        const GemmPlan plan = is_long(p) ? fastest_plan(HALVES_LONG_TIMES, call, device, only, microseconds)
                                         : fastest_plan(HALVES_TIMES, call, device, only, microseconds);
        return has_long_epilogue(plan, p, device) ? GemmPlan{GEMM_SM90, COOPERATIVE, 1, 0, plan.group} : plan;
    }
    if (p.dtype == CUDA_OPS_FLOAT64)
        return fastest_plan(FLOAT64_TIMES, call, device, only, microseconds);
    if (p.dtype == CUDA_OPS_FLOAT32 && gemm_direct_uses_cores(p, device)) {
        const GemmPlan plan = fastest_plan(FLOAT32_TIMES, call, device, only, microseconds);
        const double tiled = simt_microseconds(p, device, plan);
        if (only != 0 || tiled >= *microseconds)
            return plan;
        *microseconds = tiled;
        return {GEMM_SIMT, 0, 1, 0, 8};
    }
    if (p.dtype == CUDA_OPS_FLOAT32 && p.transpose_a && !p.transpose_b)
        return fastest_plan(TF32_TN_TIMES, call, device, only, microseconds);
    if (p.dtype == CUDA_OPS_FLOAT32)
        return !p.transpose_a && p.transpose_b ? fastest_plan(TF32_NT_TIMES, call, device, only, microseconds)
                                               : fastest_plan(TF32_TIMES, call, device, only, microseconds);
    return {};
}

static GemmPlan padded_plan(const GemmCall &call, GemmDevice device, double *microseconds)
{
    const GemmCall product = gemm_padded_call(call);
    double least = 0, skinny = 0;
    GemmPlan plan = tabled_plan(product, device, GEMM_SM90, &least);
    const GemmPlan other = tabled_plan(product, device, GEMM_SM90_SKINNY, &skinny);
    if (other.path && (plan.path == 0 || skinny < least)) {
        plan = other;
        plan.tile += PADDED_SKINNY;
        least = skinny;
    }
    plan.path = GEMM_PADDED;
    *microseconds = least + copy_microseconds(gemm_padded_bytes(call));
    return plan;
}

static GemmCall without_pointers(const cuda_ops_gemm_problem &problem)
{
    return {nullptr, nullptr, nullptr, nullptr, nullptr, problem, nullptr};
}

// path 0: nothing is known of the problem's times. only: as above.
static GemmPlan plan_anew(const GemmCall &call, GemmDevice device, int only)
{
    const cuda_ops_gemm_problem &p = call.problem;
    if (only == GEMM_NARROW)
        return gemm_narrow_plan(p, device);
    double least = 0, padded = 0, other = 0;
    if (only == GEMM_SM90_UNALIGNED)
        return gemm_sm90_unaligned_plan(p, device, &least);
    const GemmPlan in_place = tabled_plan(call, device, only, &least);
    GemmPlan plan = in_place;
    if ((only == 0 || only == GEMM_PADDED) && gemm_padded_supports(call, device)) {
        const GemmPlan copied = padded_plan(call, device, &padded);
        if (plan.path == 0 || padded < least)
            plan = copied, least = padded;
    }
    if (only != 0 || plan.path == 0)
        return plan;
    const GemmCall sizes = without_pointers(p);
    bool is_taken = true; // by the call's addresses too
    if (gemm_narrow_supports(sizes, device)) {
        other = gemm_narrow_microseconds(p, device);
        if (other < least)
            plan = gemm_narrow_plan(p, device), least = other, is_taken = gemm_narrow_supports(call, device);
    }
    if (gemm_sm90_unaligned_is_for(p) && gemm_sm90_unaligned_supports(sizes, device)) {
        const GemmPlan unaligned = gemm_sm90_unaligned_plan(p, device, &other);
        if (other < least)
            plan = unaligned, is_taken = gemm_sm90_unaligned_supports(call, device);
    }
    if (is_taken)
        return plan;
    // An address that the problem does not tell of: the query for the workspace took that path, and padded and
    // sm90_3xtf32 may have no room in what it asked for.
    return in_place.path == GEMM_SM90_3XTF32 ? GemmPlan{GEMM_SIMT, 0, 1, 0, 8} : in_place;
}

static GemmPlan plan_for(const GemmCall &call, GemmDevice device, int only)
{
    static KnownPlans &known = *new KnownPlans; // never freed: a thread may launch while others leave main()
    const PlanKey key = plan_key(call, device, only);
    GemmPlan plan = {};
    if (!known.find(key, &plan)) {
        plan = plan_anew(call, device, only);
        known.keep(key, plan);
    }
    return plan;
}

// Whether the plan's kernel can also store the preactivation.
static bool can_keep(const GemmPlan &plan)
{
    if (plan.path == GEMM_PADDED)
        return can_keep(gemm_padded_product(plan));
    return plan.path == GEMM_SIMT || plan.path == GEMM_SM90_SKINNY ||
           ((plan.path == GEMM_SM90 || plan.path == GEMM_SM90_3XTF32) && plan.splits == 1);
}

GemmPlan gemm_sm90_plan(const cuda_ops_gemm_problem &p, GemmDevice device)
{
    return plan_for(without_pointers(p), device, GEMM_SM90);
}

GemmPlan gemm_sm90_3xtf32_plan(const cuda_ops_gemm_problem &p, GemmDevice device)
{
    return plan_for(without_pointers(p), device, GEMM_SM90_3XTF32);
}

GemmPlan gemm_sm90_skinny_plan(const cuda_ops_gemm_problem &p, GemmDevice device)
{
    return plan_for(without_pointers(p), device, GEMM_SM90_SKINNY);
}

GemmPlan gemm_mma_float64_plan(const cuda_ops_gemm_problem &p, GemmDevice device)
{
    return plan_for(without_pointers(p), device, GEMM_MMA);
}

GemmPlan gemm_direct_plan(const cuda_ops_gemm_problem &p, GemmDevice device)
{
    return plan_for(without_pointers(p), device, GEMM_DIRECT);
}

GemmPlan gemm_padded_plan(const cuda_ops_gemm_problem &p, GemmDevice device)
{
    return plan_for(without_pointers(p), device, GEMM_PADDED);
}

// Of the bias and of D, beside A and B: the same dtype, or float32 with fp16 and bf16.
static bool is_wider_or_same(cuda_ops_dtype other, cuda_ops_dtype dtype)
{
    return other == dtype || (other == CUDA_OPS_FLOAT32 && (dtype == CUDA_OPS_FLOAT16 || dtype == CUDA_OPS_BFLOAT16));
}

static bool is_valid(const GemmCall &call)
{
    const cuda_ops_gemm_problem &p = call.problem;
    const int64_t a_row = p.transpose_a ? p.m : p.k, b_row = p.transpose_b ? p.k : p.n;
    return p.m >= 0 && p.n >= 0 && p.k >= 0 && p.batch >= 0 && p.lda >= a_row && p.ldb >= b_row && p.ldd >= p.n &&
           is_wider_or_same(p.output_dtype, p.dtype) && (!call.bias || is_wider_or_same(p.bias_dtype, p.dtype)) &&
           p.activation >= CUDA_OPS_GEMM_NONE && p.activation <= CUDA_OPS_GEMM_HARDSWISH;
}

static const GemmPath *choose(const GemmCall &call, int number, GemmDevice device)
{
    if (!is_valid(call))
        return nullptr;
    const bool fastest = number == CUDA_OPS_GEMM_FASTEST;
    if (call.problem.preactivation && number != GEMM_SIMT) { // simt plans by itself
        const GemmPlan plan = plan_for(call, device, fastest ? 0 : number);
        return can_keep(plan) ? path_numbered(plan.path) : nullptr;
    }
    if (!fastest) {
        const GemmPath *const path = path_numbered(number);
        return path && path->supports(call, device) ? path : nullptr;
    }
    if (const int planned = plan_for(call, device, 0).path)
        return path_numbered(planned);
    for (int candidate : PREFERENCE) {
        const GemmPath *const path = path_numbered(candidate);
        if (path && path->supports(call, device))
            return path;
    }
    return nullptr;
}

static cuda_ops_status launch_planned(const GemmCall &call, GemmDevice device, const GemmPlan &plan)
{
    switch (plan.path) {
    case GEMM_SIMT:
        return gemm_simt_planned(call, device, plan);
    case GEMM_MMA:
        return gemm_mma_planned(call, device, plan);
    case GEMM_SM90:
        return gemm_sm90_planned(call, device, plan);
    case GEMM_SM90_SKINNY:
        return gemm_sm90_skinny_planned(call, device, plan);
    case GEMM_DIRECT:
        return gemm_direct_planned(call, device, plan);
    case GEMM_PADDED:
        return gemm_padded_planned(call, device, plan);
    case GEMM_NARROW:
        return gemm_narrow_planned(call, device, plan);
    case GEMM_SM90_3XTF32:
        return gemm_sm90_3xtf32_planned(call, device, plan);
    case GEMM_SM90_UNALIGNED:
        return gemm_sm90_unaligned_planned(call, device, plan);
    default:
        return path_numbered(plan.path)->launch(call, device);
    }
}

int gemm_path_on(const cuda_ops_gemm_problem &problem, GemmDevice device, int path)
{
    const GemmPath *const chosen = choose(without_pointers(problem), path, device);
    return chosen ? chosen->number : -1;
}

extern "C" int cuda_ops_gemm_path_cuda(const cuda_ops_gemm_problem *problem, int path)
{
    return gemm_path_on(*problem, current_device(), path);
}

// The ladder's rungs that the choice never takes are reported too, since they can be forced.
static bool is_never_chosen(int path)
{
    return path < GEMM_SIMT || path == GEMM_TMA_WGMMA || path > GEMM_SM90_UNALIGNED;
}

extern "C" int cuda_ops_gemm_paths_cuda(cuda_ops_path_report *reports, int room, const cuda_ops_gemm_problem *problem,
                                        int path, const cuda_ops_device_facts *device)
{
    const GemmCall call = without_pointers(*problem);
    const GemmDevice on = device ? *device : current_device();
    const int chosen = gemm_path_on(*problem, on, path);
    int count = 0;
    for (const GemmPath &row : PATHS) {
        const Answer supports = row.supports(call, on);
        const Answer is_fast = row.number == chosen && path == CUDA_OPS_GEMM_FASTEST ? YES
                               : is_never_chosen(row.number)
                                   ? no("a rung of the ladder that the choice never takes")
                                   : no("slower by the times of gemm/times.h, narrow.cu and sm90_unaligned.cu");
        if (count < room)
            reports[count] = {row.name,
                              row.file,
                              row.kernels,
                              supports ? is_fast.why_not : supports.why_not,
                              supports,
                              supports && is_fast,
                              row.number == chosen};
        count++;
    }
    return count;
}

extern "C" const char *cuda_ops_gemm_path_name_cuda(int path)
{
    const GemmPath *const found = path_numbered(path);
    return found ? found->name : nullptr;
}

// Paths whose workspace is for copies of operands.
static bool makes_copies(int path)
{
    return path == GEMM_PADDED || path == GEMM_SM90_3XTF32;
}

extern "C" int64_t cuda_ops_gemm_workspace_cuda(const cuda_ops_gemm_problem *problem, int path)
{
    if (problem->m == 0 || problem->n == 0 || problem->batch == 0)
        return 0;
    const GemmCall call = without_pointers(*problem);
    const GemmDevice device = current_device();
    if (!is_valid(call))
        return 0;
    // The pointers, unknown here, may be less aligned than assumed, and the call then falls to a later path. Not to
    // padded or sm90_3xtf32, whose copies may be as large as the operands: they are taken for what is known here, or not
    // at all.
    int64_t bytes = 0;
    for (const GemmPath &candidate : PATHS)
        if ((path == candidate.number || (path == CUDA_OPS_GEMM_FASTEST && !makes_copies(candidate.number))) &&
            candidate.workspace && candidate.supports(call, device)) {
            const int64_t wanted = candidate.workspace(*problem, device);
            bytes = wanted > bytes ? wanted : bytes;
        }
    if (path == CUDA_OPS_GEMM_FASTEST) {
        const GemmPlan plan = plan_for(call, device, 0);
        const int64_t wanted = plan.path == GEMM_PADDED        ? gemm_padded_planned_workspace(*problem, plan)
                               : plan.path == GEMM_SM90_3XTF32 ? gemm_sm90_3xtf32_planned_workspace(*problem, plan)
                                                               : 0;
        bytes = wanted > bytes ? wanted : bytes;
    }
    return bytes;
}

extern "C" cuda_ops_status cuda_ops_gemm_cuda(void *d, const void *a, const void *b, const void *bias, void *workspace,
                                              const cuda_ops_gemm_problem *problem, int path, cuda_ops_stream stream)
{
    GemmCall call = {d, a, b, bias, workspace, *problem, stream};
    const GemmDevice device = current_device();
    if (problem->m == 0 || problem->n == 0 || problem->batch == 0)
        return is_valid(call) ? CUDA_OPS_SUCCESS : CUDA_OPS_INVALID_ARGUMENT;
    if (!is_valid(call))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (path != CUDA_OPS_GEMM_FASTEST || problem->preactivation) {
        const GemmPath *const chosen = choose(call, path, device);
        return chosen ? chosen->launch(call, device) : CUDA_OPS_INVALID_ARGUMENT;
    }
    // A path may find at its launch that it cannot take the call after all (more tiles than its counters hold, a driver
    // without tensor maps); then the next one does.
    const GemmPlan plan = plan_for(call, device, 0);
    cuda_ops_status status = plan.path ? launch_planned(call, device, plan) : CUDA_OPS_INVALID_ARGUMENT;
    for (size_t i = 0; i < sizeof(PREFERENCE) / sizeof(int) && status == CUDA_OPS_INVALID_ARGUMENT; i++) {
        const GemmPath *const candidate = path_numbered(PREFERENCE[i]);
        if (candidate->supports(call, device))
            status = candidate->launch(call, device);
    }
    return status;
}

// The band is the choice's for that tile.
static GemmPlan internal(const cuda_ops_gemm_problem &p, const cuda_ops_gemm_plan &plan)
{
    const GemmPlan found = {plan.path, plan.tile, plan.splits, plan.swapped, 8};
    const GemmPlan product = plan.path == GEMM_PADDED ? gemm_padded_product(found) : found;
    if (product.path == GEMM_SM90 && (p.dtype == CUDA_OPS_FLOAT16 || p.dtype == CUDA_OPS_BFLOAT16))
        for (const GemmTime &t : HALVES_TIMES)
            if (t.path == product.path && t.tile == product.tile)
                return {plan.path, plan.tile, plan.splits, plan.swapped, band_of(p, t)};
    return found;
}

// Of k: a tile that shares its SM with another, for each place on the GPU.
static constexpr int MOST_SM90_SPLITS = 264, MOST_NARROW_SPLITS = 528;

// Whether a kernel takes a plan that the caller made (tests and the tuner).
static bool is_plan(const GemmCall &call, GemmDevice device, const cuda_ops_gemm_plan &plan)
{
    const GemmPath *const path = path_numbered(plan.path);
    const int kernel = plan.path == GEMM_PADDED ? gemm_padded_product(internal(call.problem, plan)).path : plan.path;
    if (kernel == GEMM_SIMT)
        return is_valid(call) && plan.tile >= 0 && plan.splits >= 1 &&
               gemm_simt_takes(call, device, internal(call.problem, plan));
    return is_valid(call) && path && path->supports(call, device) && plan.tile >= 0 && plan.splits >= 1 &&
           (!call.problem.preactivation || can_keep(internal(call.problem, plan))) &&
           plan.splits <= (kernel == GEMM_MMA              ? call.problem.dtype == CUDA_OPS_FLOAT64 ? 32 : 1
                           : kernel == GEMM_SM90           ? MOST_SM90_SPLITS
                           : kernel == GEMM_SM90_3XTF32    ? MOST_SM90_SPLITS
                           : kernel == GEMM_SM90_SKINNY    ? 8
                           : kernel == GEMM_DIRECT         ? 16
                           : kernel == GEMM_NARROW         ? MOST_NARROW_SPLITS
                           : kernel == GEMM_SM90_UNALIGNED ? MOST_SM90_UNALIGNED_SPLITS
                                                           : 1);
}

extern "C" cuda_ops_status cuda_ops_gemm_plan_cuda(cuda_ops_gemm_plan *plan, const cuda_ops_gemm_problem *problem,
                                                   int path)
{
    const GemmCall call = without_pointers(*problem);
    const GemmDevice device = current_device();
    const GemmPath *const chosen = choose(call, path, device);
    if (!chosen)
        return CUDA_OPS_INVALID_ARGUMENT;
    const GemmPlan found = plan_for(call, device, chosen->number);
    // Of the paths below sm90, only mma's float64 has its splits of k from here.
    const bool splits =
        chosen->number >= GEMM_SM90 || (chosen->number == GEMM_MMA && problem->dtype == CUDA_OPS_FLOAT64);
    *plan = {chosen->number, found.tile, splits ? found.splits : 1, found.swapped};
    return CUDA_OPS_SUCCESS;
}

extern "C" int64_t cuda_ops_gemm_planned_workspace_cuda(const cuda_ops_gemm_problem *problem,
                                                        const cuda_ops_gemm_plan *plan)
{
    const GemmPath *const path = path_numbered(plan->path);
    if (plan->path == GEMM_SIMT)
        return gemm_simt_planned_workspace(*problem, current_device(), internal(*problem, *plan));
    if (plan->path == GEMM_MMA)
        return gemm_mma_planned_workspace(*problem, current_device(), internal(*problem, *plan));
    if (plan->path == GEMM_SM90)
        return gemm_sm90_planned_workspace(*problem, internal(*problem, *plan));
    if (plan->path == GEMM_PADDED)
        return gemm_padded_planned_workspace(*problem, internal(*problem, *plan));
    if (plan->path == GEMM_NARROW)
        return gemm_narrow_planned_workspace(*problem, internal(*problem, *plan));
    if (plan->path == GEMM_SM90_3XTF32)
        return gemm_sm90_3xtf32_planned_workspace(*problem, internal(*problem, *plan));
    if (plan->path == GEMM_SM90_UNALIGNED)
        return gemm_splits_bytes(*problem, plan->splits);
    return path && path->workspace ? path->workspace(*problem, current_device()) : 0;
}

extern "C" cuda_ops_status cuda_ops_gemm_planned_cuda(void *d, const void *a, const void *b, const void *bias,
                                                      void *workspace, const cuda_ops_gemm_problem *problem,
                                                      const cuda_ops_gemm_plan *plan, cuda_ops_stream stream)
{
    const GemmCall call = {d, a, b, bias, workspace, *problem, stream};
    const GemmDevice device = current_device();
    if (!is_plan(call, device, *plan))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (problem->m == 0 || problem->n == 0 || problem->batch == 0)
        return CUDA_OPS_SUCCESS;
    return launch_planned(call, device, internal(*problem, *plan));
}
