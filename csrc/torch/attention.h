// What the glue of attention's ops shares: attention, attention_varlen and attention_cache.
#pragma once

#include <algorithm>
#include <array>
#include <optional>

#include "checks.h"
#include "cpu_workspace.h"
#include "cuda_ops/attention.h"
#include "cuda_ops/attention_halves_cpu.h"
#include "empty.h"

namespace cuda_ops
{

// What passes are told beside tensors; -1: no bound.
struct AttentionOptions {
    double scale;
    int64_t diagonal, window_left, window_right;
    double softcap, dropout;
};

// Multiply-adds below which another thread is not worth waking.
constexpr int64_t ATTENTION_GRAIN = 1 << 19;

// Softcap, windows and diagonal.
void check_attention_options(const char *op, const AttentionOptions &options);

// With elements of a row as neighbours.
Tensor attention_rows(const Tensor &tensor);

// A batch's, a head's and a row's.
cuda_ops_attention_strides attention_strides(const Tensor &tensor);

// Of softcap and windows, into the call.
void set_attention_options(cuda_ops_attention &call, const AttentionOptions &options);

// Checks slopes for call.batch and call.heads, and puts them into the call; `kept` holds their memory.
void set_attention_slopes(const char *op, Tensor &kept, cuda_ops_attention &call,
                          const std::optional<Tensor> &alibi_slopes, const Tensor &query);

inline at::ScalarType logsumexp_type(const Tensor &query)
{
    return query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// kernel(workspace, begin, end) over parts of about `multiply_adds` each.
template <typename Kernel>
void parallel_parts(const char *op, int64_t parts, double multiply_adds, int64_t workspace_bytes, const Kernel &kernel)
{
    const int64_t grain =
        std::max<int64_t>(1, static_cast<int64_t>(static_cast<double>(ATTENTION_GRAIN) / std::max(multiply_adds, 1.0)));
    parallel_ranges(op, parts, grain,
                    [&](int64_t begin, int64_t end) { return kernel(thread_workspace(workspace_bytes), begin, end); });
}

// Forward of halves on the CPU as they are. False: nothing was done that counts, and the call goes by float32.
bool attention_forward_of_halves(const char *op, const Tensor &output, const Tensor &logsumexp, const Tensor &query,
                                 const Tensor &key, const Tensor &value, const cuda_ops_attention &call,
                                 cuda_ops_dtype dtype);
// Likewise backward, of grad_query, grad_key and grad_value.
bool attention_backward_of_halves(const char *op, const std::array<Tensor, 3> &grads, const Tensor &grad_output,
                                  const Tensor &grad_logsumexp, const Tensor &query, const Tensor &key,
                                  const Tensor &value, const Tensor &output, const Tensor &logsumexp,
                                  const cuda_ops_attention &call, bool with_scores, cuda_ops_dtype dtype);

#ifdef CUDA_OPS_WITH_CUDA
inline Tensor attention_workspace(int64_t bytes, const Tensor &like)
{
    return bytes > 0 ? empty_bytes(bytes, like) : Tensor();
}
#endif

} // namespace cuda_ops
