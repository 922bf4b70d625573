// attention, forward and backward: the paths of mma.sync, of float32, of CUDA cores and of few queries, with windows,
// caps, slopes, masks and dropout, packed sequences and caches, against the CPU's kernels in double. Hopper's path is not
// emulated.
#include <float.h>

#include <initializer_list>

#include "attention/sm90/sm90.h"
#include "cases.h"
#include "cuda_ops/attention.h"

using namespace emulation;

Answer attention_sm90_supports(const AttentionCall &call, const Device &)
{
    if (call.problem.sequences.bottom_right && !call.problem.sequences.query_starts)
        fail("the path looks at the diagonal alone");
    return no("is not emulated");
}
Answer attention_sm90_is_fast(const AttentionCall &, const Device &)
{
    return YES;
}
int64_t attention_sm90_workspace(const AttentionCall &, const Device &)
{
    return 0;
}
cuda_ops_status attention_sm90(const AttentionCall &, const Device &)
{
    return CUDA_OPS_INVALID_ARGUMENT;
}

// Strides of [batch, heads, rows, dim], or of [batch, rows, heads, dim], with gaps now and then; and the elements in all.
static int64_t extent_of(cuda_ops_attention_strides &s, int64_t batch, int64_t heads, int64_t rows, int64_t dim)
{
    const int64_t pitch = dim + (one_in(4) ? 8 : 0);
    if (one_in(2))
        s = {heads * rows * pitch, rows * pitch, pitch};
    else
        s = {heads * rows * pitch, pitch, heads * pitch};
    return batch * heads * rows * pitch;
}

// An array on the device and its values in double.
struct Pair {
    Array device;
    std::vector<double> host;
    Pair(int64_t count, cuda_ops_dtype dtype, bool random) : device(count, dtype), host((size_t)count, NAN)
    {
        if (random)
            device.random();
        for (int64_t i = 0; i < count; i++)
            host[(size_t)i] = random ? device[i] : NAN;
    }
    // Those that the CPU has written.
    void compare(const char *what, double tolerance) const
    {
        for (int64_t i = 0; i < device.count; i++)
            if (host[(size_t)i] == host[(size_t)i])
                expect_near(what, i, device[i], host[(size_t)i], tolerance * (1 + fabs(host[(size_t)i])));
    }
};

// A mask to be added, of the call's strides, and the same in double for the CPU: hidden keys, and the lowest number of
// some type, which transformers puts where others put -inf, at single keys and throughout a row.
static void random_mask(cuda_ops_attention &p, std::vector<double> &host, cuda_ops_dtype dtype)
{
    p.mask_dtype = one_in(2) ? CUDA_OPS_FLOAT32 : dtype;
    const bool per_batch = one_in(3);
    const int64_t rows = (per_batch ? p.batch : 1) * p.queries, count = rows * p.keys;
    p.mask_row = p.keys, p.mask_column = 1, p.mask_batch = per_batch ? p.queries * p.keys : 0;
    const Array mask(count, p.mask_dtype);
    const float of_bfloat16 = -3.38953139e38f;
    const double lowest = p.mask_dtype == CUDA_OPS_FLOAT16    ? -65504
                          : p.mask_dtype == CUDA_OPS_BFLOAT16 ? of_bfloat16
                          : p.mask_dtype == CUDA_OPS_FLOAT64  ? -DBL_MAX
                          : one_in(2)                         ? -FLT_MAX
                                                              : of_bfloat16;
    host.resize((size_t)count);
    for (int64_t row = 0; row < rows; row++) {
        const bool padded = one_in(4);
        for (int64_t j = 0; j < p.keys; j++) {
            const double x = padded && !one_in(6) ? lowest : (double)random_in(-8, 8) / 8;
            const int64_t at = row * p.keys + j;
            host[(size_t)at] = one_in(9) ? -INFINITY : one_in(9) || (padded && row % 2) ? lowest : x;
            set(mask.data, at, host[(size_t)at], p.mask_dtype);
        }
    }
    p.mask = mask.data;
}

