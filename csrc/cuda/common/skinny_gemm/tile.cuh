// skinny_gemm: a block's tile, from the loop over slices to the sum over the splits of k and the epilogue.
#ifndef CUDA_OPS_COMMON_SKINNY_GEMM_TILE_CUH
#define CUDA_OPS_COMMON_SKINNY_GEMM_TILE_CUH

#include "common/skinny_gemm/multiply.cuh"
#include "ptx/cluster.cuh"

// Adds the sums of all splits for adjacent elements, in the order of the splits. Four splits are in flight at a time,
// since each is a trip to another multiprocessor.
template <typename A, int COUNT>
__device__ __forceinline__ void add_splits(A (&values)[COUNT], const A *own, int splits)
{
    constexpr int STEP = 16 / (int)sizeof(A), VECTORS = COUNT / STEP, TOGETHER = 4;
#pragma unroll
    for (int e = 0; e < COUNT; e++)
        values[e] = 0;
    for (int first = 0; first < splits; first += TOGETHER) {
        vector16<A> v[TOGETHER][VECTORS];
#pragma unroll
        for (int s = 0; s < TOGETHER; s++) {
            const A *const from = mapa(own, first + s < splits ? first + s : 0);
#pragma unroll
            for (int i = 0; i < VECTORS; i++)
                v[s][i] = reinterpret_cast<const vector16<A> *>(from)[i];
        }
#pragma unroll
        for (int s = 0; s < TOGETHER; s++)
#pragma unroll
            for (int e = 0; e < COUNT; e++)
                values[e] += first + s < splits ? v[s][e / STEP].element[e % STEP] : A(0);
    }
}

template <typename TA, typename TB, typename TC, typename TP>
__device__ __forceinline__ bool has_aligned_output(const skinny_product<TA, TB, TC, TP> &p)
{
    if constexpr (std::is_same<TC, any_float>::value)
        return false;
    else
        return reinterpret_cast<uintptr_t>(p.output) % 16 == 0 && p.output_pitch * sizeof(TC) % 16 == 0;
}

// The epilogue: this split's share of the tile's sums, from shared to global memory.
template <typename Shape, typename TA, typename TB, typename TC, typename TP>
__device__ __forceinline__ void write_tile(const skinny_product<TA, TB, TC, TP> &p, int64_t row, int64_t column,
                                           int split, bool with_row_sums,
                                           const accumulate_type<typename Shape::E> *sums)
{
    typedef accumulate_type<typename Shape::E> A;
    typedef typename std::conditional<std::is_same<TC, any_float>::value, A, TC>::type C;
    constexpr int COUNT = 16 / (int)sizeof(C), ACROSS = Shape::TILE_N / COUNT, DOWN = Shape::THREADS / ACROSS;
    static_assert(Shape::THREADS % ACROSS == 0, "a thread keeps its columns");
    const int j = threadIdx.x % ACROSS * COUNT, first = threadIdx.x / ACROSS;
    const int64_t columns_left = p.n - column - j, rows_left = p.m - row;
    const int valid = columns_left >= COUNT ? COUNT : columns_left > 0 ? (int)columns_left : 0;
    const int last = valid == 0 ? 0 : rows_left < Shape::TILE_M ? (int)rows_left : Shape::TILE_M;
    const bool vectors = has_aligned_output(p) && valid == COUNT;
    A bias[COUNT];
#pragma unroll
    for (int e = 0; e < COUNT; e++)
        bias[e] = p.bias && e < valid ? (A)load_as_accumulate(p.bias[column + j + e]) : A(0);
    const auto finish = [&](int i, A(&values)[COUNT]) {
        const auto to = p.output + ((row + i) * p.output_pitch + column + j);
        vector16<C> result;
#pragma unroll
        for (int e = 0; e < COUNT; e++) {
            values[e] += bias[e];
            if (p.relu)
                values[e] = values[e] <= A(0) ? A(0) : values[e];
            if (p.accumulate && e < valid)
                values[e] += (A)load_as_accumulate(to[e]);
            result.element[e] = store_from_accumulate<C>((accumulate_type<C>)values[e]);
        }
        if constexpr (std::is_same<TC, any_float>::value) {
#pragma unroll
            for (int e = 0; e < COUNT; e++)
                if (e < valid)
                    store_element(to, e, values[e]);
        } else if (vectors) {
            *reinterpret_cast<vector16<TC> *>(to) = result;
        } else {
#pragma unroll
            for (int e = 0; e < COUNT; e++)
                if (e < valid)
                    to[e] = result.element[e];
        }
    };
    if (p.splits == 1) {
#pragma unroll 4
        for (int i = first; i < last; i += DOWN) {
            A values[COUNT];
#pragma unroll
            for (int e = 0; e < COUNT; e++)
                values[e] = sums[i * Shape::SUM_PITCH + j + e];
            finish(i, values);
        }
    } else {
        for (int i = first + split * DOWN; i < last; i += p.splits * DOWN) {
            A values[COUNT];
            add_splits(values, sums + i * Shape::SUM_PITCH + j, p.splits);
            finish(i, values);
        }
    }
    if (with_row_sums) {
        for (int i = split * Shape::THREADS + threadIdx.x; i < Shape::TILE_M; i += p.splits * Shape::THREADS) {
            if (row + i >= p.m)
                continue;
            const A *const own = sums + Shape::TILE_M * Shape::SUM_PITCH + i;
            A sum = 0;
            for (int s = 0; s < p.splits; s++)
                sum += p.splits > 1 ? *mapa(own, s) : *own;
            if (p.accumulate)
                sum += (A)load_as_accumulate(p.row_sums[row + i]);
            store_element(p.row_sums, row + i, (accumulate_type<TP>)sum);
        }
    }
}

