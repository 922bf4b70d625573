// The path chunks of linear_cross_entropy, for any number of classes: chunks of rows whose logits fit into 64 MB go
// through products of skinny_gemm.cuh, and a kernel between them that turns logits into their gradient.
#ifndef CUDA_OPS_LINEAR_CROSS_ENTROPY_CHUNKS_CUH
#define CUDA_OPS_LINEAR_CROSS_ENTROPY_CHUNKS_CUH

#include "common/loss.cuh"
#include "common/skinny_gemm.cuh"
#include "cuda_ops/gemm.h"
#include "linear_cross_entropy/problem.cuh"

// Rows of a chunk: logits of up to 64 MB, in whole tiles if there are that many rows.
static constexpr int64_t CHUNK_BYTES = 64 << 20;
static constexpr int64_t MOST_CHUNK_ROWS = 16384;

static int64_t chunk_pitch(int64_t classes)
{
    return ceil_div(classes, 8) * 8;
}

static int64_t chunk_rows(int64_t rows, int64_t classes, cuda_ops_dtype dtype)
{
    const int64_t fit = CHUNK_BYTES / (accumulate_bytes(dtype) * (chunk_pitch(classes) > 0 ? chunk_pitch(classes) : 1));
    const int64_t most = fit < MOST_CHUNK_ROWS ? fit : MOST_CHUNK_ROWS, whole = most >= 64 ? most / 64 * 64 : 64;
    return rows < whole ? rows : whole;
}

// A warp or a block a row: its loss to row_losses (NaN with weight 0 for a bad class), its gradient to grad_logits, which
// for float and double overwrites the logits. The row is padded with zeros to the pitch, since products load whole
// vectors. Logits with a cap are replaced by the capped ones first, each by the thread that reads it later.
template <int GROUP, typename T, typename P>
__global__ void __launch_bounds__(GROUP_THREADS)
    grad_logits_kernel(T *grad_logits, double *row_losses, P *losses, cuda_ops_index_error *error,
                       accumulate_type<T> *logits, const int64_t *target, const P *row_scale, int64_t first_row,
                       int64_t rows, int64_t classes, int64_t pitch, int64_t ignore_index, accumulate_type<T> keep,
                       accumulate_type<T> spread, accumulate_type<T> z_loss, accumulate_type<T> softcap,
                       bool with_gradient)
{
    typedef accumulate_type<T> A;
    __shared__ log_sum_exp<A> scratch[WARP_SIZE];
    __shared__ A sum_scratch[WARP_SIZE];
    release_successor();
    wait_for_predecessor();
    const group_position at = position_in_group(GROUP, false);
    const int64_t local = (int64_t)blockIdx.x * (GROUP_THREADS / GROUP) + at.slot;
    if (local >= rows)
        return; // a whole group, which shares nothing with the block's others
    const auto synchronize = [] {
        if (GROUP > WARP_SIZE)
            __syncthreads();
        else
            __syncwarp();
    };
    const int64_t row = first_row + local, t = target[row];
    A *const x = logits + local * pitch;
    T *const gradient = grad_logits + local * pitch;
    const bool ignored = t == ignore_index, bad = !ignored && !is_class(t, classes);
    if (softcap > A(0)) {
        for (int64_t c = at.rank; c < classes && !ignored && !bad; c += GROUP)
            x[c] = softcap * tanh(x[c] / softcap);
        synchronize();
    }
    const log_sum_exp<A> state = group_log_sum_exp<GROUP, false>(x, ignored || bad ? 0 : classes, 1, at.rank, scratch);
    const A log_sum = log_of_sum(state);
    const A target_logit = ignored || bad ? A(0) : x[t];
    synchronize(); // the gradient may be written where target_logit was read
    A loss = 0;
    if (ignored || bad) {
        if (with_gradient)
            for (int64_t c = at.rank; c < pitch; c += GROUP)
                gradient[c] = store_from_accumulate<T>(A(0));
        loss = bad ? A(CUDART_NAN) : A(0);
    } else {
        const A scale = row_scale ? (A)load_as_accumulate(row_scale[row]) : A(1);
        const A lse = state.maximum + log_sum, by_softmax = A(1) + A(2) * z_loss * lse;
        if (with_gradient || spread > A(0)) {
            for (int64_t c = at.rank; c < classes; c += GROUP) {
                const A shifted = x[c] - state.maximum;
                loss += log_sum - shifted;
                if (with_gradient) {
                    const A capped = softcap > A(0) ? x[c] / softcap : A(0);
                    gradient[c] = store_from_accumulate<T>(
                        scale * (A(1) - capped * capped) *
                        (by_softmax * exp(shifted - log_sum) - spread - (c == t ? keep : A(0))));
                }
            }
        }
        if (with_gradient && classes + at.rank < pitch)
            gradient[classes + at.rank] = store_from_accumulate<T>(A(0));
        loss = spread > A(0) ? spread * group_reduce<GROUP, false>(loss, sum_scratch) : A(0);
        loss += keep * (log_sum - (target_logit - state.maximum)) + z_loss * lse * lse;
    }
    if (at.rank != 0)
        return;
    if (bad)
        record_bad_index(error, row, t, classes);
    if (losses)
        losses[row] = store_from_accumulate<P>((accumulate_type<P>)loss);
    row_losses[2 * row] = loss;
    row_losses[2 * row + 1] = ignored || bad ? 0 : 1;
}

