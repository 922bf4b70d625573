// linear_gelu: the elementwise parts; the product, with bias and gelu in its epilogue, is gemm's.
//     output = gelu(preactivation)
//     grad_preactivation = grad_output * gelu'(preactivation)
//     grad_bias[j]       = sum over i of grad_preactivation[i][j]
// Forward maps one thread to 16 bytes in a grid-stride loop; misaligned arrays go element by element. In backward a
// block has 32 vectors of 16 bytes of the columns and a chunk of the rows, of which a warp takes every eighth:
// grad_bias' sums stay in registers, and grad_preactivation is not read again. A second kernel adds the chunks' sums in
// order, so that results repeat bitwise. Bound by memory: 2 and 3 streams.
#include "cuda_ops/linear_gelu.h"

#include "common/activation.cuh"
#include "common/aligned_vector.cuh"
#include "common/column_sums.cuh"
#include "common/common.cuh"
#include "common/elementwise.cuh"
#include "gemm/paths.h"
#include "gemm/sm90/gelu.h"

static constexpr int THREADS = 256, WARPS = THREADS / WARP_SIZE;
// Fills a large GPU several times over; a constant, so that sums are split alike everywhere.
static constexpr int64_t WANTED_BLOCKS = 1056;
static constexpr int64_t SMALLEST_CHUNK = 32;

// fp16 and bf16 use approximations: at float32's accuracy the arithmetic would take longer than the memory.
template <typename T>
__device__ __forceinline__ accumulate_type<T> gelu_of(T x, int activation)
{
    if constexpr (sizeof(T) == 2) {
        const float value = load_as_accumulate(x);
        return activation == CUDA_OPS_GEMM_GELU ? gelu_quickly(value) : gelu_tanh_quickly(value);
    } else {
        return activate(load_as_accumulate(x), activation);
    }
}

// `vectors`: see common/elementwise.cuh.
template <typename T>
__global__ void linear_gelu_activate_kernel(T *output, const T *preactivation, int64_t count, int64_t vectors,
                                            int activation)
{
    wait_for_predecessor();
    release_successor();
    const T *const inputs[] = {preactivation};
    for_elements(output, inputs, count, vectors, [&](int64_t, const auto &x, auto &y) {
#pragma unroll
        for (int e = 0; e < y.size; e++)
            y.element[e] = store_from_accumulate<T>(gelu_of(x[0].element[e], activation));
    });
}

__device__ __forceinline__ float gelu_slope(float x, bool tanh)
{
    return tanh ? gelu_tanh_slope_f32(x) : gelu_slope_f32(x);
}
__device__ __forceinline__ double gelu_slope(double x, bool tanh)
{
    return tanh ? gelu_tanh_slope_f64(x) : gelu_slope_f64(x);
}

template <typename T>
__device__ __forceinline__ accumulate_type<T> gelu_slope_of(T x, bool tanh)
{
    if constexpr (sizeof(T) == 2)
        return tanh ? gelu_tanh_slope_quickly(load_as_accumulate(x)) : gelu_slope_quickly(load_as_accumulate(x));
    else
        return gelu_slope(load_as_accumulate(x), tanh);
}

