// Matrix products with one short side, the linear layers of small networks:
//     output[i][j] = epilogue(sum over p of a[i][p] * b[p][j])        output m x n, sum over k
// Either operand may be K-major (a stored m x k, b stored n x k) or MN-major (k x m, k x n), so that the three products
// of a linear layer are one kernel:
//     forward      input (K-major), weight (K-major)           NT
//     grad_input   grad_output (K-major), weight (MN-major)    NN
//     grad_weight  grad_output (MN-major), input (MN-major)    TN
//
// A block makes a tile of output from slices of k in shared memory, copied there by cp.async some stages ahead
// (skinny_gemm/load.cuh), with an XOR swizzle against bank conflicts. fp16 and bf16 are multiplied by mma.sync
// m16n8k16, float as TF32 where allowed (m16n8k8: each thread rounds what it copied, before the barrier), else float
// and double on the CUDA cores (skinny_gemm/multiply.cuh).
//
// Where tiles do not fill the GPU, the blocks of a cluster split k, leave their sums in shared memory and add up each
// other's in rank order (skinny_gemm/tile.cuh): one launch, no workspace, results that repeat bitwise. Before Hopper k
// is not split.
//
// float operands beside fp16 or bf16 (a layer's parameters) are converted on their way to shared memory. What tensor
// cores do not take is multiplied as float by one kernel for all dtypes (any_float): a kernel for each combination
// would take minutes to compile.
#ifndef CUDA_OPS_COMMON_SKINNY_GEMM_CUH
#define CUDA_OPS_COMMON_SKINNY_GEMM_CUH

#include "common/skinny_gemm/tile.cuh"

// Splits k for clusters of at most `wanted` blocks.
static inline void split_skinny(int64_t *chunk, int *splits, int64_t k, int depth, int wanted)
{
    const int64_t steps = ceil_div(k, depth), each = ceil_div(steps, wanted > 1 ? wanted : 1);
    *splits = steps > 0 ? (int)ceil_div(steps, each) : 1;
    *chunk = steps > 0 ? each * depth : depth;
}

template <typename Shape, typename TA, typename TB, typename TC, typename TP>
static inline int64_t skinny_tiles(const skinny_product<TA, TB, TC, TP> &p)
{
    return ceil_div(p.m, Shape::TILE_M) * skinny_tile_columns<Shape>(p);
}

// Whether both operands (and the mask) allow 16-byte accesses.
template <typename TA, typename TB, typename TC, typename TP>
static inline bool is_skinny_aligned(const skinny_product<TA, TB, TC, TP> &p)
{
    return is_aligned_16(p.a) && is_aligned_16(p.b) && is_aligned_16(p.mask) && p.a_pitch * sizeof(TA) % 16 == 0 &&
           p.b_pitch * sizeof(TB) % 16 == 0;
}

// Whether tensor cores can take it: an operand that is converted must also consist of whole chunks.
template <bool B_K_MAJOR, typename TA, typename TB, typename TC, typename TP>
static inline bool fits_tensor_cores(const skinny_product<TA, TB, TC, TP> &p)
{
    return current_device().capability >= 80 && is_skinny_aligned(p) &&
           (std::is_same<TA, TB>::value || (B_K_MAJOR ? p.k : p.n) % 8 == 0);
}

// Before Ampere fp16 and bf16 are multiplied as float, and a block has 64 KB. Kernels that need tensor cores, or more
// memory, are empty there.
template <typename Shape>
__host__ __device__ constexpr bool is_compiled(bool masked)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    return !Shape::TENSOR_CORES && Shape::shared_bytes(masked) <= 64 << 10;
#else
    (void)masked;
    return true;
#endif
}

template <typename Shape, bool A_K_MAJOR, bool B_K_MAJOR, bool WITH_ROW_SUMS, bool ALIGNED, typename TA, typename TB,
          typename TC, typename TP>
__global__ void __launch_bounds__(Shape::THREADS) skinny_gemm_kernel(skinny_product<TA, TB, TC, TP> p)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    if constexpr (is_compiled<Shape>(false)) {
        release_successor();
        wait_for_predecessor();
        make_tile<Shape, A_K_MAJOR, B_K_MAJOR, false, WITH_ROW_SUMS, ALIGNED>(p, blockIdx.x, shared);
    }
}