// n = 0 keeps one column of tiles, for row_sums.
template <typename Shape, typename TA, typename TB, typename TC, typename TP>
__host__ __device__ __forceinline__ int64_t skinny_tile_columns(const skinny_product<TA, TB, TC, TP> &p)
{
    return p.n > 0 ? ceil_div(p.n, Shape::TILE_N) : 1;
}

// A block's tile and its split of k.
struct skinny_item {
    int64_t row, column, begin, end; // of the tile; of k
    int split;
};

// The main loop: leaves the item's sums in shared memory; the caller's barrier follows. One function up to the sums'
// store, without which its machine code differs.
template <typename Shape, bool A_K_MAJOR, bool B_K_MAJOR, bool MASKED, bool ROW_SUMS, bool ALIGNED, typename TA,
          typename TB, typename TC, typename TP>
__device__ __forceinline__ void sum_tile(const skinny_product<TA, TB, TC, TP> &p, const skinny_item &item,
                                         unsigned char *shared)
{
    typedef typename Shape::E E;
    typedef accumulate_type<E> A;
    typedef skinny_loader<E, TA, A_K_MAJOR, Shape::TILE_M, Shape::THREADS> LoadA;
    typedef skinny_loader<E, TB, B_K_MAJOR, Shape::TILE_N, Shape::THREADS> LoadB;
    constexpr int STAGES = Shape::STAGES, DEPTH = Shape::DEPTH;
    constexpr int A_ELEMENTS = Shape::TILE_M * DEPTH, B_ELEMENTS = Shape::TILE_N * DEPTH;
    constexpr int STAGE_ELEMENTS = Shape::stage_bytes(MASKED) / (int)sizeof(E);
    const int64_t depth = item.end - item.begin;
    const int steps = depth > 0 ? (int)ceil_div(depth, DEPTH) : 0;
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int first_m = warp / Shape::WARPS_N * Shape::WARP_M, first_n = warp % Shape::WARPS_N * Shape::WARP_N;
    E *const slices = reinterpret_cast<E *>(shared);

    LoadA load_a =
        make_loader<E, TA, A_K_MAJOR, Shape::TILE_M, Shape::THREADS>(p.a, item.row, p.m, p.a_pitch, item.begin);
    LoadA load_mask = load_a;
    if constexpr (MASKED)
        load_mask =
            make_loader<E, TA, A_K_MAJOR, Shape::TILE_M, Shape::THREADS>(p.mask, item.row, p.m, p.a_pitch, item.begin);
    LoadB load_b =
        make_loader<E, TB, B_K_MAJOR, Shape::TILE_N, Shape::THREADS>(p.b, item.column, p.n, p.b_pitch, item.begin);
    typename LoadA::raw_chunk raw_a[STAGES - 1][LoadA::RAW], raw_mask[STAGES - 1][MASKED ? LoadA::RAW : 1];
    typename LoadB::raw_chunk raw_b[STAGES - 1][LoadB::RAW];
    const auto fetch = [&](int step, E *stage, int slot) {
        const int64_t left = depth - (int64_t)step * DEPTH;
        fetch_slice<ALIGNED>(stage, raw_a[slot], load_a, left);
        if constexpr (MASKED)
            fetch_slice<ALIGNED>(stage + A_ELEMENTS + B_ELEMENTS, raw_mask[slot], load_mask, left);
        fetch_slice<ALIGNED>(stage + A_ELEMENTS, raw_b[slot], load_b, left);
    };
    const auto deposit = [&](E *stage, int slot) {
        deposit_slice(stage, raw_a[slot], load_a);
        if constexpr (MASKED)
            deposit_slice(stage + A_ELEMENTS + B_ELEMENTS, raw_mask[slot], load_mask);
        deposit_slice(stage + A_ELEMENTS, raw_b[slot], load_b);
    };
#pragma unroll
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < steps)
            fetch(step, slices + step * STAGE_ELEMENTS, step);
        cp_async_commit_group();
    }
