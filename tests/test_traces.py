"""Traces: what they hold equals plain Hugging Face forwards, replay equals the engine, and bad files are refused.

Oracles: plain forwards over a whole text for p and q; sums over a small vocabulary for overlaps and acceptance;
`Engine` on the same tiny pair for what a policy does.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from test_simulate import trace_header

from avref import LLM, CostTable, SamplingParams, cli
from avref import features as feature_module
from avref.evidence import traces
from avref.evidence.replay import Policy, Replay
from avref.evidence.trace_file import COLUMNS, Trace
from avref.packed import plain_attention

K = 4
WARM = SamplingParams(temperature=0.8, top_p=0.9, top_k=30, max_tokens=16)
PROMPTS = {"one": [[3, 4, 5], [7, 8], [21, 5, 9, 30]], "two": [[11, 12, 13, 14], [40]]}
BUSY = [[3 + i % 40, 5 + i % 17, 7 + i % 11] for i in range(60)]
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=25, ignore_eos=True)
COSTS = tiny.flat_costs(max_requests=64, max_tokens=640)
CHEAP = CostTable(np.linspace(0, 0.5, 5) * np.ones((65, 1)), 2 + 0.02 * np.arange(400))


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.sharpen(tiny.llama(), 1.5)


@pytest.fixture(scope="module")
def drafters(target: Any) -> dict[str, Any]:
    return {"draft_model": tiny.near(target, 0.1), "dflash": tiny.dflash(target, vocab_ids=range(tiny.VOCAB - 5))}


def make(target: Any, method: str, drafter: Any, max_num_seqs: int = 4, **settings: Any) -> LLM:
    config = {"method": method, "model": drafter, "num_speculative_tokens": K, **settings}
    return LLM(target, config, max_num_seqs=max_num_seqs, max_model_len=64, cost_table=COSTS)


@pytest.fixture(scope="module")
def recorded(target: Any, drafters: dict[str, Any]) -> dict[str, Trace]:
    return {name: traces.record(make(target, name, d), PROMPTS, WARM, seed=3) for name, d in drafters.items()}


@pytest.fixture(scope="module")
def wide(target: Any, drafters: dict[str, Any]) -> dict[str, Trace]:
    """Enough offsets for frequencies: one workload, no stop tokens."""
    return {name: traces.record(make(target, name, d, 32), {"all": BUSY}, SAMPLED) for name, d in drafters.items()}


def answer_ids(trace: Trace, i: int) -> list[int]:
    """The tokens of answer i but its first, which a trace does not keep."""
    first = int(trace.first_row[i])
    return trace.token[first : first + trace.num_tokens[i] - 1].tolist()


@torch.inference_mode()
def plain_logits(model: Any, ids: list[int]) -> torch.Tensor:
    with plain_attention(model):
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


def law(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """p by the book: temperature, top-k, then top-p, by a full sort of one row."""
    p = torch.softmax(logits.double() / params.temperature, -1)
    order = p.argsort(descending=True, stable=True)
    kept = p[order]
    if params.top_k:
        kept[params.top_k :] = 0
        kept /= kept.sum()
    kept[(kept.cumsum(0) - kept) >= params.top_p] = 0
    out = torch.zeros_like(p)
    out[order] = kept / kept.sum()
    return out


# What a trace holds


def test_target_and_draft_model_equal_plain_forwards(
    target: Any, drafters: dict[str, Any], recorded: dict[str, Trace]
) -> None:
    """Every stored number of every answer, from one plain forward of each model over the whole text."""
    trace, drafter = recorded["draft_model"], drafters["draft_model"]
    llm = make(target, "draft_model", drafter)
    firsts = first_tokens(llm, trace)
    for i in range(len(trace.num_tokens)):
        prompt = PROMPTS[trace.header["workloads"][trace.workload[i]]][trace.prompt[i]]
        ids = [*prompt, firsts[i], *answer_ids(trace, i)]
        logits, draft_logits = plain_logits(target, ids), plain_logits(drafter, ids)
        p = [law(row, WARM) for row in logits]
        q = torch.softmax(draft_logits.double() / WARM.temperature, -1)
        for t in range(int(trace.num_tokens[i]) - 1):
            row, place = int(trace.first_row[i]) + t, len(prompt) + t
            y = ids[place + 1]
            entropy = -sum(float(x) * np.log(float(x)) for x in p[place] if x > 0)
            assert trace.p_y[row] == pytest.approx(float(p[place][y]), rel=2e-3)
            assert trace.target_entropy[row] == pytest.approx(entropy, rel=2e-3, abs=1e-3)
            for k in range(min(K, len(ids) - 1 - place)):
                here = place + k
                y = ids[here + 1]
                assert trace.q_y[row, k] == pytest.approx(float(q[here][y]), rel=2e-3, abs=1e-6)
                overlap = float(torch.minimum(p[here], q[here]).sum())
                assert trace.overlap[row, k] == pytest.approx(overlap, abs=1e-3)
                for name in ("logit_q_max", "margin", "entropy"):
                    value = feature_module.FEATURES[name].fn(draft_logits[here], None, WARM.temperature)
                    assert getattr(trace, name)[row, k] == pytest.approx(float(value), rel=2e-3, abs=1e-3)
                assert any(  # the draft is not stored, its p and q are: they belong to one token
                    abs(float(trace.p_x[row, k]) - float(a)) < 1e-3
                    and abs(1 / (1 + np.exp(-float(trace.logit_q_sampled[row, k]))) - float(b)) < 1e-3
                    for a, b in zip(p[here], q[here], strict=True)
                )


def first_tokens(llm: LLM, trace: Trace) -> list[int]:
    """Sampling is seeded, so recording again shows the answers, first tokens included."""
    from avref.evidence import recording

    answers = recording._sample(llm, PROMPTS, WARM, None, 3, recording.Journal(None, {}))
    assert [a.ids[1:] for a in answers] == [answer_ids(trace, i) for i in range(len(answers))]
    return [a.ids[0] for a in answers]


def test_dflash_blocks_equal_those_of_a_fresh_drafter(target: Any, drafters: dict[str, Any], recorded: Any) -> None:
    """At every offset, a drafter that entered with the text so far as its prompt proposes the recorded block."""
    from avref.layout import Layout

    trace, llm = recorded["dflash"], make(target, "dflash", drafters["dflash"])
    firsts, reduced = first_tokens(llm, trace), set(range(tiny.VOCAB - 5))
    drafter, packed = llm.engine.drafter, llm.engine.target
    for i in (0, len(firsts) - 1):
        prompt = PROMPTS[trace.header["workloads"][trace.workload[i]]][trace.prompt[i]]
        ids = [*prompt, firsts[i], *answer_ids(trace, i)]
        for t in range(int(trace.num_tokens[i]) - 1):
            row, n = int(trace.first_row[i]) + t, len(prompt) + t
            with torch.inference_mode():
                layout = Layout([0], [n])
                _, hidden = packed.forward(torch.tensor(ids[:n]), layout, layout.last, drafter.hidden_layers)
                drafter.enter(layout, [ids[:n]], hidden)
                temperature = torch.tensor([WARM.temperature])
                block = drafter.propose([n], torch.tensor(ids[n : n + 1]), K, temperature, torch.zeros(1, K), False)
            value = feature_module.logit_q_max(block.logits, temperature[:, None])[0]
            assert np.allclose(trace.logit_q_max[row], value.numpy(), rtol=2e-3, atol=2e-3)
            assert np.allclose(trace.stop[row], block.stop[0].numpy(), rtol=2e-3, atol=2e-3)
            for k in range(min(K, len(ids) - 1 - n)):
                y = ids[n + k + 1]
                expected = float(block.q[0, k, y]) if y in reduced else 0.0
                assert trace.q_y[row, k] == pytest.approx(expected, rel=3e-3, abs=1e-6)


def test_rows_know_their_place(recorded: dict[str, Trace]) -> None:
    trace = recorded["dflash"]
    assert set(trace.header["workloads"]) == set(PROMPTS)
    for i in range(len(trace.num_tokens)):
        rows = np.flatnonzero(trace.answer == i)
        assert trace.offset[rows].tolist() == list(range(trace.num_tokens[i] - 1))
        assert trace.tokens_left[rows].tolist() == list(range(trace.num_tokens[i] - 1, 0, -1))
        ended = trace.token[rows[-1]] == tiny.EOS
        assert bool(trace.stopped[i]) == ended
        assert ended or trace.num_tokens[i] == WARM.max_tokens
    assert (trace.known.sum(1) == np.minimum(K, trace.tokens_left)).all()
    assert (trace.overlap[~trace.known] == 0).all()
    assert (trace.num_drafted == K).all()


def test_every_feature_follows_from_the_stored_ones() -> None:
    """All eight features of made-up logits, from float16 columns, against `avref.features`, at all certainties."""
    generator = torch.Generator().manual_seed(0)
    logits = 6 * torch.randn(40, 3, 30, generator=generator)
    logits[:10, :, 4] += 60  # q_max of 1 to within 1e-20
    tokens = torch.multinomial(logits.softmax(-1).flatten(0, 1), 1, generator=generator).view(40, 3)
    columns = {}
    for name in ("logit_q_max", "margin", "entropy", "logit_q_sampled"):
        columns[name] = feature_module.FEATURES[name].fn(logits, tokens, 1.0).numpy().astype(np.float16)
    trace = synthetic(num_tokens=[41], positions=3, **columns)
    for name, feature in feature_module.FEATURES.items():
        value = feature.fn(logits, tokens, 1.0).double().numpy()
        assert np.allclose(traces.features(trace, name), value, rtol=3e-3, atol=3e-3), name
        assert np.isfinite(traces.features(trace, name)).all()
    with pytest.raises(ValueError, match=r"'sure'.*'margin'"):
        traces.features(trace, "sure")


def synthetic(num_tokens: list[int], positions: int, **columns: Any) -> Trace:
    """A trace of made-up numbers; what is not given is uniform."""
    rows = sum(n - 1 for n in num_tokens)
    generator = np.random.default_rng(0)
    header = trace_header(positions, max(num_tokens), ("made_up",)) | columns.pop("header", {})
    arrays = {
        "workload": np.zeros(len(num_tokens), np.uint8),
        "prompt": np.arange(len(num_tokens), dtype=np.int32),
        "num_tokens": np.array(num_tokens, np.int32),
        "stopped": np.zeros(len(num_tokens), bool),
        "token": np.zeros(rows, np.int32),
        "p_y": np.ones(rows, np.float16),
        "target_entropy": np.zeros(rows, np.float16),
        "num_drafted": np.full(rows, positions, np.uint8),
        **{n: generator.random((rows, positions)).astype(np.float16) for n in ("q_y", "overlap", "p_x")},
        **{n: generator.normal(size=(rows, positions)).astype(np.float16) for n in ("logit_q_max", "logit_q_sampled")},
        "margin": np.ones((rows, positions), np.float16),
        "entropy": -np.ones((rows, positions), np.float16),
    }
    return Trace(header, **{**arrays, **columns})


# What follows from it


def test_a_draft_that_is_the_target_overlaps_fully(target: Any) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=16)
    trace = traces.record(make(target, "draft_model", target), PROMPTS, params)
    overlap, weight = traces.overlap_by_position(trace)
    assert overlap == pytest.approx(np.ones(K), abs=1e-3)
    assert weight == pytest.approx(trace.known.sum(0), rel=1e-2)
    assert np.nanmin(traces.accept_probability(trace)) > 0.99
    accepted, graded = traces.verdicts(trace)
    assert graded.sum() > 0.98 * trace.known.sum() and accepted.sum() > 0.98 * graded.sum()


def test_overlap_is_weighted_by_the_accepted_prefix() -> None:
    """Two answers by hand: weights are running products of min(1, q(y) / p(y)), and end with the answer."""
    trace = synthetic(
        [3, 2],
        2,
        p_y=np.array([0.5, 0.25, 0.5], np.float16),
        q_y=np.array([[0.25, 0.9], [0.9, 0], [0.125, 0]], np.float16),
        overlap=np.array([[0.25, 0.75], [0.5, 0], [1, 0]], np.float16),
    )
    assert traces.accept_probability(trace)[0].tolist() == [0.5, 1.0]  # .25 / .5, then .9 / .25 over 1
    overlap, weight = traces.overlap_by_position(trace)
    assert weight.tolist() == [3.0, 0.5]
    assert overlap.tolist() == pytest.approx([(0.25 + 0.5 + 1) / 3, 0.75])
    again, _ = traces.overlap_by_position(trace.take([1, 0]))
    assert again.tolist() == overlap.tolist()
    with pytest.raises(ValueError, match=r"'chat'.*'made_up'"):
        traces.overlap_by_position(trace, "chat")


@pytest.mark.parametrize("method", ["draft_model", "dflash"])
def test_three_ways_to_the_acceptance_rate_agree(method: str, wide: dict[str, Trace]) -> None:
    """At each depth, E min(1, q(y)/p(y)) over y ~ p, E min(1, p(x)/q(x)) over x ~ q, and the overlap are one number."""
    trace = wide[method]
    weight = np.nan_to_num(traces.reach(trace))
    for k in range(K):
        known = trace.known[:, k]
        w = weight[known, k] / weight[known, k].sum()
        overlap = float((trace.overlap[known, k] * w).sum())
        for probability in (traces.accept_probability(trace), traces.draft_accept_probability(trace)):
            values = probability[known, k]
            error = np.sqrt((w**2 * (values - trace.overlap[known, k]) ** 2).sum())
            assert abs(float((values * w).sum()) - overlap) < 5 * error + 1e-3


def test_workloads_split_and_resample(recorded: dict[str, Trace]) -> None:
    trace = recorded["dflash"]
    assert sorted(np.concatenate([trace.answers_of(w) for w in PROMPTS]).tolist()) == list(range(5))
    part = trace.take(trace.answers_of("two"))
    whole, _ = traces.overlap_by_position(trace, "two")
    assert traces.overlap_by_position(part)[0].tolist() == whole.tolist()
    twice = trace.take([2, 2])
    assert len(twice) == 2 * (trace.num_tokens[2] - 1)
    assert np.array_equal(twice.token[: len(twice) // 2], twice.token[len(twice) // 2 :])


def test_greedy_drafting_is_one_hot_and_keeps_its_features(target: Any, drafters: dict[str, Any]) -> None:
    """x is the argmax: q(y) is 0 or 1, the overlap is p(x), and the features are those of the softmax all the same."""
    llm = make(target, "draft_model", drafters["draft_model"], draft_sample_method="greedy")
    trace, free = (
        traces.record(m, PROMPTS, WARM, seed=3) for m in (llm, make(target, "draft_model", drafters["draft_model"]))
    )
    assert trace.greedy and not free.greedy
    assert set(np.unique(trace.q_y)) == {0, 1}
    assert np.array_equal(trace.overlap, trace.p_x)
    assert np.allclose(trace.logit_q_max, free.logit_q_max, atol=2e-3)
    assert np.allclose(trace.logit_q_sampled, trace.logit_q_max, atol=2e-3)
    hit = trace.q_y[:, 0] == 1
    assert np.allclose(trace.p_x[hit, 0], trace.p_y[hit], atol=1e-3)
    assert np.allclose(traces.draft_accept_probability(trace)[trace.known], trace.p_x[trace.known])


def test_greedy_requests(target: Any, drafters: dict[str, Any]) -> None:
    """At temperature 0 p and q are one-hot: a draft is accepted or not, and the answers are plain greedy ones."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    trace = traces.record(make(target, "dflash", drafters["dflash"]), PROMPTS, params)
    for i in range(5):
        prompt = PROMPTS[trace.header["workloads"][trace.workload[i]]][trace.prompt[i]]
        assert answer_ids(trace, i) == tiny.greedy(target, prompt, 12)[1:]
    assert trace.greedy and set(np.unique(trace.overlap)) <= {0, 1} and (trace.p_y == 1).all()
    assert (trace.logit_q_max < 40).any()  # features read the softmax at temperature 1


