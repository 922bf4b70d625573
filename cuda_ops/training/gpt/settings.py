"""What a run of `python -m cuda_ops gpt` is asked to do, checked before anything is done."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from ..._errors import UserError
from ...models import BACKENDS, GPTConfig
from ..distributed import World
from ..options import check_share, choose_device

PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
COMPILED = "compiled"
"""The name of native under torch.compile among the backends of a run."""


@dataclass(frozen=True)
class Recipe:
    """All that the weights of a run depend on, beside the data and the backend."""

    config: GPTConfig
    batch: int
    length: int
    """Tokens of a sequence, at most config.block_size."""
    steps: int
    lr: float
    min_lr: float
    """What the learning rate has fallen to at the end."""
    warmup: int
    """Steps in which it rises."""
    beta2: float
    weight_decay: float
    clip: float
    """Of the norm of all gradients."""
    precision: str = "fp32"
    seed: int = 0
    recomputed_blocks: int = 0
    """Of GPT: less memory for some time; gradients differ by rounding alone, as gelu is of another kernel then."""


def _gpt2(layers: int, heads: int, features: int, batch: int, recomputed_blocks: int = 0) -> Recipe:
    """Of GPT-2, with the vocabulary of 50257 padded to a multiple of 64, as nanoGPT and llm.c train it."""
    config = GPTConfig(50304, 1024, layers, heads, features)
    return Recipe(config, batch, 1024, 100, 6e-4, 6e-5, 20, 0.95, 0.1, 1.0, recomputed_blocks=recomputed_blocks)


# The two of characters are nanoGPT's. On the CPU the learning rate is twice its: after 2000 steps the loss of the whole
# validation part is 1.81, by its own 1e-3 it is 1.90 (fused, seed 0). On a GPU its steps are 5000, but it overfits from
# 2000 on.
RECIPES = {
    "cpu-char": Recipe(GPTConfig(65, 64, 4, 4, 128, 0.0, False), 12, 64, 2000, 2e-3, 2e-4, 100, 0.99, 0.1, 1.0),
    "char": Recipe(GPTConfig(65, 256, 6, 6, 384, 0.2, False), 64, 256, 2000, 1e-3, 1e-4, 100, 0.99, 0.1, 1.0),
    "gpt2-124m": _gpt2(12, 12, 768, 32, recomputed_blocks=1),
    "gpt2-350m": _gpt2(24, 16, 1024, 16),
    "gpt2-774m": _gpt2(36, 20, 1280, 8),
    "gpt2-1558m": _gpt2(48, 25, 1600, 4),
}
GPT2_TOKENS = 50257
DEFAULT_MODEL = {"cpu": "cpu-char", "cuda": "char"}
DEFAULT_PRECISION = {"cpu": "fp32", "cuda": "bf16"}
EVALUATIONS = {"cpu": 4, "cuda": 8}
# Two CPU cores train a model of characters with two backends in some minutes.
DEFAULT_BACKENDS = {"cpu": ("fused", "native"), "cuda": tuple(BACKENDS)}


@dataclass(frozen=True)
class Settings:
    """One run. `resolve` makes it from the options of the command line."""

    model: str
    recipe: Recipe
    backends: tuple[str, ...]
    """Names of BACKENDS, and COMPILED."""
    device: torch.device
    world: World
    graph: bool
    """Whether steps are CUDA graphs."""
    tokens: Path | None
    val_tokens: Path | None
    text: Path | None
    data_root: Path
    init: Path | None
    eval_every: int
    sample: int
    """Tokens of the text that is generated at the end."""
    prompt: str
    save: Path | None
    save_every: int | None
    resume: Path | None
    export: Path | None
    out: Path

    @property
    def autocast(self) -> torch.dtype | None:
        return torch.bfloat16 if self.recipe.precision == "bf16" else None

    @property
    def parameter_dtype(self) -> torch.dtype:
        """Under autocast parameters are float32."""
        return torch.float64 if self.recipe.precision == "fp64" else torch.float32

    @property
    def of_characters(self) -> bool:
        """Whether a token is a character, and not one of GPT-2's."""
        return self.tokens is None and self.recipe.config.vocab_size < GPT2_TOKENS


def layers_of(backend: str) -> str:
    """The backend whose layers a backend of a run has: COMPILED those of native."""
    return "native" if backend == COMPILED else backend


