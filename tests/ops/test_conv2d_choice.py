"""Which path conv2d takes at sizes that it was not tuned for, where `bench regret` found another one much faster on an
H200. No GPU is needed."""

import pytest
import torch

import cuda_ops
from cuda_ops import _explain, _library

pytestmark = pytest.mark.skipif(not _library.has_cuda(), reason="a build without CUDA has no tables of paths")


def chosen(image, weight, dtype=torch.bfloat16, tf32=False, channels_last=True, capability="9.0", **kwargs):
    """{pass: path} on an H200, or a device of another capability."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    tensors = [torch.empty(*of, dtype=dtype, device="meta").to(memory_format=layout) for of in (image, weight)]
    with _explain.tf32(tf32):
        explanation = cuda_ops.explain(
            cuda_ops.functional.conv2d, *tensors, capability=capability, show=False, **kwargs
        )
    return {product.name: product.chosen.name for product in explanation.products}


def test_a_gradient_of_weight_with_a_1x1_kernel_is_the_gemms():
    """Also in TF32, where the sm90 path copies grad_output K-major, and the GEMM only if that pays. With a stride the
    sm90 path copies less, unless there are more output channels."""
    tf32 = {"dtype": torch.float32, "tf32": True}
    for image, out in (((25, 16, 1, 1), 8), ((25, 16, 56, 56), 8), ((64, 224, 39, 39), 128), ((8, 320, 7, 7), 1280)):
        assert chosen(image, (out, image[1], 1, 1), **tf32)["gradient of weight"] == "gemm_1x1"
    assert chosen((25, 16, 1, 1), (8, 16, 1, 1), channels_last=False, **tf32)["gradient of weight"] == "gemm_1x1"
    assert chosen((64, 256, 56, 56), (64, 256, 1, 1), stride=2, **tf32)["gradient of weight"] == "sm90"
    assert chosen((25, 16, 56, 56), (64, 16, 1, 1), stride=2, **tf32)["gradient of weight"] == "gemm_1x1"


def test_few_channels_to_sum_over_go_to_the_halo():
    """sm90 would multiply a slice of 64 channels for each tap, of which 16 are there."""
    assert chosen((32, 568, 44, 44), (16, 568, 5, 5))["gradient of input"] == "sm90_halo"
    assert chosen((32, 16, 44, 44), (568, 16, 5, 5))["forward"] == "sm90_halo"
    # Twice as many are half of a slice's products.
    assert chosen((32, 568, 44, 44), (64, 568, 5, 5))["gradient of input"] == "sm90"
    assert chosen((32, 64, 44, 44), (568, 64, 5, 5))["forward"] == "sm90"


def test_eight_channels_do_not_go_to_sm90_where_the_halo_does_not_fit():
    """It leaves gaps between taps."""
    assert chosen((8, 8, 30, 30), (16, 8, 7, 7))["forward"] == "patches"
    assert chosen((8, 32, 30, 30), (16, 32, 7, 7))["forward"] != "mma"


def test_groups_with_enough_channels_go_to_wgmma():
    assert set(chosen((64, 896, 20, 20), (896, 128, 3, 3), groups=7, padding=1, stride=2).values()) == {"sm90"}
    # The gradient of weight too, since a sum of one split is written three times as fast.
    assert set(chosen((4, 1056, 28, 28), (1056, 264, 3, 3), groups=4, padding=1).values()) == {"sm90"}


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "tf32", "float32"])
def test_groups_of_few_channels_share_tiles(kind):
    """Slices and tiles of a group alone would be mostly empty."""
    how = {"dtype": torch.float32, "tf32": True} if kind == "tf32" else {"dtype": getattr(torch, kind)}
    assert set(chosen((64, 256, 28, 28), (256, 8, 3, 3), groups=32, padding=1, **how).values()) == {"grouped"}
    strided = chosen((128, 256, 56, 56), (256, 8, 3, 3), groups=32, padding=1, stride=2, **how)
    assert strided["forward"] == strided["gradient of input"] == "grouped"
    assert chosen((16, 168, 40, 40), (168, 24, 3, 3), groups=7, padding=1, stride=2, **how)["forward"] == "grouped"


@pytest.mark.parametrize("size, stride", [((64, 1024, 14, 14), 2), ((8, 1024, 9, 9), 1), ((64, 1024, 7, 7), 1)])
def test_groups_of_32_channels_share_tiles_by_wgmma(size, stride):
    """But for the gradient of the weight, and before Hopper."""
    case = {"groups": 32, "padding": 1, "stride": stride, "dtype": torch.float16}
    paths = chosen(size, (1024, 32, 3, 3), **case)
    assert paths["forward"] == paths["gradient of input"] == "grouped"
    assert paths["gradient of weight"] != "grouped"


def test_groups_of_64_channels_fill_the_slices_of_wgmma():
    paths = chosen((32, 2048, 7, 7), (2048, 64, 3, 3), groups=32, padding=1)
    assert paths["forward"] == paths["gradient of input"] == "sm90"


def test_winograd_takes_no_groups_where_it_is_not_fast():
    """Its transforms are of memory that is slow here. What grouped left to it would be simt's."""
    paths = chosen((32, 80, 28, 28), (80, 40, 3, 3), torch.float32, capability="8.6", groups=2, padding=1)
    assert set(paths.values()) == {"grouped"}