// A product without a mask in one launch, with at most `splits` splits of k, for which the GPU must have clusters.
// ALIGNED: p.aligned is true.
template <typename Shape, bool A_K_MAJOR, bool B_K_MAJOR, bool WITH_ROW_SUMS, bool ALIGNED, typename TA, typename TB,
          typename TC, typename TP>
static cuda_ops_status launch_skinny(skinny_product<TA, TB, TC, TP> p, int splits, cudaStream_t stream)
{
    split_skinny(&p.chunk, &p.splits, p.k, Shape::DEPTH, splits);
    const int64_t blocks = skinny_tiles<Shape>(p) * p.splits;
    if (blocks > INT32_MAX)
        return CUDA_OPS_INVALID_ARGUMENT;
    launch_dependent_clusters(skinny_gemm_kernel<Shape, A_K_MAJOR, B_K_MAJOR, WITH_ROW_SUMS, ALIGNED, TA, TB, TC, TP>,
                              (unsigned int)blocks, Shape::THREADS, p.splits, Shape::shared_bytes(false), stream, p);
    return launch_status();
}

template <typename T>
static inline any_pointer any_pointer_to(const T *pointer)
{
    constexpr cuda_ops_dtype dtype = std::is_same<T, float>::value    ? CUDA_OPS_FLOAT32
                                     : std::is_same<T, __half>::value ? CUDA_OPS_FLOAT16
                                                                      : CUDA_OPS_BFLOAT16;
    static_assert(sizeof(T) <= sizeof(float), "double would be rounded");
    return {(char *)pointer, dtype};
}

// The product as any_float's kernels take it.
template <typename TA, typename TB, typename TC, typename TP>
static inline skinny_product<any_float, any_float, any_float, any_float>
any_product(const skinny_product<TA, TB, TC, TP> &p)
{
    return {any_pointer_to(p.output),
            any_pointer_to(p.a),
            any_pointer_to(p.mask),
            any_pointer_to(p.b),
            any_pointer_to(p.bias),
            any_pointer_to(p.row_sums),
            p.m,
            p.n,
            p.k,
            p.a_pitch,
            p.b_pitch,
            p.output_pitch,
            p.chunk,
            p.splits,
            p.relu,
            p.accumulate,
            p.aligned};
}

// A product that is not aligned, or in fp16 or bf16 that tensor cores do not take, on the CUDA cores.
template <typename Shape, bool A_K_MAJOR, bool B_K_MAJOR, bool WITH_ROW_SUMS, typename TA, typename TB, typename TC,
          typename TP>
static cuda_ops_status launch_plain(const skinny_product<TA, TB, TC, TP> &p, int splits, cudaStream_t stream)
{
    if constexpr (std::is_same<TA, double>::value)
        return launch_skinny<Shape, A_K_MAJOR, B_K_MAJOR, WITH_ROW_SUMS, false>(p, splits, stream);
    else
        return launch_skinny<Shape, A_K_MAJOR, B_K_MAJOR, WITH_ROW_SUMS, false>(any_product(p), splits, stream);
}

// Runs the statement with T and P for the types of activations and parameters.
#define CUDA_OPS_MIXED_DISPATCH(dtype, parameter_dtype, T, P, ...)                                                     \
    do {                                                                                                               \
        if ((parameter_dtype) == (dtype)) {                                                                            \
            CUDA_OPS_DISPATCH(dtype, T, typedef T P; __VA_ARGS__)                                                      \
        } else if ((parameter_dtype) == CUDA_OPS_FLOAT32 && (dtype) == CUDA_OPS_FLOAT16) {                             \
            typedef __half T;                                                                                          \
            typedef float P;                                                                                           \
            __VA_ARGS__;                                                                                               \
        } else if ((parameter_dtype) == CUDA_OPS_FLOAT32 && (dtype) == CUDA_OPS_BFLOAT16) {                            \
            typedef __nv_bfloat16 T;                                                                                   \
            typedef float P;                                                                                           \
            __VA_ARGS__;                                                                                               \
        }                                                                                                              \
    } while (false)

#endif
