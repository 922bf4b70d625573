// linear_relu: output[i][j] = relu(sum over p of input[i][p] * weight[j][p] + bias[j]), and with
// masked = output <= 0 ? 0 : grad_output
//     grad_input[i][p]  = sum over j of masked[i][j] * weight[j][p]
//     grad_weight[j][p] = sum over i of masked[i][j] * input[i][p]
//     grad_bias[j]      = sum over i of masked[i][j]
// Products of skinny_gemm.cuh with bias and relu, or the mask, inside. Backward is one launch: blocks take a tile of
// grad_weight, then of grad_input, and those of grad_weight's first column sum up grad_bias on the way.
// Bound by latency for few rows (the sum over in_features is then split among the blocks of a cluster), by memory or
// tensor cores for many. Measured on an H200, 3136 to 128 features, bfloat16 beside float, best tiles: 64 rows 6.0 us
// forward and 5.4 backward; 16384 rows 64 and 250 us, which is 204 and 105 TFLOP/s, or 0.4 and 0.2 of a copy's 4.3
// TB/s.
#include "cuda_ops/linear_relu.h"

#include "skinny_gemm.cuh"

// The shapes of tiles, by element type in shared memory. Forward's small tile has the many blocks that few rows need.
// Where a GPU has too little shared memory for a shape, it takes the one before, or PLAIN: Turing has 64 KB a block,
// Ampere's and Ada's smaller GPUs have 99.
template <typename E>
struct tiles {
    typedef skinny_shape<E, 32, 16, 2, 2, 4> SMALL;
    typedef skinny_shape<E, 64, 64, 2, 2, 3> MEDIUM;
    typedef skinny_shape<E, 128, 128, 2, 4, 3> LARGE;
};
template <>
struct tiles<float> {
    typedef skinny_shape<float, 32, 32, 2, 2, 4> SMALL;
    typedef skinny_shape<float, 64, 64, 2, 2, 3> MEDIUM;
    typedef skinny_shape<float, 64, 64, 2, 2, 2> PLAIN;
    typedef skinny_shape<float, 128, 128, 4, 2, 3> LARGE;
};
template <>
struct tiles<double> {
    typedef skinny_shape<double, 32, 32, 2, 2, 3> SMALL;
    typedef skinny_shape<double, 64, 64, 2, 2, 3> MEDIUM;
    typedef skinny_shape<double, 64, 64, 2, 2, 2> PLAIN;
    typedef skinny_shape<double, 64, 64, 2, 2, 3> LARGE;
};
static_assert(tiles<float>::MEDIUM::shared_bytes(false) <= 64 << 10 &&
                  tiles<double>::MEDIUM::shared_bytes(false) <= 64 << 10 &&
                  tiles<float>::PLAIN::shared_bytes(true) <= 64 << 10 &&
                  tiles<double>::PLAIN::shared_bytes(true) <= 64 << 10,
              "what Turing runs fits into its shared memory");
static_assert(tiles<__half>::LARGE::shared_bytes(false) <= 99 << 10 &&
                  tiles<__half>::MEDIUM::shared_bytes(true) <= 99 << 10,
              "so does what other GPUs with tensor cores run");

enum tile_size { TILE_SMALL, TILE_MEDIUM, TILE_LARGE };

struct skinny_choice {
    tile_size tile;
    int splits; // blocks of a cluster, at most 8
};

// Which tile and how many splits, by rows: measured for 3136 -> 128 features; other shapes by the number of tiles.
static constexpr int LARGEST_CLUSTER = 8;
static constexpr int64_t WANTED_BLOCKS = 132; // a large GPU's multiprocessors; a constant, so that sums are cut alike

static int splits_for(int64_t tiles)
{
    const int64_t splits = WANTED_BLOCKS / (tiles > 0 ? tiles : 1);
    return splits < 1 ? 1 : splits > LARGEST_CLUSTER ? LARGEST_CLUSTER : (int)splits;
}

static skinny_choice choose_forward(int64_t rows, int64_t out_features)
{
    if (ceil_div(rows, 128) * ceil_div(out_features, 128) >= 64)
        return {TILE_LARGE, splits_for(ceil_div(rows, 128) * ceil_div(out_features, 128))};
    if (ceil_div(rows, 64) * ceil_div(out_features, 64) >= 16)
        return {TILE_MEDIUM, splits_for(ceil_div(rows, 64) * ceil_div(out_features, 64))};
    return {TILE_SMALL, LARGEST_CLUSTER};
}

