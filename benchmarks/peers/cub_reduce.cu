// cub::DeviceReduce::Sum for ctypes. With a workspace of NULL it says how many bytes it wants.
#include <cub/device/device_reduce.cuh>

#include <stdint.h>

extern "C" int cub_reduce_f32(void *workspace, size_t *bytes, const float *input, float *output, int64_t count,
                              cudaStream_t stream)
{
    return cub::DeviceReduce::Sum(workspace, *bytes, input, output, count, stream);
}

extern "C" int cub_reduce_f64(void *workspace, size_t *bytes, const double *input, double *output, int64_t count,
                              cudaStream_t stream)
{
    return cub::DeviceReduce::Sum(workspace, *bytes, input, output, count, stream);
}