// COUNT columns a thread: 16 bytes, or one. grad_bias, of T or as it is summed (`full`), may be null; with several
// chunks `partial` is written instead.
template <typename T, int COUNT>
__global__ void __launch_bounds__(THREADS)
    linear_gelu_backward_kernel(T *grad_preactivation, void *grad_bias, accumulate_type<T> *partial,
                                const T *grad_output, const T *preactivation, int64_t rows, int64_t columns,
                                int64_t chunk, int64_t chunks, bool tanh, bool full)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<T, COUNT> vector;
    __shared__ A shared[WARPS][WARP_SIZE][COUNT + 1];
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
    const int64_t groups = ceil_div(columns, WARP_SIZE * COUNT);
    wait_for_predecessor();
    release_successor();
    for (int64_t work = blockIdx.x; work < groups * chunks; work += gridDim.x) {
        const int64_t part = work / groups, column = (work % groups * WARP_SIZE + lane) * COUNT;
        const int64_t begin = part * chunk, end = begin + chunk < rows ? begin + chunk : rows;
        A sum[COUNT] = {};
        if (column < columns)
#pragma unroll 2
            for (int64_t row = begin + warp; row < end; row += WARPS) {
                const int64_t at = row * columns + column;
                const vector g = *reinterpret_cast<const vector *>(grad_output + at);
                const vector x = *reinterpret_cast<const vector *>(preactivation + at);
                vector y;
#pragma unroll
                for (int e = 0; e < COUNT; e++) {
                    const A gradient = load_as_accumulate(g.element[e]) * gelu_slope_of(x.element[e], tanh);
                    y.element[e] = store_from_accumulate<T>(gradient);
                    sum[e] += gradient;
                }
                *reinterpret_cast<vector *>(grad_preactivation + at) = y;
            }
        if (!grad_bias)
            continue;
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            shared[warp][lane][e] = sum[e];
        __syncthreads();
        for (int i = threadIdx.x; i < WARP_SIZE * COUNT; i += THREADS) {
            const int64_t to = work % groups * WARP_SIZE * COUNT + i;
            if (to >= columns)
                break;
            A total = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++)
                total += shared[w][i / COUNT][i % COUNT];
            if (chunks > 1)
                partial[part * columns + to] = total;
            else if (full)
                ((A *)grad_bias)[to] = total;
            else
                ((T *)grad_bias)[to] = store_from_accumulate<T>(total);
        }
        __syncthreads(); // the next iteration overwrites the sums
    }
}

// The rows are split into `chunks` of `chunk` rows, the last one shorter.
struct Chunks {
    int64_t chunks, chunk;
};

static Chunks chunk_rows(int64_t rows, int64_t columns, int count)
{
    const int64_t groups = ceil_div(columns, WARP_SIZE * count);
    int64_t chunks = groups > 0 ? ceil_div(WANTED_BLOCKS, groups) : 1;
    chunks = chunks < rows / SMALLEST_CHUNK ? chunks : rows / SMALLEST_CHUNK;
    if (chunks <= 1)
        return {1, rows};
    const int64_t chunk = ceil_div(ceil_div(rows, chunks), WARPS) * WARPS;
    return {ceil_div(rows, chunk), chunk};
}

template <typename T, int COUNT>
static cuda_ops_status backward(T *grad_preactivation, void *grad_bias, void *workspace, const T *grad_output,
                                const T *preactivation, int64_t rows, int64_t columns, bool tanh, bool full,
                                cudaStream_t stream)
{
    typedef accumulate_type<T> A;
    const Chunks cut = chunk_rows(rows, columns, COUNT);
    const int64_t blocks = ceil_div(columns, WARP_SIZE * COUNT) * cut.chunks;
    launch_dependent(linear_gelu_backward_kernel<T, COUNT>, clamp_grid(blocks), THREADS, 0, stream, grad_preactivation,
                     grad_bias, (A *)workspace, grad_output, preactivation, rows, columns, cut.chunk, cut.chunks, tanh,
                     full);
    const cuda_ops_status status = launch_status();
    if (status != CUDA_OPS_SUCCESS || !grad_bias || cut.chunks == 1)
        return status;
    return full ? add_column_sums((A *)grad_bias, (const A *)workspace, cut.chunks, columns, stream)
                : add_column_sums((T *)grad_bias, (const A *)workspace, cut.chunks, columns, stream);
}

// Whether a gradient of a bias may be of that dtype, beside others of `dtype`.
static bool is_bias_dtype(cuda_ops_dtype bias_dtype, cuda_ops_dtype dtype)
{
    return bias_dtype == dtype || (bias_dtype == CUDA_OPS_FLOAT32 && dtype != CUDA_OPS_FLOAT64);
}

// The forward pass as a launcher gets it.
struct GeluCall {
    void *output, *preactivation; // in queries: whether there is to be a preactivation
    const void *input, *weight, *bias;
    void *workspace;
    int64_t rows, in_features, out_features;
    bool tanh, allow_tf32;
    int path;
    cuda_ops_dtype dtype;
    cudaStream_t stream;
};

static cuda_ops_gemm_problem plain_product(const GeluCall &call)
{
    cuda_ops_gemm_problem problem = {};
    problem.m = call.rows, problem.n = call.out_features, problem.k = call.in_features, problem.batch = 1;
    problem.lda = problem.ldb = call.in_features, problem.ldd = call.out_features;
    problem.alpha = 1;
    problem.transpose_b = 1;
    problem.dtype = problem.output_dtype = problem.bias_dtype = call.dtype;
    problem.allow_tf32 = call.dtype == CUDA_OPS_FLOAT32 && call.allow_tf32;
    return problem;
}

