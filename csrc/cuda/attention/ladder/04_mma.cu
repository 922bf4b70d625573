// attention, rung 4: the tensor cores, by mma.sync, in the shape of FlashAttention-2.
//     output = softmax(scale * query key^T) value
// Threads: a block of 128 for 64 queries of a head, 16 a warp, which no other warp has to know of. A warp keeps its
// queries, its scores and its output in registers; keys and values come through shared memory in tiles of 64, in bf16, by
// cp.async, past the registers; ldmatrix takes them out as mma.sync wants them. Scores turn into weights where they are
// (fragment.cuh says why they can). A tile of values is on its way during the product of queries and keys, and the next
// keys during the product with the values. Fixes: products at the speed of tensor cores; weights never leave the
// registers; loads run beside products. Leaves: every warp reads all keys and values from shared memory for 16 queries,
// and issues the loads, thread by thread; mma.sync has half of what Hopper's tensor cores can do; while a warp makes
// exponentials its products wait, and only other warps' fill the gap. Bfloat16 alone. Bound by shared memory and by the
// instructions that feed mma.sync.
#include "attention/ladder/fragment.cuh"
#include "common/aligned_vector.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared_memory.cuh"

static constexpr int THREADS = 128, ROWS = 64; // of a tile, of queries and of keys

// The 16-byte vectors of a row are permuted by the row's number: those of eight rows below each other, which ldmatrix
// reads at once, are in different banks.
template <int D>
__device__ __forceinline__ uint32_t vector_address(uint32_t tile, int row, int vector)
{
    return tile + row * (D * 2) + ((vector ^ row % 8) << 4);
}

// The rows from `first` on, of `count` that there are; zeros beyond.
template <int D>
__device__ __forceinline__ void copy_tile(uint32_t tile, const bf16 *rows, int first, int count)
{
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * D / 8; i += THREADS) {
        const int row = i / (D / 8), vector = i % (D / 8);
        const bool there = first + row < count;
        cp_async<16>(vector_address<D>(tile, row, vector),
                     there ? rows + (int64_t)(first + row) * D + 8 * vector : rows, there ? 16 : 0);
    }
}

template <int D>
__global__ void __launch_bounds__(THREADS) attention_tensor_cores_kernel(const AttentionLadder a)
{
    extern __shared__ __align__(128) char shared[];
    const uint32_t queries = shared_address(shared), keys = queries + ROWS * D * 2, values = keys + ROWS * D * 2;
    const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, head = blockIdx.y;
    const int first = (gridDim.x - 1 - blockIdx.x) * ROWS, my_query = first + 16 * warp + lane / 4;
    const int end = a.causal ? min(a.keys, first + ROWS) : a.keys;
    const bf16 *const key = static_cast<const bf16 *>(a.key) + (int64_t)head * a.keys * D;
    const bf16 *const value = static_cast<const bf16 *>(a.value) + (int64_t)head * a.keys * D;
    copy_tile<D>(queries, static_cast<const bf16 *>(a.query) + (int64_t)head * a.queries * D, first, a.queries);
    copy_tile<D>(keys, key, 0, a.keys);
    cp_async_wait_all();
    __syncthreads();
    uint32_t query[D / 16][4];
#pragma unroll
    for (int k = 0; k < D / 16; k++) // 16 rows, 16 elements: four matrices of 8 x 8
        ldmatrix_x4(query[k], vector_address<D>(queries, 16 * warp + lane % 16, 2 * k + lane / 16));

    SoftmaxRows rows = rows_without_scores();
    float output[D / 2] = {};
    for (int first_key = 0; first_key < end; first_key += ROWS) {
        copy_tile<D>(values, value, first_key, a.keys);
        float scores[ROWS / 2] = {}, factor[2];
#pragma unroll
        for (int k = 0; k < D / 16; k++)
#pragma unroll
            for (int n = 0; n < ROWS / 16; n++) { // keys 16 n to 16 n + 15 are columns: two instructions' operands
                uint32_t right[4];
                ldmatrix_x4(right, vector_address<D>(keys, 16 * n + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
                float *const s = scores + 8 * n;
                mma_sync<bf16>(s[0], s[1], s[2], s[3], query[k], right[0], right[1]);
                mma_sync<bf16>(s[4], s[5], s[6], s[7], query[k], right[2], right[3]);
            }
        if (first_key + ROWS > a.keys || (a.causal && first_key + ROWS > first + 1))
            mask_scores(scores, a, my_query, first_key + lane % 4 * 2);
        softmax_scores(scores, rows, factor, a.scale * LOG2_E);
        rescale(output, factor);
        uint32_t weights[ROWS / 16][4];
        pack_scores(weights, scores);
        cp_async_wait_all();
        __syncthreads(); // the values are there, and the keys have been read
        if (first_key + ROWS < end)
            copy_tile<D>(keys, key, first_key + ROWS, a.keys);
#pragma unroll
        for (int k = 0; k < ROWS / 16; k++) // the sum goes over keys: rows of values, turned by .trans
#pragma unroll
            for (int n = 0; n < D / 16; n++) {
                uint32_t right[4];
                ldmatrix_x4_trans(right, vector_address<D>(values, 16 * k + lane % 16, 2 * n + lane / 16));
                float *const o = output + 8 * n;
                mma_sync<bf16>(o[0], o[1], o[2], o[3], weights[k], right[0], right[1]);
                mma_sync<bf16>(o[4], o[5], o[6], o[7], weights[k], right[2], right[3]);
            }
        cp_async_wait_all();
        __syncthreads(); // the next keys are there, and the values have been read
    }
    store_rows<D>(a, head, output, rows, my_query);
}

template <int D>
static void launch(const AttentionLadder &a, cudaStream_t stream)
{
    const int bytes = 3 * ROWS * D * 2;
    const dim3 grid((unsigned int)ceil_div(a.queries, ROWS), (unsigned int)a.heads);
    allow_shared_memory(attention_tensor_cores_kernel<D>, bytes);
    attention_tensor_cores_kernel<D><<<grid, THREADS, bytes, stream>>>(a);
}

cuda_ops_status attention_mma(const LadderCall &call)
{
    const AttentionLadder a = attention_tensors(call);
    bool aligned = a.keys > 0;
    for (const void *pointer : {a.query, a.key, a.value, (const void *)a.output})
        aligned = aligned && is_aligned_16(pointer);
    if (!aligned || a.heads == 0 || a.queries == 0)
        return attention_online_softmax(call);
    a.head_dim == 64 ? launch<64>(a, call.stream) : launch<128>(a, call.stream);
    return launch_status();
}
