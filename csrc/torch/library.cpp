// Home of the cuda_ops library: the shared checks of checks.h, and the ops that take no tensor, `build_info` and
// `cpu_isa`.
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty_like.h>

#include <cstdlib>
#include <string>

#include "checks.h"
#include "cuda_ops/cpu_isa.h"
#include "vmap.h"

#ifdef CUDA_OPS_WITH_CUDA
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#endif

namespace cuda_ops
{

static const char *const REBUILD_WITH_CUDA =
    "this build of cuda_ops has no CUDA kernels. Rebuild it where nvcc is found, with "
    "`CUDA_OPS_CUDA=1 pip install --no-build-isolation -e .`; `python -m cuda_ops doctor` says more.";

static std::string name_of(at::ScalarType dtype)
{
    return c10::getDtypeNames(dtype).first;
}

cuda_ops_dtype check_dtype(const char *op, const char *argument, const Tensor &tensor)
{
    switch (tensor.scalar_type()) {
    case at::kFloat:
        return CUDA_OPS_FLOAT32;
    case at::kDouble:
        return CUDA_OPS_FLOAT64;
    case at::kHalf:
        return CUDA_OPS_FLOAT16;
    case at::kBFloat16:
        return CUDA_OPS_BFLOAT16;
    default:
        TORCH_CHECK(false, op, ": expected ", argument, " to be floating point, got ", name_of(tensor.scalar_type()));
    }
}

void check_same_device(const char *op, const char *argument, const Tensor &tensor, const char *reference_name,
                       const Tensor &reference)
{
    TORCH_CHECK(tensor.device() == reference.device(), op, ": expected ", argument, " to be on the device of ",
                reference_name, ", ", reference.device(), ", got ", tensor.device());
}

void check_like(const char *op, const char *argument, const Tensor &tensor, const char *reference_name,
                const Tensor &reference)
{
    check_same_device(op, argument, tensor, reference_name, reference);
    TORCH_CHECK(tensor.scalar_type() == reference.scalar_type(), op, ": expected ", argument, " to have the dtype of ",
                reference_name, ", ", name_of(reference.scalar_type()), ", got ", name_of(tensor.scalar_type()));
}

void check_same_shape(const char *op, const char *argument, const Tensor &tensor, const char *reference_name,
                      const Tensor &reference)
{
    TORCH_CHECK(tensor.sizes() == reference.sizes(), op, ": expected ", argument, " to have the shape of ",
                reference_name, ", ", reference.sizes(), ", got ", tensor.sizes());
}

void check_dim(const char *op, const char *argument, const Tensor &tensor, int64_t minimum, int64_t maximum)
{
    if (minimum == maximum)
        TORCH_CHECK(tensor.dim() == minimum, op, ": expected ", argument, " to have ", minimum,
                    " dimensions, got shape ", tensor.sizes());
    TORCH_CHECK(minimum <= tensor.dim() && tensor.dim() <= maximum, op, ": expected ", argument, " to have ", minimum,
                " to ", maximum, " dimensions, got shape ", tensor.sizes());
}

void check_written(const char *op, const char *argument, const Tensor &tensor)
{
    TORCH_CHECK(at::has_internal_overlap(tensor) != at::MemOverlap::Yes, op, ": expected ", argument,
                " to have a place in memory for each element, got strides ", tensor.strides(),
                ": more than one element of the written-to tensor refers to a single memory location (clone it first)");
}

void check_no_overlap(const char *op, const char *argument, const Tensor &tensor, const char *written_name,
                      const Tensor &written)
{
    const at::MemOverlapStatus status = at::get_overlap_status(written, tensor);
    TORCH_CHECK(status != at::MemOverlapStatus::Partial && status != at::MemOverlapStatus::Full, op, ": expected ",
                argument, " to share no memory with ", written_name,
                ", but elements of both refer to a single memory location (clone it first)");
}

const Tensor &required(const char *op, const char *argument, const std::optional<Tensor> &tensor)
{
    TORCH_CHECK(tensor.has_value(), op, ": expected ", argument, " to be a Tensor, got None");
    return *tensor;
}

Tensor dense(const Tensor &tensor)
{
    return tensor.is_non_overlapping_and_dense() && !tensor.is_neg() ? tensor
                                                                     : tensor.clone(at::MemoryFormat::Preserve);
}

Tensor dense_like(const Tensor &tensor, const Tensor &reference)
{
    if (tensor.strides() == reference.strides() && !tensor.is_neg())
        return tensor;
    Tensor copy = at::empty_like(reference, reference.options().dtype(tensor.scalar_type()));
    return copy.copy_(tensor);
}

#ifdef CUDA_OPS_WITH_CUDA
static std::string no_kernel_image_cure()
{
    int device = 0;
    cudaDeviceProp properties{};
    if (cudaGetDevice(&device) != cudaSuccess || cudaGetDeviceProperties(&properties, device) != cudaSuccess)
        return "";
    const std::string sm = std::to_string(properties.major) + "." + std::to_string(properties.minor);
    return ". The device (" + std::string(properties.name) + ") has compute capability " + sm +
           ", and cuda_ops was built for " CUDA_OPS_ARCH_LIST ". Rebuild with TORCH_CUDA_ARCH_LIST=" + sm +
           " pip install --no-build-isolation -e .";
}
#endif

void check_status(const char *op, cuda_ops_status status)
{
    if (C10_LIKELY(status == CUDA_OPS_SUCCESS))
        return;
#ifdef CUDA_OPS_WITH_CUDA
    if (status >= CUDA_OPS_CUDA_ERROR) {
        const cudaError_t error = static_cast<cudaError_t>(status - CUDA_OPS_CUDA_ERROR);
        const bool no_image = error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction;
        TORCH_CHECK(false, op, ": CUDA error: ", cudaGetErrorString(error), no_image ? no_kernel_image_cure() : "");
    }
#endif
    TORCH_CHECK_NOT_IMPLEMENTED(status != CUDA_OPS_UNSUPPORTED_DTYPE && status != CUDA_OPS_PATH_CANNOT, op, ": ",
                                cuda_ops_status_string(status));
    TORCH_CHECK(false, op, ": ", cuda_ops_status_string(status));
}

cuda_ops_stream current_stream(const char *op)
{
#ifdef CUDA_OPS_WITH_CUDA
    (void)op;
    return c10::cuda::getCurrentCUDAStream().stream();
#else
    TORCH_CHECK(false, op, ": ", REBUILD_WITH_CUDA);
#endif
}

std::string display_name(const c10::OperatorHandle &op)
{
    std::string name = op.schema().name().substr(op.schema().name().find("::") + 2);
    for (const char *const kind : {"_forward", "_inference", "_inplace"})
        name = name.substr(0, name.find(kind));
    return name;
}

// What a tensor is that has no strides, or whose elements are codes of numbers; null for any other.
static const char *kind_not_dense(const Tensor &tensor)
{
    if (!tensor.defined())
        return nullptr;
    if (tensor.is_nested())
        return "a nested tensor";
    if (tensor.is_quantized())
        return "a quantized tensor";
    if (tensor.layout() == at::kMkldnn)
        return "a tensor of MKL-DNN's layout";
    return tensor.layout() == at::kStrided ? nullptr : "a sparse tensor";
}

static void refuse_not_dense(const c10::OperatorHandle &op, torch::jit::Stack *stack)
{
    const auto &arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); i++) {
        const c10::IValue &value = (*stack)[stack->size() - arguments.size() + i];
        const char *kind = value.isTensor() ? kind_not_dense(value.toTensor()) : nullptr;
        if (value.isTensorList())
            for (const Tensor &tensor : value.toTensorVector())
                kind = kind ? kind : kind_not_dense(tensor);
        TORCH_CHECK_NOT_IMPLEMENTED(!kind, display_name(op), ": expected ", arguments[i].name(),
                                    " to be a dense tensor, got ", kind);
    }
    TORCH_CHECK_NOT_IMPLEMENTED(false, display_name(op), ": tensors that are not dense are not supported");
}