static cuda_ops_gemm_problem activated_product(const GeluCall &call)
{
    cuda_ops_gemm_problem problem = plain_product(call);
    problem.activation = call.tanh ? CUDA_OPS_GEMM_GELU_TANH : CUDA_OPS_GEMM_GELU;
    problem.preactivation = call.preactivation;
    return problem;
}

static Answer fused_supports(const GeluCall &call, const Device &device)
{
    return gemm_path_on(activated_product(call), device, call.path) >= 0
               ? YES
               : no("the GEMM's kernel for this product cannot store the preactivation too");
}

static int64_t fused_workspace(const GeluCall &call, const Device &)
{
    const cuda_ops_gemm_problem problem = activated_product(call);
    return cuda_ops_gemm_workspace_cuda(&problem, call.path);
}

static cuda_ops_status fused(const GeluCall &call, const Device &)
{
    const cuda_ops_gemm_problem problem = activated_product(call);
    return cuda_ops_gemm_cuda(call.output, call.input, call.weight, call.bias, call.workspace, &problem, call.path,
                              call.stream);
}

static Answer two_kernels_supports(const GeluCall &call, const Device &)
{
    return call.preactivation ? YES : no("no preactivation is wanted");
}

static int64_t two_kernels_workspace(const GeluCall &call, const Device &)
{
    const cuda_ops_gemm_problem problem = plain_product(call);
    return cuda_ops_gemm_workspace_cuda(&problem, call.path);
}

static cuda_ops_status activate(const GeluCall &call)
{
    const int activation = call.tanh ? CUDA_OPS_GEMM_GELU_TANH : CUDA_OPS_GEMM_GELU;
    const int64_t count = call.rows * call.out_features;
    CUDA_OPS_DISPATCH(call.dtype, T, {
        const T *const preactivation = (const T *)call.preactivation;
        const int64_t vectors = vectors_of(count, (const T *)call.output, preactivation);
        launch_dependent(linear_gelu_activate_kernel<T>, elementwise_grid(count, vectors), ELEMENTWISE_THREADS, 0,
                         call.stream, (T *)call.output, preactivation, count, vectors, activation);
    });
    return launch_status();
}

static cuda_ops_status two_kernels(const GeluCall &call, const Device &)
{
    const cuda_ops_gemm_problem problem = plain_product(call);
    const cuda_ops_status status = cuda_ops_gemm_cuda(call.preactivation, call.input, call.weight, call.bias,
                                                      call.workspace, &problem, call.path, call.stream);
    return status == CUDA_OPS_SUCCESS ? activate(call) : status;
}

static PathTable<GeluCall, 2> table = {
    {"CUDA_OPS_LINEAR_GELU_PATH"},
    {{"fused", "linear_gelu.cu", "", fused_supports, nullptr, fused_workspace, fused},
     {"two_kernels", "linear_gelu.cu", "linear_gelu_activate_kernel", two_kernels_supports, nullptr,
      two_kernels_workspace, two_kernels}}};

static GeluCall call_of_sizes(int64_t rows, int64_t in_features, int64_t out_features, bool with_preactivation,
                              cuda_ops_gelu gelu, int allow_tf32, int path, cuda_ops_dtype dtype)
{
    GeluCall call = {};
    // Where only the sizes are asked about, the address of one that is aligned.
    call.preactivation = with_preactivation ? (void *)(uintptr_t)256 : nullptr;
    call.rows = rows, call.in_features = in_features, call.out_features = out_features;
    call.tanh = gelu == CUDA_OPS_GELU_TANH, call.allow_tf32 = allow_tf32 != 0, call.path = path, call.dtype = dtype;
    return call;
}

extern "C" int64_t cuda_ops_linear_gelu_forward_workspace_cuda(int64_t rows, int64_t in_features, int64_t out_features,
                                                               int with_preactivation, cuda_ops_gelu gelu,
                                                               int allow_tf32, int path, cuda_ops_dtype dtype)
{
    return path_workspace(
        table, call_of_sizes(rows, in_features, out_features, with_preactivation != 0, gelu, allow_tf32, path, dtype));
}