def test_ngram_has_no_features_but_a_record() -> None:
    """A target that counts to six over and over: once round, every draft is right, and the record says so."""
    circle = tiny.bigram(20 * torch.eye(6).roll(1, dims=1))
    llm = make(circle, "ngram", None)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    trace = traces.record(llm, {"loop": [[2], [4, 5]]}, params)
    assert trace.logit_q_max is None and trace.head is not None and trace.header["parallel"] and trace.greedy
    assert trace.num_drafted[0] == 0 and trace.num_drafted[-1] == K
    drafted = np.arange(K) < trace.num_drafted[:, None]
    assert np.array_equal(trace.q_y, drafted & trace.known) and np.array_equal(trace.overlap, trace.q_y)
    assert (trace.head[~drafted] == -40).all()
    told = 1 / (1 + np.exp(-trace.head.astype(float)))  # Laplace's rule over the verdicts of all earlier offsets
    assert told[drafted].min() == pytest.approx(0.5, abs=1e-3) and told[drafted].max() == pytest.approx(
        43 / 44, abs=0.03
    )
    with pytest.raises(ValueError, match="ngram drafter of this trace has no logits"):
        traces.features(trace)
    outcome = Replay(trace, CHEAP, Policy.adaptive(confidence="head"), num_requests=2).run()
    assert outcome.stats.num_tokens == 60 and outcome.stats.num_steps < 29


