"""How often a decode step makes the host wait for the device, and what it sends there: what decides speed on a GPU.

No GPU is needed to count. A dispatch mode sees every read of a scalar (`bool`, `int`, `item`) and every operation whose
result's size depends on data (`nonzero`, a boolean index), whichever line of Python or of a model asks for it; a
function mode sees `tolist` and copies to the host. All of these would wait for a GPU. The numbers are those that the
docstrings of `avref.engine` and `avref.sampling` state; a new wait makes a test fail.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import tiny
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from avref import models, sampling
from avref.config import SamplingParams
from avref.drafters.eagle import EagleModel
from avref.drafters.layers import DrafterConfig
from avref.layout import Layout, send
from avref.llm import LLM
from avref.selfcheck import CUDA_ROWS, cuda_rows
from avref.speed import Row
from avref.stats import Stopwatch

READS = {"item", "_local_scalar_dense", "is_nonzero", "equal"}
SIZED_BY_DATA = {"nonzero", "masked_select", "_unique2", "unique_dim", "repeat_interleave"}


class Dispatched(TorchDispatchMode):
    def __init__(self, waits: Counter[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        sized = name in SIZED_BY_DATA and not kwargs.get("output_size") and func._overloadname != "self_int"
        by_mask = name.startswith("index") and any(
            isinstance(i, torch.Tensor) and i.dtype == torch.bool for x in args[1:2] if isinstance(x, list) for i in x
        )
        if name in READS or sized or by_mask:
            self.waits["scalar" if name in READS else "size"] += 1
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    def __init__(self, waits: Counter[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        named = kwargs or {}
        ours = "/transformers/" not in sys._getframe(1).f_code.co_filename  # whose tensors are on the device already
        moves = ours and name == "to" and any(isinstance(x, torch.device) for x in (*args[1:], named.get("device")))
        made_there = name == "tensor" and named.get("device", "cpu") != "cpu"  # from pageable memory: the stream waits
        if name in ("tolist", "cpu") or made_there or (moves and not named.get("non_blocking")):
            self.waits["copy"] += 1
        if moves and named.get("non_blocking"):
            self.waits["sent"] += 1
        return func(*args, **(kwargs or {}))


def count(function: Any) -> Counter[str]:
    """What `function` makes the host wait for: scalars, sizes, copies to the host; and tensors `sent` to the device."""
    waits: Counter[str] = Counter()
    with torch.inference_mode(), Called(waits), Dispatched(waits):
        function()
    return waits


def test_the_counter_counts() -> None:
    x = torch.tensor([0.0, 1.0, 2.0])
    for wait, kind in (
        (lambda: bool((x > 0).any()), "scalar"),
        (lambda: int(x[1]), "scalar"),
        (lambda: x.max().item(), "scalar"),
        (lambda: x.nonzero(), "size"),
        (lambda: x[x > 0], "size"),
        (lambda: x.tolist(), "copy"),
        (lambda: x.cpu(), "copy"),
        (lambda: torch.tensor([1, 2], device=x.device), "copy"),
        (lambda: x.to(x.device), "copy"),
        (lambda: x.to(x.device, non_blocking=True), "sent"),
        (lambda: send([1, 2], x.device), "sent"),
    ):
        assert count(wait) == {kind: 1}, kind
    assert count(lambda: (x + 1).cumsum(0)[:, None].masked_fill(x > 0, 0)) == {}
    assert count(lambda: x.repeat_interleave(3)) == count(lambda: torch.tensor([1, 2], device="cpu")) == {}


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.sharpen(tiny.llama(), 1.5)


def drafter(target: Any, method: str) -> Any:
    if method == "draft_model":
        return tiny.near(target, 0.1)
    if method == "dflash":
        return tiny.dflash(target)
    config = DrafterConfig(
        hidden_size=32, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, depth=8,
        vocab_size=tiny.VOCAB, target_layers=(1, 2),
    )  # fmt: skip
    made = EagleModel(config)
    made.vocab_ids.copy_(torch.arange(tiny.VOCAB))
    return made


def a_step(
    target: Any, method: str | None, params: SamplingParams, k: int = 3, override: int | None = None, **config: Any
) -> Counter[str]:
    """Waits of one decode step of three requests, none of which enters or ends; `override` drafts are verified."""
    settings = None
    if method is not None:
        settings = {"method": method, "model": drafter(target, method), "num_speculative_tokens": k, **config}
    llm = LLM(target, settings, max_num_seqs=3, max_model_len=128, cost_table=tiny.flat_costs())
    for request in llm._requests([[3, 4, 5], [7], [9, 8]], params):
        llm.engine.add(request)
    for _ in range(3):
        llm.engine.step()
    if override is not None:
        llm.engine.override = lambda capacity: override
    before = llm.engine.stats.verified_by_position.copy()
    waits = count(llm.engine.decode)
    if method is not None:
        assert (llm.engine.stats.verified_by_position > before).any()  # it did verify drafts
    return waits


def total(waits: Counter[str]) -> int:
    """Waits of every kind; sending something is none."""
    return sum(n for kind, n in waits.items() if kind != "sent")


SAMPLED = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True)
NUCLEUS = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=60, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


@pytest.mark.parametrize(("params", "waits"), [(SAMPLED, 4), (GREEDY, 4), (NUCLEUS, 5)])
def test_a_plain_step(params: SamplingParams, waits: int, target: Any) -> None:
    """The settings, NaN logits, the mass drawn from, the tokens; with top-p, where the nucleus ends."""
    counted = a_step(target, None, params)
    assert (total(counted), counted["sent"]) == (waits, 7)


def test_a_layout_is_sent_in_one_piece() -> None:
    assert count(lambda: Layout([3, 0, 7], [2, 4, 1], torch.device("cpu"))) == {"sent": 1}


@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_each_draft_position_waits_three_times(method: str, target: Any) -> None:
    """Settings, NaN logits, the mass drawn from. What is verified is the same, so only drafting differs."""

    def waits(k: int) -> int:
        made = a_step(target, method, GREEDY, k, override=1)
        return total(made)

    assert waits(4) - waits(2) == 2 * 3


def test_a_parallel_drafter_waits_as_often_at_any_depth(target: Any) -> None:
    assert total(a_step(target, "dflash", GREEDY, 6, override=1)) == total(
        a_step(target, "dflash", GREEDY, 2, override=1)
    )


@pytest.mark.parametrize("method", ["dflash", "eagle"])
def test_adaptive_verification_waits_nine_times_more(method: str, target: Any) -> None:
    """Feature, estimator, survival and allocation; six of the nine read what lies on the host already."""
    adaptive = {"enable_adaptive_verification": True, "adaptive_drafting": False}
    plain = total(a_step(target, method, GREEDY, override=1))
    assert total(a_step(target, method, GREEDY, override=1, **adaptive)) - plain <= 9


@pytest.mark.parametrize("drafts", [1, 2, 5])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_acceptance_waits_a_few_times_per_position_reached(drafts: int, top_p: float) -> None:
    """Exactly 7 + 4 d when d drafts of each request are accepted untruncated; at most 11 + 7 d in any case."""
    generator = torch.Generator().manual_seed(drafts)
    rows, vocabulary = 3, 40
    logits = torch.randn(rows * (drafts + 1), vocabulary, generator=generator)
    p = logits.softmax(-1).view(rows, drafts + 1, vocabulary)[:, :drafts]
    tokens = p.argmax(-1)
    ones = torch.ones(rows)

    def verify(q: torch.Tensor) -> Counter[str]:
        q_drawn = q.gather(-1, tokens[..., None])[..., 0]
        uniforms = torch.full((rows, drafts), 0.5), torch.full((rows,), 0.5)
        settings = ones, torch.zeros(rows, dtype=torch.long), top_p * ones
        counts = torch.full((rows,), drafts)
        return count(lambda: sampling.verify(logits, counts, tokens, q, q_drawn, *uniforms, *settings))

    if top_p == 1:
        assert total(verify(p.contiguous())) == 7 + 4 * drafts
    for seed in range(5):
        other = torch.randn(p.shape, generator=generator.manual_seed(seed)).softmax(-1)
        assert total(verify(other)) <= 11 + 7 * drafts
    assert total(verify(torch.zeros_like(p).scatter_(-1, tokens[..., None], 1.0))) <= 11 + 7 * drafts  # one-hot q


# What else a GPU needs, without one


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [((7, 0), torch.float16), ((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)],
)
def test_half_precision_by_compute_capability(
    capability: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A T4 (7.5) has no bfloat16."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert models.choose_dtype("auto", torch.device("cuda")) == dtype
    assert models.choose_dtype("float32", torch.device("cuda")) == torch.float32


@pytest.mark.parametrize(("matrix", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_cpu_takes_bfloat16_only_with_matrix_instructions(
    matrix: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: matrix, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True, raising=False)  # slower than float32
    assert models.choose_dtype("auto", torch.device("cpu")) == dtype


def test_device_map_reaches_hugging_face(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded for real, and left where Hugging Face put it."""
    from transformers import LlamaForCausalLM

    model = tiny.llama()
    model.save_pretrained(tmp_path)
    seen = {}
    monkeypatch.setattr(LlamaForCausalLM, "to", lambda self, *a, **k: pytest.fail("moved off its device map"))
    real = models._from_pretrained
    monkeypatch.setattr(models, "_from_pretrained", lambda *a, **k: seen.update(k) or real(*a, **k))
    loaded = models.load_model(str(tmp_path), torch.device("cpu"), torch.float32, device_map="cpu")
    assert seen["device_map"] == "cpu" and seen["use_safetensors"]
    monkeypatch.undo()
    llm = LLM(loaded, max_num_seqs=1, max_model_len=64)
    out = llm.generate([[3, 4, 5]], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    assert out[0].outputs[0].token_ids == tiny.greedy(model, [3, 4, 5], 8)


def test_a_gpu_is_timed_with_events_and_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waited = iter(range(100)), []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: Any) -> None:
            self.at, self.stream = next(clock), stream

        def elapsed_time(self, end: Any) -> float:
            return float(end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    watch = Stopwatch(torch.device("cuda:1"))
    watch.start()
    watch.lap("draft")
    watch.lap("verify")
    assert waited == [] and watch._last.stream == "stream of cuda:1"
    assert (watch.read()["draft"], watch.read()["verify"]) == (1, 1)
    assert waited == [torch.device("cuda:1")]


def test_selfcheck_has_every_cuda_row_and_leaves_them_empty_on_a_cpu() -> None:
    measured = [Row(f"{start} and so on", 0.5, 1.0) for start in CUDA_ROWS.values()]
    assert list(CUDA_ROWS) == ["packed", "ragged", "cost ratio", "sampling", "whole step"]
    assert [(r.name, r.value) for r in cuda_rows(measured, False)] == [(f"CUDA: {n}", None) for n in CUDA_ROWS]
    assert [(r.name, r.value, r.bar) for r in cuda_rows(measured, True)] == [
        (f"CUDA: {n}", 0.5, 1.0) for n in CUDA_ROWS
    ]