// The splits are grad_weight's.
static skinny_choice choose_backward(int64_t rows, int64_t in_features, int64_t out_features)
{
    const bool large = rows >= 1024;
    const int64_t tile = large ? 128 : 64;
    const int splits = splits_for(ceil_div(in_features, tile) * ceil_div(out_features, tile));
    return {large ? TILE_LARGE : TILE_MEDIUM, rows >= 16384 ? LARGEST_CLUSTER : rows > 256 ? splits : 1};
}

// The first `weight_items` blocks work on grad_weight. Both numbers of items are multiples of the cluster's size.
template <typename Shape, bool ALIGNED, typename T, typename P>
__global__ void __launch_bounds__(Shape::THREADS)
    linear_relu_backward_kernel(skinny_product<T, P, T, P> for_input, skinny_product<T, T, P, P> for_weight,
                                int64_t weight_items, int64_t input_items)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    if constexpr (is_compiled<Shape>()) {
        release_successor();
        wait_for_predecessor();
        if (blockIdx.x < weight_items)
            make_tile<Shape, false, false, true, true, ALIGNED>(for_weight, blockIdx.x, shared);
        else if (blockIdx.x - weight_items < input_items)
            make_tile<Shape, true, false, true, false, ALIGNED>(for_input, blockIdx.x - weight_items, shared);
    }
}

