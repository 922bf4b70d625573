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
    case CUDA_OPS_UNKNOWN_PATH:
        return "the environment's CUDA_OPS_<OP>_PATH names no path of this op; `python -m cuda_ops explain` lists them";
    case CUDA_OPS_PATH_CANNOT:
        return "the path that the environment's CUDA_OPS_<OP>_PATH names cannot do this call on this device; "
               "`python -m cuda_ops explain` tells why";
    default:
        return status >= CUDA_OPS_CUDA_ERROR ? "the CUDA runtime reported an error" : "unknown status";
    }
}

const char *cuda_ops_version(void)
{
    return CUDA_OPS_VERSION;
}