def test_offsets_are_counted_exactly_and_workloads_take_turns(target: Any, drafters: dict[str, Any]) -> None:
    llm = make(target, "dflash", drafters["dflash"])
    trace = traces.record(llm, PROMPTS, replace(WARM, ignore_eos=True), offsets=100, max_tokens=12)
    assert len(trace) == 100 and trace.num_tokens.max() == 12
    assert trace.prompt[:5].tolist() == [0, 0, 1, 1, 2] and trace.workload[:5].tolist() == [0, 1, 0, 1, 0]
    assert len(trace.num_tokens) > 5  # prompts come round again, with other answers
    assert answer_ids(trace, 0) != answer_ids(trace, 5)
    assert llm.generate([[3, 4, 5]], replace(WARM, seed=1))  # the LLM is as good as new


def test_what_cannot_be_recorded_is_refused(target: Any, drafters: dict[str, Any]) -> None:
    llm = make(target, "dflash", drafters["dflash"])
    with pytest.raises(ValueError, match="needs a drafter"):
        traces.record(LLM(target, max_num_seqs=2, max_model_len=64), PROMPTS, WARM)
    with pytest.raises(ValueError, match=r"60 tokens of answer.*lower max_tokens"):
        traces.record(llm, PROMPTS, WARM, max_tokens=60)
    with pytest.raises(ValueError, match="at least one prompt"):
        traces.record(llm, {"none": []}, WARM)
    with pytest.raises(ValueError, match="offsets is 0"):
        traces.record(llm, PROMPTS, WARM, offsets=0)
    with pytest.raises(ValueError, match="max_tokens is 1; it must be a whole number from 2"):
        traces.record(llm, PROMPTS, WARM, max_tokens=1)


