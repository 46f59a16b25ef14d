"""The speed rows of the self check: the packed forward, sampling, the method on the host, and the whole step.

Every row is a ratio of medians of interleaved runs in one process (whole steps: the median of ratios within a repeat),
or a time, beside its bar.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from avref import features, profiling, sampling, workloads
from avref.config import SamplingParams
from avref.cost_table import CostTable
from avref.estimator import OnlineAcceptanceEstimator
from avref.layout import Layout
from avref.llm import LLM
from avref.packed import PackedModel, plain_attention
from avref.pruning import SurvivalProfile, allocate, choose_budget, survival

CONTEXT = 256


@dataclass(frozen=True)
class Row:
    """One figure: `value` against `bar` (`at_most` or at least); `value` None means that it does not apply here."""

    name: str
    value: float | None
    bar: float | None
    at_most: bool = True
    unit: str = "x"

    @property
    def ok(self) -> bool | None:
        if self.value is None or self.bar is None:
            return None
        return self.value <= self.bar if self.at_most else self.value >= self.bar


def interleaved(functions: Sequence[Callable[[], Any]], repeats: int, device: torch.device) -> list[float]:
    """Median milliseconds of each function, run in turn `repeats` times after one warm-up."""
    times: list[list[float]] = [[] for _ in functions]
    for repeat in range(repeats + 1):
        for function, own in zip(functions, times, strict=True):
            _synchronise(device)
            began = time.perf_counter()
            function()
            _synchronise(device)
            if repeat:
                own.append((time.perf_counter() - began) * 1e3)
    return [statistics.median(t) for t in times]


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- fast: the packed forward ----
class _Contexts:
    """R contexts of `CONTEXT` random tokens, in our cache and in a Hugging Face cache."""

    def __init__(self, llm: LLM, num_requests: int) -> None:
        self.llm, self.requests = llm, num_requests
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(llm.vocab_size, (num_requests, CONTEXT + 8), generator=generator).to(llm.device)
        self.packed = PackedModel(llm.model, num_requests, CONTEXT + 8)
        prompts = self.ids[:, :CONTEXT]
        for first in range(0, num_requests, 8):
            rows = prompts[first : first + 8]
            layout = Layout([0] * len(rows), [CONTEXT] * len(rows), llm.device, first)
            self.packed.forward(rows.flatten(), layout, layout.last)
        with plain_attention(llm.model), torch.inference_mode():
            self.cache = llm.model(input_ids=prompts, use_cache=True, logits_to_keep=1).past_key_values

    def ours(self, counts: Sequence[int]) -> Callable[[], Any]:
        ids = torch.cat([self.ids[r, CONTEXT : CONTEXT + n] for r, n in enumerate(counts)])
        return lambda: self.packed.forward(ids, Layout([CONTEXT] * self.requests, counts, self.llm.device))

    def theirs(self, count: int) -> Callable[[], Any]:
        ids = self.ids[:, CONTEXT : CONTEXT + count]

        def forward() -> None:
            with torch.inference_mode():
                self.llm.model(input_ids=ids, past_key_values=self.cache, use_cache=True)

        return forward

    def compare(self, count: int, repeats: int) -> tuple[float, float]:
        """Median milliseconds (ours, Hugging Face's) of a forward with `count` tokens per request."""
        ours, theirs = self.ours([count] * self.requests), self.theirs(count)
        times: tuple[list[float], list[float]] = ([], [])
        for repeat in range(repeats + 1):
            one = interleaved([ours], 1, self.llm.device)[0] if repeat == 0 else _once(ours, self.llm.device)
            with plain_attention(self.llm.model):
                other = _once(theirs, self.llm.device)
                _crop(self.cache, count)
            if repeat:
                times[0].append(one)
                times[1].append(other)
        return statistics.median(times[0]), statistics.median(times[1])


def _once(function: Callable[[], Any], device: torch.device) -> float:
    _synchronise(device)
    began = time.perf_counter()
    function()
    _synchronise(device)
    return (time.perf_counter() - began) * 1e3


def _crop(cache: Any, count: int) -> None:
    """Remove the last `count` entries, a negative number in all of transformers 5; 0 means all of them in 5.0."""
    if count:
        cache.crop(-count)


def forward_rows(llm: LLM) -> Iterator[Row]:
    """Packed decode forward against Hugging Face's batched one, ragged against uniform, eight tokens each over one."""
    bars = {1: 1.05, 4: 1.0, 16: 0.8, 64: 0.6}
    llm.model.set_attn_implementation("avref")
    for num_requests in (1, 4, 16, 64):
        contexts = _Contexts(llm, num_requests)
        for k in (0, 1, 3, 7):
            ours, theirs = contexts.compare(k + 1, 7 if num_requests <= 16 else 5)
            bar = 1.0 if num_requests == 64 and k == 7 else bars[num_requests]
            yield Row(f"packed forward / batched forward, {num_requests} requests x {k + 1} tokens", ours / theirs, bar)
        if num_requests == 16:
            llm.model.set_attn_implementation("avref")
            ragged, uniform = interleaved(
                [contexts.ours([1, 2, 3, 4, 5, 6, 7, 8] * 2), contexts.ours([4, 5] * 8)], 9, llm.device
            )
            yield Row("ragged (1 to 8 tokens) / uniform (4 or 5), 16 requests, 72 tokens", ragged / uniform, 1.2)
        del contexts
        gc.collect()
    contexts = _Contexts(llm, 32)
    llm.model.set_attn_implementation("avref")
    eight, one = interleaved([contexts.ours([8] * 32), contexts.ours([1] * 32)], 7, llm.device)
    yield Row("32 requests x 8 tokens / x 1 token", eight / one, 2.5, at_most=False)


# ---- fast: sampling and the method ----
def sampling_rows(llm: LLM) -> Iterator[Row]:
    """Acceptance with top-p at R = 32, K = 7 against the forward of the same step; the feature against a softmax."""
    contexts = _Contexts(llm, 32)
    llm.model.set_attn_implementation("avref")
    forward = contexts.ours([8] * 32)
    logits, _ = forward()
    p = torch.softmax(logits.float(), -1).view(32, 8, -1)
    generator = torch.Generator(llm.device).manual_seed(0)
    draft_ids = torch.arange(8192, device=llm.device)
    q = p[:, :7, :8192].contiguous()
    q = q + 0.2 * torch.rand(q.shape, generator=generator, device=llm.device) * q.mean()
    q = q / q.sum(-1, keepdim=True)
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(32, 7)
    q_drawn = q.gather(-1, tokens[..., None])[..., 0]
    u = torch.rand(32, 8, generator=generator, device=llm.device)
    ones = torch.ones(32, device=llm.device)
    arguments = (
        torch.full((32,), 7, device=llm.device),
        tokens,
        q,
        q_drawn,
        u[:, :7],
        u[:, 7],
        ones,
        torch.zeros_like(ones, dtype=torch.long),
        0.95 * ones,
    )
    step, accept = interleaved(
        [forward, lambda: sampling.verify(logits, *arguments, vocab_ids=draft_ids)], 7, llm.device
    )
    yield Row("acceptance with top-p 0.95 / forward, 32 requests, K = 7", accept / step, 0.2)
    rows = logits.float()
    out = torch.empty_like(rows)  # fresh memory would cost the softmax more than its arithmetic
    both = [lambda: features.logit_q_max(rows), lambda: torch.softmax(rows, -1, out=out)]
    feature, softmax = interleaved(both, 9, llm.device)
    yield Row(f"feature / softmax over {rows.shape[0]} x {rows.shape[1]} logits", feature / softmax, 1.5)


def method_rows(llm: LLM) -> Iterator[Row]:
    """Host time of predict, survival, budget, allocation and observe at R = 64, K = 7, and of a refit."""
    generator = torch.Generator().manual_seed(0)
    f = (2 * torch.randn(64, 7, generator=generator)).to(llm.device)
    estimator = OnlineAcceptanceEstimator(7, device=llm.device)
    curve = [(n, 20 + 0.6 * n) for n in (1, 8, 64, 128, 256, 512)]
    table = CostTable.from_curves([(1, 3.0), (64, 20.0)], curve, max_requests=64, max_tokens=512)
    s = survival(estimator.predict(f)).double().cpu()
    profile = SurvivalProfile()
    profile.update(s)
    accepted, verified = torch.full((64,), 2, device=llm.device), torch.full((64,), 4, device=llm.device)

    def observe_and_refit() -> None:
        estimator.observe(f, accepted, verified)
        estimator.refit()

    parts: dict[str, Callable[[], Any]] = {
        "predict": lambda: estimator.predict(f),
        "survival": lambda: survival(f),
        "budget": lambda: choose_budget(s, table, 64, rule="lookahead", profile=profile.predict(448)),
        "allocate": lambda: allocate(s, 150),
        "observe": lambda: estimator.observe(f, accepted, verified),
        "observe and refit": observe_and_refit,
    }
    for name, ms in zip(parts, interleaved(list(parts.values()), 51, llm.device), strict=True):
        yield Row(f"{name}, 64 requests, K = 7", ms, 1.0, unit="ms")


def generate_rows(llm: LLM) -> Iterator[Row]:
    """Plain decoding here against `model.generate` on the same prompts, sampling without top-p, 32 new tokens each."""
    for count, bar in ((16, 1.3), (64, 2.0)):
        prompts = llm.prompt_ids(workloads.mix(count))
        prompts = [p[-256:] for p in prompts]
        longest = max(map(len, prompts))
        params = SamplingParams(temperature=1.0, max_tokens=32, ignore_eos=True, seed=0)
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=llm.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=llm.device)

        def theirs(ids: Tensor = ids, mask: Tensor = mask) -> None:
            with plain_attention(llm.model), torch.inference_mode():
                llm.model.generate(
                    ids,
                    attention_mask=mask,
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    min_new_tokens=32,
                    max_new_tokens=32,
                    pad_token_id=0,
                )

        ours_ms, theirs_ms = interleaved([lambda: llm.generate(prompts, params), theirs], 2, llm.device)  # noqa: B023
        yield Row(
            f"plain decoding here / model.generate, {count} requests, tokens per second",
            theirs_ms / ours_ms,
            bar,
            at_most=False,
        )


