// attention's cache: cache[b, length of b + t] = new[b, t], of keys and values, in whole 16-byte vectors or by elements.
// A block copies one new key of one sequence, all heads; where it goes is read once. Bound by memory.
#include "attention/paths.h"
#include "common/aligned_vector.cuh"

static constexpr int THREADS = 128;

struct AppendWork {
    void *key_cache, *value_cache;
    const void *key, *value;
    cuda_ops_attention_strides new_key, new_value;
    cuda_ops_attention p;
};

template <typename Piece>
__device__ __forceinline__ void copy_rows(void *cache, const void *from, const cuda_ops_attention_strides &to_strides,
                                          const cuda_ops_attention_strides &from_strides, int64_t page, int64_t row,
                                          int64_t batch, int64_t t, int64_t heads, int64_t pieces)
{
    for (int64_t index = threadIdx.x; index < heads * pieces; index += THREADS) {
        const int64_t head = index / pieces, piece = index % pieces;
        ((Piece *)cache)[page * to_strides.batch + head * to_strides.head + row * to_strides.row + piece] =
            ((const Piece *)from)[batch * from_strides.batch + head * from_strides.head + t * from_strides.row + piece];
    }
}

// Strides and dimensions are in pieces.
template <typename Piece>
__global__ void __launch_bounds__(THREADS) attention_append_kernel(const __grid_constant__ AppendWork work)
{
    const cuda_ops_attention &p = work.p;
    const cuda_ops_attention_sequences &q = p.sequences;
    for (int64_t index = blockIdx.x; index < p.batch * q.new_keys; index += gridDim.x) {
        const int64_t batch = index / q.new_keys, t = index % q.new_keys;
        int64_t page = batch, row = q.key_lengths[batch] + t;
        if (q.key_lengths[batch] < 0 || row >= p.keys)
            continue;
        if (q.block_table) {
            page = q.block_table[batch * q.table_row + row / q.page_size];
            row %= q.page_size;
            if (page < 0 || page >= q.pages)
                continue;
        }
        copy_rows<Piece>(work.key_cache, work.key, p.key, work.new_key, page, row, batch, t, p.key_heads, p.head_dim);
        copy_rows<Piece>(work.value_cache, work.value, p.value, work.new_value, page, row, batch, t, p.key_heads,
                         p.value_dim);
    }
}

template <typename Piece>
static cuda_ops_status launch(AppendWork work, int64_t element_size, cudaStream_t stream)
{
    const int64_t elements = (int64_t)sizeof(Piece) / element_size; // of a piece
    for (cuda_ops_attention_strides *s : {&work.p.key, &work.p.value, &work.new_key, &work.new_value})
        s->batch /= elements, s->head /= elements, s->row /= elements;
    work.p.head_dim /= elements, work.p.value_dim /= elements;
    attention_append_kernel<Piece><<<clamp_grid(work.p.batch * work.p.sequences.new_keys), THREADS, 0, stream>>>(work);
    return launch_status();
}

static bool is_whole(const cuda_ops_attention_strides &s, int64_t elements, int64_t size)
{
    return s.batch * size % 16 == 0 && s.head * size % 16 == 0 && s.row * size % 16 == 0 && elements * size % 16 == 0;
}

extern "C" cuda_ops_status cuda_ops_attention_append_cuda(void *key_cache, void *value_cache, const void *key,
                                                          const void *value, cuda_ops_attention_strides new_key,
                                                          cuda_ops_attention_strides new_value,
                                                          const cuda_ops_attention *call, cuda_ops_dtype dtype,
                                                          cuda_ops_stream stream)
{
    const cuda_ops_attention &p = *call;
    const cuda_ops_attention_sequences &q = p.sequences;
    if (!q.key_lengths || q.new_keys < 0 || p.batch < 0 || p.keys < 0 || p.key_heads < 0 || p.head_dim < 0 ||
        p.value_dim < 0 || (q.block_table && (q.page_size <= 0 || q.table_row < 0)))
        return CUDA_OPS_INVALID_ARGUMENT;
    if (p.batch * q.new_keys * p.key_heads == 0)
        return CUDA_OPS_SUCCESS;
    const AppendWork work = {key_cache, value_cache, key, value, new_key, new_value, p};
    const int64_t size = dtype_size(dtype);
    const bool vectors = is_whole(p.key, p.head_dim, size) && is_whole(p.value, p.value_dim, size) &&
                         is_whole(new_key, p.head_dim, size) && is_whole(new_value, p.value_dim, size) &&
                         is_aligned_16(key_cache) && is_aligned_16(value_cache) && is_aligned_16(key) &&
                         is_aligned_16(value);
    if (vectors)
        return launch<uint4>(work, size, stream);
    return size == 8   ? launch<uint2>(work, size, stream)
           : size == 4 ? launch<uint32_t>(work, size, stream)
                       : launch<uint16_t>(work, size, stream);
}