# The file


def test_round_trip_and_numpy_alone(recorded: dict[str, Trace], tmp_path: Path) -> None:
    trace = recorded["dflash"]
    path = traces.save(trace, tmp_path / "sub" / "t.npz")
    assert [p.name for p in path.parent.iterdir()] == ["t.npz"]
    loaded = traces.load(path)
    assert loaded.header == trace.header
    assert loaded.arrays().keys() == trace.arrays().keys()
    for name, array in loaded.arrays().items():
        assert array.dtype == COLUMNS[name].dtype and np.array_equal(array, getattr(trace, name))
    with np.load(path, allow_pickle=False) as file:  # numpy and json are enough
        assert json.loads(str(file["header"]))["method"] == "dflash"
        assert file["q_y"].shape == (len(trace), K)


def test_thirty_thousand_offsets_fit_in_three_megabytes(tmp_path: Path) -> None:
    """Made-up numbers of full entropy are the worst case for the compression."""
    trace = synthetic([151] * 200, 7)
    generator = np.random.default_rng(1)
    noisy = {n: -abs(generator.normal(size=trace.overlap.shape)).astype(np.float16) for n in ("entropy", "stop")}
    noisy["margin"] = abs(noisy["entropy"])
    full = replace(trace, **noisy, token=generator.integers(49152, size=len(trace), dtype=np.int32))
    assert traces.save(full, tmp_path / "t.npz").stat().st_size < 3.6e6