static constexpr int LARGE_TILE = 128, MOST_SPLITS = 8; // of large_product on tensor cores

// A product on tensor cores for 16-bit T and aligned operands, else on CUDA cores; float64 has one kernel, aligned or
// not. k is split over the blocks of clusters where tiles are fewer than multiprocessors, as those of the gradient of a
// weight of few classes, whose k is the rows.
template <typename T, bool A_BY_DEPTH, bool B_BY_DEPTH, bool WITH_ROW_SUMS, typename TA, typename TB, typename TC,
          typename TP>
static cuda_ops_status large_product(skinny_product<TA, TB, TC, TP> p, cudaStream_t stream)
{
    // Each slice of k is summed by itself: exp magnifies the rounding errors of one long sum.
    typedef skinny_shape<accumulate_type<T>, 64, 64, 2, 2, 2, sizeof(accumulate_type<T>) == 4> plain_shape;
    p.aligned = is_skinny_aligned(p);
    if constexpr (sizeof(T) == 2) {
        typedef skinny_shape<T, LARGE_TILE, LARGE_TILE, 2, 4, 3> shape;
        const Device &device = current_device();
        const int64_t splits = device.multiprocessors / (skinny_tiles<shape>(p) > 0 ? skinny_tiles<shape>(p) : 1);
        const int most = device.capability >= 90 ? MOST_SPLITS : 1;
        if (fits_tensor_cores<B_BY_DEPTH>(p))
            return launch_skinny<shape, A_BY_DEPTH, B_BY_DEPTH, WITH_ROW_SUMS, true>(
                p, splits < most ? (int)splits : most, stream);
    } else if constexpr (sizeof(T) == 4) {
        if (p.aligned)
            return launch_skinny<plain_shape, A_BY_DEPTH, B_BY_DEPTH, WITH_ROW_SUMS, true>(p, 1, stream);
    }
    return launch_plain<plain_shape, A_BY_DEPTH, B_BY_DEPTH, WITH_ROW_SUMS>(p, 1, stream);
}

static int64_t chunks_sums_from(const HeadCall &call)
{
    const int64_t elements = chunk_rows(call.rows, call.classes, call.dtype) * chunk_pitch(call.classes);
    const bool half = call.dtype == CUDA_OPS_FLOAT16 || call.dtype == CUDA_OPS_BFLOAT16;
    return ceil_div(elements * (accumulate_bytes(call.dtype) + (half ? 2 : 0)), 256) * 256 +
           ceil_div(2 * (int64_t)sizeof(double) * call.rows, 256) * 256;
}

static int64_t chunks_gemm_from(const HeadCall &call)
{
    return chunks_sums_from(call) +
           (rounds_weight_gradient(call) ? ceil_div(4 * call.classes * call.in_features, 256) * 256 : 0);
}

// From so many rows on gemm makes the gradients on Hopper. That of weight, where its tiles are so few that clusters'
// splits of k, the rows, leave half of the GPU idle: gemm splits it as often as fills it. All rows are one chunk then,
// so that nothing is added to it.
static constexpr int64_t ROWS_FOR_GEMM = 4096;

static bool has_gemm(const HeadCall &call, const Device &device)
{
    return device.capability == 90 && (call.dtype == CUDA_OPS_FLOAT16 || call.dtype == CUDA_OPS_BFLOAT16) &&
           call.rows >= ROWS_FOR_GEMM && call.classes > 0 && call.in_features > 0 && call.with_gradient;
}

