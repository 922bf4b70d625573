// linear_cross_entropy, path sm90, for language models' heads in fp16 and bf16: the products run at the tensor cores'
// pace, and a logit is neither computed twice nor stored as such. For each chunk of rows
//   1. a product whose epilogue leaves exp(logit - reference) in 16 bits (where gradients are wanted) and the sum of
//      these over each tile of classes; the reference is the row's target logit, which a kernel before computes;
//   2. the rows' losses. A gradient of the logits is factor * (exponentials - one number at the target), where factor
//      is the row's scale / sum: that number is subtracted in place, and the factor is left to what follows, since it
//      belongs to a row: input is multiplied by it before the product for grad_weight, and the result of the product
//      for grad_input after. So nothing reads or writes a chunk of exponentials between the products;
//   3. grad_input = exponentials * weight by gemm; grad_weight += exponentials^T * input. Rows of the former are
//      multiplied by their factors in step 2 of the next chunk, so that the three products follow one another.
// Where a row has logits that exceed its reference by far (a loss above 30 or so), tiles have references of their own,
// and step 2 rewrites the row as its gradient. It does so with all rows under label smoothing, which subtracts a number
// from each class, and in fp16, whose exponents are too few.
// Bound by the tensor cores: 2 rows * in_features * classes operations for the loss, three times as many with both
// gradients.
#include "common/aligned_vector.cuh"
#include "common/loss.cuh"
#include "common/tensor_map.h"
#include "cuda_ops/gemm.h"
#include "linear_cross_entropy/sm90/products.h"
#include "linear_cross_entropy/sm90/sm90.h"
#include "ptx/arithmetic.cuh"
#include "ptx/wgmma.cuh"

// Rows of a chunk: few enough that its exponentials take up to 1 GB, and at most so many: with more, grad_weight, which
// every chunk reads and writes once, costs no less to speak of.
static constexpr int64_t HEAD_CHUNK_BYTES = 1 << 30, HEAD_MOST_ROWS = 4096, HEAD_ROW_STEP = 256;
// Below this many multiply-adds the launches take longer than the products.
static constexpr double HEAD_FEWEST_PRODUCTS = 1 << 27;

// How a call is done, and where what it needs lies in the workspace, in bytes from its beginning.
struct HeadPlan {
    bool factored; // factors of rows are applied outside of the exponentials
    int64_t chunk, pitch, tiles;
    int64_t exponentials, partials, logit_sums, target_logits, references, factors, scaled_input, product, weight, gemm,
        row_losses, weight_sums, bytes;
};

static cuda_ops_gemm_problem grad_input_product(const HeadCall &call, const HeadPlan &plan, int64_t rows)
{
    cuda_ops_gemm_problem p = {};
    p.m = rows, p.n = call.in_features, p.k = call.classes, p.batch = 1;
    p.lda = plan.pitch, p.ldb = p.ldd = call.in_features;
    p.alpha = 1;
    p.dtype = p.bias_dtype = call.dtype;
    p.output_dtype = plan.factored ? CUDA_OPS_FLOAT32 : call.dtype;
    return p;
}

// What gemm takes of operands that are aligned: all are, where D is in the workspace. Its query for a workspace without
// a plan counts what those that are not may come to need, a hundred megabytes for 4096 rows.
static bool knows_plan(const cuda_ops_gemm_problem &problem, cuda_ops_gemm_plan *plan)
{
    return cuda_ops_gemm_plan_cuda(plan, &problem, CUDA_OPS_GEMM_FASTEST) == CUDA_OPS_SUCCESS;
}