#pragma unroll
    for (int step = 0; step < STAGES - 1; step++)
        if (step < steps)
            deposit(slices + step * STAGE_ELEMENTS, step);

    constexpr int M = Shape::TENSOR_CORES ? Shape::WARP_M / 16 : Shape::WARP_M / 4, N = Shape::WARP_N / 8;
    constexpr int FRAGMENT = Shape::TENSOR_CORES ? 4 : 1;
    typedef typename std::conditional<Shape::TENSOR_CORES, A[M][N][FRAGMENT], A[M][N]>::type Sums;
    typedef typename std::conditional<Shape::TENSOR_CORES, A[M][FRAGMENT], A[M]>::type RowSums;
    Sums sums = {};
    RowSums row_sums = {};
    int reading = 0, writing = (STAGES - 1) * STAGE_ELEMENTS; // offsets of stages
    for (int step = 0; step < steps; step++) {
        cp_async_wait_group<STAGES - 2>();
        if constexpr (Shape::TF32) {
            round_slice(slices + reading, load_a);
            round_slice(slices + reading + A_ELEMENTS, load_b);
        }
        __syncthreads();
        const int next = step + STAGES - 1;
        if (next < steps)
            fetch(next, slices + writing, 0);
        cp_async_commit_group();
        const E *const stage = slices + reading;
        if constexpr (Shape::TF32)
            multiply_slice_tf32<Shape, A_K_MAJOR, B_K_MAJOR, MASKED, ROW_SUMS>(
                sums, row_sums, stage, stage + A_ELEMENTS + B_ELEMENTS, stage + A_ELEMENTS, first_m, first_n, lane);
        else if constexpr (Shape::TENSOR_CORES)
            multiply_slice_tensor<Shape, A_K_MAJOR, B_K_MAJOR, MASKED, ROW_SUMS>(
                sums, row_sums, stage, stage + A_ELEMENTS + B_ELEMENTS, stage + A_ELEMENTS, first_m, first_n, lane);
        else if constexpr (Shape::SLICE_SUMS) {
            Sums slice_sums = {};
            RowSums slice_row_sums = {};
            multiply_slice_registers<Shape, A_K_MAJOR, B_K_MAJOR, MASKED, ROW_SUMS>(
                slice_sums, slice_row_sums, stage, stage + A_ELEMENTS + B_ELEMENTS, stage + A_ELEMENTS, first_m,
                first_n, lane);
#pragma unroll
            for (int i = 0; i < M; i++) {
                row_sums[i] += slice_row_sums[i];
#pragma unroll
                for (int j = 0; j < N; j++)
                    sums[i][j] += slice_sums[i][j];
            }
        } else
            multiply_slice_registers<Shape, A_K_MAJOR, B_K_MAJOR, MASKED, ROW_SUMS>(
                sums, row_sums, stage, stage + A_ELEMENTS + B_ELEMENTS, stage + A_ELEMENTS, first_m, first_n, lane);
        if (next < steps)
            deposit(slices + writing, 0);
        reading = reading == (STAGES - 1) * STAGE_ELEMENTS ? 0 : reading + STAGE_ELEMENTS;
        writing = writing == (STAGES - 1) * STAGE_ELEMENTS ? 0 : writing + STAGE_ELEMENTS;
    }
    cp_async_wait_group<0>();
    __syncthreads(); // before the sums overwrite the slices

    A *const shared_sums = reinterpret_cast<A *>(shared);
    A *const shared_row_sums = shared_sums + Shape::TILE_M * Shape::SUM_PITCH;
