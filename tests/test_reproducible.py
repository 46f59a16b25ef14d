"""The seed promises on the real target: what the same seed repeats, alone, in company and in another order.

Promised: greedy decoding, and sampling at fixed K in float32, give a request the same tokens alone and in company; the
same seed and cost table repeat a run, adaptive or not. Not promised: the same tokens in company when sampling with
adaptive verification, or in half precision, where logits that nearly tie may fall either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from avref.config import SamplingParams
from avref.cost_table import CostTable
from avref.layout import Layout
from avref.llm import LLM
from avref.packed import PackedModel

QUESTIONS = ["What is the capital of France?", "Write one line about rain.", "What is 12 times 12?"]
target_only = pytest.mark.target


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM("smollm2", dtype="float32", max_num_seqs=3, max_model_len=96)


def speculative(llm: LLM, method: str, **config: Any) -> LLM:
    """The same weights again, with a made-up cost table: nothing is timed."""
    costs = CostTable.from_curves([(1, 2.0), (3, 2.5)], [(1, 20.0), (24, 30.0)], max_requests=3, max_tokens=24)
    settings = {"method": method, "num_speculative_tokens": 3, **config}
    return LLM(llm.model, settings, tokenizer=llm.tokenizer, max_num_seqs=3, max_model_len=96, cost_table=costs)


def answers(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params)]


def settings(temperature: float, count: int = 3) -> list[SamplingParams]:
    return [SamplingParams(temperature=temperature, top_p=0.95, max_tokens=8, seed=5 + i) for i in range(count)]


@target_only
@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampling"])
@pytest.mark.parametrize("method", [None, "dflash", "ngram"])
def test_alone_in_company_and_in_another_order(method: str | None, temperature: float, plain: LLM) -> None:
    llm = plain if method is None else speculative(plain, method)
    prompts, params = plain.chat_ids(QUESTIONS), settings(temperature)
    together = answers(llm, prompts, params)
    assert answers(llm, prompts, params) == together  # the same seed again
    assert answers(llm, prompts[::-1], params[::-1])[::-1] == together
    assert [answers(llm, [p], [s])[0] for p, s in zip(prompts, params, strict=True)] == together
    if temperature == 0:
        assert together == answers(plain, prompts, params)  # speculation changes nothing
    elif method is None:
        others = [SamplingParams(temperature=1.0, top_p=0.95, max_tokens=8, seed=50 + i) for i in range(3)]
        assert answers(llm, prompts, others) != together  # and the seed does something


@target_only
@pytest.mark.slow
def test_adaptive_greedy_in_company_and_adaptive_sampling_repeated(plain: LLM) -> None:
    """Greedy tokens never depend on what is verified; sampled ones do, but the same run repeats them."""
    prompts = plain.chat_ids(QUESTIONS)
    adaptive = {"enable_adaptive_verification": True, "estimator": {"refit_interval": 3}}
    greedy = answers(speculative(plain, "dflash", **adaptive), prompts, settings(0.0))
    assert greedy == answers(plain, prompts, settings(0.0))
    runs = [answers(speculative(plain, "dflash", **adaptive), prompts, settings(1.0)) for _ in range(2)]
    assert runs[0] == runs[1]


# Half precision


@target_only
@pytest.mark.slow
def test_where_bfloat16_may_differ_in_company_the_logits_nearly_tie() -> None:
    """A batch of another shape rounds differently: by a few roundings of the largest logit, and by no more.

    So a request's greedy token can differ in company only where its two best logits are that close. In float32 the
    same comparison stays a thousand times closer.
    """
    gaps = {}
    for dtype in (torch.float32, torch.bfloat16):
        llm = LLM("smollm2", dtype=dtype, max_num_seqs=3, max_model_len=96)
        prompts = llm.chat_ids(QUESTIONS)
        ids = torch.tensor([t for p in prompts for t in p])
        together, _ = PackedModel(llm.model, 3, 96).forward(ids, Layout([0, 0, 0], [len(p) for p in prompts]))
        gaps[dtype] = 0.0
        for prompt, row in zip(prompts, together.float().split([len(p) for p in prompts]), strict=True):
            alone, _ = PackedModel(llm.model, 1, 96).forward(torch.tensor(prompt), Layout([0], [len(prompt)]))
            alone = alone.float()  # [L, V]
            moved = (alone - row).abs().amax(-1)  # [L]
            size = alone.abs().amax(-1)
            gaps[dtype] = max(gaps[dtype], float((moved / size).max()))
            flipped = alone.argmax(-1) != row.argmax(-1)
            best = alone.topk(2).values
            assert (best[flipped, 0] - best[flipped, 1] <= 2 * moved[flipped]).all()
    assert gaps[torch.float32] < 1e-4
    assert gaps[torch.bfloat16] < 16 * torch.finfo(torch.bfloat16).eps, gaps