static HeadPlan plan_of(const HeadCall &call)
{
    HeadPlan plan = {};
    plan.factored = call.dtype == CUDA_OPS_BFLOAT16 && call.label_smoothing == 0;
    plan.pitch = ceil_div(call.classes, 8) * 8;
    plan.tiles = ceil_div(call.classes, HEAD_TILE_CLASSES);
    int64_t most =
        call.with_gradient ? HEAD_CHUNK_BYTES / (2 * plan.pitch) / HEAD_ROW_STEP * HEAD_ROW_STEP : 4 * HEAD_MOST_ROWS;
    most = most < HEAD_ROW_STEP ? HEAD_ROW_STEP : call.with_gradient && most > HEAD_MOST_ROWS ? HEAD_MOST_ROWS : most;
    const int64_t chunks = ceil_div(call.rows, most);
    plan.chunk = ceil_div(ceil_div(call.rows, chunks), HEAD_ROW_STEP) * HEAD_ROW_STEP;
    if (plan.chunk > call.rows)
        plan.chunk = call.rows;
    const auto place = [&](bool wanted, int64_t bytes) {
        const int64_t at = plan.bytes;
        plan.bytes += wanted ? ceil_div(bytes, 256) * 256 : 0;
        return at;
    };
    const bool gradient = call.with_gradient, factored = gradient && plan.factored;
    plan.exponentials = place(gradient, plan.chunk * plan.pitch * 2);
    plan.partials = place(true, plan.chunk * plan.tiles * (int64_t)sizeof(HeadPartial));
    plan.logit_sums = place(call.label_smoothing > 0, plan.chunk * plan.tiles * 4);
    plan.target_logits = place(true, plan.chunk * 4);
    plan.references = place(factored, call.rows * 4);
    plan.factors = place(factored, 2 * plan.chunk * 4); // of a chunk and of the one before
    plan.scaled_input = place(factored, plan.chunk * call.in_features * 2);
    plan.product = place(factored, plan.chunk * call.in_features * 4);
    plan.weight = place(call.parameter_dtype != call.dtype, call.classes * call.in_features * 2);
    int64_t gemm = 0;
    const int64_t last = call.rows % plan.chunk;
    for (const int64_t rows : {plan.chunk, last}) {
        if (!gradient || rows == 0)
            continue;
        const cuda_ops_gemm_problem p = grad_input_product(call, plan, rows);
        cuda_ops_gemm_plan chosen;
        const int64_t needed = factored && knows_plan(p, &chosen)
                                   ? cuda_ops_gemm_planned_workspace_cuda(&p, &chosen)
                                   : cuda_ops_gemm_workspace_cuda(&p, CUDA_OPS_GEMM_FASTEST);
        gemm = needed > gemm ? needed : gemm;
    }
    plan.gemm = place(gemm > 0, gemm);
    plan.row_losses = place(true, 2 * (int64_t)sizeof(double) * call.rows);
    plan.weight_sums =
        place(rounds_weight_gradient(call) && plan.chunk < call.rows, 4 * call.classes * call.in_features);
    return plan;
}

// ---- Kernels ----

static constexpr int ROW_THREADS = 256; // group_reduce's block