DAMAGE = {
    "schema_version": ({"schema_version": 99}, {}, "schema version is 99"),
    "header": ({"parallel": "yes"}, {}, "'parallel' = 'yes'"),
    "missing": ({}, {"q_y": None}, "lacks the arrays q_y"),
    "type": ({}, {"overlap": np.float64}, "'overlap' is float64"),
    "range": ({}, {"p_x": 1.5}, "'p_x' holds 1.5"),
    "nan": ({}, {"margin": np.nan}, "'margin' holds nan"),
    "shape": ({"num_speculative_tokens": 5}, {}, "expected float16"),
    "lengths": ({}, {"num_tokens": 3}, "offsets, but"),
    "workload": ({"workloads": ["one"]}, {}, "workload that the header does not have"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_files_that_lie_are_refused_by_name(case: str, recorded: dict[str, Trace], tmp_path: Path) -> None:
    in_header, in_arrays, message = DAMAGE[case]
    trace = recorded["dflash"]
    arrays: dict[str, Any] = dict(trace.arrays())
    for name, change in in_arrays.items():
        if change is None:
            del arrays[name]
        elif isinstance(change, type):
            arrays[name] = arrays[name].astype(change)
        else:
            arrays[name] = np.full_like(arrays[name], change)
    path = tmp_path / "bad.npz"
    np.savez_compressed(path, header=np.array(json.dumps({**trace.header, **in_header})), **arrays)
    with pytest.raises(ValueError, match=f"bad.npz.*{message}.*avref trace"):
        traces.load(path)


def test_broken_files_are_refused_by_name(recorded: dict[str, Trace], tmp_path: Path) -> None:
    """Cut anywhere, or with a byte changed anywhere, a file is refused with one kind of error (or is still right)."""
    whole = traces.save(recorded["dflash"], tmp_path / "whole.npz").read_bytes()
    path, generator = tmp_path / "cut.npz", np.random.default_rng(0)
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut\.npz.*record it again"):
            traces.load(path)
    refused = 0
    for place in generator.integers(len(whole), size=60):
        changed = bytearray(whole)
        changed[place] ^= 0xFF
        path.write_bytes(changed)
        try:
            traces.load(path)
        except ValueError as error:
            assert "cut.npz" in str(error)
            refused += 1
    assert refused > 30
    with pytest.raises(ValueError, match=r"no trace at .*none\.npz"):
        traces.load(tmp_path / "none.npz")
    with pytest.raises(ValueError, match="no trace 'nothing' is shipped"):
        traces.load("nothing")


def test_shipped_traces_load() -> None:
    for name in traces.shipped():
        trace = traces.load(name)
        assert trace.header["target"] == "smollm2" and len(trace.header["workloads"]) == 5


# Replay


def standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values)))


