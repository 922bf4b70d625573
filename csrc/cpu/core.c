#include "cuda_ops/core.h"

const char *cuda_ops_status_string(cuda_ops_status status)
{
    switch (status) {
    case CUDA_OPS_SUCCESS:
        return "success";
    case CUDA_OPS_INVALID_ARGUMENT:
        return "a size or a parameter is out of range";
    case CUDA_OPS_UNSUPPORTED_DTYPE:
        return "this backend has no kernel for this dtype";
    default:
        return status >= CUDA_OPS_CUDA_ERROR ? "the CUDA runtime reported an error" : "unknown status";
    }
}

const char *cuda_ops_version(void)
{
    return CUDA_OPS_VERSION;
}