def resolve(options, world: World, saved: dict | None = None) -> Settings:
    """Checks the options of the command line and fills in what they leave open.

    Args:
        options: the namespace that argparse returns for `gpt`.
        world: the processes of this run.
        saved: "model", "backends" and "recipe" of the checkpoint to resume; options that say otherwise are refused,
            but for `--steps`.

    Raises:
        UserError: an option cannot be met; the message says which, and what would do.
    """
    _check_numbers(options)
    backends = _backends(options)
    device = choose_device(options.device, [layers_of(name) for name in backends or BACKENDS], world)
    model = options.model or (saved["model"] if saved else DEFAULT_MODEL[device.type])
    if saved:
        recipe, backends = _resumed(options, saved, model, backends)
    else:
        backends = backends or _with_compiled(DEFAULT_BACKENDS[device.type], options)
        recipe = _changed(RECIPES[model], options)
        if options.precision is None:
            recipe = dataclasses.replace(recipe, precision=DEFAULT_PRECISION[device.type])
    if recipe.precision == "tf32" and device.type == "cpu":
        raise UserError("--precision tf32 needs a GPU: on the CPU take --precision fp32, fp64 or bf16")
    for name, other in (("val_tokens", "tokens"), ("save_every", "save")):
        if getattr(options, name) and not getattr(options, other):
            raise UserError(f"--{name.replace('_', '-')} needs --{other}")
    check_share("--batch", recipe.batch, world)
    if world.bf16_reduce and recipe.precision == "fp64":
        raise UserError("--bf16-reduce: gradients of --precision fp64 are not rounded, leave one of them out")
    if options.tokens and options.text:
        raise UserError("--tokens and --text: expected one of them")
    if options.init and options.resume:
        raise UserError("--init and --resume: a checkpoint has its own weights, leave out --init")
    return Settings(
        model=model,
        recipe=recipe,
        backends=backends,
        device=device,
        world=world,
        graph=options.graph and device.type == "cuda" and not world.is_sharded,
        tokens=options.tokens,
        val_tokens=options.val_tokens,
        text=options.text,
        data_root=options.data_dir,
        init=options.init,
        eval_every=options.eval_every or max(1, recipe.steps // EVALUATIONS[device.type]),
        sample=options.sample,
        prompt=options.prompt,
        save=options.save,
        save_every=options.save_every,
        resume=options.resume,
        export=options.export,
        out=options.out,
    )


def _backends(options) -> tuple[str, ...]:
    if not options.backend:
        return ()
    names = BACKENDS if "all" in options.backend else dict.fromkeys(options.backend)
    return _with_compiled(tuple(names), options)


def _with_compiled(names: tuple[str, ...], options) -> tuple[str, ...]:
    return (*names, COMPILED) if options.compile else names


# Options that stand for a field of the recipe, beside dropout, which is one of its config.
FIELDS = ("batch", "length", "steps", "lr", "min_lr", "warmup", "weight_decay", "clip", "precision", "seed")


def _changed(recipe: Recipe, options) -> Recipe:
    """The recipe with what the options say otherwise."""
    given = {name: getattr(options, name) for name in FIELDS if getattr(options, name) is not None}
    config = recipe.config
    if options.dropout is not None:
        config = dataclasses.replace(config, dropout=options.dropout)
    given.setdefault("min_lr", given.get("lr", recipe.lr) * recipe.min_lr / recipe.lr)
    given.setdefault("length", min(recipe.length, config.block_size))
    given.setdefault("warmup", min(recipe.warmup, given.get("steps", recipe.steps) // 2))
    return dataclasses.replace(recipe, config=config, **given)


def _resumed(options, saved: dict, model: str, backends: tuple[str, ...]) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe and backends of a checkpoint, unless an option says otherwise."""
    recipe: Recipe = saved["recipe"]
    if model != saved["model"]:
        raise UserError(f"--model {model}: {options.resume} is of --model {saved['model']}")
    if (backends or options.compile) and set(backends or saved["backends"]) != set(saved["backends"]):
        raise UserError(f"--backend: {options.resume} has {', '.join(saved['backends'])}: leave it out")
    for name in (*FIELDS, "dropout"):
        given = getattr(options, name)
        before = recipe.config.dropout if name == "dropout" else getattr(recipe, name)
        if given is not None and given != before and name != "steps":
            raise UserError(f"--{name.replace('_', '-')} {given}: {options.resume} was trained with {before}")
    return dataclasses.replace(recipe, steps=options.steps or recipe.steps), tuple(saved["backends"])


def _check_numbers(options):
    for name in ("batch", "length", "steps", "eval_every", "save_every"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: expected a whole number of at least 1")
    for name in ("warmup", "sample"):
        value = getattr(options, name)
        if value is not None and value < 0:
            raise UserError(f"--{name} {value}: expected a whole number of at least 0")
    for name in ("lr", "clip"):
        value = getattr(options, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UserError(f"--{name} {value}: expected a number above 0")
    if options.lr is not None and options.precision != "fp64" and options.lr > torch.finfo(torch.float32).max:
        raise UserError(
            f"--lr {options.lr}: expected at most {torch.finfo(torch.float32).max:.6g}, the largest of float32, which "
            "the weights are"
        )
    for name in ("min_lr", "weight_decay"):
        value = getattr(options, name)
        if value is not None and not (value >= 0 and math.isfinite(value)):
            raise UserError(f"--{name.replace('_', '-')} {value}: expected a number of at least 0")
    if options.dropout is not None and not 0 <= options.dropout < 1:
        raise UserError(f"--dropout {options.dropout}: expected a number from 0 to less than 1")
    if options.seed is not None and not 0 <= options.seed < 2**63:
        raise UserError(f"--seed {options.seed}: expected a whole number from 0 to 2**63 - 1")


def check_length(recipe: Recipe, tokens: int, what: str):
    """Whether sequences fit into the model, and into a part of the data.

    Raises:
        UserError: they do not.
    """
    if recipe.length > recipe.config.block_size:
        raise UserError(f"--length {recipe.length}: the model sees at most {recipe.config.block_size} tokens")
    if tokens <= recipe.length:
        raise UserError(
            f"--length {recipe.length}: the {what} data has {tokens} tokens, and a sequence takes one more than its "
            "length: take a shorter one or more data"
        )
