"""The default target itself: loading, parity with plain Hugging Face, and short speculative runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import avref
from avref import models
from avref.config import SamplingParams
from avref.cost_table import CostTable
from avref.drafters import weights
from avref.layout import Layout
from avref.llm import LLM
from avref.packed import PackedModel, plain_attention
from avref.parity import check_parity

pytestmark = pytest.mark.target
QUESTIONS = ["What is the capital of France?", "What is 12 times 12?"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SHIPPED = weights.SHIPPED / f"dflash-{models.DEFAULT_TARGET}"


@pytest.fixture(scope="module")
def plain() -> LLM:
    """In float32: two correct programs may break a tie of bfloat16 logits differently."""
    return LLM("smollm2", dtype="float32", max_num_seqs=2, max_model_len=128)


@pytest.fixture(scope="module")
def answers(plain: LLM) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in plain.chat(QUESTIONS, GREEDY)]


def adaptive(llm: LLM, **config: Any) -> LLM:
    """The same model again, with a made-up cost table: nothing is timed here."""
    costs = CostTable.from_curves([(1, 2.0), (2, 2.5)], [(1, 20.0), (16, 30.0)], max_requests=2, max_tokens=16)
    settings = {"enable_adaptive_verification": True, **config}
    return LLM(llm.model, settings, tokenizer=llm.tokenizer, max_num_seqs=2, max_model_len=128, cost_table=costs)


def test_it_is_the_model_that_the_hash_names() -> None:
    folder = models.fetch_default_target()
    assert (folder / "complete").read_text() == models._SHA256
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {f.name for f in folder.iterdir()}


@torch.inference_mode()
def test_logits_equal_plain_hugging_face(plain: LLM) -> None:
    """`check_parity` on two short prompts, and a chat prompt of its own length through the packed path."""
    assert check_parity(plain.model) < 1e-4
    ids = torch.tensor(plain.chat_ids(QUESTIONS[:1])[0])
    with plain_attention(plain.model):
        expected = plain.model(input_ids=ids[None], use_cache=False).logits[0, -1]
    layout = Layout([0], [len(ids)])
    got, _ = PackedModel(plain.model, 1, 128).forward(ids, layout, layout.last)
    assert (got[0] - expected).abs().max() < 1e-4 * expected.std()


def test_greedy_chat_equals_generate(plain: LLM, answers: list[list[int]]) -> None:
    for ids, answer in zip(plain.chat_ids(QUESTIONS), answers, strict=True):
        assert answer == tiny.greedy(plain.model, ids, 24, plain.tokenizer.eos_token_id)
    text = plain.tokenizer.decode(answers[0], skip_special_tokens=True)
    assert "Paris" in text  # it answers, rather than continuing the question


def test_the_target_drafts_for_itself(plain: LLM, answers: list[list[int]]) -> None:
    llm = adaptive(plain, method="draft_model", model=plain.model, num_speculative_tokens=2)
    assert [o.outputs[0].token_ids for o in llm.chat(QUESTIONS, GREEDY)] == answers
    stats = llm.stats
    assert stats.accepted_by_position.sum() == stats.graded_by_position.sum() > 0
    assert stats.tokens_per_request_step > 1.5


@pytest.mark.skipif(not SHIPPED.is_dir(), reason="no dflash drafter is shipped yet")
def test_the_shipped_drafter(plain: LLM, answers: list[list[int]]) -> None:
    llm = adaptive(plain, method="dflash", num_speculative_tokens=7)
    assert [o.outputs[0].token_ids for o in llm.chat(QUESTIONS, GREEDY)] == answers
    assert 0 < llm.stats.accepted_by_position[0] < llm.stats.num_request_steps
    llm.chat(QUESTIONS, SamplingParams(temperature=1.0, top_p=0.95, max_tokens=24, seed=1))
    assert 0 < llm.stats.accepted_by_position[0] < llm.stats.num_request_steps


def test_weights_travel_with_the_package() -> None:
    assert Path(avref.__file__).parent / "weights" == weights.SHIPPED
