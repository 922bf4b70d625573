"""What GPT-2's models are read from and written to: llm.c's and Hugging Face's weights, texts and token files."""

import json
import struct

import numpy as np
import pytest
import torch
from support.gpt import SMALL, batch, same_models

from cuda_ops._errors import UserError
from cuda_ops.data import Characters, Windows, read_tokens, shakespeare, write_tokens
from cuda_ops.models import GPT, GPTConfig
from cuda_ops.training.gpt.run import load_model

# Files of weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_llmc_round_trip(dtype, tmp_path):
    (model,) = same_models(["fused"], dtype=torch.float32)
    model.save_llmc(tmp_path / "model.bin", dtype)
    content = (tmp_path / "model.bin").read_bytes()
    version = 3 if dtype == torch.float32 else 5
    assert struct.unpack("<8i", content[:32]) == (20240326, version, 12, 31, 2, 2, 16, 128)
    assert len(content) == 1024 + dtype.itemsize * (SMALL.parameter_count + (128 - 31) * 16)
    # The second tensor is wpe, behind wte with its padding; the last one is ln_f's bias.
    kind, size = ("<f4", 4) if dtype == torch.float32 else ("<i2", 2)
    values = torch.from_numpy(np.frombuffer(content[1024:], kind).copy()).view(dtype)
    assert torch.equal(values[31 * 16 : 128 * 16], torch.zeros(97 * 16, dtype=dtype))
    assert torch.equal(values[128 * 16 :][: 12 * 16], model.transformer.wpe.weight.detach().to(dtype).flatten())
    assert torch.equal(values[-16:], model.transformer.ln_f.bias.detach().to(dtype))
    assert size == dtype.itemsize
    loaded = GPT.from_llmc(tmp_path / "model.bin", "native")
    assert loaded.config == SMALL
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(dtype).float()), name


def test_a_model_without_biases_is_written_with_zeros(tmp_path):
    model = GPT("native", GPTConfig(31, 12, 2, 2, 16, bias=False))
    model.save_llmc(tmp_path / "model.bin")
    loaded = GPT.from_llmc(tmp_path / "model.bin", "native")
    inputs, _ = batch()
    assert loaded.config.bias
    assert torch.equal(loaded(inputs), model(inputs))


HEADER = {"magic": 20240326, "version": 3, "length": 12, "vocabulary": 31, "layers": 2, "heads": 2, "features": 16}
HEADER["padded"] = 128
HOSTILE = {
    "another magic": ({"magic": 20240520}, "is no checkpoint of llm.c: it begins with 20240520, expected 20240326"),
    "another version": ({"version": 1}, r"expected version 3 \(float32\) or 5 \(bfloat16\) .*, got 1"),
    "2^32-1 layers": ({"layers": -1}, r"is damaged: expected n_layer to be from 1 to 2\*\*31 - 1, got -1"),
    "2^31-1 layers": ({"layers": 2**31 - 1}, "is damaged or truncated: its header calls for"),
    "negative vocabulary": ({"vocabulary": -31}, "is damaged: expected vocab_size to be"),
    "everything at most": (
        {"length": 2**31 - 1, "vocabulary": 2**31 - 1, "padded": 2**31 - 1, "layers": 2**31 - 1, "heads": 1}
        | {"features": 2**31 - 1},
        "is damaged or truncated: its header calls for",
    ),
    "no features": ({"features": 0}, "is damaged: expected n_embd to be"),
    "heads that do not divide": ({"heads": 3}, "is damaged: expected n_head to divide n_embd, 16, got 3"),
    "less padded than there is": ({"padded": 30}, "is damaged: its vocabulary of 31 is padded to 30"),
    "negative padding": ({"padded": -128}, "is damaged: its vocabulary of 31 is padded to -128"),
    "one token more": ({"padded": 129}, "is damaged or truncated: its header calls for"),
}


