// cuda_ops._C: what needs Python's headers, so that the op library links no Python. Ops run without it as well, by way
// of torch.ops, which takes the host longer.
//
// bind(op, otherwise) makes a function that calls a registered op (bind.cpp).
//
// kernels(code, device) lists the kernels in a fat binary as they come out for one GPU. Nobody registers them: the
// driver is handed the bytes that nvcc put into the op library, and is asked what is in there. The driver is opened
// when it is first needed, so that the module loads on machines without one.
#include <pybind11/pybind11.h>

#include "bind.h"
#include "cuda_ops/core.h"

#ifdef CUDA_OPS_WITH_CUDA
#include <cuda.h>
#endif

#if defined(CUDA_OPS_WITH_CUDA) && CUDA_VERSION >= 12040
#include <cxxabi.h>
#include <dlfcn.h>

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

// cuda.h defines some names as other ones with a version at the end; two macros, so that the final name is looked up.
#define NAME_OF(function) #function
#define DRIVER(function) reinterpret_cast<decltype(&function)>(driver_symbol(NAME_OF(function)))

static void *driver_symbol(const char *name)
{
    static void *const driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (driver == nullptr)
        throw std::runtime_error("needs a GPU: there is no NVIDIA driver (libcuda.so.1)");
    void *symbol = dlsym(driver, name);
    if (symbol == nullptr)
        throw std::runtime_error("the NVIDIA driver is older than CUDA 12.4: it has no " + std::string(name));
    return symbol;
}

static void check(CUresult result, const char *what)
{
    if (result == CUDA_SUCCESS)
        return;
    const char *text = nullptr;
    if (DRIVER(cuGetErrorString)(result, &text) != CUDA_SUCCESS || text == nullptr)
        text = "unknown error";
    throw std::runtime_error(std::string(what) + ": " + text);
}

static std::string demangle(const char *name)
{
    int status = 0;
    char *text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
    const std::string result = status == 0 ? text : name;
    std::free(text);
    return result;
}

// The primary context of a device, current for as long as this lives: it is the one that PyTorch uses too.
struct primary_context {
    CUdevice device = 0;

    explicit primary_context(int index)
    {
        check(DRIVER(cuInit)(0), "needs a GPU");
        check(DRIVER(cuDeviceGet)(&device, index), "cuDeviceGet");
        CUcontext context = nullptr;
        check(DRIVER(cuDevicePrimaryCtxRetain)(&context, device), "cuDevicePrimaryCtxRetain");
        const CUresult pushed = DRIVER(cuCtxPushCurrent)(context);
        if (pushed != CUDA_SUCCESS)
            DRIVER(cuDevicePrimaryCtxRelease)(device);
        check(pushed, "cuCtxPushCurrent");
    }
    ~primary_context()
    {
        CUcontext context = nullptr;
        DRIVER(cuCtxPopCurrent)(&context);
        DRIVER(cuDevicePrimaryCtxRelease)(device);
    }
    primary_context(const primary_context &) = delete;
    primary_context &operator=(const primary_context &) = delete;
};

struct loaded_library {
    CUlibrary handle = nullptr; // null where the code has nothing for the device: some files are for sm_90a alone

    explicit loaded_library(const void *code)
    {
        const CUresult result = DRIVER(cuLibraryLoadData)(&handle, code, nullptr, nullptr, 0, nullptr, nullptr, 0);
        if (result == CUDA_ERROR_NO_BINARY_FOR_GPU)
            handle = nullptr;
        else
            check(result, "cuLibraryLoadData");
    }
    ~loaded_library()
    {
        if (handle)
            DRIVER(cuLibraryUnload)(handle);
    }
    loaded_library(const loaded_library &) = delete;
    loaded_library &operator=(const loaded_library &) = delete;
};

static py::dict describe(CUkernel kernel, CUdevice device)
{
    CUfunction function = nullptr;
    check(DRIVER(cuKernelGetFunction)(&function, kernel), "cuKernelGetFunction");
    const auto attribute = [&](CUfunction_attribute which) {
        int value = 0;
        check(DRIVER(cuFuncGetAttribute)(&value, which, function), "cuFuncGetAttribute");
        return value;
    };
    const char *name = nullptr;
    check(DRIVER(cuFuncGetName)(&name, function), "cuFuncGetName");
    int threads_per_sm = 0, blocks = 0;
    check(DRIVER(cuDeviceGetAttribute)(&threads_per_sm, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, device),
          "cuDeviceGetAttribute");
    const int max_threads = attribute(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
    // What block size and how much dynamic shared memory a launcher uses is not written in the binary.
    const int block = max_threads < 256 ? max_threads : 256;
    check(DRIVER(cuOccupancyMaxActiveBlocksPerMultiprocessor)(&blocks, function, block, 0),
          "cuOccupancyMaxActiveBlocksPerMultiprocessor");
    py::dict row;
    row["name"] = demangle(name);
    row["registers"] = attribute(CU_FUNC_ATTRIBUTE_NUM_REGS);
    row["static_shared_bytes"] = attribute(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
    row["local_bytes"] = attribute(CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES);
    row["max_threads"] = max_threads;
    row["binary_version"] = attribute(CU_FUNC_ATTRIBUTE_BINARY_VERSION);
    row["occupancy_threads"] = block;
    row["occupancy"] = static_cast<double>(blocks) * block / threads_per_sm;
    return row;
}

static py::list kernels(const std::string &code, int device)
{
    const primary_context context(device);
    // The driver wants its data aligned, which the bytes of a string need not be.
    std::vector<uint64_t> aligned(code.size() / sizeof(uint64_t) + 1);
    code.copy(reinterpret_cast<char *>(aligned.data()), code.size());
    const loaded_library library(aligned.data());
    unsigned int count = 0;
    if (library.handle == nullptr)
        return py::list();
    check(DRIVER(cuLibraryGetKernelCount)(&count, library.handle), "cuLibraryGetKernelCount");
    std::vector<CUkernel> handles(count);
    if (count > 0)
        check(DRIVER(cuLibraryEnumerateKernels)(handles.data(), count, library.handle), "cuLibraryEnumerateKernels");
    py::list rows;
    for (const CUkernel handle : handles)
        rows.append(describe(handle, context.device));
    return rows;
}
#elif defined(CUDA_OPS_WITH_CUDA)
static py::list kernels(const std::string &, int)
{
    throw std::runtime_error("cuda_ops was built with a CUDA older than 12.4, which cannot list kernels");
}
#else
static py::list kernels(const std::string &, int)
{
    throw std::runtime_error("this build of cuda_ops has no CUDA kernels");
}
#endif

PYBIND11_MODULE(_C, module)
{
    module.doc() = "What the build of cuda_ops holds.";
    module.attr("version") = CUDA_OPS_VERSION;
    module.def("bind", bind, py::arg("op"), py::arg("otherwise"),
               "A function that calls the registered op (\"namespace::name\") with positional arguments that have just "
               "the types of its schema, and `otherwise` with all others.");
    module.def(
        "kernels", [](const py::bytes &code, int device) { return kernels(code, device); }, py::arg("code"),
        py::arg("device"),
        "The kernels in a fat binary (bytes) as loaded on a device, one dict each: name, registers, "
        "static_shared_bytes, local_bytes (spills and arrays), max_threads, binary_version, and occupancy (0 to 1) "
        "with blocks of occupancy_threads and no dynamic shared memory.");
}