@pytest.mark.parametrize("method", ["draft_model", "dflash"])
def test_replayed_fixed_lengths_equal_the_engines_own(
    method: str, target: Any, drafters: dict[str, Any], wide: dict[str, Trace]
) -> None:
    """Accepted drafts per step and position, engine against replay, within five standard errors of the two."""
    trace = wide[method]
    llm = make(target, method, drafters[method], 32)
    llm.generate(BUSY * 2, SAMPLED)
    replayed = [Replay(trace, COSTS, Policy.fixed(K), num_requests=32, seed=s).run().stats for s in range(6)]
    steps = sum(s.num_request_steps for s in replayed)
    ours = sum(s.accepted_by_position for s in replayed) / steps
    engine = llm.stats.accepted_by_position / llm.stats.num_request_steps
    error = np.sqrt(engine * (1 - engine) * (1 / llm.stats.num_request_steps + 1 / (steps / 6)))
    assert (abs(ours - engine) < 5 * error).all()
    assert replayed[0].num_tokens == 60 * 25 and replayed[0].num_requests == 60
    per_step = np.array([s.tokens_per_request_step for s in replayed])
    assert standard_error(per_step) < 0.05  # else the comparison would mean nothing


def test_replayed_acceptance_is_exact_on_a_law_worked_out_by_hand() -> None:
    """Acceptance a at every place, K = 3: accepted drafts per step are a + a^2 + a^3, at any offset."""
    rows, a = 12000, 0.625
    trace = synthetic([rows + 1], 3, q_y=np.full((rows, 3), a, np.float16))
    stats = Replay(trace, COSTS, Policy.fixed(3), num_requests=1).run().stats
    share = stats.accepted_by_position[:3] / stats.num_request_steps
    assert share == pytest.approx([a, a**2, a**3], abs=0.03)
    assert stats.graded_by_position[1] <= stats.accepted_by_position[0]
    assert stats.num_tokens == rows + 1


