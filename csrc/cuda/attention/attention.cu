// attention: output = softmax(cap(scale * query key^T) + mask) value, and its gradients, without the matrix of scores
// in memory. The table of paths, and the launchers.
#include "attention/paths.h"

#include "attention/float32/float32.h"
#include "attention/mma_3xtf32/mma_3xtf32.h"
#include "attention/sm90/sm90.h"
#include "common/aligned_vector.cuh"

static bool has_cache(const AttentionCall &call)
{
    const cuda_ops_attention_sequences &sequences = call.problem.sequences;
    return sequences.key_lengths || sequences.block_table;
}

static constexpr Answer TAKES_NO_CACHE = {"reads no cache of keys"};

static Answer sm90_supports(const AttentionCall &call, const Device &device)
{
    return has_cache(call) ? TAKES_NO_CACHE : attention_sm90_supports(call, device);
}

static Answer mma_supports(const AttentionCall &call, const Device &device)
{
    return has_cache(call) ? TAKES_NO_CACHE : attention_mma_supports(call, device);
}

static Answer float32_supports(const AttentionCall &call, const Device &device)
{
    return has_cache(call) ? TAKES_NO_CACHE : attention_float32_supports(call, device);
}

static Answer mma_3xtf32_supports(const AttentionCall &call, const Device &device)
{
    return has_cache(call) ? TAKES_NO_CACHE : attention_mma_3xtf32_supports(call, device);
}

static constexpr Answer HAS_NO_ROOM_FOR_DOUBLES = {"float64 needs more shared memory than a block has before 8.0"};

static Answer simt_supports(const AttentionCall &call, const Device &device)
{
    if (call.dtype == CUDA_OPS_FLOAT64 && device.capability > 0 && device.capability < 80)
        return HAS_NO_ROOM_FOR_DOUBLES;
    return has_cache(call) ? TAKES_NO_CACHE : YES;
}

static PathTable<AttentionCall, 6> table = {
    {"CUDA_OPS_ATTENTION_PATH"},
    {{"decode", "attention/decode/decode.cu",
      "attention_decode_mma_kernel attention_decode_simt_kernel attention_decode_combine_kernel",
      attention_decode_supports, attention_decode_is_fast, attention_decode_workspace, attention_decode},
     {"sm90", "attention/sm90/sm90.cu",
      "attention_sm90_sequences_kernel attention_sm90_forward_kernel attention_sm90_prepare_kernel "
      "attention_sm90_backward_kernel attention_sm90_wide_keys_kernel attention_sm90_wide_queries_kernel",
      sm90_supports, attention_sm90_is_fast, attention_sm90_workspace, attention_sm90},
     {"mma", "attention/mma/mma.cu",
      "attention_mma_forward_kernel attention_mma_remainder_kernel attention_mma_grad_query_kernel "
      "attention_mma_grad_key_value_kernel",
      mma_supports, nullptr, attention_mma_workspace, attention_mma},
     {"mma_3xtf32", "attention/mma_3xtf32/mma_3xtf32.cu",
      "attention_mma_3xtf32_forward_kernel attention_mma_3xtf32_backward_kernel attention_float32_prepare_kernel "
      "attention_float32_remainder_kernel",
      mma_3xtf32_supports, attention_mma_3xtf32_is_fast, attention_mma_3xtf32_workspace, attention_mma_3xtf32},
     {"float32", "attention/float32/float32.cu", "attention_float32_forward_kernel attention_float32_backward_kernel",
      float32_supports, attention_float32_is_fast, attention_float32_workspace, attention_float32},
     {"simt", "attention/simt/simt.cu",
      "attention_simt_forward_kernel attention_simt_grad_query_kernel "
      "attention_simt_grad_key_value_kernel",
      simt_supports, nullptr, attention_simt_workspace, attention_simt}}};

static bool strides_are_aligned(const cuda_ops_attention_strides &strides, int64_t elements, int64_t size)
{
    return elements * size % 16 == 0 && strides.row * size % 16 == 0 && strides.head * size % 16 == 0 &&
           strides.batch * size % 16 == 0;
}

bool attention_rows_are_aligned(const AttentionCall &call)
{
    const cuda_ops_attention &p = call.problem;
    const int64_t size = dtype_size(call.dtype);
    const bool forward =
        strides_are_aligned(p.query, p.head_dim, size) && strides_are_aligned(p.key, p.head_dim, size) &&
        strides_are_aligned(p.value, p.value_dim, size) && strides_are_aligned(p.output, p.value_dim, size) &&
        is_aligned_16(call.query) && is_aligned_16(call.key) && is_aligned_16(call.value) && is_aligned_16(call.output);
    if (!forward || !call.backward)
        return forward;
    return strides_are_aligned(p.grad_output, p.value_dim, size) &&
           strides_are_aligned(p.grad_query, p.head_dim, size) && strides_are_aligned(p.grad_key, p.head_dim, size) &&
           strides_are_aligned(p.grad_value, p.value_dim, size) && is_aligned_16(call.grad_output) &&
           is_aligned_16(call.grad_query) && is_aligned_16(call.grad_key) && is_aligned_16(call.grad_value);
}

static AttentionCall call_of(bool backward, bool with_grad_mask, const cuda_ops_attention &problem,
                             cuda_ops_dtype dtype)
{
    AttentionCall call = {};
    call.backward = backward;
    call.with_grad_mask = with_grad_mask;
    call.problem = problem;
    call.dtype = dtype;
    // Where all sequences have the same lengths, the diagonal is theirs: not every path looks at each of them.
    cuda_ops_attention_sequences &sequences = call.problem.sequences;
    if (sequences.bottom_right && !sequences.query_starts && !sequences.key_lengths) {
        call.problem.diagonal += problem.keys - problem.queries;
        sequences.bottom_right = 0;
    }
    // Packed tensors have no batch, whatever its strides say.
    cuda_ops_attention &p = call.problem;
    if (sequences.query_starts)
        for (cuda_ops_attention_strides *const strides :
             {&p.query, &p.key, &p.value, &p.output, &p.grad_output, &p.grad_query, &p.grad_key, &p.grad_value})
            strides->batch = 0;
    return call;
}

