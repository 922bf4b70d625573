// cuda_ops._C: introspection only. Kernels are called through torch.ops.cuda_ops, never through this module, so that
// the op library needs no Python.
#include <pybind11/pybind11.h>

#include "cuda_ops/core.h"

PYBIND11_MODULE(_C, module)
{
    module.doc() = "What the build of cuda_ops holds.";
    module.attr("version") = CUDA_OPS_VERSION;
}