// Makes nested, sparse and quantized tensors an error that names op and argument, and not a page of the dispatcher's.
static void refuse_tensors_not_dense(torch::Library &library, const char *name)
{
    using c10::DispatchKey;
    for (const DispatchKey key :
         {DispatchKey::NestedTensorCPU, DispatchKey::NestedTensorCUDA, DispatchKey::AutogradNestedTensor,
          DispatchKey::SparseCPU, DispatchKey::SparseCUDA, DispatchKey::SparseCsrCPU, DispatchKey::SparseCsrCUDA,
          DispatchKey::MkldnnCPU, DispatchKey::QuantizedCPU, DispatchKey::QuantizedCUDA})
        library.impl(name, torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<&refuse_not_dense>()));
}

void register_kernels_of_all_ops(torch::Library &library, const char *name)
{
    refuse_tensors_not_dense(library, name);
    register_vmap(library, name);
}

// The library's own description, which `doctor` compares with what the build recorded.
static std::string build_info()
{
#ifdef CUDA_OPS_WITH_CUDA
    return "cuda_ops " + std::string(cuda_ops_version()) + " CUDA " + std::to_string(CUDART_VERSION) +
           " architectures " CUDA_OPS_ARCH_LIST;
#else
    return "cuda_ops " + std::string(cuda_ops_version()) + " CPU";
#endif
}

// The instruction set that the CPU kernels run on. Queried when the library is loaded, so that an unknown name is an
// error at once.
static std::string cpu_isa()
{
    if (cuda_ops_cpu_isa_check() != CUDA_OPS_SUCCESS) {
        std::string names = cuda_ops_cpu_isa_name(CUDA_OPS_CPU_PORTABLE);
        for (int isa = 1; isa <= cuda_ops_cpu_isa_widest(); isa++)
            names += std::string(", ") + cuda_ops_cpu_isa_name(static_cast<cuda_ops_cpu_isa>(isa));
        TORCH_CHECK(false, "CUDA_OPS_CPU_ISA: expected one of ", names, " (what this machine has), got ",
                    std::getenv("CUDA_OPS_CPU_ISA"));
    }
    return cuda_ops_cpu_isa_name(cuda_ops_cpu_isa_current());
}

} // namespace cuda_ops

TORCH_LIBRARY(cuda_ops, library)
{
    library.def("cpu_isa() -> str", []() { return cuda_ops::cpu_isa(); });
    library.def("build_info() -> str", []() { return cuda_ops::build_info(); });
}