def test_counts_and_times_of_simple_policies() -> None:
    """No speculation, control and certain acceptance: tokens, steps and milliseconds follow from the table."""
    trace = synthetic([9, 9, 9, 9], 3, q_y=np.ones((32, 3), np.float16))
    plain = Replay(trace, COSTS, Policy.none(), num_requests=2).run()
    assert plain.stats.num_steps == 16 and plain.stats.draft_ms == 0
    assert plain.total_ms == pytest.approx(16 * float(COSTS.verify(2, 2)))
    assert (plain.stats.num_requests, plain.stats.num_tokens) == (4, 4 * 9)
    assert plain.tokens_per_s == pytest.approx(2e3 / float(COSTS.verify(2, 2)))
    control = Replay(trace, COSTS, Policy.control(), num_requests=2).run()
    assert control.stats.num_steps == 16 and control.stats.accepted_by_position.sum() == 0
    assert control.total_ms > plain.total_ms
    certain = Replay(trace, COSTS, Policy.fixed(3), num_requests=4).run()
    assert certain.stats.num_steps == 2  # 4 tokens a step, 8 to decode
    assert certain.stats.accepted_by_position.tolist() == [8, 8, 8]
    steady = Replay(trace, COSTS, Policy.fixed(3), num_requests=3).run(10)
    assert steady.stats.num_steps == 10 and steady.stats.num_request_steps == 30


def test_nothing_is_drafted_past_the_length_limit_nor_graded_behind_a_stop() -> None:
    """As the engine: at most remaining - 1 drafts; a stop token among the drafts ends the grading."""
    ones = np.ones((3, 4), np.float16)
    by_length = Replay(synthetic([4], 4, q_y=ones), COSTS, Policy.fixed(4), num_requests=1).run().stats
    assert by_length.drafted_by_position.tolist() == [1, 1, 0, 0] and by_length.num_steps == 1
    stopped = synthetic([4], 4, q_y=ones, stopped=np.ones(1, bool), header={"max_tokens": 100})
    by_stop = Replay(stopped, COSTS, Policy.fixed(4), num_requests=1).run().stats
    assert by_stop.drafted_by_position.tolist() == [1, 1, 1, 1]
    assert by_stop.graded_by_position.tolist() == by_stop.accepted_by_position.tolist() == [1, 1, 1, 0]
    assert by_stop.num_tokens == 4


@pytest.mark.parametrize(
    ("method", "rule"), [("dflash", "lookahead"), ("dflash", "stale"), ("draft_model", "lookahead")]
)
def test_replayed_adaptive_verification_equals_the_engines_own(
    method: str, rule: str, target: Any, drafters: dict[str, Any], wide: dict[str, Trace]
) -> None:
    """Verified and accepted drafts per request and step, with probes; coefficients stand still, so nothing drifts."""
    settings = {"estimator": {"refit_interval": 10**6}, "probe_interval": 16, "adaptive_drafting": False}
    settings |= {"budget_rule": rule}
    llm = make(target, method, drafters[method], 32, enable_adaptive_verification=True, **settings)
    llm.cost_table = CHEAP
    llm.generate(BUSY * 2, SAMPLED)
    runs = [Replay(wide[method], CHEAP, Policy.adaptive(**settings), num_requests=32, seed=s).run() for s in range(4)]
    for name, close in (("verified_by_position", 0.04), ("accepted_by_position", 0.2)):
        ours = sum(getattr(o.stats, name) for o in runs) / sum(o.stats.num_request_steps for o in runs)
        engine = getattr(llm.stats, name) / llm.stats.num_request_steps
        assert ours.sum() == pytest.approx(engine.sum(), rel=close), name
        assert ours == pytest.approx(engine, abs=0.05), name
    verified, drafted = runs[0].stats.verified_by_position.sum(), runs[0].stats.drafted_by_position.sum()
    assert 0 < verified < drafted


def test_the_estimator_learns_in_a_replay(wide: dict[str, Trace]) -> None:
    """It starts at the engine's cold start and ends near the acceptance rate of what it saw; runs go on from there."""
    policy = Policy.adaptive(estimator={"refit_interval": 10}, adaptive_drafting=False)
    replay = Replay(wide["draft_model"], CHEAP, policy, num_requests=32)
    first, second = replay.run(100).stats, replay.run(100).stats
    assert first.num_refits == second.num_refits == 10
    assert replay.estimator is not None
    predicted = replay.estimator.predict(torch.from_numpy(traces.features(wide["draft_model"])))
    overlap, _ = traces.overlap_by_position(wide["draft_model"])
    assert float(predicted[:, 0].mean()) == pytest.approx(overlap[0], abs=0.08)


