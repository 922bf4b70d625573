// cub::DeviceHistogram::HistogramEven for ctypes: 256 bins of 0 ... 255. With a workspace of NULL it says how many bytes it
// wants.
#include <cub/device/device_histogram.cuh>

#include <stdint.h>

extern "C" int cub_histogram_u8(void *workspace, size_t *bytes, const uint8_t *input, int *output, int64_t count,
                                cudaStream_t stream)
{
    return cub::DeviceHistogram::HistogramEven(workspace, *bytes, input, output, 257, 0, 256, (int)count, stream);
}

extern "C" int cub_histogram_i32(void *workspace, size_t *bytes, const int32_t *input, int *output, int64_t count,
                                 cudaStream_t stream)
{
    return cub::DeviceHistogram::HistogramEven(workspace, *bytes, input, output, 257, 0, 256, (int)count, stream);
}