extern "C" int cuda_ops_linear_gelu_paths_cuda(cuda_ops_path_report *reports, int room, int64_t rows,
                                               int64_t in_features, int64_t out_features, int with_preactivation,
                                               int allow_tf32, cuda_ops_dtype dtype,
                                               const cuda_ops_device_facts *device)
{
    return report_paths(reports, room, table,
                        call_of_sizes(rows, in_features, out_features, with_preactivation != 0, CUDA_OPS_GELU_EXACT,
                                      allow_tf32, CUDA_OPS_GEMM_FASTEST, dtype),
                        device);
}

extern "C" cuda_ops_status cuda_ops_linear_gelu_forward_cuda(void *output, void *preactivation, const void *input,
                                                             const void *weight, const void *bias, void *workspace,
                                                             int64_t rows, int64_t in_features, int64_t out_features,
                                                             cuda_ops_gelu gelu, int allow_tf32, int path,
                                                             cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (gelu != CUDA_OPS_GELU_EXACT && gelu != CUDA_OPS_GELU_TANH)
        return CUDA_OPS_INVALID_ARGUMENT;
    if (rows == 0 || out_features == 0)
        return CUDA_OPS_SUCCESS;
    GeluCall call = call_of_sizes(rows, in_features, out_features, false, gelu, allow_tf32, path, dtype);
    call.output = output, call.preactivation = preactivation;
    call.input = input, call.weight = weight, call.bias = bias;
    call.workspace = workspace, call.stream = stream;
    return run_path(table, call);
}

extern "C" int64_t cuda_ops_linear_gelu_backward_workspace_cuda(int64_t rows, int64_t out_features,
                                                                cuda_ops_dtype dtype)
{
    // With one column a thread there are no more chunks than with several.
    const int64_t chunks = chunk_rows(rows, out_features,
                                      dtype == CUDA_OPS_FLOAT64   ? 2
                                      : dtype == CUDA_OPS_FLOAT32 ? 4
                                                                  : 8)
                               .chunks;
    return chunks > 1 ? chunks * out_features * (dtype == CUDA_OPS_FLOAT64 ? 8 : 4) : 0;
}

extern "C" cuda_ops_status cuda_ops_linear_gelu_backward_cuda(void *grad_preactivation, void *grad_bias,
                                                              const void *grad_output, const void *preactivation,
                                                              void *workspace, int64_t rows, int64_t out_features,
                                                              cuda_ops_gelu gelu, cuda_ops_dtype dtype,
                                                              cuda_ops_dtype bias_dtype, cuda_ops_stream stream)
{
    if ((gelu != CUDA_OPS_GELU_EXACT && gelu != CUDA_OPS_GELU_TANH) || !is_bias_dtype(bias_dtype, dtype))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (out_features == 0)
        return CUDA_OPS_SUCCESS;
    const bool aligned =
        is_aligned_16(grad_preactivation) && is_aligned_16(grad_output) && is_aligned_16(preactivation);
    cuda_ops_status status = CUDA_OPS_UNSUPPORTED_DTYPE;
    CUDA_OPS_DISPATCH(dtype, T, {
        constexpr int COUNT = vector16<T>::size;
        const bool tanh = gelu == CUDA_OPS_GELU_TANH, full = bias_dtype != dtype;
        if (aligned && out_features % COUNT == 0)
            status = backward<T, COUNT>((T *)grad_preactivation, grad_bias, workspace, (const T *)grad_output,
                                        (const T *)preactivation, rows, out_features, tanh, full, stream);
        else
            status = backward<T, 1>((T *)grad_preactivation, grad_bias, workspace, (const T *)grad_output,
                                    (const T *)preactivation, rows, out_features, tanh, full, stream);
    });
    return status;
}

static cuda_ops_gemm_problem gelu_linear_product(int64_t rows, int64_t features, int64_t out_features, int allow_tf32,
                                                 cuda_ops_dtype dtype)
{
    cuda_ops_gemm_problem problem = {};
    problem.m = rows, problem.n = features, problem.k = out_features, problem.batch = 1;
    problem.lda = out_features, problem.ldb = problem.ldd = features;
    problem.alpha = 1;
    problem.dtype = problem.output_dtype = problem.bias_dtype = dtype;
    problem.allow_tf32 = dtype == CUDA_OPS_FLOAT32 && allow_tf32;
    return problem;
}

