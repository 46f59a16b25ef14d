"""Tiny random models, a word-level tokenizer and cost tables, made in the test that uses them.

Weights are drawn wide (`initializer_range`), so that attention is peaked and a wrong mask or position moves the
logits by about their own spread, and so that distributions are peaked as a language model's are.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from avref.cost_table import CostTable
from avref.drafters.dflash import DFlashModel
from avref.packed import plain_attention
from avref.train.dflash import start
from avref.train.loop import Settings

EOS = 2
VOCAB = 50
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}


def build(config: PreTrainedConfig, seed: int = 0) -> Any:
    """A float32 model with weights of its own; the global random state is left alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config).float().eval()


def llama(seed: int = 0, **changes: Any) -> Any:
    return build(LlamaConfig(**{**SHAPE, **changes}), seed)


def gpt2(seed: int = 0, **changes: Any) -> Any:
    """Learned absolute positions: a position that is off by one is not hidden by rotary embeddings."""
    shape = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
    ends = {"bos_token_id": 1, "eos_token_id": EOS, "initializer_range": 0.3}
    return build(GPT2Config(**{**shape, **ends, **changes}), seed)


def qwen2(seed: int = 0, **changes: Any) -> Any:
    model = build(Qwen2Config(**{**SHAPE, **changes}), seed)
    with torch.no_grad():  # transformers starts its query, key and value biases at 0
        for name, weight in model.named_parameters():
            if name.endswith("_proj.bias"):
                weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(seed))
    return model


def mistral(seed: int = 0, window: int = 8, **changes: Any) -> Any:
    return build(MistralConfig(**{**SHAPE, "sliding_window": window, **changes}), seed)


def gemma2(seed: int = 0, **changes: Any) -> Any:
    """Soft caps low enough to bite, and a window in every second layer."""
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
    return build(Gemma2Config(**{**SHAPE, "head_dim": 8, "sliding_window": 8, **caps, **changes}), seed)


def gemma3(seed: int = 0, **changes: Any) -> Any:
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    return build(Gemma3TextConfig(**{**SHAPE, "head_dim": 8, **layers, **changes}), seed)


def bigram(next_logits: torch.Tensor) -> Any:
    """A Llama whose logits after token t are row t of a table [V, V], whatever stands before it.

    One-hot embeddings and a layer that adds nothing. It makes laws, and leaks, that can be worked out by hand.
    """
    size = len(next_logits)
    width = 2 * (-(-size // 2))
    shape = {"vocab_size": size, "hidden_size": width, "intermediate_size": 4, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "eos_token_id": None, "bos_token_id": None}
    model = llama(**shape, **heads, pad_token_id=None, rms_norm_eps=1e-12, tie_word_embeddings=False)
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size, width))
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, :size] = next_logits.T / width**0.5  # the final norm scales a one-hot by sqrt(width)
    return model


def near(model: Any, noise: float, seed: int = 1) -> Any:
    """A copy with every matrix disturbed by `noise` times its spread: a drafter that is often, not always, right."""
    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in copied.parameters():
            if weight.dim() > 1:
                weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    return copied


def sharpen(model: Any, factor: float) -> Any:
    """Scale the logits, by the head (the models here do not tie it)."""
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(factor)
    return model


def dflash(target: Any, block: int = 8, vocab_ids: Sequence[int] | None = None, seed: int = 0) -> DFlashModel:
    """A drafter that starts from the last layer of a Llama, over all ids or some of them."""
    size = target.get_output_embeddings().weight.shape[0]
    ids = torch.tensor(range(size) if vocab_ids is None else vocab_ids)
    last = target.config.num_hidden_layers
    settings = Settings(depth=block, target_layers=(last - 1, last), num_layers=1, intermediate_size=16)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return start(target, settings, ids)


@torch.inference_mode()
def greedy(model: Any, prompt: Sequence[int], max_new_tokens: int, eos: int | None = None) -> list[int]:
    """What plain Hugging Face `generate` answers."""
    with plain_attention(model):
        ids = torch.tensor([list(prompt)])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=eos,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def flat_costs(max_requests: int = 16, max_tokens: int = 256) -> CostTable:
    """A fixed part and a price per token: some drafts pay, most do not."""
    return CostTable.from_curves(
        [(1, 0.2), (max_requests, 0.4)],
        [(1, 1.0), (max_requests, 1.5), (max_tokens, 0.06 * max_tokens)],
        max_requests=max_requests,
        max_tokens=max_tokens,
    )


def tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Whitespace-separated words; the id of a word is its place in the list."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    made = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token=words[0], eos_token=words[EOS])
