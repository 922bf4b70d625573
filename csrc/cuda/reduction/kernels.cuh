// The kernels of all reductions. A family is a struct, the kernels' argument:
//
//     State<A>                what a thread keeps of its elements, in the accumulation type; for what is kept of a part,
//                             and from there on, in double
//     none<A>()               of no elements
//     add(state, v, at, stride)   elements in registers: v[j] has the index at + j / SIZE * stride + j % SIZE in cols
//     VECTORS                 how many vectors of a row it takes at a time
//     merge(a, b)             of both
//     store(state, to)        the result
//     USES_ORIGIN             whether elements are to be taken relative to one of their row
//     from_origin(state, origin)  then takes that back, in double
//
// Rows (inner == 1): 16-byte vectors wherever they start, four in flight in a thread; `lanes` threads a part. Columns
// (inner > 1): neighbouring threads have neighbouring vectors and go down the rows. Where a result has several parts,
// each leaves its state in the workspace, and a second kernel merges these in a fixed order. Bound by memory: one read.
#ifndef CUDA_OPS_REDUCTION_KERNELS_CUH
#define CUDA_OPS_REDUCTION_KERNELS_CUH

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/group_sums.cuh"
#include "common/rows.cuh"
#include "common/value.cuh"
#include "reduction/reduction.h"

static constexpr int ROWS_IN_FLIGHT = 8;

// Where results go: of int64 if `indices`.
struct ReductionOutput {
    void *values;
    cuda_ops_dtype dtype;
    bool indices;

    __device__ __forceinline__ void store(int64_t at, double value, int64_t index) const
    {
        if (indices)
            ((int64_t *)values)[at] = index;
        else
            store_value(values, dtype, at, value);
    }
};

// A state as words, so that one function moves all of them between lanes.
template <typename S>
__device__ __forceinline__ S shuffle_state(const S &state, int offset)
{
    constexpr int WORDS = sizeof(S) / sizeof(unsigned int);
    union Words {
        S state;
        unsigned int word[WORDS];
        __device__ Words()
        {
        }
    } from, to;
    from.state = state;
#pragma unroll
    for (int w = 0; w < WORDS; w++)
        to.word[w] = __shfl_xor_sync(FULL_WARP, from.word[w], offset);
    return to.state;
}