@pytest.mark.parametrize("confidence", ["estimator", "oracle", "q_max", "threshold", "stop_head"])
def test_confidences(confidence: str, wide: dict[str, Trace]) -> None:
    more = {"threshold": 0.4} if confidence == "stop_head" else {}  # an untrained stop head says about .5
    policy = Policy.adaptive(confidence=confidence, adaptive_drafting=False, **more)
    outcome = Replay(wide["dflash"], CHEAP, policy, num_requests=16).run(60)
    stats = outcome.stats
    assert 0 < stats.verified_by_position.sum() < stats.drafted_by_position.sum()
    assert (stats.accepted_by_position <= stats.verified_by_position).all()
    assert outcome.tokens_per_s > 0


def test_the_oracle_beats_a_constant_and_adaptive_drafting_runs(wide: dict[str, Trace]) -> None:
    """Where drafts are dear, knowing the overlap pays; and a policy may choose to draft nothing."""
    dear = CostTable(np.linspace(0, 20, 33), np.r_[1.0, 1.0 + np.arange(400)])

    def speed(policy: Policy) -> float:
        return Replay(wide["draft_model"], dear, policy, num_requests=16).run(300).tokens_per_s

    oracle = speed(Policy.adaptive(confidence="oracle", adaptive_drafting=True))
    assert oracle > 0.9 * speed(Policy.none()) and oracle > 1.1 * speed(Policy.fixed(K))


def test_behind_the_first_rejection_only_token_by_token_blocks_are_redrawn() -> None:
    """Row i's features all are i: a parallel block reads its own row everywhere, the other only up to the rejection."""
    rows = 60
    feature = np.repeat(np.arange(rows)[:, None], 4, 1).astype(np.float16) / 2
    for parallel in (True, False):
        trace = synthetic([rows + 1], 4, logit_q_max=feature, header={"parallel": parallel})
        replay = Replay(trace, COSTS, Policy.adaptive(), num_requests=4)
        at, rejection = np.array([3, 9, 20, 31]), np.array([0, 1, 4, 2])
        read = replay._read(at, rejection, np.full(4, 30))
        own = read == feature[at]
        expected = np.ones((4, 4), bool) if parallel else np.arange(4) <= rejection[:, None]
        assert (own[expected]).all()
        assert parallel or own[~expected].mean() < 0.5
        for row in read:  # what is foreign belongs together
            assert len(set(row.tolist())) <= 2


def test_policies_that_a_trace_cannot_judge_are_refused(wide: dict[str, Trace]) -> None:
    with pytest.raises(ValueError, match=r"'logit_q_sampled'.*'margin'"):
        Policy.adaptive(feature="logit_q_sampled")
    with pytest.raises(ValueError, match=r"'head'.*dflash drafter has none"):
        Replay(wide["dflash"], COSTS, Policy.adaptive(confidence="head"), num_requests=2)
    with pytest.raises(ValueError, match=r"depth is 5.*blocks of 4"):
        Replay(wide["dflash"], COSTS, Policy.fixed(5), num_requests=2)
    with pytest.raises(ValueError, match="covers 1 to 64"):
        Replay(wide["dflash"], COSTS, Policy.fixed(2), num_requests=65)
    with pytest.raises(ValueError, match=r"answers is .*at least one index"):
        Replay(wide["dflash"], COSTS, Policy.fixed(2), num_requests=2).run(answers=[])


# The command


def test_command_writes_a_trace(
    target: Any, drafters: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from avref import workloads

    def tiny_llm(model: str, config: dict[str, Any], **settings: Any) -> LLM:
        made = LLM(target, {**config, "model": drafters["dflash"]}, max_num_seqs=4, max_model_len=64)
        made.prompt_ids = lambda texts: [[3 + len(t) % 40, 9] for t in texts]
        return made

    monkeypatch.setattr("avref.LLM", tiny_llm)
    monkeypatch.setattr(workloads, "NAMES", ("math", "chat"))
    path = tmp_path / "t.npz"
    arguments = ["trace", "--num-speculative-tokens", "4", "--offsets", "30", "--max-tokens", "12", "--greedy"]
    assert cli.main([*arguments, "--output", str(path)]) == 0
    trace = traces.load(path)
    assert len(trace) == 30 and trace.header["draft_sample_method"] == "greedy"
    assert trace.header["workloads"] == ["math", "chat"]
    assert "30 offsets" in capsys.readouterr().out
