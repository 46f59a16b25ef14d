"""Every model family: either the packed forward reproduces it, or it is refused with the reason.

The models are tiny and random, of two layers, with weights wide enough that attention decides the logits. Windows are
shorter than the prompts of the check. The oracle is the unmodified Hugging Face model.
"""

from __future__ import annotations

import copy
from importlib.metadata import version
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoConfig

from avref import packed
from avref.config import SamplingParams
from avref.layout import Block, Layout
from avref.llm import LLM
from avref.packed import PackedModel, longest_context, plain_attention
from avref.parity import LIMITS, check_parity

WINDOW: dict[str, Any] = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SERVED: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "decoder_sparse_step": 1, **EXPERTS},
    "mistral": {"sliding_window": 4},
    "mixtral": {"sliding_window": 4, "num_local_experts": 4},
    "phi": {},
    "phi3": {"sliding_window": 4},
    "gemma2": {"head_dim": 8, "attn_logit_softcapping": 2.0, **WINDOW},
    "gemma3_text": {"head_dim": 8, **WINDOW},
    "olmo2": {},
    "olmo3": WINDOW,
    "smollm3": {"no_rope_layers": [1, 0]},
    "granite": {},
    "cohere": {},
    "cohere2": WINDOW,
    "starcoder2": {"sliding_window": 4},
    "gpt2": GPT,
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "glm4": {"head_dim": 8},
}
CONV = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": ({"n_layer": 2, "n_head": 4}, "0 of 2 layers.*attention of their own"),  # alibi
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 2}, "0 of 2 layers"),  # alibi
    "falcon": ({}, "0 of 2 layers"),
    "xglm": ({"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}, "0 of 2 layers"),
    "openai-gpt": (GPT, "0 of 2 layers"),
    "gpt_neo": ({"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}, "0 of 2 layers"),
    "gpt_oss": ({"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}, "attention sinks"),
    "mamba": ({}, "0 of 2 layers.*recurrent"),
    "rwkv": ({"attention_hidden_size": 32}, "0 of 2 layers.*recurrent"),
    "bamba": ({"attn_layer_indices": [1], **CONV}, "1 of 2 layers.*recurrent|without a mask"),
    "lfm2": ({"layer_types": ["conv", "full_attention"], "block_dim": 32}, "1 of 2 layers.*recurrent"),
}


def make(family: str, **changes: Any) -> Any:
    return tiny.build(AutoConfig.for_model(family, **{**tiny.SHAPE, **changes}))


@pytest.mark.parametrize("family", SERVED)
def test_served(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In three precisions; and a mask that looks ahead is noticed, so the family's attention does count."""
    model = make(family, **SERVED[family])
    if family == "opt" and version("transformers") < "5.1":  # it built a mask of its own
        with pytest.raises(RuntimeError, match="without a mask"):
            check_parity(model)
        return
    assert check_parity(model) < 1e-5
    assert check_parity(copy.deepcopy(model).bfloat16()) < LIMITS[torch.bfloat16]
    half = copy.deepcopy(model).half()
    assert check_parity(half) < LIMITS[torch.float16]
    correct = Block.mask
    monkeypatch.setattr(Block, "mask", lambda self, *args: torch.zeros_like(correct(self, *args)))
    for broken in (model, half):
        with pytest.raises(RuntimeError, match="packed logits differ"):
            check_parity(broken)


@pytest.mark.parametrize("family", REFUSED)
def test_refused_with_the_reason(family: str) -> None:
    changes, reason = REFUSED[family]
    with pytest.raises(RuntimeError, match=f"(?s){reason}"):
        LLM(make(family, **changes), max_model_len=64)


def test_a_window_that_never_reaches_the_attention_is_refused() -> None:
    """Short prompts cannot tell: here, as in a model that puts its window into the mask only, nothing passes it on."""
    model = tiny.llama()
    model.config.sliding_window, model.config.layer_types = 64, ["sliding_attention", "full_attention"]
    with pytest.raises(RuntimeError, match="sliding window of 64 tokens does not reach"):
        check_parity(model)


@pytest.mark.parametrize(("change", "served"), [(1.4e-4, True), (1e-3, False)])
def test_parity_allows_what_the_number_of_tokens_changes_in_the_plain_model(change: float, served: bool) -> None:
    """Kernels that depend on the size; here odd numbers of tokens add `change` of the logits' spread."""
    model = tiny.llama()
    with torch.no_grad():
        odd = change * float(model(torch.tensor([[3, 10, 17]])).logits.std())
    model.lm_head.register_forward_hook(lambda *found: found[-1] + odd * (found[-1].shape[-2] % 2))
    if served:
        assert LIMITS[torch.float32] < check_parity(model) < 4e-4
    else:
        with pytest.raises(RuntimeError, match=r"allowed in float32: 0\.0001"):
            check_parity(model)


# Faults that begin past the length of the check's prompts

LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
LATE: dict[str, tuple[str, dict[str, Any], int]] = {
    "a chunked mask": (
        "llama4_text",
        {
            **{"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2},
            **{"intermediate_size_mlp": 48, "attention_chunk_size": 16, "no_rope_layers": [1, 0]},
        },
        0,
    ),
    "rotary scaling by length": (
        "phi3",
        {"original_max_position_embeddings": 16, "max_position_embeddings": 64, "rope_parameters": LONGROPE},
        1,
    ),
}


@pytest.mark.parametrize("kind", LATE)
def test_a_context_beyond_what_packing_serves_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the limit it is served; one position further it is refused, and rightly: the logits would be wrong.

    With a chunked mask those of the long request, with scaling by length those of the short one beside it.
    """
    family, changes, victim = LATE[kind]
    model = make(family, **changes)
    limit, _ = longest_context(model)
    assert limit == 16
    with pytest.raises(ValueError, match=r"up to 16 tokens here, not 17.*max_model_len=16 or less"):
        LLM(model, max_model_len=17)
    llm = LLM(model, max_model_len=16)
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    assert llm.generate([[5, 6, 7]], greedy)[0].outputs[0].token_ids == tiny.greedy(model, [5, 6, 7], 8)

    monkeypatch.setattr(packed, "longest_context", lambda model: (None, ""))
    rows = [[(7 * i + 3) % tiny.VOCAB for i in range(n)] for n in (40, 5)]
    with torch.inference_mode(), plain_attention(model):
        alone = model(input_ids=torch.tensor([rows[victim]]), use_cache=False).logits[0]
    together, _ = PackedModel(model, 2, 64).forward(torch.tensor(rows[0] + rows[1]), Layout([0, 0], [40, 5]))
    assert (together.split([40, 5])[victim] - alone).abs().max() > alone.std()


# The whole engine on families of different kinds: learned positions, soft caps and windows, experts, a tied bias


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "qwen3_moe", "phi3"])
def test_speculation_equals_plain_greedy(family: str, method: str) -> None:
    """Contexts several times the window; the drafter is the target with noise, so drafts are accepted and rejected."""
    target = make(family, **SERVED[family])
    model = tiny.near(target, 0.1) if method == "draft_model" else None
    config = {"method": method, "model": model, "num_speculative_tokens": 3, "enable_adaptive_verification": True}
    llm = LLM(target, config, max_num_seqs=3, max_model_len=64, cost_table=tiny.flat_costs())
    prompts = [[3, 4, 5, 3, 4], [7], [9, 8, 7, 6, 9, 8], list(range(20, 34))]
    out = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
    assert [o.outputs[0].token_ids for o in out] == [tiny.greedy(target, p, 16) for p in prompts]
    assert llm.stats.verified_by_position.sum() > 0