// The state of rows' parts, or the result where a row has one part.
template <typename F, typename T>
__global__ void __launch_bounds__(ROW_THREADS, 2)
    reduction_rows_kernel(const F family, const ReductionOutput output, void *partials, const T *input, int64_t rows,
                          int64_t cols, int64_t parts, int64_t step, int lanes, bool vectorised, bool direct)
{
    typedef accumulate_type<T> A;
    typedef vector16<T> V;
    typedef typename F::template State<A> S;
    typedef typename F::template State<double> P;
    constexpr int SIZE = V::size, IN_FLIGHT = VECTORS_IN_FLIGHT;
    __shared__ __align__(16) unsigned char shared[ROW_THREADS / WARP_SIZE * sizeof(S)];
    S *const scratch = (S *)shared;
    const int lane = threadIdx.x % lanes, slots = blockDim.x / lanes;
    wait_for_predecessor();
    release_successor();
    for (int64_t first = (int64_t)blockIdx.x * slots; first < rows * parts; first += (int64_t)gridDim.x * slots) {
        const int64_t unit = first + threadIdx.x / lanes;
        S state = family.template none<A>();
        A origin = 0;
        if (unit < rows * parts) {
            const int64_t row = parts == 1 ? unit : unit / parts, begin = (unit - row * parts) * step;
            const int64_t count = cols - begin < step ? cols - begin : step;
            const T *const from = input + row * cols + begin;
            if constexpr (F::USES_ORIGIN) {
                const T *const whole = input + row * cols;
                origin = middle_of(load_as_accumulate(whole[0]), load_as_accumulate(whole[cols / 2]),
                                   load_as_accumulate(whole[cols - 1]));
            }
            const auto add_one = [&](int64_t c) {
                const A v[1] = {load_as_accumulate(from[c]) - origin};
                family.template add<1>(state, v, begin + c, 1);
            };
            if (vectorised) {
                // In the order of the elements, of which equal ones are told apart by their place.
                const row_split split = split_row(from, count);
                if (lane < split.head)
                    add_one(lane);
                int64_t vector = lane;
                for (; vector + (IN_FLIGHT - 1) * lanes < split.vectors; vector += IN_FLIGHT * lanes) {
                    const V *const at = reinterpret_cast<const V *>(from + split.head) + vector;
                    V x[IN_FLIGHT];
#pragma unroll
                    for (int i = 0; i < IN_FLIGHT; i++)
                        x[i] = at[i * lanes];
#pragma unroll
                    for (int i = 0; i < IN_FLIGHT; i += F::VECTORS) {
                        A v[F::VECTORS * SIZE];
#pragma unroll
                        for (int j = 0; j < F::VECTORS * SIZE; j++)
                            v[j] = element_of(x[i + j / SIZE], j % SIZE) - origin;
                        family.template add<SIZE>(state, v, begin + split.head + (vector + i * lanes) * SIZE,
                                                  (int64_t)lanes * SIZE);
                    }
                }
                // The rest, of which short rows have nothing else, is in flight together too.
                V x[IN_FLIGHT];
#pragma unroll
                for (int i = 0; i < IN_FLIGHT - 1; i++)
                    if (vector + i * lanes < split.vectors)
                        x[i] = (reinterpret_cast<const V *>(from + split.head) + vector)[i * lanes];
#pragma unroll
                for (int i = 0; i < IN_FLIGHT - 1; i++)
                    if (vector + i * lanes < split.vectors) {
                        A v[SIZE];
#pragma unroll
                        for (int j = 0; j < SIZE; j++)
                            v[j] = element_of(x[i], j) - origin;
                        family.template add<SIZE>(state, v, begin + split.head + (vector + i * lanes) * SIZE, 0);
                    }
                if (split.tail + lane < count)
                    add_one(split.tail + lane);
            } else {
                int64_t c = lane;
                for (; c + (IN_FLIGHT - 1) * lanes < count; c += IN_FLIGHT * lanes) {
                    A v[IN_FLIGHT];
#pragma unroll
                    for (int i = 0; i < IN_FLIGHT; i++)
                        v[i] = load_as_accumulate(from[c + i * lanes]) - origin;
                    family.template add<1>(state, v, begin + c, lanes);
                }
                for (; c < count; c += lanes)
                    add_one(c);
            }
        }
        for (int offset = (lanes < WARP_SIZE ? lanes : WARP_SIZE) / 2; offset > 0; offset /= 2)
            state = family.merge(state, shuffle_state(state, offset));
        if (lanes > WARP_SIZE) { // the block
            if (threadIdx.x % WARP_SIZE == 0)
                scratch[threadIdx.x / WARP_SIZE] = state;
            __syncthreads();
            if (threadIdx.x < WARP_SIZE) {
                constexpr int WARPS = ROW_THREADS / WARP_SIZE;
                state = threadIdx.x < WARPS ? scratch[threadIdx.x] : family.template none<A>();
#pragma unroll
                for (int offset = WARPS / 2; offset > 0; offset /= 2)
                    state = family.merge(state, shuffle_state(state, offset));
            }
            __syncthreads();
        }
        if (lane == 0 && unit < rows * parts) {
            const P part = family.from_origin(state, (double)origin);
            if (direct)
                family.store(part, output, unit);
            else
                ((P *)partials)[unit] = part;
        }
    }
}

