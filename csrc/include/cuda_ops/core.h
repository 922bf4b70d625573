/* What every header of the C API needs: element types, status codes, the version.
 *
 * Conventions that hold for every function of the API:
 *   - outputs come first, then inputs, sizes (int64_t), scalars, dtype, and on CUDA the stream last;
 *   - nothing is allocated, synchronised, printed or kept between calls;
 *   - a size of zero is success and touches no memory;
 *   - pointers are device pointers in *_cuda functions and host pointers in *_cpu functions;
 *   - outputs are written (=), never accumulated (+=), unless the header of the op says so;
 *   - outputs and inputs must not overlap unless the header of the op allows it.
 */
#ifndef CUDA_OPS_CORE_H
#define CUDA_OPS_CORE_H

#include <stdint.h>

/* In front of the small functions of these headers that C, C++ and CUDA kernels share. */
#ifdef __CUDACC__
#define CUDA_OPS_HOST_DEVICE static __host__ __device__ __forceinline__
#else
#define CUDA_OPS_HOST_DEVICE static inline
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define CUDA_OPS_VERSION "0.1.0"

/* Element type of the tensors of a call. The CPU backend takes the first two, the CUDA backend all four. */
typedef enum cuda_ops_dtype {
    CUDA_OPS_FLOAT32 = 0,
    CUDA_OPS_FLOAT64 = 1,
    CUDA_OPS_FLOAT16 = 2,
    CUDA_OPS_BFLOAT16 = 3
} cuda_ops_dtype;

/* Zero is success. Values from CUDA_OPS_CUDA_ERROR on are CUDA_OPS_CUDA_ERROR + cudaError_t. */
typedef int cuda_ops_status;
enum {
    CUDA_OPS_SUCCESS = 0,
    CUDA_OPS_INVALID_ARGUMENT = 1,
    CUDA_OPS_UNSUPPORTED_DTYPE = 2,
    CUDA_OPS_UNKNOWN_PATH = 3, /* of paths.h */
    CUDA_OPS_PATH_CANNOT = 4,
    CUDA_OPS_CUDA_ERROR = 1000
};

/* A cudaStream_t without the CUDA headers, so that plain C can include this file. */
typedef struct CUstream_st *cuda_ops_stream;

/* A sentence for a status below CUDA_OPS_CUDA_ERROR; never NULL. */
const char *cuda_ops_status_string(cuda_ops_status status);

/* CUDA_OPS_VERSION of the library that is linked, as against that of the header. */
const char *cuda_ops_version(void);

#ifdef __cplusplus
}
#endif

#endif
