/* transpose_images: each of `images` matrices from[rows][columns] transposed to to[columns][rows], at the speed of a copy.
 * From contiguous to channels_last rows are channels and columns pixels, and back the other way round; conv2d copies
 * contiguous images so, where a path for channels_last is faster (cuda_ops_conv2d_wants_channels_last_cuda).
 *
 *   to, from: images * rows * columns elements, dense; they must not overlap
 *   Sizes of 0 do nothing. CUDA_OPS_INVALID_ARGUMENT for more tiles than a grid has. On the CPU there is none.
 */
#ifndef CUDA_OPS_TRANSPOSE_IMAGES_H
#define CUDA_OPS_TRANSPOSE_IMAGES_H

#include "cuda_ops/core.h"

#ifdef __cplusplus
extern "C" {
#endif

cuda_ops_status cuda_ops_transpose_images_cuda(void *to, const void *from, int64_t images, int64_t rows,
                                               int64_t columns, cuda_ops_dtype dtype, cuda_ops_stream stream);

#ifdef __cplusplus
}
#endif

#endif
