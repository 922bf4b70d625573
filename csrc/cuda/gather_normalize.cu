// gather_normalize: output[b] = (images[indices[b]] / 255 - mean) / std, and labels[indices[b]] in the same launch.
// Maps a warp to a row, or to an equal segment of a long one: the index is read once, and up to UNROLL loads a thread
// are in flight together. A thread stores aligned vectors of 16 bytes; rows of another size and misaligned arrays go
// element by element.
// Bound by two dependent reads (index, then image) for small batches, by memory for large ones: a byte read and an
// element written each. On an H200, 28 x 28: 1.7 us for 64 images in float32; for 16384 two thirds (float32) and seven
// tenths (bf16) of a copy's 4.3 TB/s.
#include "cuda_ops/gather_normalize.h"

#include "common/aligned_vector.cuh"
#include "common/common.cuh"
#include "common/loss.cuh"

static constexpr int WARPS = 4;
static constexpr int UNROLL = 4;

struct GatherSource {
    const uint8_t *images;
    const void *indices, *labels;
    int index_bytes, label_bytes;
    int64_t count;
};

// A row has `vectors` vectors of SIZE elements, split into `segments` of `segment` vectors each.
template <typename T, int SIZE>
__global__ void __launch_bounds__(WARPS *WARP_SIZE)
    gather_normalize_kernel(T *output, int64_t *output_labels, cuda_ops_index_error *error, const GatherSource source,
                            int64_t rows, int64_t vectors, int64_t segments, int64_t segment, accumulate_type<T> center,
                            accumulate_type<T> scale)
{
    typedef accumulate_type<T> A;
    typedef aligned_vector<uint8_t, SIZE> In;
    typedef aligned_vector<T, SIZE> Out;
    const int lane = threadIdx.x % WARP_SIZE;
    const int64_t warps = (int64_t)gridDim.x * WARPS;
    release_successor();
    wait_for_predecessor();
    for (int64_t task = (int64_t)blockIdx.x * WARPS + threadIdx.x / WARP_SIZE; task < rows * segments; task += warps) {
        const int64_t row = segments == 1 ? task : task / segments, part = task - row * segments;
        const int64_t index =
            source.index_bytes == 4 ? ((const int32_t *)source.indices)[row] : ((const int64_t *)source.indices)[row];
        const bool good = 0 <= index && index < source.count;
        if (lane == 0 && part == 0) {
            if (!good)
                record_bad_index(error, row, index, source.count);
            if (output_labels)
                output_labels[row] = !good                     ? -1
                                     : source.label_bytes == 1 ? ((const uint8_t *)source.labels)[index]
                                                               : ((const int64_t *)source.labels)[index];
        }
        const In *image = (const In *)source.images + (good ? index : 0) * vectors;
        Out *target = (Out *)output + row * vectors;
        const int64_t end = (part + 1) * segment < vectors ? (part + 1) * segment : vectors;
        for (int64_t first = part * segment + lane; first < end; first += UNROLL * WARP_SIZE) {
            In in[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (good && first + u * WARP_SIZE < end)
                    in[u] = image[first + u * WARP_SIZE];
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                if (first + u * WARP_SIZE >= end)
                    continue;
                Out out;
#pragma unroll
                for (int e = 0; e < SIZE; e++)
                    out.element[e] =
                        store_from_accumulate<T>(good ? (A(in[u].element[e]) - center) * scale : A(CUDART_NAN));
                target[first + u * WARP_SIZE] = out;
            }
        }
    }
}

template <typename T, int SIZE>
static cuda_ops_status launch(T *output, int64_t *output_labels, cuda_ops_index_error *error,
                              const GatherSource &source, int64_t rows, int64_t row_size, double mean, double std,
                              cudaStream_t stream)
{
    typedef accumulate_type<T> A;
    const int64_t vectors = row_size / SIZE, segments = vectors == 0 ? 1 : ceil_div(vectors, UNROLL * WARP_SIZE);
    launch_dependent(gather_normalize_kernel<T, SIZE>, clamp_grid(ceil_div(rows * segments, WARPS)), WARPS * WARP_SIZE,
                     0, stream, output, output_labels, error, source, rows, vectors, segments,
                     ceil_div(vectors, segments), A(255 * mean), A(1 / (255 * std)));
    return launch_status();
}

extern "C" cuda_ops_status cuda_ops_gather_normalize_cuda(void *output, int64_t *output_labels,
                                                          cuda_ops_index_error *error, const uint8_t *images,
                                                          const void *indices, int index_bytes, const void *labels,
                                                          int label_bytes, int64_t count, int64_t rows,
                                                          int64_t row_size, double mean, double std,
                                                          cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if ((index_bytes != 4 && index_bytes != 8) || (labels && label_bytes != 1 && label_bytes != 8))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (rows == 0)
        return CUDA_OPS_SUCCESS;
    const GatherSource source = {images, indices, labels, index_bytes, label_bytes, count};
    int64_t *const to_labels = labels ? output_labels : nullptr;
    CUDA_OPS_DISPATCH(dtype, T, {
        constexpr int SIZE = vector16<T>::size;
        const bool aligned = is_aligned_16(output) && is_aligned_16(images) && row_size % SIZE == 0;
        if (aligned)
            return launch<T, SIZE>((T *)output, to_labels, error, source, rows, row_size, mean, std, stream);
        return launch<T, 1>((T *)output, to_labels, error, source, rows, row_size, mean, std, stream);
    });
    return CUDA_OPS_SUCCESS;
}