@pytest.fixture
def llmc_file(tmp_path):
    path = tmp_path / "model.bin"
    GPT("native", SMALL).save_llmc(path)
    return path


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_checkpoint_of_llmc(case, llmc_file, monkeypatch):
    changes, message = HOSTILE[case]
    content = llmc_file.read_bytes()
    llmc_file.write_bytes(struct.pack("<8i", *(HEADER | changes).values()) + content[32:])
    monkeypatch.setattr(GPT, "__init__", lambda *_: pytest.fail("a model was made of it"))
    with pytest.raises(ValueError, match=message) as caught:
        GPT.from_llmc(llmc_file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [0, 7, 1023, 1024, 5000])
def test_truncated_checkpoint_of_llmc(size, llmc_file):
    llmc_file.write_bytes(llmc_file.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"it has|truncated"):
        GPT.from_llmc(llmc_file)


def test_hugging_face_round_trip():
    (model,) = same_models(["fused"], GPTConfig(31, 12, 2, 2, 128), torch.float32)
    state = model.hugging_face_state_dict()
    assert state["transformer.h.0.attn.c_attn.weight"].shape == (128, 384)
    assert state["transformer.h.0.mlp.c_proj.weight"].shape == (512, 128)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in state.items() if name != "lm_head.weight"}
    masks = {"h.0.attn.bias": torch.ones(1, 1, 12, 12), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    for found in (state, bare, bare | masks):
        loaded = GPT.from_hugging_face(found, "native")
        assert loaded.config == model.config
        for name, tensor in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor), name