// Half of the time the path that the call gets, else any that can do it.
static void choose_path(std::initializer_list<const void *> tensors, bool backward, bool with_grad_mask,
                        const cuda_ops_attention &p, cuda_ops_dtype dtype)
{
    const char *const variable = "CUDA_OPS_ATTENTION_PATH";
    setenv(variable, "", 1);
    cuda_ops_reload_paths_cuda();
    cuda_ops_path_report reports[8];
    const int rows = cuda_ops_attention_paths_cuda(reports, 8, backward, with_grad_mask, &p, dtype, nullptr);
    const cuda_ops_path_report &report = reports[random_below((uint64_t)rows)];
    bool aligned = true; // as the reports take them to be, of which three paths ask
    for (const void *const tensor : tensors)
        aligned = aligned && (uintptr_t)tensor % 16 == 0;
    const bool asks =
        !strcmp(report.name, "mma") || !strcmp(report.name, "mma_3xtf32") || !strcmp(report.name, "float32");
    if (one_in(2) || !report.supports || (!aligned && asks))
        return;
    setenv(variable, report.name, 1);
    cuda_ops_reload_paths_cuda();
}

static int32_t *starts_of(int64_t batch, int64_t &rows, int64_t &longest)
{
    int32_t *const starts = (int32_t *)device_memory((size_t)(4 * (batch + 1)), 0);
    const bool all_empty = one_in(6);
    starts[0] = one_in(3) ? (int32_t)random_in(0, 3) : 0;
    longest = 0;
    for (int64_t b = 0; b < batch; b++) {
        const int64_t length = one_in(6) || all_empty ? 0 : random_size(150);
        starts[b + 1] = (int32_t)(starts[b] + length);
        longest = length > longest ? length : longest;
    }
    rows = starts[batch] + (one_in(3) ? random_in(0, 4) : 0);
    // The most that one may have is no less, and may be more than any has.
    longest += one_in(3) || (longest == 0 && one_in(2));
    return starts;
}

