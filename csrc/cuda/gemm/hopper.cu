// Tensor maps: what the copy engine is told about a matrix. Encoded by the driver on the host, in well under a
// microsecond each, and passed to kernels by value.
#include "gemm/hopper.cuh"

#include <cuda.h>

typedef CUresult (*EncodeTiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Found at run time, so that the library links no libcuda and loads where there is none.
static EncodeTiled find_encode_tiled()
{
    void *function = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
    if (error != cudaSuccess || result != cudaDriverEntryPointSuccess)
        return nullptr;
    return (EncodeTiled)function;
}

bool map_possible(const void *matrix, int64_t element_size, int64_t inner, int64_t outer, int64_t batch, int64_t pitch,
                  int64_t stride)
{
    const int64_t most = INT32_MAX - 1024; // coordinates are ints, and run past the end by less than a tile
    return is_aligned_16(matrix) && pitch * element_size % 16 == 0 && stride * element_size % 16 == 0 && inner > 0 &&
           outer > 0 && inner < most && outer < most && batch < most && pitch * element_size < (int64_t)1 << 40 &&
           stride * element_size < (int64_t)1 << 40;
}

bool make_map(CUtensorMap *map, const void *matrix, cuda_ops_dtype dtype, bool round_to_tf32, int64_t inner,
              int64_t outer, int64_t batch, int64_t pitch, int64_t stride, int box_inner, int box_outer)
{
    static const EncodeTiled encode_tiled = find_encode_tiled();
    if (!encode_tiled)
        return false;
    const CUtensorMapDataType type = dtype == CUDA_OPS_FLOAT16    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                     : dtype == CUDA_OPS_BFLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                     : round_to_tf32              ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
                                                                  : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    const int64_t element_size = dtype == CUDA_OPS_FLOAT32 ? 4 : 2;
    // A stride of zero stands for one matrix that all products share; the kernels then ask for matrix 0.
    const int64_t matrices = stride == 0 ? 1 : batch;
    const cuuint64_t sizes[3] = {(cuuint64_t)inner, (cuuint64_t)outer, (cuuint64_t)matrices};
    const cuuint64_t pitches[2] = {(cuuint64_t)(pitch * element_size),
                                   (cuuint64_t)((stride == 0 ? pitch : stride) * element_size)};
    const cuuint32_t box[3] = {(cuuint32_t)box_inner, (cuuint32_t)box_outer, 1};
    const cuuint32_t steps[3] = {1, 1, 1};
    return encode_tiled(
               map, type, 3, const_cast<void *>(matrix), sizes, pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               box_inner * element_size == SWIZZLE_ROW ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}
