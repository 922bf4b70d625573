/* concat on the CPU: the inputs' runs, one memcpy each. Bound by memory: one read, one write. */
#include "cuda_ops/concat.h"

#include "common/common.h"

cuda_ops_status cuda_ops_concat_cpu(void *output, const void *const *inputs, const int64_t *cols, int64_t count,
                                    int64_t outer, int64_t inner, int64_t begin, int64_t end, int element_bytes)
{
    if (element_bytes != 2 && element_bytes != 4 && element_bytes != 8)
        return CUDA_OPS_UNSUPPORTED_DTYPE;
    int64_t row = 0; /* elements of output for one `outer` */
    for (int64_t i = 0; i < count; i++)
        row += cols[i] * inner;
    if (row == 0 || outer == 0)
        return CUDA_OPS_SUCCESS;
    const size_t bytes = (size_t)element_bytes;
    for (int64_t at = begin; at < end;) {
        const int64_t o = at / row;
        int64_t within = at % row, i = 0;
        for (; within >= cols[i] * inner; i++)
            within -= cols[i] * inner;
        const int64_t run = cols[i] * inner, length = min_i64(run - within, end - at);
        memcpy((char *)output + (size_t)at * bytes, (const char *)inputs[i] + (size_t)(o * run + within) * bytes,
               (size_t)length * bytes);
        at += length;
    }
    return CUDA_OPS_SUCCESS;
}