static void attention(int64_t number)
{
    // Most paths are of bfloat16 and float32.
    const cuda_ops_dtype dtype = one_in(3) ? CUDA_OPS_BFLOAT16 : one_in(2) ? CUDA_OPS_FLOAT32 : DTYPES[random_below(4)];
    const cuda_ops_dtype sums = dtype == CUDA_OPS_FLOAT64 ? dtype : CUDA_OPS_FLOAT32;
    const bool packed = one_in(3), cached = !packed && one_in(3);
    cuda_ops_attention p = {};
    p.batch = random_in(1, 3), p.key_heads = random_in(1, 2), p.heads = p.key_heads * random_in(1, 3);
    p.queries = one_in(2) ? random_in(1, 9) : random_size(150), p.keys = random_size(p.queries < 10 ? 500 : 200);
    if (one_in(20))
        p.queries = 0;
    else if (one_in(20))
        p.keys = 0;
    p.head_dim = one_in(4) ? random_in(1, 40) : 8 * random_in(1, one_in(6) ? 20 : 9);
    p.value_dim = one_in(3) ? (p.head_dim % 8 == 0 ? 8 * random_in(1, 9) : random_in(1, 40)) : p.head_dim;
    p.scale = one_in(4) ? 0.3 : 1 / sqrt((double)p.head_dim);
    p.window_left = one_in(3) ? random_in(0, 80) : CUDA_OPS_ATTENTION_UNBOUNDED;
    p.window_right = one_in(2) ? random_in(0, 20) * one_in(2) : CUDA_OPS_ATTENTION_UNBOUNDED;
    p.softcap = one_in(6) ? 2.0 : 0.0;
    p.sequences.bottom_right = one_in(2);
    if (!p.sequences.bottom_right && one_in(3))
        p.diagonal = random_in(-30, 30);
    if (one_in(6)) {
        float *const slopes = (float *)device_memory((size_t)(4 * p.batch * p.heads), 0);
        for (int64_t i = 0; i < p.batch * p.heads; i++)
            slopes[i] = (float)random_in(0, 8) / 64;
        p.alibi_slopes = slopes, p.alibi_batch = p.heads;
    }
    std::vector<double> host_mask;
    int64_t query_rows = p.queries, key_rows = p.keys, batch = p.batch, key_batch = p.batch;
    if (packed) {
        p.sequences.query_starts = starts_of(p.batch, query_rows, p.queries);
        p.sequences.key_starts = starts_of(p.batch, key_rows, p.keys);
        p.sequences.query_rows = query_rows, p.sequences.key_rows = key_rows;
        batch = key_batch = 1;
    } else if (cached) {
        int32_t *const lengths = (int32_t *)device_memory((size_t)(4 * p.batch), 0);
        p.sequences.new_keys = random_in(0, 2) < p.keys ? random_in(0, 1) : 0;
        if (one_in(2)) {
            const int64_t page = one_in(2) ? 16 : random_in(1, 40), columns = (p.keys + page - 1) / page;
            p.keys = columns * page;
            p.sequences.page_size = page, p.sequences.table_row = columns;
            p.sequences.pages = key_batch = p.batch * columns + random_in(0, 3);
            int32_t *const table = (int32_t *)device_memory((size_t)(4 * p.batch * columns), 0);
            for (int64_t i = 0; i < p.batch * columns; i++)
                table[i] = (int32_t)random_in(0, p.sequences.pages - 1);
            p.sequences.block_table = table;
            key_rows = page;
        }
        for (int64_t b = 0; b < p.batch; b++)
            lengths[b] = (int32_t)random_in(0, p.keys - p.sequences.new_keys);
        p.sequences.key_lengths = lengths;
    } else {
        if (one_in(6)) {
            p.mask_kind = CUDA_OPS_ATTENTION_MASK_BOOLEAN, p.mask_row = p.keys, p.mask_column = 1;
            unsigned char *const mask = (unsigned char *)device_memory((size_t)(p.queries * p.keys), 0);
            for (int64_t i = 0; i < p.queries * p.keys; i++)
                mask[i] = !one_in(4);
            p.mask = mask;
        } else if (one_in(2)) {
            p.mask_kind = CUDA_OPS_ATTENTION_MASK_ADDITIVE;
            random_mask(p, host_mask, dtype);
        }
        if (one_in(2))
            p.dropout = (double)random_in(1, 3) / 4;
    }
    Pair query(extent_of(p.query, batch, p.heads, query_rows, p.head_dim), dtype, true);
    Pair key(extent_of(p.key, key_batch, p.key_heads, key_rows, p.head_dim), dtype, true);
    Pair value(extent_of(p.value, key_batch, p.key_heads, key_rows, p.value_dim), dtype, true);
    Pair output(extent_of(p.output, batch, p.heads, query_rows, p.value_dim), dtype, false);
    Pair logsumexp(batch * p.heads * query_rows, sums, false);
    describe(
        "case %lld: dtype %d, batch %lld, heads %lld of %lld, %lld queries, %lld keys, dims %lld and %lld, windows "
        "%lld and %lld from %lld%s, cap %g%s, mask %d of dtype %d, dropout %g, %s",
        (long long)number, dtype, (long long)p.batch, (long long)p.heads, (long long)p.key_heads, (long long)p.queries,
        (long long)p.keys, (long long)p.head_dim, (long long)p.value_dim, (long long)p.window_left,
        (long long)p.window_right, (long long)p.diagonal, p.sequences.bottom_right ? " at the bottom right" : "",
        p.softcap, p.alibi_slopes ? ", slopes" : "", p.mask_kind, p.mask_dtype, p.dropout,
        packed                    ? "packed"
        : p.sequences.block_table ? "paged"
        : cached                  ? "cached"
                                  : "dense");
    cuda_ops_attention on_host = p;
    if (p.mask_kind == CUDA_OPS_ATTENTION_MASK_ADDITIVE)
        on_host.mask = host_mask.data(), on_host.mask_dtype = CUDA_OPS_FLOAT64;
    p.philox.seed = on_host.philox.seed = random_below(1 << 30);
    p.philox.offset = on_host.philox.offset = 4 * random_below(1 << 20);
    choose_path({query.device.data, key.device.data, value.device.data, output.device.data}, false, false, p, dtype);
    const auto room_of = [](int64_t bytes) { return device_memory((size_t)bytes, 0); };
    int64_t *const state = p.dropout > 0 ? (int64_t *)room_of(16) : nullptr;
    expect_success(cuda_ops_attention_forward_cuda(
        output.device.data, logsumexp.device.data, state, query.device.data, key.device.data, value.device.data,
        room_of(cuda_ops_attention_forward_workspace_cuda(&p, dtype)), &p, dtype, nullptr));
    expect_success(cuda_ops_attention_forward_cpu(
        output.host.data(), logsumexp.host.data(), query.host.data(), key.host.data(), value.host.data(),
        room_of(cuda_ops_attention_forward_workspace_cpu(&on_host, CUDA_OPS_FLOAT64)), &on_host, 0,
        cuda_ops_attention_forward_parts_cpu(&on_host), CUDA_OPS_FLOAT64));
    const double tolerance = dtype == CUDA_OPS_FLOAT64 ? 1e-11 : 12 * rounding_of(dtype) + 1e-4;
    output.compare("output", tolerance);
    logsumexp.compare("logsumexp", dtype == CUDA_OPS_FLOAT64 ? 1e-11 : 1e-3);
    // Whatever the mask has, of a key whose score is not -inf something is seen.
    for (int64_t i = 0; i < logsumexp.device.count; i++)
        if (isfinite(logsumexp.host[(size_t)i]) && !isfinite(logsumexp.device[i]))
            fail("logsumexp[%lld] is %g", (long long)i, logsumexp.device[i]);
    if (cached)
        return;

    // Backward, of the same output on both sides.
    for (int64_t i = 0; i < output.device.count; i++)
        output.host[(size_t)i] = output.device[i];
    for (int64_t i = 0; i < logsumexp.device.count; i++)
        logsumexp.host[(size_t)i] = logsumexp.device[i];
    Pair grad_output(extent_of(p.grad_output, batch, p.heads, query_rows, p.value_dim), dtype, true);
    Pair grad_query(extent_of(p.grad_query, batch, p.heads, query_rows, p.head_dim), dtype, false);
    Pair grad_key(extent_of(p.grad_key, key_batch, p.key_heads, key_rows, p.head_dim), dtype, false);
    Pair grad_value(extent_of(p.grad_value, key_batch, p.key_heads, key_rows, p.value_dim), dtype, false);
    Pair grad_logsumexp(batch * p.heads * query_rows, sums, true);
    const bool has_logsumexp = one_in(2), with_grad_mask = !packed && one_in(4);
    Pair grad_mask(with_grad_mask ? batch * p.heads * p.queries * p.keys : 0, dtype, false);
    void *const grad_mask_data = with_grad_mask ? grad_mask.device.data : nullptr;
    cuda_ops_attention q = p, q_on_host = on_host;
    if (state)
        q.philox = {0, 0, state, state + 1};
    for (cuda_ops_attention *const call : {&q, &q_on_host}) {
        call->grad_output = p.grad_output, call->grad_query = p.grad_query;
        call->grad_key = p.grad_key, call->grad_value = p.grad_value;
    }
    choose_path({query.device.data, key.device.data, value.device.data, output.device.data, grad_output.device.data,
                 grad_query.device.data, grad_key.device.data, grad_value.device.data},
                true, with_grad_mask, q, dtype);
    expect_success(cuda_ops_attention_backward_cuda(
        grad_query.device.data, grad_key.device.data, grad_value.device.data, grad_mask_data, grad_output.device.data,
        has_logsumexp ? grad_logsumexp.device.data : nullptr, query.device.data, key.device.data, value.device.data,
        output.device.data, logsumexp.device.data,
        room_of(cuda_ops_attention_backward_workspace_cuda(&q, with_grad_mask, dtype)), &q, dtype, nullptr));
    expect_success(cuda_ops_attention_backward_cpu(
        grad_query.host.data(), grad_key.host.data(), grad_value.host.data(),
        with_grad_mask ? grad_mask.host.data() : nullptr, grad_output.host.data(),
        has_logsumexp ? grad_logsumexp.host.data() : nullptr, query.host.data(), key.host.data(), value.host.data(),
        output.host.data(), logsumexp.host.data(),
        room_of(cuda_ops_attention_backward_workspace_cpu(&q_on_host, CUDA_OPS_FLOAT64)), &q_on_host, 0,
        cuda_ops_attention_backward_parts_cpu(&q_on_host), CUDA_OPS_FLOAT64));
    const double wide = tolerance * (dtype == CUDA_OPS_FLOAT64 ? 1 : 6) * (1 + 4 * p.dropout);
    grad_query.compare("grad_query", wide);
    grad_key.compare("grad_key", wide);
    grad_value.compare("grad_value", wide);
    grad_mask.compare("grad_mask", wide);
}

int main(int argc, char **argv)
{
    return run_cases(argc, argv, "attention", attention);
}
