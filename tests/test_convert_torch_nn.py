"""cuda_ops.convert and models of torch.nn's larger layers: transformers, and convolutions of other kinds."""

import copy

import pytest
import torch
from support.conversion import assert_converts, images

import cuda_ops

nn = torch.nn
F = torch.nn.functional


def test_a_layer_with_submodules_is_a_layer():
    layers = cuda_ops.convert(nn.Sequential(nn.MultiheadAttention(4, 2), nn.Sequential(), nn.ModuleList())).layers
    assert [(layer.name, layer.reason) for layer in layers] == [("0", None)]  # out_proj is read by the attention itself


def transformers():
    small = {"dim_feedforward": 24, "dropout": 0.0, "dtype": torch.float64}
    encoder, decoder = nn.TransformerEncoderLayer, nn.TransformerDecoderLayer
    return {
        "encoder layer": encoder(8, 2, **small, batch_first=True),
        "encoder layer, norm first, gelu": encoder(8, 2, **small, activation="gelu", norm_first=True),
        "encoder": nn.TransformerEncoder(encoder(8, 2, **small, batch_first=True), 2),
        "decoder layer": decoder(8, 2, **small),
        "decoder": nn.TransformerDecoder(decoder(8, 2, **small, batch_first=True), 2, nn.LayerNorm(8).double()),
        "transformer": nn.Transformer(8, 2, 2, 2, **small, batch_first=True),
    }


def transformer_inputs(name):
    """Sequences of 5, of which some are shorter, and of 4 that are decoded; PyTorch's encoder makes nested tensors of
    the former in evaluation."""
    generator = torch.Generator().manual_seed(0)
    batch_first = "norm first" not in name and name != "decoder layer"
    rows = lambda length: torch.randn(3, length, 8, generator=generator, dtype=torch.float64)  # noqa: E731
    source, target = (x if batch_first else x.transpose(0, 1) for x in (rows(5), rows(4)))
    padding, causal = (
        torch.arange(5) >= torch.tensor([5, 3, 4])[:, None],
        nn.Transformer.generate_square_subsequent_mask,
    )
    if name.startswith("encoder"):
        return {"src": source, "src_key_padding_mask": padding}
    masks = {"tgt_mask": causal(4, dtype=torch.float64), "tgt_is_causal": True}
    if name.startswith("decoder"):
        return {"tgt": target, "memory": source, "memory_key_padding_mask": padding.double() * -3.0, **masks}
    return {"src": source, "tgt": target, "src_key_padding_mask": padding, **masks}


@pytest.mark.filterwarnings("ignore:.*(nested|src_key_padding|mismatched).*:UserWarning")
@pytest.mark.parametrize("name", list(transformers()))
def test_transformers_of_torch_nn(name):
    """Trained, and in evaluation, where PyTorch's fast path of an encoder takes nested tensors by its layers."""
    torch.manual_seed(0)
    report = assert_converts(transformers()[name], transformer_inputs(name))
    assert "MultiheadAttention" in {layer.kind for layer in report.swapped}
    assert not any("out_proj" in layer.name for layer in report.layers)


@pytest.mark.filterwarnings("ignore:.*nested.*:UserWarning")
def test_attention_takes_nested_tensors_and_halves_as_pytorch_does():
    """After convert what ours refuses is PyTorch's."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.nested.nested_tensor([torch.rand(3, 8), torch.rand(2, 8)])
    half = torch.rand(2, 3, 8, dtype=torch.bfloat16)
    with torch.no_grad():
        before = attention(x, x, x, need_weights=False)[0].unbind()
        halves = copy.deepcopy(attention).bfloat16()(half, half, half)[0]
        cuda_ops.convert(attention)
        after = attention(x, x, x, need_weights=False)[0].unbind()
        assert torch.equal(copy.deepcopy(attention).bfloat16()(half, half, half)[0], halves)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def dcgan():
    layers = []
    for inputs, outputs, stride, padding in ((12, 16, 1, 0), (16, 8, 2, 1), (8, 6, 2, 1)):
        convolution = nn.ConvTranspose2d(inputs, outputs, 4, stride, padding, bias=False)
        layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.ConvTranspose2d(6, 3, 4, 2, 1), nn.Tanh())


class UNet(nn.Module):
    """One level, whose plane of even sizes comes back by output_size."""

    def __init__(self):
        super().__init__()
        self.down, self.drop = nn.Conv2d(3, 8, 3, 2, 1), nn.Dropout2d(0.0)
        self.up, self.head = nn.ConvTranspose2d(8, 5, 3, 2, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        y = self.up(self.drop(F.relu(self.down(x))), output_size=x.shape[2:])
        return self.head(torch.cat([x, y], 1))


def wav2vec():
    """Features of a signal, and a convolution of their positions."""
    features = []
    for inputs, kernel, stride in ((1, 10, 5), (16, 3, 2), (16, 2, 2)):
        features += [nn.Conv1d(inputs, 16, kernel, stride, bias=False), nn.GroupNorm(4, 16), nn.GELU()]
    positions = nn.Conv1d(16, 16, 8, padding=4, groups=4)
    around = nn.Conv1d(16, 8, 3, padding="same", padding_mode="circular")
    return nn.Sequential(*features, positions, nn.GELU(), around, nn.ConvTranspose1d(8, 4, 16, 8, 4), nn.Dropout1d(0.0))


def signals():
    return torch.rand(3, 1, 403, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


CONVOLUTIONS = {
    "dcgan": (dcgan, lambda: torch.rand(4, 12, 1, 1, generator=torch.Generator().manual_seed(0)).double()),
    "unet": (UNet, lambda: images(2, 16)),
    "wav2vec": (wav2vec, signals),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_of_other_kinds(name):
    make, inputs = CONVOLUTIONS[name]
    torch.manual_seed(0)
    report = assert_converts(make().double(), (inputs(),))
    assert not report.left