// The same of columns: COUNT of them a thread, whose vectors are aligned.
template <typename F, typename T, int COUNT>
__global__ void __launch_bounds__(COLUMN_THREADS, 2)
    reduction_columns_kernel(const F family, const ReductionOutput output, void *partials, const T *input, int64_t rows,
                             int64_t cols, int64_t inner, const ReductionPlan plan, bool direct)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<T, COUNT> V;
    typedef typename F::template State<A> S;
    typedef typename F::template State<double> P;
    __shared__ __align__(16) unsigned char shared[COLUMN_THREADS * COUNT * sizeof(S)];
    S *const kept = (S *)shared; // [element of a vector][thread], so that neighbours do not share banks
    const int across = threadIdx.x % plan.tile, down = threadIdx.x / plan.tile, height = plan.height;
    wait_for_predecessor();
    release_successor();
    for (int64_t block = blockIdx.x; block < rows * plan.parts * plan.tiles; block += gridDim.x) {
        const int64_t unit = block / plan.tiles, row = unit / plan.parts;
        const int64_t column = (block % plan.tiles * plan.tile + across) * COUNT;
        const int64_t begin = unit % plan.parts * plan.step;
        const int64_t end = begin + plan.step < cols ? begin + plan.step : cols;
        const T *const from = input + row * cols * inner + column;
        S state[COUNT];
        A origin[COUNT] = {};
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            state[e] = family.template none<A>();
        if (column < inner) {
            if constexpr (F::USES_ORIGIN) {
                const V a = *reinterpret_cast<const V *>(from);
                const V b = *reinterpret_cast<const V *>(from + cols / 2 * inner);
                const V c = *reinterpret_cast<const V *>(from + (cols - 1) * inner);
#pragma unroll
                for (int e = 0; e < COUNT; e++)
                    origin[e] = middle_of(element_of(a, e), element_of(b, e), element_of(c, e));
            }
            int64_t c = begin + down;
            for (; c + (ROWS_IN_FLIGHT - 1) * height < end; c += ROWS_IN_FLIGHT * height) {
                V x[ROWS_IN_FLIGHT];
#pragma unroll
                for (int i = 0; i < ROWS_IN_FLIGHT; i++)
                    x[i] = *reinterpret_cast<const V *>(from + (c + i * height) * inner);
#pragma unroll
                for (int e = 0; e < COUNT; e++) {
                    A v[ROWS_IN_FLIGHT];
#pragma unroll
                    for (int i = 0; i < ROWS_IN_FLIGHT; i++)
                        v[i] = element_of(x[i], e) - origin[e];
                    family.template add<1>(state[e], v, c, height);
                }
            }
            if (c < end) {
                V x[ROWS_IN_FLIGHT];
#pragma unroll
                for (int i = 0; i < ROWS_IN_FLIGHT - 1; i++)
                    if (c + i * height < end)
                        x[i] = *reinterpret_cast<const V *>(from + (c + i * height) * inner);
#pragma unroll
                for (int i = 0; i < ROWS_IN_FLIGHT - 1; i++)
                    if (c + i * height < end)
#pragma unroll
                        for (int e = 0; e < COUNT; e++) {
                            const A v[1] = {element_of(x[i], e) - origin[e]};
                            family.template add<1>(state[e], v, c + i * height, 1);
                        }
            }
        }
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            kept[e * COLUMN_THREADS + threadIdx.x] = state[e];
        add_groups(down, height, [&](int half) {
#pragma unroll
            for (int e = 0; e < COUNT; e++) {
                S *const mine = kept + e * COLUMN_THREADS + threadIdx.x;
                *mine = family.merge(*mine, mine[half * plan.tile]);
            }
        });
        if (down == 0 && column < inner) {
#pragma unroll
            for (int e = 0; e < COUNT; e++) {
                const P part = family.from_origin(kept[e * COLUMN_THREADS + threadIdx.x], (double)origin[e]);
                const int64_t at = unit * inner + column + e;
                if (direct)
                    family.store(part, output, at);
                else
                    ((P *)partials)[at] = part;
            }
        }
        __syncthreads(); // before the next states overwrite these
    }
}

