// index_add: output[o, r, i] = input[o, r, i] + alpha * sum of source[o, k, i] over the k with index[k] = r; scatter_add:
// output[o, index[o, k, i], i] += source[o, k, i]; and the gradients of source, which are gathered.
// index_add goes as embedding's gradient does: a stable sort of the indices, then a group of threads for each row of
// output, which it reads and writes once (embedding/sums.cuh). Bound by memory: one read of source, a read and a write of
// output.
// scatter_add has a thread for each element, and so has index_add of rows so short that the sort would be most of it:
// atomics on floats, the sums of which depend on their order, or where results are to repeat four passes that add integers
// (common/ordered_sums.cuh), three times as long. Halves are added up in float32 and rounded once. Bound by random
// accesses: atomics go over the values once for each slice of the places that fits the L2 cache, since reading indices
// again costs less than a place that comes from memory for each value.
#include "cuda_ops/scatter.h"

#include "common/fast_division.cuh"
#include "common/loss.cuh"
#include "common/ordered_sums.cuh"
#include "embedding/sums.cuh"

static constexpr int THREADS = 256, COPIES = 4; // vectors of a thread that are in flight together
static constexpr int SHORT_ROW = 2;             // elements
// Of the sums that atomics go to at a time: fewer than the L2 caches of 40 to 60 MB hold beside what streams through them.
static constexpr int64_t SLICE_BYTES = 32 << 20;
static constexpr int64_t MOST_SLICES = 4; // with more, reading the indices again costs as much as it saves

static bool known(int index_bytes, const cuda_ops_scatter_sizes &sizes)
{
    return (index_bytes == 4 || index_bytes == 8) && sizes.rows < INT32_MAX && sizes.outer * sizes.count < INT32_MAX;
}

static bool is_empty(const cuda_ops_scatter_sizes &sizes)
{
    return sizes.outer == 0 || sizes.rows == 0 || sizes.inner == 0;
}

// ---- elements ------------------------------------------------------------------------------------------------------

// Where the elements of source go: [outer, count, inner], with divisions by multiplication.
struct ElementRows {
    const void *index;
    int index_bytes;
    bool of_rows; // index is [count]
    int64_t rows, inner;
    uint32_t slab; // count * inner
    Divider by_slab, by_inner;

    // Where element i has its index.
    __device__ __forceinline__ int64_t index_of(int64_t i) const
    {
        if (!of_rows)
            return i;
        const uint32_t part = by_slab.of((uint32_t)i);
        return by_inner.of((uint32_t)i - part * slab);
    }
    __device__ __forceinline__ int64_t row(int64_t i) const
    {
        return index_at(index, index_bytes, index_of(i));
    }
    // The element of output, or -1.
    __device__ __forceinline__ int64_t target(int64_t i, int64_t row) const
    {
        const uint32_t part = by_slab.of((uint32_t)i), within = (uint32_t)i - part * slab, k = by_inner.of(within);
        return is_class(row, rows) ? (part * rows + row) * inner + (within - k * (uint32_t)inner) : -1;
    }
};

static ElementRows element_rows(const void *index, int index_bytes, bool of_rows, const cuda_ops_scatter_sizes &sizes)
{
    const uint32_t slab = (uint32_t)(sizes.count * sizes.inner);
    return {index,       index_bytes, of_rows,          sizes.rows,
            sizes.inner, slab,        divider_by(slab), divider_by((uint32_t)sizes.inner)};
}

template <typename T>
struct ScatteredElements {
    static constexpr bool WIDE = sizeof(T) == 8;
    T *output;
    cuda_ops_index_error *error;
    const T *source;
    double alpha;
    ElementRows to;

    __device__ __forceinline__ int64_t row(int64_t i) const
    {
        return to.row(i);
    }
    __device__ __forceinline__ int64_t place(int64_t i, int64_t row) const
    {
        const int64_t place = to.target(i, row);
        if (place < 0)
            record_bad_index(error, to.index_of(i), row, to.rows);
        return place;
    }
    __device__ __forceinline__ double value(int64_t i) const
    {
        return (double)load_as_accumulate(source[i]);
    }
    __device__ __forceinline__ void finish(int64_t place, double sum) const
    {
        typedef accumulate_type<T> A;
        output[place] = store_from_accumulate<T>((A)((double)load_as_accumulate(output[place]) + alpha * sum));
    }
};

