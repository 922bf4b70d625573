"""csrc/apps/gpt2, GPT-2 in plain C: the same losses as Python's from the same checkpoint and batches, files of llm.c's
both ways, and one clear line for each file or option that is wrong. Everything runs under the address and the
undefined-behaviour sanitizers."""

import dataclasses
import json
import math
import os
import re
import struct

import numpy as np
import pytest
import torch
from support.c_programs import build_cuda_program, build_program, refused, run_program

from cuda_ops import nn_utils, optim
from cuda_ops.data.text import Characters, Windows, read_text, read_tokens, write_tokens
from cuda_ops.models import GPT, GPTConfig
from cuda_ops.training.gpt.learner import learning_rate, parameter_groups
from cuda_ops.training.gpt.settings import Recipe

TOKENS, BATCH, STEPS = 1500, 4, 5
# Sizes that fill vectors, and some that do not.
CONFIGS = {"even": GPTConfig(65, 32, 2, 4, 32), "odd": GPTConfig(37, 11, 3, 3, 15)}


@pytest.fixture(scope="module")
def program(tmp_path_factory, c_kernels):
    return build_program("gpt2", tmp_path_factory.mktemp("gpt2_c"), c_kernels)


@pytest.fixture(scope="module")
def cuda_program(tmp_path_factory):
    found = build_cuda_program("gpt2", tmp_path_factory.mktemp("gpt2_cuda"))
    return found or pytest.skip("the CUDA kernels were not built in this folder, or there is no toolkit")