// The result (o, i) of the parts [batch][o][part][i]. A block has `across` neighbouring results, a power of two, and its
// other threads go down the parts.
template <typename F>
__global__ void __launch_bounds__(ROW_THREADS)
    reduction_merge_kernel(const F family, const ReductionOutput output, const void *partials, int64_t batch,
                           int64_t outer, int64_t parts, int64_t inner, int across)
{
    typedef typename F::template State<double> P;
    __shared__ __align__(16) unsigned char shared[ROW_THREADS * sizeof(P)];
    P *const kept = (P *)shared;
    const int group = threadIdx.x / across, groups = ROW_THREADS / across;
    wait_for_predecessor();
    release_successor();
    for (int64_t first = (int64_t)blockIdx.x * across; first < outer * inner; first += (int64_t)gridDim.x * across) {
        const int64_t at = first + threadIdx.x % across, o = at / inner, i = at % inner;
        P state = family.template none<double>();
        if (at < outer * inner)
#pragma unroll 4
            for (int64_t k = group; k < batch * parts; k += groups)
                state = family.merge(state,
                                     ((const P *)partials)[((k / parts * outer + o) * parts + k % parts) * inner + i]);
        kept[threadIdx.x] = state;
        add_groups(group, groups, [&](int half) {
            kept[threadIdx.x] = family.merge(kept[threadIdx.x], kept[threadIdx.x + half * across]);
        });
        if (group == 0 && at < outer * inner)
            family.store(kept[threadIdx.x], output, at);
        __syncthreads(); // before the next states overwrite these
    }
}

template <typename F, typename T, int COUNT>
static void launch_columns(const F &family, const ReductionOutput &output, const ReductionCall &call,
                           const ReductionPlan &plan, bool direct)
{
    const int64_t rows = call.sizes.batch * call.sizes.outer;
    launch_dependent(reduction_columns_kernel<F, T, COUNT>, dim3(clamp_grid(rows * plan.parts * plan.tiles)),
                     dim3((unsigned int)(plan.tile * plan.height)), 0, call.stream, family, output, call.workspace,
                     (const T *)call.input, rows, call.sizes.cols, call.sizes.inner, plan, direct);
}

// `indices`: the result is what a state says of an index.
template <typename F>
static cuda_ops_status launch_reduction(const F &family, const ReductionCall &call, bool indices)
{
    const ReductionOutput output = {call.output, call.output_dtype, indices};
    const cuda_ops_reduction_sizes &s = call.sizes;
    const int64_t rows = s.batch * s.outer;
    ReductionPlan plan = {};
    bool direct = false;
    CUDA_OPS_DISPATCH(
        call.dtype, T, constexpr int SIZE = vector16<T>::size; const bool aligned = is_aligned_16(call.input);
        if (s.inner == 1) {
            plan = plan_reduction(s, SIZE);
            direct = s.batch * plan.parts == 1;
            // Fewer than eight threads have no ends of rows to share: theirs must be whole vectors.
            const bool vectorised = plan.lanes >= 8 || (aligned && s.cols % SIZE == 0);
            const int threads = plan.lanes <= WARP_SIZE ? SHORT_ROW_THREADS : ROW_THREADS;
            launch_dependent(reduction_rows_kernel<F, T>,
                             dim3(clamp_grid(ceil_div(rows * plan.parts, threads / plan.lanes))), dim3(threads), 0,
                             call.stream, family, output, call.workspace, (const T *)call.input, rows, s.cols,
                             plan.parts, plan.step, plan.lanes, vectorised, direct);
        } else {
            const int64_t fold = aligned ? fold_of(s, SIZE) : 0;
            ReductionCall wide = call;
            if (fold > 0 && !(indices && fold > 1)) { // an index counts rows as they are
                wide.sizes = folded(s, fold);
                plan = plan_reduction(wide.sizes, SIZE);
                direct = s.batch * plan.parts * fold == 1;
                launch_columns<F, T, SIZE>(family, output, wide, plan, direct);
                plan.parts *= fold;
            } else {
                plan = plan_reduction(s, 1);
                direct = s.batch * plan.parts == 1;
                launch_columns<F, T, 1>(family, output, call, plan, direct);
            }
        });
    const cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS || direct)
        return status;
    const int64_t results = s.outer * s.inner;
    int across = 1;
    if (s.inner > 1 || s.batch > 1)
        while (across < WARP_SIZE && across < results)
            across *= 2;
    launch_dependent(reduction_merge_kernel<F>, dim3(clamp_grid(ceil_div(results, across))), dim3(ROW_THREADS), 0,
                     call.stream, family, output, (const void *)call.workspace, s.batch, s.outer, plan.parts, s.inner,
                     across);
    return launch_status();
}

#endif