static bool input_by_gemm(const HeadCall &call, const Device &device)
{
    return has_gemm(call, device) && call.in_features % 8 == 0;
}

static bool weight_by_gemm(const HeadCall &call, const Device &device)
{
    const int64_t tiles = ceil_div(call.classes, LARGE_TILE) * ceil_div(call.in_features, LARGE_TILE);
    return has_gemm(call, device) && 2 * MOST_SPLITS * tiles <= device.multiprocessors &&
           chunk_rows(call.rows, call.classes, call.dtype) >= call.rows;
}

static cuda_ops_gemm_problem gradient_product(const HeadCall &call, int64_t m, int64_t k)
{
    cuda_ops_gemm_problem p = {};
    p.m = m, p.n = call.in_features, p.k = k, p.batch = 1;
    p.lda = chunk_pitch(call.classes), p.ldb = p.ldd = call.in_features;
    p.alpha = 1;
    p.dtype = p.output_dtype = p.bias_dtype = call.dtype;
    return p;
}

static cuda_ops_gemm_problem input_product(const HeadCall &call, int64_t rows)
{
    return gradient_product(call, rows, call.classes);
}

static cuda_ops_gemm_problem weight_product(const HeadCall &call)
{
    cuda_ops_gemm_problem p = gradient_product(call, call.classes, call.rows);
    p.transpose_a = 1;
    p.output_dtype = CUDA_OPS_FLOAT32;
    return p;
}

// gemm's operands have one dtype: float32 weight beside halves is rounded to a copy.
template <typename T>
__global__ void __launch_bounds__(THREADS) round_weight_kernel(T *copy, const float *weight, int64_t count)
{
    wait_for_predecessor();
    release_successor();
    for (int64_t i = global_thread_index(); i < count; i += global_thread_count())
        copy[i] = store_from_accumulate<T>(weight[i]);
}

static int64_t rounded_weight_bytes(const HeadCall &call, const Device &device)
{
    const bool rounds = input_by_gemm(call, device) && call.parameter_dtype != call.dtype;
    return rounds ? ceil_div(2 * call.classes * call.in_features, 256) * 256 : 0;
}

static int64_t gradients_workspace(const HeadCall &call, const Device &device)
{
    const int64_t rows = chunk_rows(call.rows, call.classes, call.dtype), last = rows > 0 ? call.rows % rows : 0;
    int64_t most = 0;
    const auto make_room = [&](const cuda_ops_gemm_problem &problem) {
        const int64_t bytes = cuda_ops_gemm_workspace_cuda(&problem, CUDA_OPS_GEMM_FASTEST);
        most = bytes > most ? bytes : most;
    };
    if (weight_by_gemm(call, device))
        make_room(weight_product(call));
    if (input_by_gemm(call, device)) {
        make_room(input_product(call, rows));
        make_room(input_product(call, last));
    }
    return rounded_weight_bytes(call, device) + most;
}

