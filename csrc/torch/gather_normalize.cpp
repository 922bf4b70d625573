// gather_normalize for PyTorch: checks, allocation and the choice of backend.
#include "cuda_ops/gather_normalize.h"

#include <ATen/DeviceGuard.h>

#include <cmath>

#include "empty.h"
#include "halves.h"
#include "loss.h"

namespace cuda_ops
{

static IndexErrors gather_normalize_index_errors("gather_normalize", "indices");

static void check(const char *op, const Tensor &images, const Tensor &indices, double mean, double std,
                  const std::optional<Tensor> &labels)
{
    const auto dtype = [](const Tensor &tensor) { return c10::getDtypeNames(tensor.scalar_type()).first; };
    TORCH_CHECK(images.scalar_type() == at::kByte, op, ": expected images to be uint8, got ", dtype(images));
    TORCH_CHECK(images.dim() >= 1, op, ": expected images to have at least one dimension, got shape ", images.sizes());
    check_same_device(op, "indices", indices, "images", images);
    TORCH_CHECK(indices.scalar_type() == at::kLong || indices.scalar_type() == at::kInt, op,
                ": expected indices to be int64 or int32, got ", dtype(indices));
    TORCH_CHECK(indices.dim() == 1, op, ": expected indices to have 1 dimension, got shape ", indices.sizes());
    TORCH_CHECK_VALUE(std::isfinite(mean), op, ": expected mean to be finite, got ", mean);
    TORCH_CHECK_VALUE(std::isfinite(std) && std > 0, op, ": expected std to be above 0 and finite, got ", std);
    if (!labels)
        return;
    check_same_device(op, "labels", *labels, "images", images);
    TORCH_CHECK(labels->scalar_type() == at::kLong || labels->scalar_type() == at::kByte, op,
                ": expected labels to be int64 or uint8, got ", dtype(*labels));
    TORCH_CHECK(labels->dim() == 1 && labels->size(0) == images.size(0), op, ": expected labels to have shape [",
                images.size(0), "], one for each image, got ", labels->sizes());
}

// Before anything is allocated: an op's call may pass any number as a dtype.
static cuda_ops_dtype check_output_dtype(const char *op, at::ScalarType dtype)
{
    switch (dtype) {
    case at::kFloat:
        return CUDA_OPS_FLOAT32;
    case at::kDouble:
        return CUDA_OPS_FLOAT64;
    case at::kHalf:
        return CUDA_OPS_FLOAT16;
    case at::kBFloat16:
        return CUDA_OPS_BFLOAT16;
    default: {
        const int number = static_cast<int>(dtype);
        const bool is_known = 0 <= number && number < static_cast<int>(at::ScalarType::Undefined);
        TORCH_CHECK(false, op, ": expected dtype to be floating point, got ",
                    is_known ? c10::getDtypeNames(dtype).first : "the number " + std::to_string(number));
    }
    }
}

static bool is_dense_channels_last(const Tensor &images)
{
    return images.dim() == 4 && !images.is_contiguous() && images.is_contiguous(at::MemoryFormat::ChannelsLast);
}

// `images` with each image dense, one after another: contiguous or channels_last.
static Tensor dense_images(const Tensor &images)
{
    return is_dense_channels_last(images) ? images : images.contiguous();
}

// The batch, in the memory format of images, and its labels (no elements without labels).
static std::tuple<Tensor, Tensor> gather_normalize_forward(const Tensor &images, const Tensor &indices, double mean,
                                                           double std, const std::optional<Tensor> &labels,
                                                           at::ScalarType dtype)
{
    const char *op = "gather_normalize";
    const c10::OptionalDeviceGuard guard(at::device_of(images));
    check(op, images, indices, mean, std, labels);
    const cuda_ops_dtype kernel_dtype = check_output_dtype(op, dtype);
    const Tensor source = dense_images(images), i = indices.contiguous();
    const Tensor l = labels ? labels->contiguous() : Tensor();
    const int64_t rows = indices.size(0), count = images.size(0);
    std::vector<int64_t> sizes = source.sizes().vec();
    sizes[0] = rows;
    // Not by source.strides(): a single image's stride along the batch may be anything.
    const at::MemoryFormat format =
        is_dense_channels_last(source) ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
    Tensor output = empty(sizes, source.options().dtype(dtype).memory_format(format));
    Tensor output_labels = empty({labels ? rows : 0}, source.options().dtype(at::kLong));
    const int64_t row_size = c10::multiply_integers(sizes.begin() + 1, sizes.end());
    if (rows == 0)
        return {output, output_labels};
    [[maybe_unused]] int64_t *to_labels = labels ? output_labels.data_ptr<int64_t>() : nullptr;
    const int index_bytes = static_cast<int>(i.element_size());
    const int label_bytes = labels ? static_cast<int>(l.element_size()) : 0;
    if (source.is_cuda()) {
        cuda_ops_index_error *error = gather_normalize_index_errors.record();
        CUDA_OPS_LAUNCH(op, cuda_ops_gather_normalize_cuda(output.data_ptr(), to_labels, error,
                                                           source.const_data_ptr<uint8_t>(), i.const_data_ptr(),
                                                           index_bytes, pointer_or_null(l), label_bytes, count, rows,
                                                           row_size, mean, std, kernel_dtype, current_stream(op)));
        gather_normalize_index_errors.check_now(error);
        return {output, output_labels};
    }
    const int64_t bad = cuda_ops_gather_normalize_find_bad_index_cpu(i.const_data_ptr(), index_bytes, rows, count);
    if (bad >= 0)
        gather_normalize_index_errors.raise(count, i[bad].item<int64_t>(), bad);
    parallel_rows(
        op, rows, 1, std::max<int64_t>(1, ELEMENTWISE_GRAIN / std::max<int64_t>(row_size, 1)), kernel_dtype,
        [&](void *to, void *its_labels, const void *its_indices, int64_t begin, int64_t end, cuda_ops_dtype type) {
            return cuda_ops_gather_normalize_cpu(
                to, static_cast<int64_t *>(its_labels), source.const_data_ptr<uint8_t>(), its_indices, index_bytes,
                pointer_or_null(l), label_bytes, count, row_size, begin, end, mean, std, type);
        },
        writes(output, row_size), writes(labels ? output_labels : Tensor()), reads(i));
    return {output, output_labels};
}

} // namespace cuda_ops

TORCH_LIBRARY_FRAGMENT(cuda_ops, library)
{
    library.def("gather_normalize_forward(Tensor images, Tensor indices, float mean, float std, Tensor? labels, "
                "ScalarType dtype) -> (Tensor output, Tensor output_labels)");
    CUDA_OPS_IMPLEMENT(library, "gather_normalize_forward", cuda_ops::gather_normalize_forward);
}
