"""Replay against the engine on the real target: the engine's own answers, recorded afterwards and replayed.

The engine answers with a drafter at work and counts accepted drafts. A trace recorded along the same answers, replayed
with the same policy and cost table, must count the same within 2 % for a parallel drafter and 5 % for one that drafts
token by token: only the verdicts are drawn anew.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from avref import LLM, SamplingParams, workloads
from avref.cost_table import CostTable
from avref.evidence.journal import Journal
from avref.evidence.recording import _header
from avref.evidence.replay import Policy, Replay
from avref.evidence.trace_file import Trace
from avref.evidence.walk import Answer, walk

K, R = 7, 16
# made up, but of the shape of a measured one: what a forward costs grows from the first extra token on
TABLE = CostTable(np.linspace(1.0, 12.0, R + 1), 50.0 + 1.6 * np.arange(R * (K + 1) + 1))
PARAMS = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=96)


def own_answers(llm: LLM, prompts: dict[str, list[str]]) -> list[Answer]:
    """The prompts answered by the LLM, speculation included, in the form that a trace is recorded along."""
    asked = [(w, i, p) for w, group in enumerate(prompts.values()) for i, p in enumerate(group)]
    order = sorted(range(len(asked)), key=lambda j: asked[j][1])  # the workloads in turn
    ids = llm.prompt_ids([asked[j][2] for j in order])
    outputs = llm.generate(ids, [SamplingParams(**{**vars(PARAMS), "seed": j}) for j in range(len(order))])
    answers = []
    for j, prompt_ids, output in zip(order, ids, outputs, strict=True):
        one = output.outputs[0]
        if len(one.token_ids) > 1:
            answers.append(Answer(*asked[j][:2], prompt_ids, one.token_ids, one.finish_reason == "stop"))
    return answers


@pytest.mark.slow
@pytest.mark.parametrize(("method", "prompts_each", "close"), [("dflash", 40, 0.02), ("eagle", 20, 0.05)])
@pytest.mark.parametrize("adaptive", [False, True], ids=["fixed", "adaptive"])
def test_replay_counts_what_the_engine_counted(method: str, prompts_each: int, close: float, adaptive: bool) -> None:
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": K, "enable_adaptive_verification": adaptive}
    llm = LLM("smollm2", config, max_num_seqs=R, dtype="float32", max_model_len=512)
    if adaptive:
        llm.cost_table = TABLE
    prompts = {name: workloads.load(name, prompts_each) for name in workloads.NAMES}
    answers = own_answers(llm, prompts)
    engine = llm.stats
    header = _header(llm, list(prompts), PARAMS, 0)
    trace = Trace(header, **walk(llm, answers, PARAMS, 0, False, Journal(None, {})))
    policy = Policy.adaptive() if adaptive else Policy.fixed(K)
    runs = [Replay(trace, TABLE, policy, num_requests=R, seed=s).run().stats for s in range(8)]
    steps = sum(s.num_request_steps for s in runs)
    for name in ("accepted_by_position", "verified_by_position"):
        own, ours = getattr(engine, name) / engine.num_request_steps, sum(getattr(s, name) for s in runs) / steps
        print(f"\n{method} {'adaptive' if adaptive else 'fixed'} {name}: engine {own.round(3)}, replay {ours.round(3)}")
    accepted = engine.accepted_by_position.sum() / engine.num_request_steps
    replayed = sum(s.accepted_by_position.sum() for s in runs) / steps
    print(
        f"accepted a step: {accepted:.4f}, {replayed:.4f} ({replayed / accepted - 1:+.2%}), {engine.num_request_steps}"
    )
    assert replayed == pytest.approx(accepted, rel=close)