// Whether one kernel makes it: the product is sm90's by the choice (or by name), and its kernel with gelu takes it.
static bool is_one_kernel(const GemmCall &call, const Device &device, int path, const void *preactivation)
{
    const cuda_ops_gemm_problem &p = call.problem;
    return p.m > 0 && p.n > 0 && p.k > 0 && gemm_path_on(p, device, path) == GEMM_SM90 &&
           gemm_sm90_takes_gelu_backward(call, device, preactivation);
}

static int64_t gelu_sum_rows(int64_t rows)
{
    return 2 * ceil_div(rows, 2 * GELU_SUM_ROWS);
}

extern "C" int64_t cuda_ops_gelu_linear_backward_workspace_cuda(int64_t rows, int64_t features, int64_t out_features,
                                                                int allow_tf32, int path, cuda_ops_dtype dtype)
{
    const cuda_ops_gemm_problem problem = gelu_linear_product(rows, features, out_features, allow_tf32, dtype);
    const int64_t product = cuda_ops_gemm_workspace_cuda(&problem, path);
    const int64_t pass = cuda_ops_linear_gelu_backward_workspace_cuda(rows, features, dtype);
    // The addresses are not known: of one that is aligned.
    const void *const aligned = (const void *)(uintptr_t)256;
    const GemmCall call = {(void *)aligned, aligned, aligned, nullptr, nullptr, problem, nullptr};
    const bool one = is_one_kernel(call, current_device(), path, aligned);
    const int64_t fused = one ? gelu_sum_rows(rows) * features * (int64_t)sizeof(float) : 0;
    const int64_t most = product > pass ? product : pass;
    return most > fused ? most : fused;
}

extern "C" cuda_ops_status
cuda_ops_gelu_linear_backward_cuda(void *grad_preactivation, void *grad_bias, const void *grad_output,
                                   const void *weight, const void *preactivation, void *workspace, int64_t rows,
                                   int64_t features, int64_t out_features, cuda_ops_gelu gelu, int allow_tf32, int path,
                                   cuda_ops_dtype dtype, cuda_ops_dtype bias_dtype, cuda_ops_stream stream)
{
    if ((gelu != CUDA_OPS_GELU_EXACT && gelu != CUDA_OPS_GELU_TANH) || !is_bias_dtype(bias_dtype, dtype))
        return CUDA_OPS_INVALID_ARGUMENT;
    cuda_ops_gemm_problem problem = gelu_linear_product(rows, features, out_features, allow_tf32, dtype);
    const Device device = current_device();
    GemmCall call = {
        grad_preactivation, grad_output, weight, nullptr, grad_bias ? workspace : nullptr, problem, stream};
    if (is_one_kernel(call, device, path, preactivation)) {
        call.problem.activation = gelu == CUDA_OPS_GELU_TANH ? CUDA_OPS_GEMM_GELU_TANH : CUDA_OPS_GEMM_GELU;
        const bool halves = dtype == CUDA_OPS_FLOAT16;
        const cuda_ops_status status = halves ? gemm_sm90_gelu_backward_float16(call, device, preactivation)
                                              : gemm_sm90_gelu_backward_bfloat16(call, device, preactivation);
        if (status != CUDA_OPS_SUCCESS || !grad_bias)
            return status;
        const float *const sums = (const float *)workspace;
        if (bias_dtype == CUDA_OPS_FLOAT32)
            return add_column_sums((float *)grad_bias, sums, gelu_sum_rows(rows), features, stream);
        return halves ? add_column_sums((__half *)grad_bias, sums, gelu_sum_rows(rows), features, stream)
                      : add_column_sums((__nv_bfloat16 *)grad_bias, sums, gelu_sum_rows(rows), features, stream);
    }
    if (rows > 0 && features > 0) {
        const cuda_ops_status status =
            cuda_ops_gemm_cuda(grad_preactivation, grad_output, weight, nullptr, workspace, &problem, path, stream);
        if (status != CUDA_OPS_SUCCESS)
            return status;
    }
    return cuda_ops_linear_gelu_backward_cuda(grad_preactivation, grad_bias, grad_preactivation, preactivation,
                                              workspace, rows, features, gelu, dtype, bias_dtype, stream);
}