def model_of(config, backend="fused", seed=0):
    """A model none of whose parameters are zeros or ones."""
    torch.manual_seed(seed)
    model = GPT(backend, config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tokens_of(config):
    """Tokens of which each tells something of the next."""
    steps = np.random.default_rng(0).integers(1, 4, TOKENS)
    return (np.cumsum(steps) % config.vocab_size).astype("<u2")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(checkpoint, token file) of the first configuration."""
    folder = tmp_path_factory.mktemp("files")
    model_of(CONFIGS["even"]).save_llmc(folder / "model.bin")
    write_tokens(folder / "tokens.bin", tokens_of(CONFIGS["even"]))
    return folder / "model.bin", folder / "tokens.bin"


def trained(program, folder, *arguments):
    """The report of a run."""
    result = run_program(program, *arguments, "--out", folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads((folder / "report.json").read_text(), parse_constant=pytest.fail)


def losses_of(report):
    return report["backends"]["plain C"]["losses"]


def train_in_python(model, recipe, tokens, device="cpu"):
    """(losses, validation loss) with the batches of --in-order, the rest as `python -m cuda_ops gpt` has it."""

    def loss_of(inputs, targets):
        with torch.autocast(device, torch.bfloat16, enabled=recipe.precision == "bf16"):
            return model(inputs.to(device), targets.to(device))

    ours = model.backend == "fused"
    AdamW = optim.AdamW if ours else torch.optim.AdamW
    clip = nn_utils.clip_grad_norm_ if ours else torch.nn.utils.clip_grad_norm_
    optimizer = AdamW(parameter_groups(model, recipe), lr=recipe.lr, betas=(0.9, recipe.beta2), fused=True)
    middle = int(0.9 * len(tokens))
    train, validation = Windows(tokens[:middle], recipe.length), Windows(tokens[middle:], recipe.length)
    stretches = torch.arange(0, len(train), recipe.length)
    losses = []
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe)
        order = (step * recipe.batch + torch.arange(recipe.batch)) % len(stretches)
        loss = loss_of(*train(stretches[order]))
        loss.backward()
        clip(list(model.parameters()), recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        batches = validation.begins_in_order(recipe.batch, len(validation))
        total = sum(loss_of(*validation(begins)).double() * len(begins) for begins in batches)
    return losses, total.item() / sum(map(len, batches))


@pytest.mark.parametrize("backend", ["fused", "native"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("sizes", CONFIGS)
def test_losses_and_weights_are_those_of_python(sizes, bias, backend, program, tmp_path):
    config = CONFIGS[sizes]
    config = GPTConfig(config.vocab_size, config.block_size, config.n_layer, config.n_head, config.n_embd, bias=bias)
    # The first step's rate is not the peak, the norms are clipped, and decay is seen beside what AdamW adds.
    recipe = Recipe(config, BATCH, config.block_size - 1, STEPS, 2e-3, 2e-4, 2, 0.95, 2.0, 0.5)
    model, first, tokens = model_of(config, backend), model_of(config, backend), tokens_of(config)
    model.save_llmc(tmp_path / "first.bin")
    write_tokens(tmp_path / "tokens.bin", tokens)
    expected, validation = train_in_python(model, recipe, tokens)
    arguments = f"--batch {BATCH} --length {recipe.length} --steps {STEPS} --lr 2e-3 --warmup 2 --clip 0.5".split()
    arguments += ["--weight-decay", "2", "--model", "gpt2-124m", "--in-order", "--threads", "3"]
    arguments += ["--init", tmp_path / "first.bin", "--tokens", tmp_path / "tokens.bin"]
    arguments += ["--export", tmp_path / "last.bin"] + ["--no-bias"] * (not bias)
    report = trained(program, tmp_path, *arguments)
    # Of float32, 6e-8; native sums in another order.
    assert losses_of(report) == pytest.approx(expected, rel=1e-6 if backend == "fused" else 1e-5)
    assert report["backends"]["plain C"]["validation_loss"] == pytest.approx(validation, rel=1e-5)
    assert report["steps_done"] == STEPS and report["ok"] and report["sample"] is None
    assert report["parameters"] == config.parameter_count
    ours = dict(GPT.from_llmc(tmp_path / "last.bin", backend).named_parameters())
    for (name, end), begin in zip(model.named_parameters(), first.parameters(), strict=True):
        # A gradient that is nothing but rounding has a step of the learning rate's size, as the keys' biases have.
        distance, moved = (ours[name] - end).norm(), (end - begin).norm()
        assert distance <= (0.3 if name.endswith("c_attn.bias") else 2e-3) * moved, name


def test_what_is_made_again_in_backward_changes_rounding_alone(program, files, tmp_path):
    model, tokens = files
    options = ["--init", model, "--tokens", tokens, "--steps", 4, "--batch", 3, "--recompute"]
    losses, memory = [], []
    for blocks in (0, 1, 2, 9):
        report = trained(program, tmp_path, *options, blocks)
        assert report["settings"]["recomputed_blocks"] == blocks
        losses.append(losses_of(report))
        memory.append(report["backends"]["plain C"]["peak_memory_bytes"])
    assert losses[1:] == [pytest.approx(losses[0], rel=1e-6)] * 3
    # Of two blocks: the last one's place is there for all that are made again.
    assert memory[0] - memory[1] == 3 * 32 * 4 * 32 * 4
    assert memory[1] == memory[2] == memory[3]


@pytest.mark.cuda
@pytest.mark.parametrize("options", [[], ["--no-graph"], ["--recompute", 9]], ids=["graphs", "no graph", "recomputed"])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("sizes", [*CONFIGS, "many tokens"])
def test_on_a_gpu_losses_and_weights_are_those_of_python(
    sizes, bias, precision, options, cuda_program, tmp_path, monkeypatch
):
    """Validated in between, where what is recorded of a step has to wait; "many tokens" are such as are not for
    linear_cross_entropy in float32."""
    config = dataclasses.replace(CONFIGS.get(sizes, GPTConfig(2000, 64, 3, 2, 128)), bias=bias)
    recipe = Recipe(config, BATCH, config.block_size - 1, STEPS, 2e-3, 2e-4, 2, 0.95, 2.0, 0.5, precision)
    model, first, tokens = model_of(config).cuda(), model_of(config), tokens_of(config)
    first.save_llmc(tmp_path / "first.bin")
    write_tokens(tmp_path / "tokens.bin", tokens)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", precision == "tf32")
    expected, validation = train_in_python(model, recipe, tokens, "cuda")
    arguments = f"--batch {BATCH} --length {recipe.length} --steps {STEPS} --lr 2e-3 --warmup 2 --clip 0.5".split()
    arguments += ["--weight-decay", "2", "--model", "gpt2-124m", "--in-order", "--device", "cuda"]
    arguments += ["--precision", precision, "--init", tmp_path / "first.bin", "--tokens", tmp_path / "tokens.bin"]
    arguments += ["--export", tmp_path / "last.bin", "--eval-every", 3, *options] + ["--no-bias"] * (not bias)
    report = trained(cuda_program, tmp_path, *arguments)
    assert report["device"]["type"] == "cuda" and report["settings"]["precision"] == precision
    assert report["settings"]["graph"] == ("--no-graph" not in options)
    # The same kernels: of an H200 losses were within 7e-8, 3e-6 and 2e-5.
    rounding = {"fp32": 1e-6, "tf32": 1e-5, "bf16": 1e-4}[precision]
    assert losses_of(report) == pytest.approx(expected, rel=rounding)
    assert report["backends"]["plain C"]["validation_loss"] == pytest.approx(validation, rel=10 * rounding)
    ours = dict(GPT.from_llmc(tmp_path / "last.bin", "fused").named_parameters())
    for (name, end), begin in zip(model.named_parameters(), first.parameters(), strict=True):
        distance, moved = (ours[name] - end.cpu()).norm(), (end.cpu() - begin).norm()
        assert distance <= (0.3 if name.endswith("c_attn.bias") else 5e-3) * moved, name


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_a_gpu_the_sample_is_what_the_model_has_learned(precision, cuda_program, tmp_path):
    (tmp_path / "text.txt").write_text("abcd" * 200)
    model_of(GPTConfig(4, 12, 2, 2, 16)).save_llmc(tmp_path / "first.bin")
    options = ["--text", tmp_path / "text.txt", "--init", tmp_path / "first.bin", "--batch", 8, "--steps", 80]
    options += ["--lr", "2e-2", "--sample", 40, "--device", "cuda", "--precision", precision, "--prompt"]
    for prompt in ("a", "cdabcdabcdabcdab"):
        sample = trained(cuda_program, tmp_path, *options, prompt)["sample"]
        assert sample == ("abcd" * 20)["abcd".index(prompt[0]) :][: len(prompt) + 40]


def test_in_order_all_of_the_text_is_read_again_and_again(program, files, tmp_path):
    """By steps that are too small to move a weight: stretches that come back have the same loss."""
    model, tokens = files
    length = CONFIGS["even"].block_size - 1
    write_tokens(tmp_path / "tokens.bin", tokens_of(CONFIGS["even"])[: 3 * length + 1])
    options = ["--lr", "1e-30", "--weight-decay", 0, "--steps", 7, "--batch", 1, "--length", length, "--in-order"]
    options += ["--init", model, "--tokens", tmp_path / "tokens.bin", "--val-tokens", tokens]
    losses = losses_of(trained(program, tmp_path, *options))
    assert len(set(losses[:3])) == 3
    assert losses[3:] == [*losses[:3], losses[0]]


def test_every_gradient_is_clipped(program, files, tmp_path):
    """To so little that it is lost beside Adam's epsilon: of one that is not, the weight moves by the learning rate."""
    model, tokens = files
    options = ["--clip", "1e-12", "--lr", "1e-2", "--min-lr", "1e-2", "--warmup", 0, "--weight-decay", 0, "--steps", 2]
    options += ["--batch", 2, "--init", model, "--tokens", tokens, "--export", tmp_path / "last.bin"]
    trained(program, tmp_path, *options)
    last = dict(GPT.from_llmc(tmp_path / "last.bin", "native").named_parameters())
    for name, first in GPT.from_llmc(model, "native").named_parameters():
        assert (last[name] - first).abs().max() < 1e-5, name


def test_result_does_not_depend_on_threads(program, files, tmp_path):
    model, tokens = files
    losses = []
    for threads in (1, 2, 5):
        arguments = ["--init", model, "--tokens", tokens, "--steps", 4, "--threads", threads, "--seed", 2**33]
        losses.append(losses_of(trained(program, tmp_path, *arguments)))
    assert losses[0] == losses[1] == losses[2]


def test_it_learns_from_weights_of_its_own(program, tmp_path):
    """A first loss near log 65, a lower one at the end; another seed gives other weights and batches."""
    write_tokens(tmp_path / "train.bin", tokens_of(CONFIGS["even"]))
    write_tokens(tmp_path / "validation.bin", tokens_of(CONFIGS["even"])[:50])
    first = []
    for seed in (0, 2**32):
        options = ["--steps", 12, "--batch", 2, "--length", 16, "--seed", seed, "--eval-every", 5, "--warmup", 2]
        options += ["--tokens", tmp_path / "train.bin", "--val-tokens", tmp_path / "validation.bin"]
        report = trained(program, tmp_path, *options)
        losses = losses_of(report)
        assert losses[0] == pytest.approx(math.log(65), abs=0.2)
        assert losses[-1] < 0.9 * losses[0]
        assert [step for step, _ in report["backends"]["plain C"]["validation"]] == [5, 10, 12]
        first.append(losses[0])
    assert first[0] != first[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_checkpoint_comes_back_byte_by_byte(dtype, program, files, tmp_path):
    """By a step that is too small to move a weight."""
    first, last = tmp_path / "first.bin", tmp_path / "last.bin"
    model_of(CONFIGS["odd"]).save_llmc(first, dtype)
    write_tokens(tmp_path / "tokens.bin", tokens_of(CONFIGS["odd"]))
    options = ["--lr", "1e-30", "--weight-decay", 0, "--steps", 1, "--batch", 1, "--export", last, "--export-dtype"]
    options += ["bf16" if dtype == torch.bfloat16 else "fp32", "--tokens", tmp_path / "tokens.bin", "--init", first]
    trained(program, tmp_path, *options)
    assert last.read_bytes() == first.read_bytes()


def test_bfloat16_is_rounded_as_by_python(program, files, tmp_path):
    model, tokens = files
    options = ["--lr", "1e-30", "--weight-decay", 0, "--steps", 1, "--batch", 1, "--init", model, "--tokens", tokens]
    trained(program, tmp_path, *options, "--export", tmp_path / "ours.bin", "--export-dtype", "bf16")
    model_of(CONFIGS["even"]).save_llmc(tmp_path / "theirs.bin", torch.bfloat16)
    assert (tmp_path / "ours.bin").read_bytes() == (tmp_path / "theirs.bin").read_bytes()


def test_tokens_of_a_text_are_those_of_python(program, tmp_path):
    """Characters of one to four bytes, and line ends of all kinds."""
    path = tmp_path / "text.txt"
    path.write_bytes("aé漢🙂z\x7f\x80\u07ff\u0800\uffff\U00010000\U0010ffff\r\nb\rc\n\r\n\n".encode() * 30 + b"\r")
    text = read_text(path)
    characters = Characters.of(text)
    write_tokens(tmp_path / "theirs.bin", characters.encode(text))
    options = ["--text", path, "--steps", 1, "--batch", 2, "--length", 8, "--sample", 90, "--prompt", "🙂é"]
    report = trained(program, tmp_path, *options, "--export-tokens", tmp_path / "ours.bin")
    assert (tmp_path / "ours.bin").read_bytes() == (tmp_path / "theirs.bin").read_bytes()
    assert read_tokens(tmp_path / "ours.bin", len(characters)).tolist() == characters.encode(text)
    assert report["settings"]["config"]["vocab_size"] == len(characters)
    assert report["sample"].startswith("🙂é") and len(report["sample"]) == 92
    assert set(report["sample"]) <= set(characters.characters)


def test_the_sample_is_what_the_model_has_learned(program, tmp_path):
    """Within the context, by the keys and values that are kept, and far beyond it."""
    (tmp_path / "text.txt").write_text("abcd" * 200)
    model_of(GPTConfig(4, 12, 2, 2, 16)).save_llmc(tmp_path / "first.bin")
    options = ["--text", tmp_path / "text.txt", "--init", tmp_path / "first.bin", "--batch", 8, "--steps", 80]
    options += ["--lr", "2e-2", "--sample", 40, "--prompt"]
    for prompt in ("a", "cdabcdabcdabcdab"):
        sample = trained(program, tmp_path, *options, prompt)["sample"]
        assert sample == ("abcd" * 20)["abcd".index(prompt[0]) :][: len(prompt) + 40]


def test_divergence_exits_1(program, files, tmp_path):
    model, tokens = files
    options = ["--lr", "1e30", "--steps", 30, "--init", model, "--tokens", tokens, "--export", tmp_path / "last.bin"]
    result = run_program(program, *options, "--out", tmp_path)
    assert result.returncode == 1, result.stderr
    assert "training diverged" in result.stdout
    report = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert report["steps_done"] < report["steps_planned"] and not report["ok"]
    assert not (tmp_path / "last.bin").exists()


# An allocation of more is an error of the sanitizer's: nothing may be allocated for what a file claims.
LIMIT = {"ASAN_OPTIONS": "max_allocation_size_mb=8"}


def number(place, value):
    """A file with one int32 of its header replaced."""
    new = struct.pack("<I", value % 2**32)
    return lambda content: content[: 4 * place] + new + content[4 * place + 4 :]


def last_token(value):
    return lambda content: content[:-2] + struct.pack("<H", value)


BAD_TOKENS = {
    "empty": (lambda b: b"", "no token file of llm.c's: it has 0 bytes"),
    "short header": (lambda b: b[:1023], "it has 1023 bytes, and its header alone 1024"),
    "a checkpoint": (number(0, 20240326), "begins with 20240326, expected 20240520"),
    "other version": (number(1, 2), r"expected version 1 \(uint16\) of llm.c's token files, got 2"),
    "no tokens": (number(2, 0), "its header counts 0 tokens"),
    "count of 2^32 - 1": (number(2, 2**32 - 1), "its header counts -1 tokens"),
    "count of 2^31": (number(2, 2**31), "its header counts -2147483648 tokens"),
    "count of 2^31 - 1": (number(2, 2**31 - 1), "damaged or truncated: its header calls for 4294968318 bytes"),
    "truncated": (lambda b: b[:-2], "truncated: its header calls for 4024 bytes, and it has 4022"),
    "half a token": (lambda b: b[:-1], "truncated: its header calls for 4024 bytes, and it has 4023"),
    "trailing byte": (lambda b: b + b"\0", "has bytes past its end: its header calls for 4024 bytes"),
    "token beyond": (last_token(65), "has token 65, and the model knows 65"),
    "largest token": (last_token(2**16 - 1), "has token 65535, and the model knows 65"),
    "too few": (lambda b: number(2, 20)(b)[: 1024 + 40], "--length 32: the training data has 18 tokens"),
}


@pytest.mark.parametrize("case", BAD_TOKENS)
def test_wrong_token_file_is_told_in_one_line(case, program, files, tmp_path):
    spoil, message = BAD_TOKENS[case]
    model, tokens = files
    path = tmp_path / "spoiled.bin"
    path.write_bytes(spoil(tokens.read_bytes()))
    error = refused(program, "--init", model, "--tokens", path, **LIMIT)
    assert re.search(message, error), error
    if "--length" not in message:
        assert "spoiled.bin" in refused(program, "--init", model, "--tokens", tokens, "--val-tokens", path, **LIMIT)


OF_NO_MODEL = "are those of no model"
BAD_CHECKPOINTS = {
    "empty": (lambda b: b"", "no checkpoint of llm.c's: it has 0 bytes"),
    "short header": (lambda b: b[:1000], "it has 1000 bytes, and its header alone 1024"),
    "tokens": (number(0, 20240520), "begins with 20240520, expected 20240326"),
    "other version": (number(1, 4), r"expected version 3 \(float32\) or 5 \(bfloat16\) .* got 4"),
    "bfloat16 by name": (number(1, 5), "has bytes past its end"),
    "truncated": (lambda b: b[:-4], "damaged or truncated: its header calls for"),
    "trailing byte": (lambda b: b + b"\0", "has bytes past its end"),
    "vocabulary beyond its padding": (number(3, 129), OF_NO_MODEL),
    "padding of 2^32 - 1": (number(7, 2**32 - 1), OF_NO_MODEL),
    "padding of 2^31 - 1": (number(7, 2**31 - 1), "damaged or truncated"),
    "heads that do not divide": (number(5, 5), OF_NO_MODEL),
    "nan": (lambda b: b[:1024] + b"\0\0\xc0\x7f" + b[1028:], "a number that is not finite"),
    "infinite last": (lambda b: b[:-4] + b"\0\0\x80\xff", "a number that is not finite"),
    "all 2^31 - 1": (lambda b: b[:8] + struct.pack("<6i", *[2**31 - 1] * 6) + b[32:], "calls for 4.8e\\+29 bytes"),
    **{
        f"{name} of {value}": (number(place, value), OF_NO_MODEL)
        for place, name in enumerate(("block size", "vocabulary", "layers", "heads", "features"), 2)
        for value in (0, -1, -(2**31))
    },
    **{
        f"{name} of 2^31 - 1": (number(place, 2**31 - 1), f"damaged or truncated|{OF_NO_MODEL}")
        for place, name in enumerate(("block size", "vocabulary", "layers", "heads", "features"), 2)
    },
}


@pytest.mark.parametrize("case", BAD_CHECKPOINTS)
def test_wrong_checkpoint_is_told_in_one_line(case, program, files, tmp_path):
    spoil, message = BAD_CHECKPOINTS[case]
    model, tokens = files
    path = tmp_path / "spoiled.bin"
    path.write_bytes(spoil(model.read_bytes()))
    error = refused(program, "--init", path, "--tokens", tokens, **LIMIT)
    assert re.search(message, error) and "spoiled.bin" in error, error


BAD_TEXTS = {
    "empty": b"",
    "lone continuation": b"a\x80",
    "cut character": "a€".encode()[:-1],
    "overlong": b"\xc0\xaf" * 99,
    "surrogate": b"\xed\xa0\x80",
    "beyond the last code point": b"\xf4\x90\x80\x80",
    "no first byte": b"\xff\xfe",
    "wrong continuation": b"\xe2\x28\xa1",
}


@pytest.mark.parametrize("case", BAD_TEXTS)
def test_wrong_text_is_told_in_one_line(case, program, tmp_path):
    (tmp_path / "text.txt").write_bytes(BAD_TEXTS[case])
    error = refused(program, "--text", tmp_path / "text.txt")
    assert ("is empty" if case == "empty" else "is no text in UTF-8") in error


@pytest.mark.parametrize("option", ["--tokens", "--text", "--init"])
def test_what_is_no_file_is_refused(option, program, files, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    others = ["--tokens", files[1]] if option == "--init" else []
    for path in (tmp_path / "pipe", tmp_path, "/dev/zero"):
        assert "a folder, a pipe or a device, not a regular file" in refused(program, *others, option, path)
    assert f"{tmp_path}/none cannot be read (No such file" in refused(program, *others, option, tmp_path / "none")


MISTAKES = {
    "unknown option": (["--colour"], "unrecognized argument: --colour"),
    "no value": (["--lr"], "--lr: expected a value after it"),
    "no number": (["--steps", "many"], "--steps many: expected a whole number from 1 to"),
    "half a number": (["--steps", "3x"], "--steps 3x: expected a whole number"),
    "no steps": (["--steps", "0"], "--steps 0: expected"),
    "high half of a batch": (["--batch", str(2**32 + 4)], "--batch 4294967300: expected"),
    "no batch": (["--batch", "-1"], "--batch -1: expected"),
    "long": (["--length", "33"], "--length 33: the model sees at most 32 tokens"),
    "negative lr": (["--lr", "-1"], "--lr -1: expected a number above 0"),
    "lr that is no number": (["--lr", "nan"], "--lr nan: expected a number above 0"),
    "negative min-lr": (["--min-lr", "-1"], "--min-lr -1: expected a number of at least 0"),
    "clip of 0": (["--clip", "0"], "--clip 0: expected a number above 0"),
    "infinite decay": (["--weight-decay", "inf"], "--weight-decay inf: expected a number of at least 0"),
    "negative seed": (["--seed", "-1"], "--seed -1: expected"),
    "unknown model": (["--model", "gpt3"], "--model gpt3 is unknown: expected cpu-char, gpt2-124m"),
    "unknown device": (["--device", "tpu"], "--device tpu is unknown: expected cpu or cuda"),
    "no CUDA": (["--device", "cuda"], "--device cuda: this program was built without CUDA: take --device cpu"),
    "unknown precision": (["--precision", "fp64"], "--precision fp64 is unknown: expected fp32, tf32 or bf16"),
    "precision of a GPU": (["--precision", "bf16"], "--precision bf16 needs a GPU: on the CPU take --precision fp32"),
    "blocks": (["--recompute", "-1"], "--recompute -1: expected a whole number from 0 to"),
    "graphs of a GPU": (["--no-graph"], "--no-graph: the CPU has no graphs: it is for --device cuda"),
    "unknown dtype": (["--export-dtype", "fp16"], "--export-dtype fp16 is unknown: expected fp32 or bf16"),
    "text and tokens": (["--text", "a"], "--tokens and --text: expected one of them"),
    "tokens of tokens": (["--export-tokens", "a"], "--export-tokens writes the tokens of a text"),
    "biases": (["--no-bias"], "--no-bias: file .*model.bin has biases that are not zero"),
    "export in no folder": (["--export", "none/a"], r"--export none/a cannot be written \(No such file"),
    "export to a folder": (["--export", "."], r"--export . cannot be written \(it is a folder"),
    "report in a file": (["--out", "/dev/null/a"], "--out /dev/null/a cannot be made"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_mistake_is_told_in_one_line(case, program, files):
    arguments, message = MISTAKES[case]
    error = refused(program, "--init", files[0], "--tokens", files[1], *arguments)
    assert re.search(message, error), error


def test_mistakes_of_a_text(program, files, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("abc" * 300)
    assert "--val-tokens needs --tokens" in refused(program, "--text", text, "--val-tokens", files[1])
    assert "--prompt: the text has no 'é'" in refused(program, "--text", text, "--prompt", "aé")
    assert "--prompt: expected at least one character" in refused(program, "--text", text, "--prompt", "")
    assert "text.txt has 3 different characters, and the model knows 65" in refused(
        program, "--text", text, "--init", files[0]
    )
    assert "takes its tokenizer, which this program has not" in refused(
        program, "--text", text, "--model", "gpt2-124m", "--no-bias", "--batch", 1, "--length", 2
    )
    assert "none/tinyshakespeare/input.txt cannot be read" in refused(program, "--data-dir", "none")


def test_help(program):
    result = run_program(program, "--help")
    assert result.returncode == 0
    for option in ("--model", "--tokens", "--init", "--export", "--in-order", "--clip", "--prompt", "--out"):
        assert option in result.stdout