// weight rounded to T.
template <typename T>
__global__ void __launch_bounds__(ROW_THREADS) head_round_kernel(T *output, const float *input, int64_t vectors)
{
    release_successor();
    wait_for_predecessor();
    for (int64_t i = global_thread_index(); i < vectors; i += global_thread_count()) {
        const float4 first = reinterpret_cast<const float4 *>(input)[2 * i],
                     second = reinterpret_cast<const float4 *>(input)[2 * i + 1];
        const float values[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
        store_vector(reinterpret_cast<vector16<T> *>(output) + i, vector_of<T>(values));
    }
}

// A warp a row: the target's logit, or -inf where there is none that could be a reference.
template <typename T, typename P>
__global__ void __launch_bounds__(ROW_THREADS)
    head_references_kernel(float *references, const T *input, const T *weight, const P *bias, const int64_t *target,
                           int64_t rows, int64_t in_features, int64_t classes, int64_t ignore_index, float softcap)
{
    const int64_t row = (int64_t)blockIdx.x * (ROW_THREADS / WARP_SIZE) + threadIdx.x / WARP_SIZE;
    const int lane = threadIdx.x % WARP_SIZE;
    release_successor();
    wait_for_predecessor();
    if (row >= rows)
        return;
    const int64_t t = target[row];
    float logit = -CUDART_INF_F;
    if (t != ignore_index && is_class(t, classes)) {
        typedef vector16<T> V;
        const V *const x = reinterpret_cast<const V *>(input + row * in_features);
        const V *const w = reinterpret_cast<const V *>(weight + t * in_features);
        logit = 0;
        for (int64_t i = lane; i < in_features / V::size; i += WARP_SIZE) {
            const V a = x[i], b = w[i];
#pragma unroll
            for (int e = 0; e < V::size; e++)
                logit += element_of(a, e) * element_of(b, e);
        }
        logit = warp_sum(logit) + (bias ? load_as_accumulate(bias[t]) : 0.0f);
        if (softcap > 0)
            logit = softcap * tanhf(logit / softcap);
        if (!(fabsf(logit) < CUDART_INF_F))
            logit = -CUDART_INF_F;
    }
    if (lane == 0)
        references[row] = logit;
}

// grad_input = factors * product, rows of in_features.
template <typename T>
struct head_scaling {
    T *grad_input;
    const float *product, *factors;
    int64_t rows;
};

// A thread's part of a row: the vectors from `rank` on, `step` apart.
template <typename T>
__device__ __forceinline__ void scale_row(const head_scaling<T> &scaling, int64_t row, int64_t vectors, int rank,
                                          int step)
{
    const float factor = scaling.factors[row];
    for (int64_t i = row * vectors + rank; i < (row + 1) * vectors; i += step) {
        const float4 first = reinterpret_cast<const float4 *>(scaling.product)[2 * i],
                     second = reinterpret_cast<const float4 *>(scaling.product)[2 * i + 1];
        float values[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
        for (int e = 0; e < 8; e++)
            values[e] = factor == 0 ? 0.0f : values[e] * factor;
        store_vector(reinterpret_cast<vector16<T> *>(scaling.grad_input) + i, vector_of<T>(values));
    }
}

template <typename T, typename P>
struct head_rows_work {
    T *exponentials, *scaled_input; // or NULL
    float *factors;                 // or NULL: not factored
    double *row_losses;
    P *losses; // or NULL
    cuda_ops_index_error *error;
    const HeadPartial *partials;
    const float *logit_sums, *target_logits, *references;
    const T *input;
    const int64_t *target;
    const P *row_scale;     // or NULL
    head_scaling<T> before; // of the chunk before, or no rows
    int64_t rows, first_row, in_features, classes, pitch, tiles, ignore_index;
    float keep, spread, z_loss, softcap;
};

// Whether it is so for all threads of a group, which is a warp or the block.
template <int GROUP>
__device__ __forceinline__ bool is_for_group(bool is)
{
    return GROUP == WARP_SIZE ? __all_sync(FULL_WARP, is) : __syncthreads_and(is);
}

// A group of threads a row, of a chunk that begins at first_row: its loss, and where exponentials are given, its
// gradient. A warp where little of a row is touched; the block where exponentials are rewritten as a rule.
template <int GROUP, typename T, typename P>
__global__ void __launch_bounds__(ROW_THREADS) head_rows_kernel(const __grid_constant__ head_rows_work<T, P> work)
{
    typedef vector16<T> V;
    __shared__ log_sum_exp<float> scratch[GROUP_THREADS];
    __shared__ float sum_scratch[GROUP_THREADS];
    release_successor();
    wait_for_predecessor();
    const int rank = threadIdx.x % GROUP;
    const int64_t row = (int64_t)blockIdx.x * (ROW_THREADS / GROUP) + threadIdx.x / GROUP;
    const bool is_row = row < work.rows;
    const int64_t t = is_row ? work.target[work.first_row + row] : work.ignore_index;
    const bool ignored = t == work.ignore_index, bad = !ignored && !is_class(t, work.classes);
    const HeadPartial *const partials = work.partials + row * work.tiles;
    const float reference = work.factors && is_row ? work.references[row] : -CUDART_INF_F;
    log_sum_exp<float> state = log_sum_exp_of_none<float>();
    float logit_sum = 0;
    bool one_reference = true, finite = true;
    constexpr int PARTS = GROUP == WARP_SIZE ? 8 : 2; // in flight
    if (is_row)
        for (int64_t first = rank; first < work.tiles; first += PARTS * GROUP) {
            HeadPartial parts[PARTS];
#pragma unroll
            for (int i = 0; i < PARTS; i++)
                if (first + i * GROUP < work.tiles)
                    parts[i] = partials[first + i * GROUP];
#pragma unroll
            for (int i = 0; i < PARTS; i++) {
                if (first + i * GROUP >= work.tiles)
                    break;
                state = combine(state, log_sum_exp<float>{parts[i].reference, parts[i].sum});
                one_reference = one_reference && parts[i].reference == reference;
                finite = finite && parts[i].sum < CUDART_INF_F; // not NaN either
                logit_sum += work.logit_sums ? work.logit_sums[row * work.tiles + first + i * GROUP] : 0.0f;
            }
        }
    state = group_reduce<GROUP, false>(state, scratch);
    if (work.logit_sums)
        logit_sum = group_reduce<GROUP, false>(logit_sum, sum_scratch);
    const float target_logit = is_row && !ignored && !bad ? work.target_logits[row] : 0.0f;
    const float log_sum = log_of_sum(state), lse = state.maximum + log_sum;
    float loss = work.keep * (log_sum - (target_logit - state.maximum));
    if (work.spread > 0)
        loss += work.spread * ((float)work.classes * lse - logit_sum);
    if (work.z_loss > 0)
        loss += work.z_loss * lse * lse;
    if (ignored || bad)
        loss = bad ? CUDART_NAN_F : 0.0f;
    if (is_row && rank == 0) {
        const int64_t at = work.first_row + row;
        if (bad)
            record_bad_index(work.error, at, t, work.classes);
        if (work.losses)
            work.losses[at] = store_from_accumulate<P>(loss);
        work.row_losses[2 * at] = loss;
        work.row_losses[2 * at + 1] = ignored || bad ? 0 : 1;
    }
    if (is_row && work.exponentials) { // alike in all of the group
        T *const exponentials = work.exponentials + row * work.pitch;
        one_reference = is_for_group<GROUP>(one_reference);
        finite = is_for_group<GROUP>(finite);
        const float scale = work.row_scale ? load_as_accumulate(work.row_scale[work.first_row + row]) : 1.0f;
        const float per_row = 1.0f + 2.0f * work.z_loss * lse, wanted = scale * per_row;
        float factor = 1;
        if (ignored || bad) {
            factor = 0;
            if (!(work.factors && finite)) // zero times NaN is none
                for (int64_t i = rank; i < work.pitch / V::size; i += GROUP)
                    store_vector(reinterpret_cast<V *>(exponentials) + i, vector_of_equal<T, V::size>(0.0f));
        } else {
            const float capped = work.softcap > 0 ? target_logit / work.softcap : 0.0f;
            const float derivative = 1.0f - capped * capped;
            // The number at the target is divided by per_row, which must not be close to zero then.
            if (work.factors && one_reference && fabsf(per_row) >= 0.5f) {
                factor = wanted / state.sum;
                if (rank == 0)
                    exponentials[t] = store_from_accumulate<T>(
                        derivative * (exp(target_logit - reference) - work.keep * state.sum / per_row));
            } else {
                const float spread = scale * work.spread;
                constexpr int IN_FLIGHT = 4;
                for (int64_t first = rank; first < work.pitch / V::size; first += IN_FLIGHT * GROUP) {
                    V vectors[IN_FLIGHT];
#pragma unroll
                    for (int i = 0; i < IN_FLIGHT; i++)
                        if (first + i * GROUP < work.pitch / V::size)
                            vectors[i] = reinterpret_cast<const V *>(exponentials)[first + i * GROUP];
#pragma unroll
                    for (int i = 0; i < IN_FLIGHT; i++) {
                        const int64_t at = first + i * GROUP;
                        if (at >= work.pitch / V::size)
                            break;
                        static_assert(HEAD_TILE_CLASSES % V::size == 0, "a vector is in one tile");
                        const float of_tile =
                            wanted * exp(partials[at / (HEAD_TILE_CLASSES / V::size)].reference - lse);
                        float values[V::size];
#pragma unroll
                        for (int e = 0; e < V::size; e++)
                            values[e] = element_of(vectors[i], e) * of_tile - spread;
                        store_vector(reinterpret_cast<V *>(exponentials) + at, vector_of<T>(values));
                    }
                }
                if (GROUP == WARP_SIZE)
                    __syncwarp();
                else
                    __syncthreads();
                if (rank == 0)
                    exponentials[t] = store_from_accumulate<T>(
                        derivative * (wanted * exp(target_logit - lse) - spread - scale * work.keep));
            }
        }
        if (work.factors && rank == 0)
            work.factors[row] = factor;
        if (work.scaled_input) {
            const V *const from = reinterpret_cast<const V *>(work.input + row * work.in_features);
            V *const to = reinterpret_cast<V *>(work.scaled_input + row * work.in_features);
            for (int64_t i = rank; i < work.in_features / V::size; i += GROUP) {
                const V x = from[i];
                float values[V::size];
#pragma unroll
                for (int e = 0; e < V::size; e++)
                    values[e] = factor == 0 ? 0.0f : factor * element_of(x, e);
                store_vector(to + i, vector_of<T>(values));
            }
        }
    }
    if (row < work.before.rows)
        scale_row(work.before, row, work.in_features / V::size, rank, GROUP);
}

// The last chunk's, a warp a row.
template <typename T>
__global__ void __launch_bounds__(ROW_THREADS)
    head_scale_rows_kernel(const __grid_constant__ head_scaling<T> scaling, int64_t vectors)
{
    release_successor();
    wait_for_predecessor();
    const int64_t row = (int64_t)blockIdx.x * (ROW_THREADS / WARP_SIZE) + threadIdx.x / WARP_SIZE;
    if (row < scaling.rows)
        scale_row(scaling, row, vectors, threadIdx.x % WARP_SIZE, WARP_SIZE);
}

// A warp's lanes take 256 classes, the block's warps every eighth row; then their sums are added in order.
template <typename T>
__global__ void __launch_bounds__(ROW_THREADS)
    head_grad_bias_kernel(float *grad_bias, const T *gradient, const float *factors, int64_t rows, int64_t classes,
                          int64_t pitch, bool accumulate)
{
    typedef vector16<T> V;
    constexpr int WARPS = ROW_THREADS / WARP_SIZE, CLASSES = WARP_SIZE * V::size, IN_FLIGHT = 4;
    __shared__ float sums[WARPS][CLASSES];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int64_t first = (int64_t)blockIdx.x * CLASSES, at = first + lane * V::size;
    release_successor();
    wait_for_predecessor();
    float sum[V::size] = {};
    if (at < classes)
        for (int64_t row = warp; row < rows; row += IN_FLIGHT * WARPS) {
            V vectors[IN_FLIGHT];
            float factor[IN_FLIGHT];
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; i++)
                if (row + i * WARPS < rows) {
                    vectors[i] = *reinterpret_cast<const V *>(gradient + (row + i * WARPS) * pitch + at);
                    factor[i] = factors ? factors[row + i * WARPS] : 1.0f;
                }
#pragma unroll
            for (int i = 0; i < IN_FLIGHT; i++)
                if (row + i * WARPS < rows && factor[i] != 0)
#pragma unroll
                    for (int e = 0; e < V::size; e++)
                        sum[e] += factor[i] * element_of(vectors[i], e);
        }
#pragma unroll
    for (int e = 0; e < V::size; e++)
        sums[warp][lane * V::size + e] = sum[e];
    __syncthreads();
    for (int c = threadIdx.x; c < CLASSES && first + c < classes; c += ROW_THREADS) {
        float total = accumulate ? grad_bias[first + c] : 0.0f;
        for (int w = 0; w < WARPS; w++)
            total += sums[w][c];
        grad_bias[first + c] = total;
    }
}

// ---- The path ----

template <typename T, typename P>
static cuda_ops_status head_chunks(const HeadCall &call, const HeadPlan &plan)
{
    unsigned char *const space = (unsigned char *)call.workspace;
    const auto floats = [&](int64_t at) { return reinterpret_cast<float *>(space + at); };
    T *const exponentials = call.with_gradient ? (T *)(space + plan.exponentials) : nullptr;
    HeadPartial *const partials = (HeadPartial *)(space + plan.partials);
    double *const row_losses = (double *)(space + plan.row_losses);
    float *const logit_sums = call.label_smoothing > 0 ? floats(plan.logit_sums) : nullptr;
    const bool factored = call.with_gradient && plan.factored, bfloat16 = call.dtype == CUDA_OPS_BFLOAT16;
    const bool reduced = call.reduction != CUDA_OPS_REDUCTION_NONE;
    const int64_t k = call.in_features, vectors = k / 8;
    const cudaStream_t stream = call.stream;
    const T *weight = (const T *)call.weight;
    if (call.parameter_dtype != call.dtype) {
        weight = (const T *)(space + plan.weight);
        launch_dependent(head_round_kernel<T>, dim3(clamp_grid(ceil_div(call.classes * vectors, ROW_THREADS))),
                         dim3(ROW_THREADS), 0, stream, (T *)(space + plan.weight), (const float *)call.weight,
                         call.classes * vectors);
    }
    const auto warps = [](int64_t rows) { return dim3((unsigned int)ceil_div(rows, ROW_THREADS / WARP_SIZE)); };
    if (factored)
        launch_dependent(head_references_kernel<T, P>, warps(call.rows), dim3(ROW_THREADS), 0, stream,
                         floats(plan.references), (const T *)call.input, weight, (const P *)call.bias, call.target,
                         call.rows, k, call.classes, call.ignore_index, (float)call.softcap);
    cuda_ops_status status = launch_status();
    head_scaling<T> scaling = {};
    for (int64_t first = 0; first < call.rows && status == CUDA_OPS_SUCCESS; first += plan.chunk) {
        const int64_t rows = call.rows - first < plan.chunk ? call.rows - first : plan.chunk;
        const T *const input = (const T *)call.input + first * k;
        float *const factors = floats(plan.factors) + first / plan.chunk % 2 * plan.chunk;
        const HeadLogits logits = {exponentials,
                                   partials,
                                   logit_sums,
                                   floats(plan.target_logits),
                                   input,
                                   weight,
                                   call.bias,
                                   factored ? floats(plan.references) + first : nullptr,
                                   call.target + first,
                                   rows,
                                   k,
                                   call.classes,
                                   plan.pitch,
                                   (float)call.softcap,
                                   call.dtype,
                                   call.parameter_dtype,
                                   stream};
        status = bfloat16 ? head_logits_bfloat16(logits) : head_logits_float16(logits);
        if (status != CUDA_OPS_SUCCESS)
            break;
        head_rows_work<T, P> work = {};
        work.exponentials = exponentials;
        work.scaled_input = factored && call.grad_weight ? (T *)(space + plan.scaled_input) : nullptr;
        work.factors = factored ? factors : nullptr;
        work.row_losses = row_losses;
        work.losses = reduced ? nullptr : (P *)call.losses;
        work.error = call.error;
        work.partials = partials, work.logit_sums = logit_sums, work.target_logits = floats(plan.target_logits);
        work.references = floats(plan.references) + first;
        work.input = input, work.target = call.target, work.row_scale = (const P *)call.row_scale;
        work.rows = rows, work.first_row = first, work.in_features = k, work.classes = call.classes;
        work.pitch = plan.pitch, work.tiles = plan.tiles, work.ignore_index = call.ignore_index;
        work.keep = (float)(1 - call.label_smoothing);
        work.spread = (float)(call.label_smoothing / (double)call.classes);
        work.z_loss = (float)call.z_loss, work.softcap = (float)call.softcap;
        work.before = scaling;
        if (exponentials && !factored)
            launch_dependent(head_rows_kernel<ROW_THREADS, T, P>, dim3((unsigned int)rows), dim3(ROW_THREADS), 0,
                             stream, work);
        else
            launch_dependent(head_rows_kernel<WARP_SIZE, T, P>, warps(rows > scaling.rows ? rows : scaling.rows),
                             dim3(ROW_THREADS), 0, stream, work);
        status = launch_status();
        if (status == CUDA_OPS_SUCCESS && call.grad_input) {
            T *const grad_input = (T *)call.grad_input + first * k;
            const cuda_ops_gemm_problem problem = grad_input_product(call, plan, rows);
            void *const product = factored ? (void *)floats(plan.product) : (void *)grad_input;
            cuda_ops_gemm_plan chosen;
            status = factored && knows_plan(problem, &chosen)
                         ? cuda_ops_gemm_planned_cuda(product, exponentials, weight, nullptr, space + plan.gemm,
                                                      &problem, &chosen, stream)
                         : cuda_ops_gemm_cuda(product, exponentials, weight, nullptr, space + plan.gemm, &problem,
                                              CUDA_OPS_GEMM_FASTEST, stream);
            if (factored)
                scaling = {grad_input, floats(plan.product), factors, rows};
        }
        if (status == CUDA_OPS_SUCCESS && call.grad_weight) {
            const bool last = first + rows == call.rows, rounds = rounds_weight_gradient(call);
            const HeadWeightGradient product = {rounds ? floats(plan.weight_sums) : (float *)call.grad_weight,
                                                rounds && last ? call.grad_weight : nullptr,
                                                exponentials,
                                                factored ? (const void *)work.scaled_input : (const void *)input,
                                                rows,
                                                k,
                                                call.classes,
                                                plan.pitch,
                                                first > 0,
                                                call.dtype,
                                                stream};
            status = bfloat16 ? head_weight_gradient_bfloat16(product) : head_weight_gradient_float16(product);
        }
        if (status == CUDA_OPS_SUCCESS && call.grad_bias) {
            launch_dependent(head_grad_bias_kernel<T>, dim3((unsigned int)ceil_div(call.classes, 8 * WARP_SIZE)),
                             dim3(ROW_THREADS), 0, stream, (float *)call.grad_bias, (const T *)exponentials,
                             (const float *)work.factors, rows, call.classes, plan.pitch, first > 0);
            status = launch_status();
        }
    }
    if (status == CUDA_OPS_SUCCESS && scaling.rows > 0) {
        launch_dependent(head_scale_rows_kernel<T>, warps(scaling.rows), dim3(ROW_THREADS), 0, stream, scaling,
                         vectors);
        status = launch_status();
    }
    return status == CUDA_OPS_SUCCESS && reduced ? head_reduce_rows(call, row_losses) : status;
}

Answer head_sm90_supports(const HeadCall &call, const Device &device)
{
    if (!HAS_SM90A)
        return NOT_COMPILED;
    if (device.capability != 90)
        return NEEDS_90;
    if (call.dtype != CUDA_OPS_FLOAT16 && call.dtype != CUDA_OPS_BFLOAT16)
        return NEEDS_HALVES;
    if (call.in_features < 8 || call.in_features % 8 != 0)
        return no("takes in_features that are a multiple of 8");
    if (call.classes < 1 || call.classes > INT32_MAX / 2 || call.in_features > INT32_MAX / 2)
        return no("takes 1 to 2^30 classes");
    if (!is_aligned_16(call.input) || !is_aligned_16(call.weight))
        return NEEDS_ALIGNMENT;
    if (call.softcap > 0 && call.label_smoothing > 0)
        return no("takes label smoothing without logit_softcap");
    return YES;
}

Answer head_sm90_is_fast(const HeadCall &call, const Device &)
{
    const double products = (double)call.rows * (double)call.in_features * (double)call.classes;
    return products >= HEAD_FEWEST_PRODUCTS && call.classes > HEAD_TILE_CLASSES / 2 ? YES
                                                                                    : no("too small for its launches");
}

int64_t head_sm90_workspace(const HeadCall &call, const Device &)
{
    return plan_of(call).bytes;
}

cuda_ops_status head_sm90(const HeadCall &call, const Device &)
{
    const HeadPlan plan = plan_of(call);
    if (call.dtype == CUDA_OPS_BFLOAT16)
        return call.parameter_dtype == call.dtype ? head_chunks<__nv_bfloat16, __nv_bfloat16>(call, plan)
                                                  : head_chunks<__nv_bfloat16, float>(call, plan);
    return call.parameter_dtype == call.dtype ? head_chunks<__half, __half>(call, plan)
                                              : head_chunks<__half, float>(call, plan);
}
