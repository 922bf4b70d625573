// The least glue that makes a C function an op of PyTorch: check, allocate, run, register.
//
// The project's own glue, csrc/torch/add2.cpp, does more (any strides, several threads, messages with a cure). It is
// not reused here, because it registers into the library `cuda_ops`: PyTorch lets a library be defined once a process,
// so that a second copy of it would fail wherever the project's own build is loaded. Hence a namespace of its own, set
// by whoever compiles the file: JIT and CMake choose different ones, and all three can be loaded side by side.
#include "cuda_ops/add2.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>
#ifdef ADD2_WITH_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

static at::Tensor add2(const at::Tensor &input, const at::Tensor &other)
{
    TORCH_CHECK(input.sizes() == other.sizes() && input.scalar_type() == other.scalar_type() &&
                    input.device() == other.device(),
                "add2: expected two tensors of one shape, dtype and device, got ", input.toString(), input.sizes(),
                " and ", other.toString(), other.sizes());
    TORCH_CHECK(input.scalar_type() == at::kFloat || input.scalar_type() == at::kDouble,
                "add2: expected float32 or float64, got ", input.toString());
    const cuda_ops_dtype dtype = input.scalar_type() == at::kFloat ? CUDA_OPS_FLOAT32 : CUDA_OPS_FLOAT64;
    const c10::OptionalDeviceGuard guard(at::device_of(input));
    const at::Tensor a = input.contiguous(), b = other.contiguous();
    const at::Tensor output = at::empty_like(a);
    cuda_ops_status status;
#ifdef ADD2_WITH_CUDA
    if (a.is_cuda())
        status = cuda_ops_add2_forward_cuda(output.data_ptr(), a.const_data_ptr(), b.const_data_ptr(), a.numel(), dtype,
                                            c10::cuda::getCurrentCUDAStream().stream());
    else
#endif
        status =
            cuda_ops_add2_forward_cpu(output.data_ptr(), a.const_data_ptr(), b.const_data_ptr(), 0, a.numel(), dtype);
    TORCH_CHECK(status == CUDA_OPS_SUCCESS, "add2: status ", status);
    return output;
}

// TORCH_LIBRARY pastes its first argument as it stands; one more macro around it replaces ADD2_NAMESPACE first.
#define REGISTER(name_space, library) TORCH_LIBRARY(name_space, library)
REGISTER(ADD2_NAMESPACE, library)
{
    library.def("add2(Tensor input, Tensor other) -> Tensor");
    library.impl("add2", c10::DispatchKey::CPU, add2);
#ifdef ADD2_WITH_CUDA
    library.impl("add2", c10::DispatchKey::CUDA, add2);
#endif
}