template <typename Shape, bool ALIGNED, typename T, typename P>
static cuda_ops_status launch_backward(skinny_product<T, P, T, P> for_input, skinny_product<T, T, P, P> for_weight,
                                       int splits, cudaStream_t stream)
{
    const bool with_input = for_input.output != nullptr;
    const bool with_weight = for_weight.output != nullptr || for_weight.row_sums != nullptr;
    split_skinny(&for_input.chunk, &for_input.splits, for_input.k, Shape::DEPTH, 1);
    split_skinny(&for_weight.chunk, &for_weight.splits, for_weight.k, Shape::DEPTH, splits);
    const int cluster = with_weight ? for_weight.splits : 1;
    const int64_t weight_items = with_weight ? skinny_tiles<Shape>(for_weight) * for_weight.splits : 0;
    const int64_t input_items = with_input ? skinny_tiles<Shape>(for_input) : 0;
    const int64_t blocks = weight_items + ceil_div(input_items, cluster) * cluster;
    if (blocks > INT32_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    if (blocks == 0)
        return CUDA_OPS_SUCCESS;
    launch_dependent_clusters(linear_relu_backward_kernel<Shape, ALIGNED, T, P>, (unsigned int)blocks, Shape::THREADS,
                              cluster, Shape::shared_bytes(true), stream, for_input, for_weight, weight_items,
                              input_items);
    return launch_status();
}

// The most that a block may have on this GPU.
static int shared_bytes_of_a_block()
{
    int device = 0, bytes = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    return bytes;
}

// The tile by size. PLAIN takes what is not aligned, halves that tensor cores do not take (which are multiplied as
// float then), and what finds too little shared memory: one shape, since all dtypes together are minutes of compiling.
template <typename T, typename P>
static cuda_ops_status forward(const skinny_product<T, P, T, P> &p, skinny_choice choice, cudaStream_t stream)
{
    if (!p.aligned || (sizeof(T) == 2 && !fits_tensor_cores<true>(p)))
        return launch_skinny<typename tiles<accumulate_type<T>>::PLAIN, true, true, false, false>(p, choice.splits,
                                                                                                  stream);
    if (choice.tile == TILE_SMALL)
        return launch_skinny<typename tiles<T>::SMALL, true, true, false, true>(p, choice.splits, stream);
    if (choice.tile == TILE_LARGE && tiles<T>::LARGE::shared_bytes(false) <= shared_bytes_of_a_block())
        return launch_skinny<typename tiles<T>::LARGE, true, true, false, true>(p, choice.splits, stream);
    return launch_skinny<typename tiles<T>::MEDIUM, true, true, false, true>(p, choice.splits, stream);
}

template <typename T, typename P>
static cuda_ops_status backward(const skinny_product<T, P, T, P> &for_input,
                                const skinny_product<T, T, P, P> &for_weight, skinny_choice choice, cudaStream_t stream)
{
    const int shared_bytes = shared_bytes_of_a_block();
    if (!for_input.aligned || !for_weight.aligned ||
        (sizeof(T) == 2 && !(fits_tensor_cores<false>(for_input) && fits_tensor_cores<false>(for_weight))) ||
        tiles<T>::MEDIUM::shared_bytes(true) > shared_bytes)
        return launch_backward<typename tiles<accumulate_type<T>>::PLAIN, false>(for_input, for_weight, choice.splits,
                                                                                 stream);
    if (choice.tile == TILE_LARGE && tiles<T>::LARGE::shared_bytes(true) <= shared_bytes)
        return launch_backward<typename tiles<T>::LARGE, true>(for_input, for_weight, choice.splits, stream);
    return launch_backward<typename tiles<T>::MEDIUM, true>(for_input, for_weight, choice.splits, stream);
}

template <typename T, typename P>
static cuda_ops_status linear_relu_forward(T *output, const T *input, const P *weight, const P *bias, int64_t rows,
                                           int64_t in_features, int64_t out_features, cudaStream_t stream)
{
    if (rows == 0 || out_features == 0)
        return CUDA_OPS_SUCCESS;
    skinny_product<T, P, T, P> p = {};
    p.output = output, p.a = input, p.b = weight, p.bias = bias;
    p.m = rows, p.n = out_features, p.k = in_features;
    p.a_pitch = p.b_pitch = in_features, p.output_pitch = out_features;
    p.relu = true, p.aligned = is_skinny_aligned(p);
    const int capability = compute_capability();
    skinny_choice choice = choose_forward(rows, out_features);
    if (capability < 90)
        choice.splits = 1;
    return forward(p, choice, stream);
}

template <typename T, typename P>
static cuda_ops_status linear_relu_backward(T *grad_input, P *grad_weight, P *grad_bias, const T *grad_output,
                                            const T *output, const T *input, const P *weight, int64_t rows,
                                            int64_t in_features, int64_t out_features, cudaStream_t stream)
{
    if (out_features == 0 || in_features == 0)
        grad_weight = nullptr;
    if (rows == 0 || in_features == 0)
        grad_input = nullptr;
    if (out_features == 0)
        grad_bias = nullptr;
    skinny_product<T, P, T, P> for_input = {};
    for_input.output = grad_input, for_input.a = grad_output, for_input.mask = output, for_input.b = weight;
    for_input.m = rows, for_input.n = in_features, for_input.k = out_features;
    for_input.a_pitch = out_features, for_input.b_pitch = for_input.output_pitch = in_features;
    for_input.aligned = is_skinny_aligned(for_input);
    skinny_product<T, T, P, P> for_weight = {};
    for_weight.output = grad_weight, for_weight.row_sums = grad_bias;
    for_weight.a = grad_output, for_weight.mask = output, for_weight.b = input;
    for_weight.m = out_features, for_weight.n = in_features, for_weight.k = rows;
    for_weight.a_pitch = out_features, for_weight.b_pitch = for_weight.output_pitch = in_features;
    if (grad_weight == nullptr)
        for_weight.n = 0; // grad_bias alone
    for_weight.aligned = is_skinny_aligned(for_weight);
    const int capability = compute_capability();
    skinny_choice choice = choose_backward(rows, in_features, out_features);
    if (capability < 90)
        choice.splits = 1;
    return backward(for_input, for_weight, choice, stream);
}

extern "C" cuda_ops_status cuda_ops_linear_relu_forward_cuda(void *output, const void *input, const void *weight,
                                                             const void *bias, int64_t rows, int64_t in_features,
                                                             int64_t out_features, cuda_ops_dtype dtype,
                                                             cuda_ops_dtype parameter_dtype, cuda_ops_stream stream)
{
    CUDA_OPS_MIXED_DISPATCH(dtype, parameter_dtype, T, P,
                            return linear_relu_forward((T *)output, (const T *)input, (const P *)weight,
                                                       (const P *)bias, rows, in_features, out_features, stream));
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}

extern "C" cuda_ops_status cuda_ops_linear_relu_backward_cuda(void *grad_input, void *grad_weight, void *grad_bias,
                                                              const void *grad_output, const void *output,
                                                              const void *input, const void *weight, int64_t rows,
                                                              int64_t in_features, int64_t out_features,
                                                              cuda_ops_dtype dtype, cuda_ops_dtype parameter_dtype,
                                                              cuda_ops_stream stream)
{
    CUDA_OPS_MIXED_DISPATCH(dtype, parameter_dtype, T, P,
                            return linear_relu_backward((T *)grad_input, (P *)grad_weight, (P *)grad_bias,
                                                        (const T *)grad_output, (const T *)output, (const T *)input,
                                                        (const P *)weight, rows, in_features, out_features, stream));
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}
