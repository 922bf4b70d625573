// linear_relu's gradients in one launch of skinny_gemm.cuh's tiles (linear_relu.cu has the formulas): blocks take tiles
// of grad_weight first, then of grad_input; those of grad_weight's first column also add up grad_bias. Bound by latency
// for few rows, by memory or tensor cores for many: on an H200, 3136 to 128 features in bf16, 105 TFLOP/s at 16384 rows
// (benchmarks/notes/mnist.md).
#include "linear_relu/skinny/tiles.cuh"

// The large tile is float32's alone: from 1024 rows on, products of TF32, fp16 and bf16 go by TMA and wgmma
// (linear_relu/gemm.cu), except those with too few columns to fill a tile of 128. The splits are of grad_weight's k, the
// rows.
static skinny_choice choose_backward(int64_t rows, int64_t in_features, int64_t out_features, bool has_large)
{
    const bool large = has_large && rows >= 1024;
    const int64_t tile = large ? 128 : 64;
    const int splits = splits_for(ceil_div(in_features, tile) * ceil_div(out_features, tile));
    return {large ? TILE_LARGE : TILE_MEDIUM, rows >= 16384 ? LARGEST_CLUSTER : rows > 256 ? splits : 1};
}

// Before Hopper there is one tile size for each dtype, to save compile time: a kernel has three products.
template <typename Shape>
__device__ constexpr bool is_backward_compiled()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    return is_compiled<Shape>(true) && Shape::TILE_M <= 64;
#else
    return is_compiled<Shape>(true);
#endif
}

// The first `weight_items` blocks work on grad_weight. Both numbers of items are multiples of the cluster's size.
template <typename Shape, bool ALIGNED, typename T, typename P>
__global__ void __launch_bounds__(Shape::THREADS)
    linear_relu_backward_kernel(skinny_product<T, P, T, P> for_input, skinny_product<T, T, P, P> for_weight,
                                int64_t weight_items, int64_t input_items)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    if constexpr (is_backward_compiled<Shape>()) {
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
    const bool with_input = (bool)for_input.output;
    const bool with_weight = for_weight.output || for_weight.row_sums;
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

template <typename Shape, typename T, typename P>
static cuda_ops_status launch_plain_backward(const skinny_product<T, P, T, P> &for_input,
                                             const skinny_product<T, T, P, P> &for_weight, int splits,
                                             cudaStream_t stream)
{
    if constexpr (std::is_same<T, double>::value)
        return launch_backward<Shape, false>(for_input, for_weight, splits, stream);
    else
        return launch_backward<Shape, false>(any_product(for_input), any_product(for_weight), splits, stream);
}

// Picks the tile by size, or PLAIN, as forward does.
template <typename T, typename P>
static cuda_ops_status backward(const skinny_product<T, P, T, P> &for_input,
                                const skinny_product<T, T, P, P> &for_weight, skinny_choice choice, bool tf32,
                                cudaStream_t stream)
{
    if constexpr (!std::is_same<T, double>::value) {
        const int shared_bytes = current_device().shared_bytes;
        const bool fits =
            for_input.aligned && for_weight.aligned &&
            (sizeof(T) == 4 || (fits_tensor_cores<false>(for_input) && fits_tensor_cores<false>(for_weight)));
        if (fits && tiles<T>::MEDIUM::shared_bytes(true) <= shared_bytes) {
            if constexpr (std::is_same<T, float>::value) {
                if (tf32)
                    return launch_backward<tf32_tiles::MEDIUM, true>(for_input, for_weight, choice.splits, stream);
                if (choice.tile == TILE_LARGE && tiles<T>::LARGE::shared_bytes(true) <= shared_bytes)
                    return launch_backward<typename tiles<T>::LARGE, true>(for_input, for_weight, choice.splits,
                                                                           stream);
            }
            return launch_backward<typename tiles<T>::MEDIUM, true>(for_input, for_weight, choice.splits, stream);
        }
    }
    return launch_plain_backward<typename tiles<accumulate_type<T>>::PLAIN>(for_input, for_weight, choice.splits,
                                                                            stream);
}

template <typename T, typename P>
static cuda_ops_status linear_relu_backward(T *grad_input, P *grad_weight, P *grad_bias, const T *grad_output,
                                            const T *output, const T *input, const P *weight, int64_t rows,
                                            int64_t in_features, int64_t out_features, bool tf32, cudaStream_t stream)
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
    const int capability = current_device().capability;
    const bool on_tensor_cores = sizeof(T) == 2 || (tf32 && capability >= 80);
    skinny_choice choice = choose_backward(rows, in_features, out_features, !on_tensor_cores);
    if (capability < 90)
        choice = {TILE_MEDIUM, 1};
    return backward(for_input, for_weight, choice, tf32 && capability >= 80, stream);
}

cuda_ops_status linear_relu_skinny_backward(const LinearReluCall &call)
{
    CUDA_OPS_MIXED_DISPATCH(call.dtype, call.parameter_dtype, T, P,
                            return linear_relu_backward((T *)call.grad_input, (P *)call.grad_weight,
                                                        (P *)call.grad_bias, (const T *)call.grad_output,
                                                        (const T *)call.activated, (const T *)call.input,
                                                        (const P *)call.weight, call.rows, call.in_features,
                                                        call.out_features, call.allow_tf32, call.stream));
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}