#pragma unroll
    for (int i = 0; i < M; i++) {
        if constexpr (Shape::TENSOR_CORES) {
            constexpr bool M_IN_ORDER = !Shape::TF32 || A_K_MAJOR, N_IN_ORDER = !Shape::TF32 || B_K_MAJOR;
            const int line = tf32_line<M_IN_ORDER>(first_m + i * 16 + lane / 4);
            const int other = tf32_line<M_IN_ORDER>(first_m + i * 16 + lane / 4 + 8);
#pragma unroll
            for (int j = 0; j < N; j++) {
                const int column = tf32_line<N_IN_ORDER>(first_n + j * 8 + lane % 4 * 2);
                const float *const from = sums[i][j];
                *reinterpret_cast<float2 *>(shared_sums + line * Shape::SUM_PITCH + column) =
                    make_float2(from[0], from[1]);
                *reinterpret_cast<float2 *>(shared_sums + other * Shape::SUM_PITCH + column) =
                    make_float2(from[2], from[3]);
            }
            if (ROW_SUMS && first_n == 0 && lane % 4 == 0) {
                shared_row_sums[line] = row_sums[i][0];
                shared_row_sums[other] = row_sums[i][2];
            }
        } else {
            constexpr int CHUNK = Shape::CHUNK;
            const int line = first_m + thread_line<A_K_MAJOR, CHUNK, 4>(lane / 8, i);
#pragma unroll
            for (int j = 0; j < N; j++)
                shared_sums[line * Shape::SUM_PITCH + first_n + thread_line<B_K_MAJOR, CHUNK, 8>(lane % 8, j)] =
                    sums[i][j];
            if (ROW_SUMS && first_n == 0 && lane % 8 == 0)
                shared_row_sums[line] = row_sums[i];
        }
    }
}

// Makes the tile of work item `item`: tiles along n first, the splits of a tile adjacent. WITH_ROW_SUMS: whether
// p.row_sums is looked at. ALIGNED: p.aligned, known at compile time.
template <typename Shape, bool A_K_MAJOR, bool B_K_MAJOR, bool MASKED, bool WITH_ROW_SUMS, bool ALIGNED, typename TA,
          typename TB, typename TC, typename TP>
__device__ __forceinline__ void make_tile(const skinny_product<TA, TB, TC, TP> &p, int64_t item, unsigned char *shared)
{
    const int64_t columns = skinny_tile_columns<Shape>(p), tile = item / p.splits;
    skinny_item at;
    at.split = (int)(item % p.splits);
    at.row = tile / columns * Shape::TILE_M;
    at.column = tile % columns * Shape::TILE_N;
    at.begin = at.split * p.chunk;
    at.end = at.begin + p.chunk < p.k ? at.begin + p.chunk : p.k;
    const bool row_sums = WITH_ROW_SUMS && p.row_sums && at.column == 0;
    if constexpr (WITH_ROW_SUMS && ALIGNED) {
        // Branches here keep the loops free of them.
        if (row_sums)
            sum_tile<Shape, A_K_MAJOR, B_K_MAJOR, MASKED, true, true>(p, at, shared);
        else
            sum_tile<Shape, A_K_MAJOR, B_K_MAJOR, MASKED, false, true>(p, at, shared);
    } else { // slow anyway, so compiled once
        sum_tile<Shape, A_K_MAJOR, B_K_MAJOR, MASKED, WITH_ROW_SUMS, ALIGNED>(p, at, shared);
    }
    if (p.splits > 1)
        cluster_sync();
    else
        __syncthreads();
    write_tile<Shape>(p, at.row, at.column, at.split, row_sums,
                      reinterpret_cast<const accumulate_type<typename Shape::E> *>(shared));
    if (p.splits > 1)
        cluster_sync(); // a block's shared memory must outlive the cluster's reads
}

#endif
