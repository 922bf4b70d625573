"""GPT-2: the language model of `python -m cuda_ops gpt`."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import functional
from .._grad_mode import without_grad
from .._library import problem
from .._modules import parameter, unlike
from . import _gpt_ops
from .backends import get_backend

if problem is None:
    from .. import nn

    LINEARS, LAYER_NORMS = (nn.Linear, torch.nn.Linear), (nn.LayerNorm, torch.nn.LayerNorm)
    DROPOUTS = nn.Dropout, torch.nn.Dropout
    EMBEDDINGS = nn.Embedding, torch.nn.Embedding


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT. The defaults are GPT-2's smallest, of 124 million parameters.

    Args:
        vocab_size: how many tokens there are.
        block_size: the longest context, in tokens.
        n_layer: blocks.
        n_head: attention heads of each; they divide n_embd.
        n_embd: features of a token.
        dropout: probability, after the embeddings, of attention weights and of what each half of a block adds.
        bias: whether linear layers and layer norms have one.

    Raises:
        TypeError, ValueError: a size that is no int, or not above 0; heads that do not divide the features; a dropout
            outside of [0, 1).
    """

    vocab_size: int = 50257
    block_size: int = 1024
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True

    def __post_init__(self):
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd"):
            value = getattr(self, name)
            if type(value) is not int:
                raise TypeError(f"GPTConfig: expected {name} to be an int, got {value!r}")
            if not 0 < value < 2**31:
                raise ValueError(f"GPTConfig: expected {name} to be from 1 to 2**31 - 1, got {value}")
        if self.n_embd % self.n_head:
            raise ValueError(f"GPTConfig: expected n_head to divide n_embd, {self.n_embd}, got {self.n_head}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"GPTConfig: expected dropout to be at least 0 and less than 1, got {self.dropout}")
        if type(self.bias) is not bool:
            raise TypeError(f"GPTConfig: expected bias to be a bool, got {self.bias!r}")

    @property
    def parameter_count(self) -> int:
        """Of a GPT of these sizes; the head is the token embedding's."""
        features, layers = self.n_embd, self.n_layer
        matrices = 12 * features * features
        vectors = 2 * features + (11 * features if self.bias else 0)
        last = features * (2 if self.bias else 1)
        return (self.vocab_size + self.block_size) * features + layers * (matrices + vectors) + last

    def flops_per_token(self, length: int) -> float:
        """Floating-point operations of a training step for each token of sequences of that length: 6 for a parameter,
        and half of attention's two products, whose other half is masked (llm.c counts so)."""
        return 6.0 * self.parameter_count + 6.0 * self.n_layer * self.n_embd * length


class KeyValueCache:
    """The keys and values of the tokens that a GPT has seen, for those that follow; no gradient goes through them.

    Args:
        model: whose cache it is.
        batch: sequences.
        length: the most tokens that it has room for; default: the model's block_size.
    """

    def __init__(self, model: "GPT", batch: int, length: int | None = None):
        config, like = model.config, model.transformer.wte.weight
        self.capacity = config.block_size if length is None else min(length, config.block_size)
        self.length = 0
        shape = (2, config.n_layer, batch, config.n_head, self.capacity, config.n_embd // config.n_head)
        self.keys, self.values = torch.empty(shape, dtype=model.compute_dtype(like.device), device=like.device)

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds those of one layer; returns all that it has of that layer."""
        end = self.length + key.shape[-2]
        self.keys[layer, ..., self.length : end, :] = key.detach()
        self.values[layer, ..., self.length : end, :] = value.detach()
        return self.keys[layer, ..., :end, :], self.values[layer, ..., :end, :]


class CausalSelfAttention(torch.nn.Module):
    """Multi-head attention, in which a token sees itself and those before it."""

    def __init__(self, config: GPTConfig, backend: str):
        super().__init__()
        nn = get_backend(backend).nn
        self.backend, self.n_head, self.dropout = backend, config.n_head, config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, input: Tensor, cache: KeyValueCache | None = None, layer: int = 0) -> Tensor:
        return self.c_proj(self.mix(self.c_attn(input), cache, layer))

    def mix(self, projected: Tensor, cache: KeyValueCache | None, layer: int) -> Tensor:
        """Attention of what c_attn has made: (batch, length, 3 * features) to (batch, length, features)."""
        batch, length, features = projected.shape
        backend = get_backend(self.backend)
        dropout = self.dropout if self.training else 0.0
        packed = projected.view(batch, length, 3, self.n_head, features // 3 // self.n_head)
        if cache is None and backend.needs_extension:
            mixed = functional.flash_attention_qkvpacked(packed, causal=True, dropout_p=dropout)
            return mixed.view(batch, length, -1)
        query, key, value = packed.permute(2, 0, 3, 1, 4).unbind()  # (batch, heads, length, features of a head)
        is_causal = True
        if cache is not None:
            key, value = cache.extend(layer, key, value)
            is_causal = cache.length == 0  # else one token, which sees all of them
        attention = backend.functional.scaled_dot_product_attention
        mixed = attention(query, key, value, dropout_p=dropout, is_causal=is_causal)
        return mixed.transpose(1, 2).reshape(batch, length, -1)


class MLP(torch.nn.Module):
    """Two linear layers around GELU, by its approximation with tanh, as in GPT-2."""

    def __init__(self, config: GPTConfig, backend: str):
        super().__init__()
        nn = get_backend(backend).nn
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, input: Tensor) -> Tensor:
        return self.c_proj(self.gelu(self.c_fc(input)))


class Block(torch.nn.Module):
    """Attention and MLP, each behind a layer norm, each added to what came in."""

    def __init__(self, config: GPTConfig, backend: str):
        super().__init__()
        nn = get_backend(backend).nn
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config, backend)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config, backend)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, input: Tensor, cache: KeyValueCache | None = None, layer: int = 0) -> Tensor:
        x = input + self.drop(self.attn(self.ln_1(input), cache, layer))
        return x + self.drop(self.mlp(self.ln_2(x)))

    def is_fusable(self) -> bool:
        """Whether its layers still do what GPT._fused does by their parameters."""
        modules, attn, mlp = self._modules, self._modules["attn"], self._modules["mlp"]
        return (
            type(self) is Block
            and unlike(self, (Block,)) is None
            and unlike(attn, (CausalSelfAttention,)) is None
            and unlike(mlp, (MLP,)) is None
            and unlike(modules["ln_1"], LAYER_NORMS) is None
            and unlike(modules["ln_2"], LAYER_NORMS) is None
            and unlike(modules["drop"], DROPOUTS) is None
            and unlike(attn._modules["c_attn"], LINEARS) is None
            and unlike(attn._modules["c_proj"], LINEARS) is None
            and unlike(mlp._modules["c_fc"], LINEARS) is None
            and unlike(mlp._modules["c_proj"], LINEARS) is None
            and type(mlp._modules["gelu"]).__name__ == "GELU"
        )


class GPT(torch.nn.Module):
    r"""GPT-2: token and position embeddings, blocks of causal attention and MLP, a layer norm, and a head whose weight
    is the token embedding's.

    Args:
        backend: "custom" for the layers of cuda_ops.nn, "native" for those of torch.nn and PyTorch's
            scaled_dot_product_attention; "fused" for our ops that each do the work of several layers (add_layer_norm,
            linear_gelu, linear_cross_entropy), by the layers' parameters. Where a layer has become something else (by
            hooks, pruning, sharding, another in its place) they are called one after the other.
        config: the sizes.
        recomputed_blocks: in so many blocks, the first ones, the fused model in half precision on CUDA does not keep
            GELU's output for backward, which makes it again: 8 * n_embd bytes less for each token and block, and a pass
            over as many more.

    Parameters and their names are the same for all backends, so that one state_dict fits all: those of Hugging Face's
    GPT2LMHeadModel, with the weights of linear layers as (out, in), which there are transposed
    (:meth:`from_hugging_face`, :meth:`hugging_face_state_dict`).

    Under autocast the fused model computes in its dtype throughout: activations, and the sum that the blocks add to,
    are stored in it, each op computes in float32 inside, and the parameters stay float32.

    Shape:
        Input (batch, length), int64: tokens; output (batch, length, vocab_size): the logits of the token that follows
        each. With targets, of the shape of the input, the mean cross-entropy; targets of -100 have no part in it.

    Raises:
        ValueError: there is no such backend, or not so many blocks; on a call, input that is no batch of sequences, or
            is longer than block_size.

    Example:
        >>> config = cuda_ops.models.GPTConfig(vocab_size=65, block_size=64, n_layer=2, n_head=2, n_embd=32)
        >>> native, fused = GPT("native", config), GPT("fused", config)
        >>> fused.load_state_dict(native.state_dict(), strict=True)
        <All keys matched successfully>
    """

    def __init__(self, backend: str = "custom", config: GPTConfig | None = None, recomputed_blocks: int = 0):
        super().__init__()
        found = get_backend(backend)
        config = GPTConfig() if config is None else config
        if type(recomputed_blocks) is not int or not 0 <= recomputed_blocks <= config.n_layer:
            raise ValueError(
                f"GPT: expected recomputed_blocks to be from 0 to n_layer, {config.n_layer}, got {recomputed_blocks!r}"
            )
        self.recomputed_blocks = recomputed_blocks
        nn = found.nn
        embedding = found.nn.Embedding
        self.backend, self.config = backend, config
        self.transformer = torch.nn.ModuleDict(
            {
                "wte": embedding(config.vocab_size, config.n_embd),
                "wpe": embedding(config.block_size, config.n_embd),
                "drop": nn.Dropout(config.dropout),
                "h": torch.nn.ModuleList(Block(config, backend) for _ in range(config.n_layer)),
                "ln_f": nn.LayerNorm(config.n_embd, bias=config.bias),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        self.apply(self._initialise)

    def _initialise(self, module: torch.nn.Module):
        """As GPT-2: normal with a deviation of 0.02, less for what is added to the sum of all blocks."""
        if isinstance(module, torch.nn.Embedding):
            torch.nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, (CausalSelfAttention, MLP)):
            for name, linear in module.named_children():
                if isinstance(linear, torch.nn.Linear):
                    share = math.sqrt(2 * self.config.n_layer) if name == "c_proj" else 1.0
                    torch.nn.init.normal_(linear.weight, std=0.02 / share)
                    if linear.bias is not None:
                        torch.nn.init.zeros_(linear.bias)

    def extra_repr(self) -> str:
        return f"{self.config.parameter_count:,} parameters"

    def forward(self, input: Tensor, targets: Tensor | None = None, cache: KeyValueCache | None = None) -> Tensor:
        """The logits of `input`, or with `targets` their loss.

        With a `cache`, `input` continues what the cache holds (by one token, unless it is empty), which grows by it,
        and the logits are those of its last token alone, (batch, 1, vocab_size).
        """
        self._check(input, targets, cache)
        if self.backend == "fused" and self._is_fusable():
            output = self._fused(input, targets, cache)
        else:
            output = self._by_layers(input, targets, cache)
        if cache is not None:
            cache.length += input.shape[1]
        return output

    def _check(self, input: Tensor, targets: Tensor | None, cache: KeyValueCache | None):
        if input.dim() != 2:
            raise ValueError(f"GPT: expected input of (batch, length), got shape {list(input.shape)}")
        if targets is not None and targets.shape != input.shape:
            shapes = f"{list(input.shape)}, got {list(targets.shape)}"
            raise ValueError(f"GPT: expected targets of the shape of input, {shapes}")
        length, room = input.shape[1], self.config.block_size
        if length > room:
            raise ValueError(f"GPT: expected at most {room} tokens (block_size), got {length}")
        if cache is not None:
            if targets is not None:
                raise ValueError("GPT: expected targets or a cache, got both")
            if cache.length and length != 1:
                raise ValueError(f"GPT: expected one token to follow those in the cache, got {length}")
            if cache.length + length > cache.capacity:
                raise ValueError(f"GPT: the cache is full: it has room for {cache.capacity} tokens")

    def _by_layers(self, input: Tensor, targets: Tensor | None, cache: KeyValueCache | None) -> Tensor:
        begin = cache.length if cache else 0
        modules = self.transformer
        positions = torch.arange(begin, begin + input.shape[1], device=input.device)
        x = modules["drop"](modules["wte"](input) + modules["wpe"](positions))
        for layer, block in enumerate(modules["h"]):
            x = block(x, cache, layer)
        if cache is not None:
            x = x[:, -1:]
        logits = self.lm_head(modules["ln_f"](x))
        if targets is None:
            return logits
        # (batch * length, vocab_size): PyTorch's loss is slower along another dimension than the last of two.
        cross_entropy = get_backend(self.backend).functional.cross_entropy
        return cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _is_fusable(self) -> bool:
        modules = self.transformer._modules
        return (
            unlike(modules["wte"], EMBEDDINGS) is None
            and unlike(modules["wpe"], EMBEDDINGS) is None
            and unlike(modules["drop"], DROPOUTS) is None
            and unlike(modules["ln_f"], LAYER_NORMS) is None
            and unlike(self._modules["lm_head"], LINEARS) is None
            and all(isinstance(block, Block) and block.is_fusable() for block in modules["h"]._modules.values())
        )

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        """Of activations: autocast's where it is on, else the parameters'."""
        if torch.is_autocast_enabled(device.type):
            return torch.get_autocast_dtype(device.type)
        return parameter(self.transformer._modules["wte"], "weight").dtype

    def _fused(self, input: Tensor, targets: Tensor | None, cache: KeyValueCache | None) -> Tensor:
        if not torch.is_autocast_enabled(input.device.type):
            return self._fused_in(None, input, targets, cache)
        # Autocast would have every norm and sum in float32, with a cast before and after each.
        dtype = torch.get_autocast_dtype(input.device.type)
        with torch.autocast(input.device.type, enabled=False):
            return self._fused_in(dtype, input, targets, cache)

    def _fused_in(
        self, dtype: torch.dtype | None, input: Tensor, targets: Tensor | None, cache: KeyValueCache | None
    ) -> Tensor:
        modules, training = self.transformer._modules, self.training

        def linear(module):
            """Weight and bias of a linear layer, which take the dtype of its input."""
            return parameter(module, "weight"), parameter(module, "bias")

        def norm(module):
            """What the norms take beside their input: their parameters may be float32 beside halves."""
            return module.normalized_shape, parameter(module, "weight"), parameter(module, "bias"), module.eps

        begin = cache.length if cache else 0
        table, positions = parameter(modules["wte"], "weight"), parameter(modules["wpe"], "weight")
        weight = parameter(self._modules["lm_head"], "weight")
        is_tied = targets is not None and weight is table
        x, of_head = _gpt_ops.embedding(input, table, positions[begin:] if begin else positions, dtype, is_tied)
        blocks = [block._modules for block in modules["h"]._modules.values()]
        # In the order of a block: attention's two layers, and those of the MLP.
        layers = [
            [
                linear(parts[half]._modules[name])
                for half, name in (("attn", "c_attn"), ("attn", "c_proj"), ("mlp", "c_fc"), ("mlp", "c_proj"))
            ]
            for parts in blocks
        ]
        halves = _gpt_ops.halves_of(x, layers)
        h, x = _gpt_ops.dropped_norm(x, norm(blocks[0]["ln_1"]), modules["drop"].p if training else 0.0)
        for layer, parts in enumerate(blocks):
            p = parts["drop"].p if training else 0.0
            (qkv, projection, *mlp), (half_qkv, half_projection, *half_mlp) = layers[layer], halves[layer]
            attn, of_norm, both = parts["attn"], norm(parts["ln_2"]), (*qkv, *projection)
            plain = cache is None and not (training and attn.dropout)
            if plain and _gpt_ops.finds_bias(h, x, of_norm, p, *both):
                half = (*half_qkv, *half_projection)
                h, x = _gpt_ops.attention_add_norm(h, both, attn.n_head, x, of_norm, half)
            else:
                h = attn.mix(_gpt_ops.linear(h, *qkv, half_qkv), cache, layer)
                h, x = _gpt_ops.linear_add_norm(h, projection, x, of_norm, p, half_projection)
            # The norm that comes next is that of the next block, or the last one.
            following = norm(blocks[layer + 1]["ln_1"] if layer + 1 < len(blocks) else modules["ln_f"])
            how, keeps = parts["mlp"]._modules["gelu"].approximate, layer >= self.recomputed_blocks
            both, half = (*mlp[0], *mlp[1]), (*half_mlp[0], *half_mlp[1])
            h, x = _gpt_ops.mlp_add_norm(h, both, how, x, following, p, keeps, half)
        if targets is not None:
            return _gpt_ops.head_loss(h, of_head if is_tied else weight, targets)
        return _gpt_ops.linear(h if cache is None else h[:, -1:], weight, None)

    @without_grad
    def generate(
        self,
        tokens: Tensor,
        count: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        use_cache: bool = True,
    ) -> Tensor:
        """Continues sequences, each token drawn by the probabilities of the model.

        Args:
            tokens: (batch, length), at least one token; of more than block_size the last are seen.
            count: how many to add.
            temperature: divides the logits; 0 takes the most probable token.
            top_k: draw from the k most probable ones alone.
            generator: for the draws, on the CPU; default: PyTorch's.
            use_cache: keep keys and values of what was seen, as long as all of it fits into block_size; without it (and
                beyond that) the whole context is computed for every token. The tokens are the same.

        Returns:
            (batch, length + count): `tokens` and what follows them.

        Raises:
            ValueError: no token to begin with, a negative count or temperature, top_k below 1.
        """
        for token in self._continue(tokens, count, temperature, top_k, generator, use_cache):
            tokens = torch.cat([tokens, token], 1)
        return tokens

    def _continue(self, tokens, count, temperature, top_k, generator, use_cache) -> Iterator[Tensor]:
        """The tokens that follow, (batch, 1) at a time."""
        if tokens.dim() != 2 or tokens.shape[1] < 1:
            raise ValueError(f"GPT.generate: expected (batch, length) of at least one token, got {list(tokens.shape)}")
        if count < 0 or temperature < 0:
            raise ValueError(
                f"GPT.generate: expected a count and a temperature of at least 0, got {count}, {temperature}"
            )
        if top_k is not None and top_k < 1:
            raise ValueError(f"GPT.generate: expected top_k to be at least 1, got {top_k}")
        was_training, room = self.training, self.config.block_size
        self.eval()
        try:
            cache, pending = None, tokens
            if use_cache and tokens.shape[1] < room:
                cache = KeyValueCache(self, len(tokens), tokens.shape[1] + count)
            for _ in range(count):
                if cache is not None and cache.length == cache.capacity:
                    cache = None  # every token has another position from here on
                logits = self(tokens[:, -room:] if cache is None else pending, cache=cache)[:, -1]
                pending = draw(logits, temperature, top_k, generator)
                tokens = torch.cat([tokens, pending], 1)
                yield pending
        finally:
            self.train(was_training)

    @classmethod
    def from_llmc(cls, path, backend: str = "custom") -> "GPT":
        """The model of a checkpoint of llm.c's (version 3, float32, or 5, bfloat16); its padding of the vocabulary is
        left out. Parameters are float32.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no such checkpoint, or is damaged: nothing has been allocated for what it claims.
        """
        from .gpt_files import load_llmc

        return load_llmc(path, backend)

    def save_llmc(self, path, dtype: torch.dtype = torch.float32):
        """Writes a checkpoint of llm.c's, whole or not at all: float32 or bfloat16, the vocabulary padded by zeros to a
        multiple of 128. Biases that the model does not have are written as zeros.

        Raises:
            OSError: the file cannot be written.
            ValueError: another dtype.
        """
        from .gpt_files import save_llmc

        save_llmc(self, path, dtype)

    @classmethod
    def from_hugging_face(cls, state_dict, backend: str = "custom", n_head: int | None = None) -> "GPT":
        """The model of a state_dict of Hugging Face's GPT2LMHeadModel or GPT2Model: names with or without
        "transformer.", weights of linear layers transposed, buffers of masks ignored.

        Args:
            state_dict: names and tensors.
            backend: as of :class:`GPT`.
            n_head: attention heads, which no tensor tells; default: of 64 features each, as in every GPT-2.

        Raises:
            ValueError: a tensor is missing, has another shape, or is none of GPT-2's.
        """
        from .gpt_files import from_hugging_face

        return from_hugging_face(state_dict, backend, n_head)

    def hugging_face_state_dict(self) -> dict[str, Tensor]:
        """A state_dict for Hugging Face's GPT2LMHeadModel.load_state_dict; copies of the transposed weights."""
        from .gpt_files import to_hugging_face

        return to_hugging_face(self)


def draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """A token of each row of logits, (batch, vocab_size) to (batch, 1); drawn on the CPU, so that a generator of one
    seed gives the same tokens on every device."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    probabilities = logits.detach().cpu().double() / temperature
    if top_k is not None and top_k < probabilities.shape[-1]:
        least = probabilities.topk(top_k).values[:, -1:]
        probabilities = probabilities.masked_fill(probabilities < least, -math.inf)
    return torch.multinomial(probabilities.softmax(-1), 1, generator=generator).to(logits.device)