__global__ void __launch_bounds__(THREADS)
    find_bad_index_kernel(cuda_ops_index_error *error, const void *index, int index_bytes, int64_t count, int64_t rows)
{
    wait_for_predecessor();
    release_successor();
    for (int64_t k = global_thread_index(); k < count; k += global_thread_count()) {
        const int64_t row = index_at(index, index_bytes, k);
        if (!is_class(row, rows))
            record_bad_index(error, k, row, rows);
    }
}

// Halves' sums in float32, of the `places` from first_place on. COUNT: those of a thread, which are one vector.
template <typename T, int COUNT>
__global__ void __launch_bounds__(THREADS)
    finish_halves_kernel(T *output, const float *sums, float alpha, int64_t first_place, int64_t places)
{
    wait_for_predecessor();
    release_successor();
    for (int64_t i = global_thread_index() * COUNT; i < places; i += global_thread_count() * COUNT) {
        const aligned_vector<float, COUNT> sum = *(const aligned_vector<float, COUNT> *)(sums + i);
        aligned_vector<T, COUNT> *const to = (aligned_vector<T, COUNT> *)(output + first_place + i);
        const aligned_vector<T, COUNT> x = *to;
        aligned_vector<T, COUNT> y = x;
        bool changes = false;
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            if (sum.element[e] != 0) { // what nothing is added to stays, -0 and NaN too
                y.element[e] = store_from_accumulate<T>(fmaf(alpha, sum.element[e], element_of(x, e)));
                changes = true;
            }
        if (changes)
            *to = y;
    }
}

// Whether they are added by atomics on floats. A few halves are not worth sums of all places.
static bool goes_by_atomics(int64_t count, int64_t places, cuda_ops_dtype dtype, int deterministic)
{
    return !deterministic && (dtype_size(dtype) > 2 || 4 * count >= places);
}

// Places whose sums atomics go to at a time: all, but where these do not fit the L2 cache and a line would come to it
// several times.
static int64_t places_of_slice(int64_t count, int64_t places, int64_t bytes_of_sum)
{
    const int64_t slice = SLICE_BYTES / bytes_of_sum, slices = ceil_div(places, slice);
    return slices <= MOST_SLICES && 2 * count >= places ? slice : places;
}

static size_t elements_workspace(const cuda_ops_scatter_sizes &sizes, cuda_ops_dtype dtype, int deterministic)
{
    const int64_t count = sizes.outer * sizes.count * sizes.inner, places = sizes.outer * sizes.rows * sizes.inner;
    if (!goes_by_atomics(count, places, dtype, deterministic))
        return (size_t)ordered_sums_bytes(places, dtype == CUDA_OPS_FLOAT64);
    if (dtype_size(dtype) > 2)
        return 0;
    const int64_t slice = places_of_slice(count, places, 4);
    return (size_t)(4 * (slice < places ? slice : places));
}

// The halves of a slice, in a workspace of its sums.
template <typename T>
static cuda_ops_status add_halves(void *workspace, const ScatteredElements<T> &elements, int64_t count,
                                  int64_t first_place, int64_t places, cudaStream_t stream)
{
    float *const sums = (float *)workspace;
    const cudaError_t cleared = cudaMemsetAsync(sums, 0, 4 * places, stream);
    if (cleared != cudaSuccess)
        return CUDA_OPS_CUDA_ERROR + (int)cleared;
    const cuda_ops_status status = launch_atomic_sums(sums, 1.0f, elements, count, first_place, places, stream);
    if (status != CUDA_OPS_SUCCESS)
        return status;
    constexpr int COUNT = 4;
    T *const output = elements.output;
    const bool vectors = places % COUNT == 0 && (uintptr_t)(output + first_place) % (COUNT * sizeof(T)) == 0;
    launch_dependent(vectors ? finish_halves_kernel<T, COUNT> : finish_halves_kernel<T, 1>,
                     dim3(clamp_grid(ceil_div(places, vectors ? COUNT * THREADS : THREADS))), dim3(THREADS), 0, stream,
                     output, (const float *)sums, (float)elements.alpha, first_place, places);
    return launch_status();
}