def test_groups_whose_halos_are_beyond_offsets_of_32_bits():
    """A halo begins two rows above an image of one row of 1 GB, which is 2 GB from there."""
    size = (1, 64, 1, 1 << 23)
    assert "grouped" not in chosen(size, (64, 8, 5, 5), torch.float16, groups=8, padding=2).values()
    assert "grouped" in chosen((1, 64, 1, 1 << 21), (64, 8, 5, 5), torch.float16, groups=8, padding=2).values()


def test_groups_of_many_channels_go_to_winograd_in_float32():
    assert set(chosen((96, 1232, 18, 18), (1232, 112, 3, 3), torch.float32, groups=11, padding=1).values()) == {
        "winograd"
    }


@pytest.mark.parametrize("channels_last", [True, False])
def test_odd_channels_are_padded_for_tensor_cores(channels_last):
    half = {"dtype": torch.float16, "channels_last": channels_last, "padding": 1}
    assert chosen((32, 516, 10, 10), (468, 516, 3, 3), **half)["gradient of input"] == "padded"
    assert set(chosen((128, 78, 28, 28), (130, 6, 3, 3), groups=13, **half).values()) == {"padded"}
    assert set(chosen((16, 252, 20, 20), (252, 18, 3, 3), groups=14, stride=2, **half).values()) == {"padded"}
    # What the copies take, CUDA cores have done the sums in.
    assert "padded" not in chosen((1, 5, 5, 5), (7, 5, 3, 3), **half).values()


def test_few_channels_share_no_pixels_with_one_tap():
    tf32 = {"dtype": torch.float32, "tf32": True, "channels_last": False, "stride": 2}
    assert chosen((128, 3, 9, 9), (898, 3, 1, 1), **tf32)["forward"] == "simt"
    # So few pixels to so many channels, with nine taps either: 69 and 11 µs on an H100.
    assert chosen((128, 3, 9, 9), (898, 3, 3, 3), **tf32)["forward"] == "simt"
    assert chosen((128, 3, 64, 64), (32, 3, 3, 3), **tf32)["forward"] == "few_channels"