def safetensors(tensors, header=None):
    """The content of a safetensors file, written down."""
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8"}
    entries, data = {"__metadata__": {"format": "pt"}}, b""
    for name, tensor in tensors.items():
        content = tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else bytes(4)
        place = [len(data), len(data) + len(content)]
        entries[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        data += content
    header = json.dumps(entries).encode() if header is None else header
    return len(header).to_bytes(8, "little") + header + data


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_of_a_safetensors_file(dtype, tmp_path):
    (model,) = same_models(["fused"], GPTConfig(31, 12, 2, 2, 128), torch.float32)
    state = {name.removeprefix("transformer."): t.to(dtype) for name, t in model.hugging_face_state_dict().items()}
    del state["lm_head.weight"]
    masks = {"h.0.attn.bias": torch.ones(1, 1, 3, 3, dtype=torch.uint8)}
    (tmp_path / "model.safetensors").write_bytes(safetensors({**masks, **state}))
    loaded = load_model(tmp_path / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(dtype).float()), name


HEADERS = {
    "no header": (b"", "its header would be 0 bytes long|no JSON"),
    "2^64-1 bytes of header": (b"\xff" * 8 + b"{}", "its header would be 18446744073709551615 bytes long"),
    "no JSON": (safetensors({}, b"[1, 2]"), "its header is no JSON object"),
    "half of it": (safetensors({}, b'{"a": '), "its header is no JSON object"),
    "nested": (safetensors({}, b"[" * 100_000), "its header is no JSON object"),
    "no entry": (safetensors({}, b'{"a": 3}'), "is damaged: a has no dtype, shape and place"),
    "negative size": (
        safetensors({}, b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}'),
        "is damaged: a has no dtype, shape and place",
    ),
    "2^62 numbers": (
        safetensors({}, b'{"a": {"dtype": "F32", "shape": [4611686018427387904], "data_offsets": [0, 0]}}'),
        r"a of shape \[4611686018427387904\] is not where it should be",
    ),
    "beyond the end": (
        safetensors({}, b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}') + bytes(7),
        r"a of shape \[2\] is not where it should be",
    ),
    "another dtype": (
        safetensors({}, b'{"a": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}') + bytes(8),
        "a has dtype I64, expected one of F32, F16, BF16",
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_hostile_safetensors_file(case, tmp_path):
    content, message = HEADERS[case]
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        load_model(tmp_path / "model.safetensors")
    assert "\n" not in str(caught.value)


def test_state_dicts_that_are_none_of_gpt2s(monkeypatch):
    state = GPT("native", SMALL).hugging_face_state_dict()
    monkeypatch.setattr(GPT, "__init__", lambda *_: pytest.fail("a model was made of it"))
    for message, changed in {
        "transformer.wte.weight is missing": {n: t for n, t in state.items() if "wte" not in n},
        "transformer.h.1.ln_2.bias is missing": {n: t for n, t in state.items() if n != "transformer.h.1.ln_2.bias"},
        "transformer.h.2.ln_1.weight is missing": {**state, "transformer.h.9999.ln_1.weight": torch.zeros(16)},
        r"transformer.surplus is no parameter of GPT-2": {**state, "surplus": torch.zeros(1)},
        r"expected transformer.ln_f.bias of shape \[16\], got \[17\]": {
            **state,
            "transformer.ln_f.bias": torch.zeros(17),
        },
        "expected ln_f.bias to be a Tensor, got int": {**state, "ln_f.bias": 3},
        "lm_head.weight differs from transformer.wte.weight": {**state, "lm_head.weight": torch.zeros(31, 16)},
    }.items():
        with pytest.raises(ValueError, match=message):
            GPT.from_hugging_face(changed, n_head=2)
    with pytest.raises(ValueError, match="expected n_head for 16 features, which no heads of 64 divide"):
        GPT.from_hugging_face(state)


# The data


def test_tiny_shakespeare():
    text = shakespeare()
    assert len(text) == 1_115_394
    characters = Characters.of(text)
    assert len(characters) == 65
    assert characters.decode(characters.encode(text[:300])) == text[:300]


def test_token_file_round_trip(tmp_path):
    write_tokens(tmp_path / "tokens.bin", [5, 0, 50256, 65535])
    content = (tmp_path / "tokens.bin").read_bytes()
    assert struct.unpack("<3i", content[:12]) == (20240520, 1, 4)
    assert len(content) == 1024 + 8
    tokens = read_tokens(tmp_path / "tokens.bin", 2**16)
    assert tokens.tolist() == [5, 0, 50256, 65535]
    with pytest.raises(ValueError, match="write_tokens: expected tokens from 0 to 65535"):
        write_tokens(tmp_path / "tokens.bin", [-1])


TOKEN_FILES = {
    "empty": (b"", "it has 0 bytes, and the header of llm.c's token files alone 1024"),
    "of nanoGPT's": (bytes(2000), "is none of llm.c's: it begins with 0, expected 20240520"),
    "version 7": (struct.pack("<3i", 20240520, 7, 4) + bytes(1012 + 8), r"expected version 1 \(uint16\), got 7"),
    "2^32-1 tokens": (struct.pack("<3i", 20240520, 1, -1) + bytes(1012 + 8), "its header counts -1 tokens"),
    "2^31-1 tokens": (struct.pack("<3i", 20240520, 1, 2**31 - 1) + bytes(1012 + 8), "which take 4294968318 bytes"),
    "no token": (struct.pack("<3i", 20240520, 1, 0) + bytes(1012), "its header counts 0 tokens"),
    "truncated": (struct.pack("<3i", 20240520, 1, 5) + bytes(1012 + 9), "is damaged or truncated"),
    "another vocabulary": (
        struct.pack("<3i", 20240520, 1, 2) + bytes(1012) + struct.pack("<2H", 3, 31),
        "has token 31, and the model knows 31: it is of another vocabulary",
    ),
}


@pytest.mark.parametrize("case", TOKEN_FILES)
def test_hostile_token_file(case, tmp_path):
    content, message = TOKEN_FILES[case]
    (tmp_path / "tokens.bin").write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_tokens(tmp_path / "tokens.bin", 31)
    assert "\n" not in str(caught.value)


def test_windows(device):
    windows = Windows(np.arange(20, dtype="<u2"), 4, device)
    inputs, targets = windows(torch.tensor([0, 15]))
    assert inputs.device.type == targets.device.type == device
    assert inputs.tolist() == [[0, 1, 2, 3], [15, 16, 17, 18]]
    assert targets.tolist() == [[1, 2, 3, 4], [16, 17, 18, 19]]
    assert len(windows) == 16
    in_order = [part[0].tolist() for part in windows.in_order(3)]
    assert in_order == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]], [[12, 13, 14, 15]]]
    assert len(list(windows.in_order(1, most=8))) == 2