template <typename T>
static cuda_ops_status add_elements(void *output, cuda_ops_index_error *error, void *workspace, const void *source,
                                    double alpha, const ElementRows &to, const cuda_ops_scatter_sizes &sizes,
                                    cuda_ops_dtype dtype, int deterministic, cudaStream_t stream)
{
    typedef accumulate_type<T> A;
    const int64_t indices = to.of_rows ? sizes.count : sizes.outer * sizes.count * sizes.inner;
    if (indices == 0 || sizes.outer == 0)
        return CUDA_OPS_SUCCESS;
    if (sizes.rows == 0) { // all indices are bad
        if (error)
            launch_dependent(find_bad_index_kernel, clamp_grid(ceil_div(indices, THREADS)), THREADS, 0, stream, error,
                             to.index, to.index_bytes, indices, sizes.rows);
        return launch_status();
    }
    ScatteredElements<T> elements = {(T *)output, error, (const T *)source, alpha, to};
    const int64_t count = sizes.outer * sizes.count * sizes.inner, places = sizes.outer * sizes.rows * sizes.inner;
    if (!goes_by_atomics(count, places, dtype, deterministic))
        return launch_ordered_sums(workspace, elements, count, places, stream);
    const int64_t slice = places_of_slice(count, places, sizeof(A));
    for (int64_t first = 0; first < places; first += slice) {
        const int64_t of_slice = places - first < slice ? places - first : slice;
        cuda_ops_status status;
        if constexpr (sizeof(T) == sizeof(A))
            status = launch_atomic_sums((A *)output + first, (A)alpha, elements, count, first, of_slice, stream);
        else
            status = add_halves(workspace, elements, count, first, of_slice, stream);
        if (status != CUDA_OPS_SUCCESS)
            return status;
        elements.error = nullptr; // a bad index has been recorded
    }
    return CUDA_OPS_SUCCESS;
}

extern "C" size_t cuda_ops_scatter_add_workspace_cuda(cuda_ops_scatter_sizes sizes, cuda_ops_dtype dtype,
                                                      int deterministic)
{
    return elements_workspace(sizes, dtype, deterministic);
}

// ---- index_add -----------------------------------------------------------------------------------------------------

template <typename T, int SIZE>
__global__ void __launch_bounds__(EMBEDDING_THREADS, RESIDENT)
    index_add_kernel(T *output, const T *input, const accumulate_type<T> *chunks, const T *source, const RowSlots of,
                     accumulate_type<T> alpha, const RowTasks tasks)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<T, SIZE> V;
    const int group = 1 << tasks.group_bits;
    wait_for_predecessor();
    release_successor();
    for (int64_t number = first_task(tasks); number < tasks.rows * tasks.segments; number += task_step(tasks)) {
        const RowTask task = task_of(tasks, number);
        const SlotRange range = range_of(of, task.row);
        const bool named = range.begin < range.end;
        if (!named && output == input)
            continue;
        const HeldSums<T, SIZE> held = sum_of_row<T, SIZE>(chunks, source, of, range, tasks.vectors, task, group);
        // Read now and not before: with these in registers too, sums of halves would not fit.
        V x[HELD];
        load_vectors(x, (const V *)input + task.row * tasks.vectors, task, group, true);
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const int64_t v = task.begin + i * group;
            if (v >= task.end)
                continue;
            A sum[SIZE];
#pragma unroll
            for (int e = 0; e < SIZE; e++)
                sum[e] = element_of(x[i], e) + alpha * held.sum[i][e];
            ((V *)output)[task.row * tasks.vectors + v] = named ? vector_of<T>(sum) : x[i];
        }
    }
}

template <typename T, int SIZE>
static void launch_index_add(T *output, const T *input, void *chunks, const T *source, const RowSlots &of,
                             int64_t inner, double alpha, cudaStream_t stream)
{
    const RowTasks tasks = row_tasks(of.outer * of.of_table, inner / SIZE, HELD);
    if (of.of_index > CHUNK)
        launch_chunk_sums<T, SIZE>(chunks, source, of, tasks, stream);
    launch_dependent(index_add_kernel<T, SIZE>, row_tasks_grid(tasks), EMBEDDING_THREADS, 0, stream, output, input,
                     (const accumulate_type<T> *)chunks, source, of, (accumulate_type<T>)alpha, tasks);
}