def test_float32_stems_with_a_stride_go_to_few_channels_where_they_fill_the_gpu():
    float32 = {"dtype": torch.float32, "stride": 2}
    for image, weight, padding in (
        ((64, 3, 224, 224), (96, 3, 7, 7), 0),
        ((32, 3, 224, 224), (32, 3, 3, 3), 1),
        ((16, 3, 192, 192), (24, 3, 3, 3), 1),
    ):
        paths = chosen(image, weight, padding=padding, **float32)
        assert paths["forward"] == paths["gradient of weight"] == "few_channels"
    assert chosen((64, 3, 224, 224), (96, 3, 7, 7), **float32)["gradient of input"] == "few_channels"
    assert chosen((32, 3, 224, 224), (32, 3, 3, 3), padding=1, **float32)["gradient of input"] == "im2col"
    for image, weight, forward, backward in (
        ((2, 3, 224, 224), (64, 3, 7, 7), "simt", "im2col"),  # of images that are copied
        ((1, 3, 128, 128), (24, 3, 3, 3), "simt", "patches"),
    ):
        of = chosen(image, weight, padding=weight[2] // 2, channels_last=False, **float32)
        assert (of["forward"], of["gradient of input"]) == (forward, backward)
        assert of["gradient of weight"] in ("few_channels", "simt")  # of which an H100 took as long, within a fifth


def test_the_halo_where_it_is_expected_to_be_faster():
    """DenseNet's layers: sm90 loads every tap's pixels for a tile of 32 columns, or slices of 64 channels of which half
    are there."""
    for tf32 in (False, True):
        dtype = torch.float32 if tf32 else torch.bfloat16
        layer = chosen((128, 128, 56, 56), (32, 128, 3, 3), dtype, tf32, padding=1)
        assert layer["forward"] == layer["gradient of input"] == "sm90_halo"
    # Two thirds of its products would be of the halo.
    assert chosen((64, 64, 7, 7), (512, 64, 7, 7), padding=3)["forward"] == "sm90"


def test_float32_by_columns_in_memory():
    """Where Winograd's algorithm does not go, but not where there is less to multiply than to copy."""
    half = {"dtype": torch.float32}
    strided = chosen((8, 872, 28, 28), (1510, 872, 1, 1), stride=2, **half)
    assert strided["forward"] == strided["gradient of input"] == "im2col"
    assert set(chosen((32, 160, 12, 12), (192, 160, 7, 1), padding=(3, 0), **half).values()) == {"im2col"}
    assert chosen((64, 142, 28, 28), (58, 142, 3, 3), padding=1, **half)["forward"] == "winograd"
    assert "im2col" not in chosen((64, 3, 224, 224), (8, 3, 5, 5), padding=2, **half).values()  # beyond its memory


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "tf32", "float32"])
def test_stems_by_rectangles(kind, channels_last):
    """The gradient of the few channels under a large stride, where patches share pixels."""
    how = {"dtype": torch.float32, "tf32": True} if kind == "tf32" else {"dtype": getattr(torch, kind)}
    stem = chosen((2, 3, 224, 224), (64, 3, 11, 11), stride=4, padding=2, channels_last=channels_last, **how)
    assert stem["gradient of input"] == "patches"


def test_what_the_table_has_first_is_not_taken_where_it_is_expected_to_take_longer():
    """Each was measured at 1.2 to 7.4 times the time of the one that is taken now (seeds 12, 13 and 307 of `bench
    regret`, to which nothing was fitted)."""
    tf32 = {"dtype": torch.float32, "tf32": True}
    of_904 = chosen((1, 4, 52, 52), (904, 4, 3, 3), torch.float16, channels_last=False)
    assert of_904["gradient of input"] != "few_channels"
    assert chosen((16, 4, 37, 37), (392, 4, 3, 3), stride=2)["gradient of weight"] == "patches"
    assert chosen((4, 4, 4, 4), (152, 4, 3, 3), stride=2, padding=1, **tf32)["gradient of weight"] == "im2col"
    assert chosen((16, 8, 86, 86), (4, 8, 3, 3), stride=2, padding=1, **tf32)["forward"] == "mma"
    assert chosen((16, 8, 76, 76), (608, 8, 3, 3), **tf32)["gradient of weight"] == "mma"
    assert chosen((32, 24, 27, 27), (8, 24, 7, 7))["forward"] == "mma"
    assert chosen((32, 8, 30, 30), (817, 8, 1, 1), stride=2, **tf32)["forward"] == "simt"
    assert chosen((64, 139, 18, 18), (24, 139, 7, 7), stride=2, padding=3)["gradient of input"] == "patches"
    assert chosen((16, 17, 20, 20), (3, 17, 3, 3), torch.float32)["forward"] == "winograd"


