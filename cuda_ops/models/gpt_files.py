"""Weights of GPT-2 as other programs keep them: llm.c's checkpoint file, Hugging Face's state_dict.

A checkpoint of llm.c: 256 int32, of which the first eight are magic number, version (3: float32, 5: bfloat16),
block_size, vocab_size, n_layer, n_head, n_embd and the vocabulary's padded size, the rest zeros; then 16 tensors, those
of the blocks stacked. All is little-endian. What the header claims is checked against the size of the file before
anything is made of it.
"""

import json
import math
import os
import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .._files import write_file
from .gpt import GPT, GPTConfig

MAGIC, HEADER_INTS = 20240326, 256
VERSIONS = {3: torch.float32, 5: torch.bfloat16}
PADDING = 128
# In the file's order, with the model's name of each; those with {} are of every block.
TENSORS = (
    "transformer.wte.weight",
    "transformer.wpe.weight",
    "transformer.h.{}.ln_1.weight",
    "transformer.h.{}.ln_1.bias",
    "transformer.h.{}.attn.c_attn.weight",
    "transformer.h.{}.attn.c_attn.bias",
    "transformer.h.{}.attn.c_proj.weight",
    "transformer.h.{}.attn.c_proj.bias",
    "transformer.h.{}.ln_2.weight",
    "transformer.h.{}.ln_2.bias",
    "transformer.h.{}.mlp.c_fc.weight",
    "transformer.h.{}.mlp.c_fc.bias",
    "transformer.h.{}.mlp.c_proj.weight",
    "transformer.h.{}.mlp.c_proj.bias",
    "transformer.ln_f.weight",
    "transformer.ln_f.bias",
)
LINEAR = re.compile(r".*\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight")
# Of a safetensors file, those that weights come in.
SAFETENSORS_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MOST_HEADER_BYTES = 1 << 26
# Masks that Hugging Face's modules have had as buffers.
MASK = re.compile(r".*\.attn\.(bias|masked_bias)")


def shape_of(name: str, config: GPTConfig, rows: int) -> tuple[int, ...]:
    """Of the parameter of that name; `rows`: of the token embedding."""
    size = config.n_embd
    ends = {
        "wte.weight": (rows, size),
        "wpe.weight": (config.block_size, size),
        "c_attn.weight": (3 * size, size),
        "c_attn.bias": (3 * size,),
        "attn.c_proj.weight": (size, size),
        "c_fc.weight": (4 * size, size),
        "c_fc.bias": (4 * size,),
        "mlp.c_proj.weight": (size, 4 * size),
    }
    return next((shape for end, shape in ends.items() if name.endswith(end)), (size,))


def load_llmc(path, backend: str) -> GPT:
    """See GPT.from_llmc."""
    path = Path(path)
    config, dtype, rows = read_header(path)
    model = GPT(backend, config)
    parameters = dict(model.named_parameters())
    kind = "<f4" if dtype == torch.float32 else "<i2"
    content = np.memmap(path, dtype=kind, mode="r", offset=4 * HEADER_INTS)
    begin = 0

    def take(shape):
        nonlocal begin
        end = begin + int(np.prod(shape))
        part = torch.from_numpy(np.array(content[begin:end])).view(dtype).view(shape)
        begin = end
        return part

    with torch.no_grad():
        for name in TENSORS:
            for layer in range(config.n_layer) if "{}" in name else [0]:
                target = parameters[name.format(layer)]
                target.copy_(take(shape_of(name, config, rows))[: len(target)])
    return model


def read_header(path: Path) -> tuple[GPTConfig, torch.dtype, int]:
    """(config, dtype, rows of the token embedding) of a checkpoint, checked against the size of the file."""
    with open(path, "rb") as file:
        head = file.read(4 * HEADER_INTS)
        size = os.fstat(file.fileno()).st_size
    if len(head) < 4 * HEADER_INTS:
        raise ValueError(f"{path} is no checkpoint of llm.c: it has {size} bytes, and its header alone has 1024")
    magic, version, block_size, vocab_size, layers, heads, features, rows = np.frombuffer(head, "<i4")[:8].tolist()
    if magic != MAGIC:
        raise ValueError(f"{path} is no checkpoint of llm.c: it begins with {magic}, expected {MAGIC}")
    if version not in VERSIONS:
        raise ValueError(f"{path}: expected version 3 (float32) or 5 (bfloat16) of llm.c's checkpoints, got {version}")
    try:
        config = GPTConfig(vocab_size, block_size, layers, heads, features)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {str(error).removeprefix('GPTConfig: ')}") from error
    if rows < vocab_size:
        raise ValueError(f"{path} is damaged: its vocabulary of {vocab_size} is padded to {rows}")
    # In Python's integers, which do not overflow.
    count = config.parameter_count + (rows - vocab_size) * features
    expected = 4 * HEADER_INTS + count * VERSIONS[version].itemsize
    if size != expected:
        raise ValueError(f"{path} is damaged or truncated: its header calls for {expected} bytes, and it has {size}")
    return config, VERSIONS[version], rows


