// Tensor maps: TMA's descriptors of tensors, encoded on the host by the driver in well under a microsecond each.
#include "common/tensor_map.h"

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "ptx/wgmma.cuh"

typedef CUresult (*EncodeTiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

typedef CUresult (*EncodeIm2col)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                 const cuuint64_t *, const int *, const int *, cuuint32_t, cuuint32_t,
                                 const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                 CUtensorMapFloatOOBfill);

// Found at run time, so that the library links no libcuda and loads where there is none.
static void *find_in_driver(const char *name)
{
    void *function = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t error = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &result);
#endif
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? function : nullptr;
}

// Whether the driver encoded the map. It refuses where the thread has no context, as autograd's has none whose first call
// of CUDA this is: allocations come from a cache, and to ask which device is the current one binds none. A path would be
// left for the next one then, and a process's first gradients would have other last bits than those after.
template <typename... Parameters, typename... Arguments>
static bool encodes(CUresult (*function)(Parameters...), Arguments... arguments)
{
    CUresult result = function(arguments...);
    int device = 0;
    if ((result == CUDA_ERROR_INVALID_CONTEXT || result == CUDA_ERROR_NOT_INITIALIZED) &&
        cudaGetDevice(&device) == cudaSuccess && cudaSetDevice(device) == cudaSuccess)
        result = function(arguments...);
    return result == CUDA_SUCCESS;
}