def test_gradients_of_overlapping_patches():
    """Apart they are copied; of many channels the stride phases fill sm90's tiles."""
    assert chosen((2, 3, 224, 224), (96, 3, 4, 4), stride=4)["gradient of input"] == "patches"
    assert chosen((8, 64, 56, 56), (64, 64, 5, 5), stride=3, padding=2)["gradient of input"] == "sm90"


@pytest.mark.parametrize("channels_last", [True, False])
def test_patch_embeddings_and_stems_by_patches(channels_last):
    """Few channels in 16 bits: patches that share no pixels, or few; the gradient of input in rectangles."""
    half = {"dtype": torch.float16, "channels_last": channels_last}
    for kernel in (4, 14, 16, 32):
        embedding = chosen((8, 3, 224, 224), (96, 3, kernel, kernel), stride=kernel, **half)
        assert set(embedding.values()) == {"patches"}
    paths = chosen((32, 3, 224, 224), (64, 3, 7, 7), stride=4, padding=3, **half)
    assert set(paths.values()) == {"patches"}
    mobilenet = chosen((8, 3, 224, 224), (32, 3, 3, 3), stride=2, padding=1, **half)
    assert mobilenet == {"forward": "patches", "gradient of input": "patches", "gradient of weight": "few_channels"}
    # 7x7 with a stride of 2 reads a pixel twelve times, and a stride of 1 every one nine times.
    resnet = chosen((8, 3, 224, 224), (64, 3, 7, 7), stride=2, padding=3, **half)
    assert resnet == {"forward": "few_channels", "gradient of input": "patches", "gradient of weight": "few_channels"}
    assert set(chosen((8, 3, 224, 224), (64, 3, 3, 3), padding=1, **half).values()) == {"few_channels"}
    # Lines of 149 pixels are no whole vectors.
    inception = chosen((32, 3, 299, 299), (32, 3, 3, 3), stride=2, **half)
    assert inception["forward"] == inception["gradient of weight"] == "patches"
    # 72 µs and patches' 86, 134 and 122.
    assert inception["gradient of input"] == ("few_channels" if channels_last else "patches")


def test_patches_are_of_halves_with_few_channels():
    assert "patches" not in chosen((8, 96, 56, 56), (192, 96, 2, 2), stride=2).values()
    for tf32 in (False, True):
        paths = chosen((8, 3, 224, 224), (96, 3, 4, 4), torch.float32, tf32, stride=4)
        assert "patches" not in paths.values()


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("kind", ["bfloat16", "tf32", "float32"])
def test_1x1_kernels_of_few_channels_are_the_gemms(kind, channels_last):
    """There are no taps whose pixels few_channels could share: 5.0 us where the GEMM takes 1.6."""
    how = {"dtype": torch.float32, "tf32": kind == "tf32"} if kind != "bfloat16" else {}
    for image, out in (((8, 4, 1, 1), 164), ((4, 4, 1, 1), 96), ((16, 3, 14, 14), 64)):
        paths = chosen(image, (out, image[1], 1, 1), channels_last=channels_last, **how)
        assert paths["gradient of weight"] == paths["gradient of input"] == "gemm_1x1"


def test_the_path_that_is_expected_to_take_least():
    """Where simt and padded were chosen by their place in the table, and others were 1.4 to 2.6 times as fast."""
    half, contiguous = {"dtype": torch.float16}, {"channels_last": False}
    assert chosen((16, 24, 134, 134), (24, 24, 1, 1), **contiguous)["forward"] == "gemm_1x1"
    float32 = chosen((2, 344, 76, 76), (8, 344, 3, 3), torch.float32, **contiguous)
    assert float32["gradient of weight"] == "winograd"
    assert chosen((8, 64, 10, 10), (8, 64, 5, 5), stride=2, **contiguous)["gradient of weight"] == "patches"
    tf32 = chosen((64, 61, 21, 21), (4, 61, 5, 5), torch.float32, tf32=True, padding=2)
    assert tf32["gradient of weight"] == "padded"
    assert chosen((32, 502, 55, 55), (21, 502, 1, 1), stride=2, **half)["gradient of weight"] == "patches"
    assert chosen((1, 156, 7, 7), (96, 156, 3, 3), padding=1, **half)["forward"] == "patches"