static bool goes_by_elements(const cuda_ops_scatter_sizes &sizes)
{
    const int64_t elements = sizes.outer * sizes.count * sizes.inner;
    return 0 < elements && elements < INT32_MAX && sizes.inner <= SHORT_ROW;
}

extern "C" size_t cuda_ops_index_add_workspace_cuda(cuda_ops_scatter_sizes sizes, cuda_ops_dtype dtype,
                                                    int deterministic)
{
    if (goes_by_elements(sizes))
        return elements_workspace(sizes, dtype, deterministic);
    return (size_t)(sort_bytes(sizes.count, sizes.rows) + chunks_bytes(sizes.outer * sizes.count, sizes.inner, dtype));
}

extern "C" cuda_ops_status cuda_ops_index_add_cuda(void *output, cuda_ops_index_error *error, void *workspace,
                                                   const void *input, const void *source, const void *index,
                                                   int index_bytes, cuda_ops_scatter_sizes sizes, double alpha,
                                                   cuda_ops_dtype dtype, int deterministic, cuda_ops_stream stream)
{
    if (!known(index_bytes, sizes))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (goes_by_elements(sizes)) {
        CUDA_OPS_DISPATCH(dtype, T, {
            const int64_t bytes = sizes.outer * sizes.rows * sizes.inner * (int64_t)sizeof(T);
            if (output != input && bytes > 0) {
                const cudaError_t copied = cudaMemcpyAsync(output, input, bytes, cudaMemcpyDeviceToDevice, stream);
                if (copied != cudaSuccess)
                    return CUDA_OPS_CUDA_ERROR + (int)copied;
            }
            return add_elements<T>(output, error, workspace, source, alpha,
                                   element_rows(index, index_bytes, /*of_rows=*/true, sizes), sizes, dtype,
                                   deterministic, stream);
        });
    }
    if (error && sizes.count > 0)
        launch_dependent(find_bad_index_kernel, clamp_grid(ceil_div(sizes.count, THREADS)), THREADS, 0, stream, error,
                         index, index_bytes, sizes.count, sizes.rows);
    if (is_empty(sizes))
        return launch_status();
    const SortedIndices sorted =
        sort_indices(workspace, index, index_bytes, sizes.count, sizes.rows, /*padding_index=*/-1, stream);
    void *const chunks = (char *)workspace + sort_bytes(sizes.count, sizes.rows);
    const RowSlots of = {sorted, sizes.outer * sizes.count, sizes.outer, sizes.rows, sizes.count, 0, 0};
    CUDA_OPS_DISPATCH(dtype, T, {
        constexpr int SIZE = vector16<T>::size;
        const bool vectors =
            sizes.inner % SIZE == 0 && is_aligned_16(output) && is_aligned_16(input) && is_aligned_16(source);
        const auto launch = vectors ? launch_index_add<T, SIZE> : launch_index_add<T, 1>;
        launch((T *)output, (const T *)input, chunks, (const T *)source, of, sizes.inner, alpha, stream);
        return launch_status();
    });
    return CUDA_OPS_INVALID_ARGUMENT;
}

template <typename T, int SIZE>
__global__ void __launch_bounds__(EMBEDDING_THREADS)
    index_add_backward_kernel(T *grad_source, const T *grad_output, const void *index, int index_bytes,
                              cuda_ops_scatter_sizes sizes, accumulate_type<T> alpha, const RowTasks tasks)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<T, SIZE> V;
    const int group = 1 << tasks.group_bits;
    wait_for_predecessor();
    release_successor();
    for (int64_t number = first_task(tasks); number < tasks.rows * tasks.segments; number += task_step(tasks)) {
        const RowTask task = task_of(tasks, number);
        const int64_t part = sizes.outer == 1 ? 0 : task.row / sizes.count;
        const int64_t row = index_at(index, index_bytes, task.row - part * sizes.count);
        const bool good = is_class(row, sizes.rows);
        const V *const from = (const V *)grad_output + (part * sizes.rows + (good ? row : 0)) * tasks.vectors;
        V x[COPIES];
#pragma unroll
        for (int i = 0; i < COPIES; i++)
            if (good && task.begin + i * group < task.end)
                x[i] = from[task.begin + i * group];
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            if (task.begin + i * group >= task.end)
                continue;
            A product[SIZE];
#pragma unroll
            for (int e = 0; e < SIZE; e++)
                product[e] = good ? alpha * element_of(x[i], e) : A(0);
            ((V *)grad_source)[task.row * tasks.vectors + task.begin + i * group] = vector_of<T>(product);
        }
    }
}

