// linear_relu's forward in one launch, for few rows and for calls that the other paths do not take: a product of
// skinny_gemm.cuh with bias and relu in its epilogue (linear_relu.cu has the formula). Backward is another file, so
// that neither compiles for long. Bound by latency for few rows, whose k is split among the blocks of a cluster; by
// memory or tensor cores for many: on an H200, 3136 to 128 features in bf16, 204 TFLOP/s or 0.4 of a copy's 4.3 TB/s at
// 16384 rows (benchmarks/notes/mnist.md).
#include "linear_relu/skinny/tiles.cuh"

static skinny_choice choose_forward(int64_t rows, int64_t out_features)
{
    if (ceil_div(rows, 128) * ceil_div(out_features, 128) >= 64)
        return {TILE_LARGE, splits_for(ceil_div(rows, 128) * ceil_div(out_features, 128))};
    if (ceil_div(rows, 64) * ceil_div(out_features, 64) >= 16)
        return {TILE_MEDIUM, splits_for(ceil_div(rows, 64) * ceil_div(out_features, 64))};
    return {TILE_SMALL, LARGEST_CLUSTER};
}

// Picks the tile by size.
template <typename Tiles, typename T, typename P>
static cuda_ops_status forward_aligned(const skinny_product<T, P, T, P> &p, skinny_choice choice, cudaStream_t stream)
{
    if (choice.tile == TILE_SMALL)
        return launch_skinny<typename Tiles::SMALL, true, true, false, true>(p, choice.splits, stream);
    if (choice.tile == TILE_LARGE && Tiles::LARGE::shared_bytes(false) <= current_device().shared_bytes)
        return launch_skinny<typename Tiles::LARGE, true, true, false, true>(p, choice.splits, stream);
    return launch_skinny<typename Tiles::MEDIUM, true, true, false, true>(p, choice.splits, stream);
}

// PLAIN takes float64, unaligned operands, fp16 and bf16 that tensor cores do not take (multiplied as float), and GPUs
// with too little shared memory.
template <typename T, typename P>
static cuda_ops_status forward(const skinny_product<T, P, T, P> &p, skinny_choice choice, bool tf32,
                               cudaStream_t stream)
{
    if constexpr (std::is_same<T, float>::value)
        if (tf32 && p.aligned)
            return forward_aligned<tf32_tiles>(p, choice, stream);
    if constexpr (!std::is_same<T, double>::value)
        if (p.aligned && (sizeof(T) == 4 || fits_tensor_cores<true>(p)))
            return forward_aligned<tiles<T>>(p, choice, stream);
    return launch_plain<typename tiles<accumulate_type<T>>::PLAIN, true, true, false>(p, choice.splits, stream);
}

template <typename T, typename P>
static cuda_ops_status linear_relu_forward(T *output, const T *input, const P *weight, const P *bias, int64_t rows,
                                           int64_t in_features, int64_t out_features, bool tf32, cudaStream_t stream)
{
    if (rows == 0 || out_features == 0)
        return CUDA_OPS_SUCCESS;
    skinny_product<T, P, T, P> p = {};
    p.output = output, p.a = input, p.b = weight, p.bias = bias;
    p.m = rows, p.n = out_features, p.k = in_features;
    p.a_pitch = p.b_pitch = in_features, p.output_pitch = out_features;
    p.relu = true, p.aligned = is_skinny_aligned(p);
    const int capability = current_device().capability;
    skinny_choice choice = choose_forward(rows, out_features);
    if (capability < 90)
        choice.splits = 1;
    return forward(p, choice, tf32 && capability >= 80, stream);
}

cuda_ops_status linear_relu_skinny_forward(const LinearReluCall &call)
{
    CUDA_OPS_MIXED_DISPATCH(call.dtype, call.parameter_dtype, T, P,
                            return linear_relu_forward((T *)call.output, (const T *)call.input, (const P *)call.weight,
                                                       (const P *)call.bias, call.rows, call.in_features,
                                                       call.out_features, call.allow_tf32, call.stream));
    return CUDA_OPS_UNSUPPORTED_DTYPE;
}