template <typename T, typename P>
static cuda_ops_status large_head(const head_problem<T, P> &p, const HeadCall &call, accumulate_type<T> *grad_weight)
{
    typedef accumulate_type<T> A;
    const int64_t in_features = call.in_features, classes = call.classes;
    const cuda_ops_dtype dtype = call.dtype;
    const cudaStream_t stream = call.stream;
    void *const workspace = call.workspace;
    const int64_t rows = chunk_rows(p.rows, classes, dtype), pitch = chunk_pitch(classes);
    A *const logits = (A *)workspace;
    T *const grad_logits = sizeof(T) == sizeof(A) ? (T *)logits : (T *)(logits + rows * pitch);
    double *const row_losses = (double *)((unsigned char *)workspace +
                                          ceil_div(rows * pitch * (sizeof(A) + (sizeof(T) == 2 ? 2 : 0)), 256) * 256);
    const bool with_gradient = call.with_gradient;
    const bool reduced = p.reduction != CUDA_OPS_REDUCTION_NONE;
    const Device &device = current_device();
    unsigned char *const rounded = (unsigned char *)workspace + chunks_gemm_from(call);
    unsigned char *const for_gemm = rounded + rounded_weight_bytes(call, device);
    const void *weight = p.weight;
    if constexpr (sizeof(T) == 2 && sizeof(P) == 4)
        if (p.grad_input && input_by_gemm(call, device)) {
            launch_dependent(round_weight_kernel<T>, dim3(clamp_grid(ceil_div(classes * in_features, THREADS))),
                             dim3(THREADS), 0, stream, (T *)rounded, p.weight, classes * in_features);
            weight = rounded;
        }
    cuda_ops_status status = CUDA_OPS_SUCCESS;
    for (int64_t first = 0; first < p.rows && status == CUDA_OPS_SUCCESS; first += rows) {
        const int64_t count = p.rows - first < rows ? p.rows - first : rows;
        const T *const input = p.input + first * in_features;
        if (classes > 0) {
            skinny_product<T, P, A, P> product = {};
            product.output = logits, product.a = input, product.b = p.weight, product.bias = p.bias;
            product.m = count, product.n = classes, product.k = in_features;
            product.a_pitch = product.b_pitch = in_features, product.output_pitch = pitch;
            status = large_product<T, true, true, false>(product, stream);
            if (status != CUDA_OPS_SUCCESS)
                return status;
        }
        const bool by_warps = classes <= SHORT_ROW;
        launch_dependent(by_warps ? grad_logits_kernel<WARP_SIZE, T, P> : grad_logits_kernel<GROUP_THREADS, T, P>,
                         dim3((unsigned int)(by_warps ? ceil_div(count, GROUP_THREADS / WARP_SIZE) : count)),
                         dim3(GROUP_THREADS), 0, stream, grad_logits, row_losses, reduced ? nullptr : p.losses, p.error,
                         logits, p.target, p.row_scale, first, count, classes, pitch, p.ignore_index, p.keep, p.spread,
                         p.z_loss, p.softcap, with_gradient);
        status = launch_status();
        if (status == CUDA_OPS_SUCCESS && p.grad_input && input_by_gemm(call, device)) {
            const cuda_ops_gemm_problem problem = input_product(call, count);
            status = cuda_ops_gemm_cuda(p.grad_input + first * in_features, grad_logits, weight, nullptr, for_gemm,
                                        &problem, CUDA_OPS_GEMM_FASTEST, stream);
        } else if (status == CUDA_OPS_SUCCESS && p.grad_input && in_features > 0) {
            skinny_product<T, P, T, P> product = {};
            product.output = p.grad_input + first * in_features, product.a = grad_logits, product.b = p.weight;
            product.m = count, product.n = in_features, product.k = classes;
            product.a_pitch = pitch, product.b_pitch = product.output_pitch = in_features;
            status = large_product<T, true, false, false>(product, stream);
        }
        if (status == CUDA_OPS_SUCCESS && grad_weight && !p.grad_bias && weight_by_gemm(call, device)) {
            const cuda_ops_gemm_problem problem = weight_product(call);
            status = cuda_ops_gemm_cuda(grad_weight, grad_logits, input, nullptr, for_gemm, &problem,
                                        CUDA_OPS_GEMM_FASTEST, stream);
        } else if (status == CUDA_OPS_SUCCESS && (grad_weight || p.grad_bias) && classes > 0) {
            skinny_product<T, T, A, A> product = {};
            product.output = grad_weight, product.row_sums = p.grad_bias, product.a = grad_logits, product.b = input;
            product.m = classes, product.n = grad_weight ? in_features : 0, product.k = count;
            product.a_pitch = pitch, product.b_pitch = product.output_pitch = in_features;
            product.accumulate = first > 0;
            status = large_product<T, false, false, true>(product, stream);
        }
    }
    return status == CUDA_OPS_SUCCESS && reduced ? head_reduce_rows(call, row_losses) : status;
}

static Answer chunks_supports(const HeadCall &, const Device &)
{
    return YES;
}

static int64_t chunks_workspace(const HeadCall &call, const Device &device)
{
    return chunks_gemm_from(call) + gradients_workspace(call, device);
}

static cuda_ops_status chunks(const HeadCall &call, const Device &)
{
    if (rounds_weight_gradient(call) && call.grad_weight) {
        float *const sums = (float *)((unsigned char *)call.workspace + chunks_sums_from(call));
        const cuda_ops_status status = large_head(problem_of<__nv_bfloat16, __nv_bfloat16>(call), call, sums);
        return status == CUDA_OPS_SUCCESS ? head_round_weight_gradient(call, sums) : status;
    }
    CUDA_OPS_MIXED_DISPATCH(call.dtype, call.parameter_dtype, T, P,
                            return large_head(problem_of<T, P>(call), call, (accumulate_type<T> *)call.grad_weight));
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}

#endif