extern "C" cuda_ops_status cuda_ops_index_add_backward_cuda(void *grad_source, const void *grad_output,
                                                            const void *index, int index_bytes,
                                                            cuda_ops_scatter_sizes sizes, double alpha,
                                                            cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (!known(index_bytes, sizes))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (sizes.outer == 0 || sizes.count == 0 || sizes.inner == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T, {
        constexpr int SIZE = vector16<T>::size;
        const bool vectors = sizes.inner % SIZE == 0 && is_aligned_16(grad_source) && is_aligned_16(grad_output);
        const auto kernel = vectors ? index_add_backward_kernel<T, SIZE> : index_add_backward_kernel<T, 1>;
        const RowTasks tasks = row_tasks(sizes.outer * sizes.count, vectors ? sizes.inner / SIZE : sizes.inner, COPIES);
        launch_dependent(kernel, row_tasks_grid(tasks), EMBEDDING_THREADS, 0, stream, (T *)grad_source,
                         (const T *)grad_output, index, index_bytes, sizes, (accumulate_type<T>)alpha, tasks);
        return launch_status();
    });
    return CUDA_OPS_INVALID_ARGUMENT;
}

// ---- scatter_add ---------------------------------------------------------------------------------------------------

extern "C" cuda_ops_status cuda_ops_scatter_add_cuda(void *output, cuda_ops_index_error *error, void *workspace,
                                                     const void *source, const void *index, int index_bytes,
                                                     cuda_ops_scatter_sizes sizes, cuda_ops_dtype dtype,
                                                     int deterministic, cuda_ops_stream stream)
{
    const int64_t count = sizes.outer * sizes.count * sizes.inner;
    if (!known(index_bytes, sizes) || count > INT32_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    if (count == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T, {
        return add_elements<T>(output, error, workspace, source, 1,
                               element_rows(index, index_bytes, /*of_rows=*/false, sizes), sizes, dtype, deterministic,
                               stream);
    });
    return CUDA_OPS_INVALID_ARGUMENT;
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    scatter_add_backward_kernel(T *grad_source, const T *grad_output, int64_t count, const ElementRows from)
{
    wait_for_predecessor();
    release_successor();
    // Indices of several elements first, then these, so that none waits for the store of another.
    const int64_t step = (int64_t)gridDim.x * THREADS * COPIES;
    for (int64_t first = (int64_t)blockIdx.x * THREADS * COPIES + threadIdx.x; first < count; first += step) {
        int64_t row[COPIES];
        T x[COPIES];
#pragma unroll
        for (int k = 0; k < COPIES; k++)
            if (first + k * THREADS < count)
                row[k] = from.row(first + k * THREADS);
#pragma unroll
        for (int k = 0; k < COPIES; k++) {
            const int64_t i = first + k * THREADS, place = i < count ? from.target(i, row[k]) : -1;
            x[k] = place >= 0 ? grad_output[place] : store_from_accumulate<T>(0);
        }
#pragma unroll
        for (int k = 0; k < COPIES; k++)
            if (first + k * THREADS < count)
                grad_source[first + k * THREADS] = x[k];
    }
}

extern "C" cuda_ops_status cuda_ops_scatter_add_backward_cuda(void *grad_source, const void *grad_output,
                                                              const void *index, int index_bytes,
                                                              cuda_ops_scatter_sizes sizes, cuda_ops_dtype dtype,
                                                              cuda_ops_stream stream)
{
    const int64_t count = sizes.outer * sizes.count * sizes.inner;
    if (!known(index_bytes, sizes) || count > INT32_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    if (count == 0)
        return CUDA_OPS_SUCCESS;
    CUDA_OPS_DISPATCH(dtype, T, {
        launch_dependent(scatter_add_backward_kernel<T>, clamp_grid(ceil_div(count, COPIES * THREADS)), THREADS, 0,
                         stream, (T *)grad_source, (const T *)grad_output, count,
                         element_rows(index, index_bytes, /*of_rows=*/false, sizes));
        return launch_status();
    });
    return CUDA_OPS_INVALID_ARGUMENT;
}