def import_row(llm: LLM) -> Iterator[Row]:
    """Seconds of `import avref` beyond importing torch and transformers."""

    def seconds(code: str) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, stdin=subprocess.DEVNULL)
        return time.perf_counter() - began

    base = "import torch, transformers; from transformers import AutoModelForCausalLM, AutoTokenizer"
    pairs = [(seconds(base + "; import avref"), seconds(base)) for _ in range(3)]
    yield Row("import avref beyond torch and transformers", statistics.median(a - b for a, b in pairs), 1.0, unit="s")


# ---- the drafter and the whole step ----
def speculative_rows(base: LLM, method: str, drafter: Any) -> Iterator[Row]:
    """The drafter's overlap on held-out samples, and adaptive verification against every other arm."""
    from avref import quickstart
    from avref.arms import warm_up

    if method == "dflash":
        from avref.train.evaluate import held_out_overlap

        overlap = held_out_overlap(base, method, drafter, per_workload=8, max_tokens=64)["all"]
        for position, bar in ((1, 0.45), (2, 0.34), (4, 0.25), (7, 0.16)):
            if position <= len(overlap):
                yield Row(
                    f"drafter overlap at position {position}, top-p 0.95, held-out samples",
                    overlap[position - 1],
                    bar,
                    at_most=False,
                    unit="",
                )
    arms = quickstart.make_arms(base, method, drafter, 32)
    names = list(arms)
    *_, full, own = names  # the longest fixed length, and adaptive
    adaptive = arms[own]
    adaptive.cost_table = profiling.load_or_profile(adaptive)
    warm = base.prompt_ids(workloads.load("warmup"))
    warm_up(adaptive, warm, 48, loads=(1, 8, 32))
    control = LLM(
        base.model,
        {"method": method, "model": drafter, "num_speculative_tokens": adaptive.engine.num_positions},
        base.tokenizer,
        max_num_seqs=32,
        max_model_len=512,
    )
    control.engine.override = lambda capacity: 0
    for concurrency, repeats in ((1, 5), (8, 3)):
        speeds = _speeds(base, arms, names, concurrency, repeats)
        best = max(names[:-1], key=lambda n: statistics.median(speeds[n]))
        ratios = [a / b for a, b in zip(speeds[own], speeds[best], strict=True)]
        yield Row(
            f"adaptive / best fixed choice ({best}), {concurrency} requests",
            statistics.median(ratios),
            0.97,
            at_most=False,
        )
    arms["control"] = control
    speeds = _speeds(base, arms, [full, "control", own], 32, 3)
    bars: dict[str, float | None] = {full: 1.5, "control": None}
    for other, bar32 in bars.items():
        ratio = statistics.median(a / b for a, b in zip(speeds[own], speeds[other], strict=True))
        name = "draft everything, verify nothing" if other == "control" else other
        yield Row(f"adaptive / {name}, 32 requests", ratio, bar32, at_most=False)


def _speeds(
    base: LLM, arms: dict[str, LLM], names: Sequence[str], concurrency: int, repeats: int
) -> dict[str, list[float]]:
    """Tokens per second of each arm, taking turns step by step; every repeat has prompts of its own."""
    from avref.arms import params, race, rotate

    prompts = base.prompt_ids(workloads.mix())
    count = max(5, concurrency + concurrency // 2)
    speeds: dict[str, list[float]] = {n: [] for n in names}
    for repeat in range(repeats):
        chosen = [prompts[(100 + repeat * count + i) % len(prompts)] for i in range(count)]
        own = params(count, 48, 7000 * (repeat + 1))
        for name, run in race({n: arms[n] for n in rotate(names, repeat)}, chosen, own, concurrency).items():
            speeds[name].append(run.tokens_per_s)
    return speeds