// Whether there are no queries. Keys may be there nevertheless, and have gradients of 0.
static bool is_empty(const cuda_ops_attention &p)
{
    const bool no_rows = p.sequences.query_starts && p.sequences.query_rows == 0;
    return p.batch == 0 || p.heads == 0 || p.queries == 0 || no_rows;
}

static bool is_sound(const cuda_ops_attention_sequences &q, const cuda_ops_attention &p, bool backward)
{
    const bool packed = q.query_starts || q.key_starts, cache = q.key_lengths || q.block_table;
    if (packed && (!q.query_starts || !q.key_starts || q.query_rows < 0 || q.key_rows < 0 || p.dropout > 0 ||
                   p.mask_kind != CUDA_OPS_ATTENTION_MASK_NONE || cache))
        return false;
    if (q.block_table && (q.page_size <= 0 || q.page_size >= INT32_MAX || q.pages < 0 || q.table_row < 0))
        return false;
    return q.new_keys >= 0 && (!cache || (!backward && p.dropout == 0));
}

static cuda_ops_status run(const AttentionCall &call)
{
    if (call.problem.sequences.query_starts) {
        const cuda_ops_status status = attention_clear_unpacked(call);
        if (status != CUDA_OPS_SUCCESS)
            return status;
    }
    if (is_empty(call.problem))
        return call.backward ? attention_clear_keys(call) : CUDA_OPS_SUCCESS;
    return run_path(table, call);
}

// Sizes that fit each other, and none so large that an index could overflow.
static bool is_sound(const cuda_ops_attention &p, bool backward)
{
    const int64_t limit = CUDA_OPS_ATTENTION_UNBOUNDED;
    const bool sizes = p.batch >= 0 && p.heads >= 0 && p.key_heads >= 0 && p.queries >= 0 && p.keys >= 0 &&
                       p.head_dim >= 0 && p.value_dim >= 0 && p.queries < limit && p.keys < limit &&
                       -limit < p.diagonal && p.diagonal < limit;
    return sizes && 0 <= p.window_left && p.window_left <= limit && 0 <= p.window_right && p.window_right <= limit &&
           p.softcap >= 0 && p.dropout >= 0 && p.dropout <= 1 && is_sound(p.sequences, p, backward) &&
           (p.heads == 0 || (p.key_heads > 0 && p.heads % p.key_heads == 0));
}

extern "C" int64_t cuda_ops_attention_forward_workspace_cuda(const cuda_ops_attention *problem, cuda_ops_dtype dtype)
{
    return is_sound(*problem, false) && !is_empty(*problem)
               ? path_workspace(table, call_of(false, false, *problem, dtype))
               : 0;
}

extern "C" cuda_ops_status cuda_ops_attention_forward_cuda(void *output, void *logsumexp, int64_t *state,
                                                           const void *query, const void *key, const void *value,
                                                           void *workspace, const cuda_ops_attention *problem,
                                                           cuda_ops_dtype dtype, cuda_ops_stream stream)
{
    if (!is_sound(*problem, false) || (problem->dropout > 0 && state == nullptr))
        return CUDA_OPS_INVALID_ARGUMENT;
    AttentionCall call = call_of(false, false, *problem, dtype);
    call.output = output, call.logsumexp = logsumexp, call.state = problem->dropout > 0 ? state : nullptr;
    call.query = query, call.key = key, call.value = value;
    call.workspace = workspace, call.stream = stream;
    return run(call);
}

extern "C" int64_t cuda_ops_attention_backward_workspace_cuda(const cuda_ops_attention *problem, int with_grad_mask,
                                                              cuda_ops_dtype dtype)
{
    return is_sound(*problem, true) && !is_empty(*problem)
               ? path_workspace(table, call_of(true, with_grad_mask != 0, *problem, dtype))
               : 0;
}

extern "C" cuda_ops_status cuda_ops_attention_backward_cuda(void *grad_query, void *grad_key, void *grad_value,
                                                            void *grad_mask, const void *grad_output,
                                                            const void *grad_logsumexp, const void *query,
                                                            const void *key, const void *value, const void *output,
                                                            const void *logsumexp, void *workspace,
                                                            const cuda_ops_attention *problem, cuda_ops_dtype dtype,
                                                            cuda_ops_stream stream)
{
    if (!is_sound(*problem, true))
        return CUDA_OPS_INVALID_ARGUMENT;
    AttentionCall call = call_of(true, grad_mask != nullptr, *problem, dtype);
    call.grad_query = grad_query, call.grad_key = grad_key, call.grad_value = grad_value, call.grad_mask = grad_mask;
    call.grad_output = grad_output, call.grad_logsumexp = grad_logsumexp;
    call.query = query, call.key = key, call.value = value;
    call.output = const_cast<void *>(output), call.logsumexp = const_cast<void *>(logsumexp);
    call.workspace = workspace, call.stream = stream;
    return run(call);
}

extern "C" int cuda_ops_attention_paths_cuda(cuda_ops_path_report *reports, int room, int backward, int with_grad_mask,
                                             const cuda_ops_attention *problem, cuda_ops_dtype dtype,
                                             const cuda_ops_device_facts *device)
{
    if (!is_sound(*problem, backward != 0))
        return -1;
    return report_paths(reports, room, table, call_of(backward != 0, with_grad_mask != 0, *problem, dtype), device);
}
