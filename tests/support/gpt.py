"""Small models of GPT-2's kind, and batches for them."""

import torch

from cuda_ops.models import GPT, GPTConfig

SMALL = GPTConfig(vocab_size=31, block_size=12, n_layer=2, n_head=2, n_embd=16)
OURS = ["custom", "fused"]


def same_models(backends, config=SMALL, dtype=torch.float64, device="cpu", seed=0):
    """A model of each backend, of the same weights, biases and all."""
    torch.manual_seed(seed)
    state = GPT("native", config).state_dict()
    for name, tensor in state.items():
        if name != "lm_head.weight":
            tensor += 0.1 * torch.randn_like(tensor)
    models = [GPT(backend, config) for backend in backends]
    for model in models:
        model.load_state_dict(state, strict=True)
    return [model.to(device, dtype) for model in models]


def batch(config=SMALL, length=10, count=3, device="cpu", seed=1):
    generator = torch.Generator().manual_seed(seed)
    both = torch.randint(config.vocab_size, (count, length + 1), generator=generator).to(device)
    return both[:, :-1], both[:, 1:]