def save_llmc(model: GPT, path, dtype: torch.dtype):
    """See GPT.save_llmc."""
    versions = {dtype: version for version, dtype in VERSIONS.items()}
    if dtype not in versions:
        raise ValueError(f"save_llmc: expected dtype to be torch.float32 or torch.bfloat16, got {dtype}")
    config = model.config
    rows = -(-config.vocab_size // PADDING) * PADDING
    header = np.zeros(HEADER_INTS, "<i4")
    sizes = config.block_size, config.vocab_size, config.n_layer, config.n_head, config.n_embd
    header[:8] = MAGIC, versions[dtype], *sizes, rows
    parameters = dict(model.named_parameters())
    parts = [header.tobytes()]
    for name in TENSORS:
        shape = shape_of(name, config, rows)
        for layer in range(config.n_layer) if "{}" in name else [0]:
            parameter = parameters.get(name.format(layer))
            tensor = torch.zeros(shape, dtype=dtype)
            if parameter is not None:
                tensor[: len(parameter)] = parameter.detach().to("cpu", dtype)
            parts.append(tensor.view(torch.int16 if dtype == torch.bfloat16 else torch.int32).numpy().tobytes())
    write_file(Path(path), b"".join(parts))


def read_safetensors(path) -> dict[str, Tensor]:
    """The tensors of a file of Hugging Face's: eight bytes with the length of a header, the header in JSON ({name:
    {dtype, shape, data_offsets}}), then the data. A tensor shares the memory of the mapped file: nothing is read yet.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such file, or is damaged: nothing has been allocated for what it claims.
    """
    path = Path(path)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MOST_HEADER_BYTES):
            raise ValueError(f"{path} is no safetensors file, or is damaged: its header would be {length} bytes long")
        try:
            header = json.loads(file.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        except (ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is no safetensors file, or is damaged: its header is no JSON object") from error
    data = np.memmap(path, dtype=np.uint8, mode="c", offset=8 + length) if size > 8 + length else np.zeros(0, np.uint8)
    found = {}
    for name, entry in entries.items():
        try:
            kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        except (KeyError, TypeError, ValueError):
            whole = False
        if not whole:
            raise ValueError(f"{path} is damaged: {name} has no dtype, shape and place")
        if kind not in SAFETENSORS_DTYPES:
            if MASK.fullmatch(name if "." not in name or name.startswith("transformer.") else f"transformer.{name}"):
                continue
            raise ValueError(f"{path}: {name} has dtype {kind}, expected one of {', '.join(SAFETENSORS_DTYPES)}")
        dtype = SAFETENSORS_DTYPES[kind]
        if not begin <= end <= len(data) or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{path} is damaged or truncated: {name} of shape {shape} is not where it should be")
        # (A view needs an address that fits its dtype, which the format does not promise.)
        part = data[begin:end]
        part = part if part.ctypes.data % dtype.itemsize == 0 else part.copy()
        found[name] = torch.from_numpy(part).view(dtype).view(shape)
    return found


def from_hugging_face(state_dict, backend: str, n_head: int | None) -> GPT:
    """See GPT.from_hugging_face."""
    found = {}
    for name, tensor in state_dict.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"from_hugging_face: expected {name} to be a Tensor, got {type(tensor).__name__}")
        name = name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
        if not MASK.fullmatch(name):
            found[name] = tensor
    config = _config_of(found, n_head)
    wte = found["transformer.wte.weight"]
    head = found.pop("lm_head.weight", wte)
    if head is not wte and (head.shape != wte.shape or not torch.equal(head, wte)):
        raise ValueError(
            "from_hugging_face: lm_head.weight differs from transformer.wte.weight, which is its weight here"
        )
    expected = {
        name.format(layer): shape_of(name, config, config.vocab_size)
        for name in TENSORS
        if config.bias or not name.endswith(".bias")
        for layer in (range(config.n_layer) if "{}" in name else [0])
    }
    for name in found:
        if name not in expected:
            raise ValueError(f"from_hugging_face: {name} is no parameter of GPT-2")
    for name, shape in expected.items():
        if name not in found:
            raise ValueError(f"from_hugging_face: {name} is missing")
        if LINEAR.fullmatch(name) and found[name].dim() == 2:
            found[name] = found[name].t()
        if found[name].shape != shape:
            raise ValueError(
                f"from_hugging_face: expected {name} of shape {list(shape)}, got {list(found[name].shape)}"
            )
    model = GPT(backend, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(found[name])
    return model


def _config_of(found: dict[str, Tensor], n_head: int | None) -> GPTConfig:
    """The sizes, of the shapes of what was found."""
    for name in ("transformer.wte.weight", "transformer.wpe.weight"):
        if name not in found:
            raise ValueError(f"from_hugging_face: {name} is missing")
        if found[name].dim() != 2:
            raise ValueError(f"from_hugging_face: expected {name} to have 2 dimensions, got {list(found[name].shape)}")
    vocab_size, features = found["transformer.wte.weight"].shape
    layers = {int(m.group(1)) for name in found if (m := re.match(r"transformer\.h\.(\d{1,4})\.", name))}
    if n_head is None and features % 64:
        raise ValueError(f"from_hugging_face: expected n_head for {features} features, which no heads of 64 divide")
    return GPTConfig(
        vocab_size=vocab_size,
        block_size=len(found["transformer.wpe.weight"]),
        n_layer=max(layers, default=0) + 1,
        n_head=features // 64 if n_head is None else n_head,
        n_embd=features,
        bias="transformer.ln_f.bias" in found,
    )


def to_hugging_face(model: GPT) -> dict[str, Tensor]:
    """See GPT.hugging_face_state_dict."""
    state = {}
    for name, tensor in model.state_dict().items():
        state[name] = tensor.t().contiguous() if LINEAR.fullmatch(name) else tensor
    return state
