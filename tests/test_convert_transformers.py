"""cuda_ops.convert and models of transformers."""

import pytest
import torch
from support.conversion import assert_converts, images


def tiny(name):
    """A transformers model of two tiny layers with random weights, and its inputs."""
    transformers = pytest.importorskip("transformers", reason="needs transformers (pip install transformers)")
    tokens = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(0))
    text = {"input_ids": tokens}
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes["intermediate_size"] = 32
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    kinds = {
        "Bert": (lambda t: t.BertModel(t.BertConfig(**sizes, **none)), text),
        "GPT2": (
            lambda t: t.GPT2Model(
                t.GPT2Config(
                    vocab_size=50, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
                )
            ),
            text,
        ),
        "ViT": (
            lambda t: t.ViTModel(
                t.ViTConfig(
                    **{k: v for k, v in sizes.items() if k != "vocab_size"}, **none, image_size=32, patch_size=8
                )
            ),
            {"pixel_values": images(2, 32)},
        ),
        "Llama": (lambda t: t.LlamaModel(t.LlamaConfig(**sizes)), text),
        "T5": (
            lambda t: t.T5Model(
                t.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0)
            ),
            {**text, "decoder_input_ids": tokens},
        ),
    }
    make, inputs = kinds[name]
    torch.manual_seed(0)
    model = make(transformers).double().train()
    if name != "ViT":
        model.config.use_cache = False
    return model, inputs


@pytest.mark.parametrize("name", ["Bert", "GPT2", "ViT", "Llama", "T5"])
def test_transformers(name):
    model, inputs = tiny(name)
    assert_converts(model, inputs, ["add_layer_norm"] if name == "Bert" else [])