static CUtensorMapDataType type_of(cuda_ops_dtype dtype, bool round_to_tf32)
{
    return dtype == CUDA_OPS_FLOAT16    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
           : dtype == CUDA_OPS_BFLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
           : round_to_tf32              ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
                                        : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
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
    static const EncodeTiled encode_tiled = (EncodeTiled)find_in_driver("cuTensorMapEncodeTiled");
    if (!encode_tiled)
        return false;
    const int64_t element_size = dtype == CUDA_OPS_FLOAT32 ? 4 : 2;
    // A stride of zero stands for one matrix that all products share; the kernels then ask for matrix 0.
    const int64_t matrices = stride == 0 ? 1 : batch;
    const cuuint64_t sizes[3] = {(cuuint64_t)inner, (cuuint64_t)outer, (cuuint64_t)matrices};
    const cuuint64_t pitches[2] = {(cuuint64_t)(pitch * element_size),
                                   (cuuint64_t)((stride == 0 ? pitch : stride) * element_size)};
    const cuuint32_t box[3] = {(cuuint32_t)box_inner, (cuuint32_t)box_outer, 1};
    const cuuint32_t steps[3] = {1, 1, 1};
    // Where rows begin within a sector, a row of a box lies in two lines, and what is asked of the L2 beside each of them
    // takes up to a quarter of TMA's time.
    const bool within_sectors = ((uintptr_t)matrix | (uintptr_t)(pitch * element_size)) % 32 != 0;
    return encodes(encode_tiled, map, type_of(dtype, round_to_tf32), 3, const_cast<void *>(matrix), sizes, pitches, box,
                   steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                   box_inner * element_size == SWIZZLE_ROW ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                   within_sectors ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// A stride as TMA is told it. That of a dimension of one is never taken, but has to be a valid one.
static int64_t stride_told(int64_t size, int64_t stride)
{
    return size == 1 ? 8 : stride;
}

bool heads_map_possible(const HeadsLayout &layout, const void *tensor)
{
    const HeadsLayout &l = layout;
    const int64_t most = INT32_MAX - 1024, longest = (int64_t)1 << 38; // strides are below 2^40 bytes
    const int64_t sizes[4] = {l.elements, l.rows, l.heads, l.batch};
    const int64_t strides[3] = {stride_told(l.rows, l.row_stride), stride_told(l.heads, l.head_stride),
                                stride_told(l.batch, l.batch_stride)};
    bool possible = is_aligned_16(tensor) && l.elements % 8 == 0;
    for (int64_t size : sizes)
        possible = possible && size > 0 && size < most;
    for (int64_t stride : strides)
        possible = possible && stride > 0 && stride % 8 == 0 && stride < longest;
    return possible;
}

bool make_heads_map(CUtensorMap *map, const void *tensor, cuda_ops_dtype dtype, const HeadsLayout &layout, int box_rows)
{
    static const EncodeTiled encode_tiled = (EncodeTiled)find_in_driver("cuTensorMapEncodeTiled");
    const HeadsLayout &l = layout;
    if (!encode_tiled || !heads_map_possible(l, tensor))
        return false;
    const cuuint64_t sizes[4] = {(cuuint64_t)l.elements, (cuuint64_t)l.rows, (cuuint64_t)l.heads, (cuuint64_t)l.batch};
    const cuuint64_t pitches[3] = {(cuuint64_t)(2 * stride_told(l.rows, l.row_stride)),
                                   (cuuint64_t)(2 * stride_told(l.heads, l.head_stride)),
                                   (cuuint64_t)(2 * stride_told(l.batch, l.batch_stride))};
    const cuuint32_t box[4] = {SWIZZLE_ROW / 2, (cuuint32_t)box_rows, 1, 1};
    const cuuint32_t steps[4] = {1, 1, 1, 1};
    return encodes(encode_tiled, map, type_of(dtype, false), 4, const_cast<void *>(tensor), sizes, pitches, box, steps,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// The rows are a window of PACKED_ROWS whose last one is a sequence's last row, so that its bound is the sequence's.
// Where it ends is another dimension of the rows' stride. The window would begin before the tensor: the last dimension
// takes the addresses back by PACKED_ROWS rows, since PACKED_ROWS * 2^34 bytes are nothing in 64 bits. (A map's own
// address is that of the tensor, since before it nothing may be mapped. Triton's ragged descriptors do the same.)
static constexpr int64_t PACKED_ROUND = (int64_t)1 << 34;
static_assert((uint64_t)PACKED_ROUND * PACKED_ROWS == 0, "once around");

bool packed_map_possible(const HeadsLayout &layout, const void *tensor)
{
    HeadsLayout l = layout;
    l.batch = 1;
    return heads_map_possible(l, tensor) && l.rows < PACKED_ROWS &&
           2 * stride_told(l.rows, l.row_stride) < PACKED_ROUND;
}

bool make_packed_map(CUtensorMap *map, const void *tensor, cuda_ops_dtype dtype, const HeadsLayout &layout,
                     int box_rows)
{
    static const EncodeTiled encode_tiled = (EncodeTiled)find_in_driver("cuTensorMapEncodeTiled");
    const HeadsLayout &l = layout;
    if (!encode_tiled || !packed_map_possible(l, tensor))
        return false;
    const int64_t pitch = 2 * stride_told(l.rows, l.row_stride);
    const cuuint64_t sizes[5] = {(cuuint64_t)l.elements, PACKED_ROWS, (cuuint64_t)l.heads, (cuuint64_t)l.rows + 1,
                                 PACKED_ROWS + 1};
    const cuuint64_t pitches[4] = {(cuuint64_t)pitch, (cuuint64_t)(2 * stride_told(l.heads, l.head_stride)),
                                   (cuuint64_t)pitch, (cuuint64_t)(PACKED_ROUND - pitch)};
    const cuuint32_t box[5] = {SWIZZLE_ROW / 2, (cuuint32_t)box_rows, 1, 1, 1};
    const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
    return encodes(encode_tiled, map, type_of(dtype, false), 5, const_cast<void *>(tensor), sizes, pitches, box, steps,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

bool make_image_map(CUtensorMap *map, const void *images, cuda_ops_dtype dtype, bool round_to_tf32, int64_t batch,
                    int64_t height, int64_t width, int64_t channels, int box_height, int box_width, int box_channels)
{
    static const EncodeTiled encode_tiled = (EncodeTiled)find_in_driver("cuTensorMapEncodeTiled");
    const int64_t pitch = channels * (dtype == CUDA_OPS_FLOAT32 ? 4 : 2);
    if (!encode_tiled || !is_aligned_16(images) || pitch % 16 != 0)
        return false;
    const cuuint64_t sizes[4] = {(cuuint64_t)channels, (cuuint64_t)width, (cuuint64_t)height, (cuuint64_t)batch};
    const cuuint64_t pitches[3] = {(cuuint64_t)pitch, (cuuint64_t)(pitch * width),
                                   (cuuint64_t)(pitch * width * height)};
    const cuuint32_t box[4] = {(cuuint32_t)box_channels, (cuuint32_t)box_width, (cuuint32_t)box_height, 1};
    const cuuint32_t steps[4] = {1, 1, 1, 1};
    return encodes(encode_tiled, map, type_of(dtype, round_to_tf32), 4, const_cast<void *>(images), sizes, pitches, box,
                   steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

static bool within(int64_t value, int64_t least, int64_t most)
{
    return least <= value && value <= most;
}

// How far the last pixel of a row or column of the grid lies beyond the image's last one.
static int64_t last_offset(int64_t start, int64_t step, int64_t pixels, int64_t extent)
{
    return start + (pixels - 1) * step - (extent - 1);
}

bool pixel_map_possible(const PixelGrid &g, const void *images, int64_t element_size)
{
    const int64_t most = INT32_MAX - 1024, row = g.width * g.channels, image = row * g.height;
    // The corners of the grid are signed bytes, and the stride is at most 8.
    return is_aligned_16(images) && g.channels * element_size % 16 == 0 && within(g.images, 1, most) &&
           within(g.height, 1, most) && within(g.width, 1, most) && within(g.channels, 1, most) &&
           image * element_size < (int64_t)1 << 40 && within(g.start_y, -128, 127) && within(g.start_x, -128, 127) &&
           within(last_offset(g.start_y, g.step_y, g.grid_height, g.height), -128, 127) &&
           within(last_offset(g.start_x, g.step_x, g.grid_width, g.width), -128, 127) && within(g.step_y, 1, 8) &&
           within(g.step_x, 1, 8) && within(g.grid_height, 1, most) && within(g.grid_width, 1, most) &&
           g.images * g.grid_height <= most / g.grid_width;
}

bool make_pixel_map(CUtensorMap *map, const void *images, cuda_ops_dtype dtype, bool round_to_tf32, const PixelGrid &g,
                    int channels, int pixels)
{
    return make_group_pixel_map(map, images, dtype, round_to_tf32, g, g.channels, channels, pixels);
}

bool make_group_pixel_map(CUtensorMap *map, const void *images, cuda_ops_dtype dtype, bool round_to_tf32,
                          const PixelGrid &g, int64_t pixel_stride, int channels, int pixels)
{
    static const EncodeIm2col encode_im2col = (EncodeIm2col)find_in_driver("cuTensorMapEncodeIm2col");
    const int64_t element_size = dtype == CUDA_OPS_FLOAT32 ? 4 : 2;
    PixelGrid all = g;
    all.channels = pixel_stride;
    if (!encode_im2col || g.channels < 1 || g.channels > pixel_stride || !pixel_map_possible(all, images, element_size))
        return false;
    const cuuint64_t sizes[4] = {(cuuint64_t)g.channels, (cuuint64_t)g.width, (cuuint64_t)g.height,
                                 (cuuint64_t)g.images};
    const cuuint64_t pitch = pixel_stride * element_size;
    const cuuint64_t pitches[3] = {pitch, pitch * g.width, pitch * g.width * g.height};
    const int first[2] = {(int)g.start_x, (int)g.start_y};
    const int last[2] = {(int)last_offset(g.start_x, g.step_x, g.grid_width, g.width),
                         (int)last_offset(g.start_y, g.step_y, g.grid_height, g.height)};
    const cuuint32_t steps[4] = {1, (cuuint32_t)g.step_x, (cuuint32_t)g.step_y, 1};
    return encodes(encode_im2col, map, type_of(dtype, round_to_tf32), 4, const_cast<void *>(images), sizes, pitches,
                   first, last, (cuuint32_t)channels, (cuuint32_t)pixels, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                   channels * element_size == SWIZZLE_ROW ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}
