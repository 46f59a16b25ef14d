"""Bad input is refused at once, with what was seen and what to give; and some that looks bad is served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from test_traces import make, target  # noqa: F401  # a fixture

from avref import LLM, CostTable, SpeculativeConfig, cli, models, profiling
from avref.evidence import hardware, simulate, traces
from avref.evidence.bench import bench
from avref.evidence.replay import Policy, Replay
from avref.evidence.trace_file import Trace
from avref.train import command
from avref.vllm_args import parse_settings, vllm_args

ADAPTIVE = {"method": "dflash", "enable_adaptive_verification": True}
FIXED = {"method": "dflash"}


@pytest.fixture(scope="module")
def trace() -> Trace:
    return traces.load("ngram").take(range(6))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target of 600 positions, with a tokenizer, as the command line takes it."""
    path = tmp_path_factory.mktemp("target")
    tiny.llama(max_position_embeddings=600).save_pretrained(path)
    tiny.tokenizer([f"w{i}" for i in range(tiny.VOCAB)]).save_pretrained(path)
    return str(path)


# ---- settings ----
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(({**ADAPTIVE, "estimator": {"damping": bad}}, "damping is") for bad in ("x", None, -1, float("nan"), True)),
        ({**ADAPTIVE, "estimator": {"ridge": "x"}}, "ridge is 'x'"),
        ({**ADAPTIVE, "estimator": {"slope": None}}, "slope is None; expected a finite number, at least 0"),
        ({**ADAPTIVE, "estimator": {"slope": "a"}}, "slope is 'a'"),
        ({**ADAPTIVE, "estimator": {"intercept": {}}}, "intercept is {}"),
        ({**ADAPTIVE, "estimator": {"intercept": [[1], [1, 2]]}}, "intercept is"),
        ({**ADAPTIVE, "estimator": {"shared_slope": "no"}}, "shared_slope is 'no'; expected True or False"),
        ({**ADAPTIVE, "estimator": {"device": "meta"}}, "device 'meta' cannot be used"),
        ({**ADAPTIVE, "estimator": {"device": "foo"}}, "device is 'foo'"),
        ({**FIXED, "estimator": {"damping": -1}}, "damping is -1"),
        ({**FIXED, "estimator": {"damping": 1.0}}, "not read by a fixed K; set enable_adaptive_verification"),
        ({**FIXED, "feature": "margin"}, "feature='margin' is not read"),
        ({**FIXED, "budget_rule": "stale"}, "budget_rule='stale' is not read"),
        ({**FIXED, "probe_interval": 3}, "probe_interval=3 is not read"),
        ({**FIXED, "confidence": "head"}, "confidence='head' is not read"),
        *(({**FIXED, "model": bad}, r"\['model'\] is") for bad in (5, [1], {}, "", " ", True)),
        ({"method": "ngram", "model": "x"}, "takes no model"),
    ],
)
def test_settings_are_refused_alike_everywhere(settings: dict[str, Any], message: str) -> None:
    for take in (SpeculativeConfig.from_dict, lambda s: vllm_args(s, "org/target")):
        with pytest.raises(ValueError, match=message):
            take(settings)


@pytest.mark.parametrize(
    ("settings", "flags", "message"),
    [
        ({**ADAPTIVE, "confidence": "head"}, {}, "a confidence of the drafter's own"),
        ({**ADAPTIVE, "method": "ngram", "confidence": "estimator"}, {}, "draft logits"),
        ({**ADAPTIVE, "method": "ngram", "feature": "margin"}, {}, "feature='margin' is not read"),
        (FIXED, {"max_num_seqs": 0}, "max_num_seqs is 0"),
        (FIXED, {"max_model_len": -5}, "max_model_len is -5"),
        (FIXED, {"dtype": "foo"}, "dtype is 'foo'"),
        (FIXED, {"dtype": ""}, "dtype is ''"),
    ],
)
def test_vllm_args(settings: dict[str, Any], flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vllm_args(settings, "org/target", **flags)


def test_a_key_given_twice() -> None:
    with pytest.raises(ValueError, match="'a' twice"):
        parse_settings('{"a": 1, "b": 2, "a": 3}')


# ---- LLM ----
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": None}, "model is NoneType"),
        ({"model": 5}, "model is int"),
        ({"model": torch.nn.Linear(1, 1)}, "model is Linear"),
        (
            {"speculative_config": {"method": "draft_model", "model": torch.nn.Linear(1, 1)}},
            "is Linear; give a causal LM",
        ),
        ({"tokenizer": "x"}, "tokenizer is 'x'"),
        ({"dtype": "float32"}, "dtype given with a loaded model"),
        ({"device": "cpu"}, "device given with a loaded model"),
        *(({"seed": bad}, "seed is") for bad in ("x", None, 0.5, -1)),
        ({"max_num_seqs": 10**14}, "max_num_seqs is 100000000000000; .* from 1 to 65536"),
        *(({"cost_table": bad}, "cost_table is") for bad in ({}, "measured")),
        ({"cost_table": CostTable(np.ones((3, 3)), np.ones(99))}, "covers 2 drafts, num_speculative_tokens is 4"),
    ],
)
def test_llm(target: Any, arguments: dict[str, Any], message: str) -> None:  # noqa: F811
    config = {"method": "ngram", "num_speculative_tokens": 4, "enable_adaptive_verification": True}
    given = {"model": target, "speculative_config": config, "max_num_seqs": 2, **arguments}
    with pytest.raises(ValueError, match=message):
        LLM(**given)


def test_a_table_that_is_none_is_refused_later_too(target: Any) -> None:  # noqa: F811
    llm = make(target, "ngram", None, enable_adaptive_verification=True)
    with pytest.raises(ValueError, match="cost_table is 'x'"):
        llm.cost_table = "x"  # type: ignore[assignment]


def test_a_short_target_is_served_without_a_word_about_its_length() -> None:
    assert LLM(tiny.llama(max_position_embeddings=100), max_num_seqs=1).max_model_len == 100
    assert LLM(tiny.llama(max_position_embeddings=2000), max_num_seqs=1).max_model_len == 1024


def test_profiling_says_which_contexts_fit(target: Any) -> None:  # noqa: F811
    for context in (-5, 0, 60):
        with pytest.raises(ValueError, match=f"context is {context}; .* from 1 to 44"):
            profiling.profile(make(target, "ngram", None), context=context)


# ---- evidence ----
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: hardware.gpu_roofline("H100", "SmolLM2-135M", "SmolLM2-135M", max_requests=100_000), "up to 4,096"),
        (lambda t: Policy.adaptive(threshold=float("nan")), "threshold is nan"),
        (lambda t: Policy.adaptive(threshold=0.5), "confidence with a threshold is 'estimator'"),
        (lambda t: Policy.adaptive(probe_interval=-1), "probe_interval is -1"),
        (lambda t: Policy.adaptive(adaptive_drafting="no"), "adaptive_drafting is 'no'"),
        (lambda t: Policy.adaptive(estimator={"x": 1}), "an estimator key is 'x'"),
        (lambda t: Policy.adaptive(estimator=None), "estimator is None"),
        *((lambda t, k=k: Policy.fixed(k), f"depth is {k!r}") for k in ("x", 1.5, -1)),
        (lambda t: replay(t).run(0), "num_steps is 0"),
        (lambda t: replay(t).run(float("nan")), "num_steps is nan"),  # type: ignore[arg-type]
        (lambda t: replay(t, 1.5), "num_requests is 1.5"),
        *((lambda t, a=a: replay(t).run(answers=a), "answers is") for a in ([9999], [-1], [0.5], [])),
        *((lambda t, a=a: t.take(a), "answers is") for a in ([1.7], [True, False], [-1], [9999])),
        (lambda t: simulate.simulate(t, tiny.flat_costs(), effort=0), "effort is 0"),
        (lambda t: simulate.simulate(t, tiny.flat_costs(), [1.5]), "a number of requests is 1.5"),  # type: ignore[list-item]
        (lambda t: replace(t, p_y=np.zeros_like(t.p_y)), "'p_y' holds 0"),
        *(
            (lambda t, k=k, v=v: replace(t, header={**t.header, k: v}), k)
            for k, v in (
                ("temperature", -5.0),
                ("temperature", float("nan")),
                ("top_p", 7.0),
                ("max_tokens", 0),
                ("draft_sample_method", "foo"),
                ("method", "foo"),
                ("workloads", [1, 2, 3, 4, 5]),
                ("workloads", ["a"] * 5),
            )
        ),
    ],
)
def test_evidence(trace: Trace, call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(trace)


def replay(trace: Trace, num_requests: Any = 2) -> Replay:
    return Replay(trace, tiny.flat_costs(), Policy.fixed(2), num_requests=num_requests)


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ({"a": ["w5"]}, {"max_tokens": 1}, "max_tokens is 1"),
        ({"a": [None]}, {}, "prompt 0 is None"),
        ({"a": "w5"}, {}, "prompts maps"),
        ([[5]], {}, "prompts maps"),
        ({"a": [[5]]}, {"params": {}}, "params is {}"),
    ],
)
def test_recording(target: Any, prompts: Any, settings: dict[str, Any], message: str) -> None:  # noqa: F811
    settings = {"offsets": 5, **settings}
    with pytest.raises(ValueError, match=message):
        traces.record(make(target, "ngram", None), prompts, **settings)


def test_a_cost_table_s_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.json"
    monkeypatch.setattr("avref.cost_table.json_checksum", lambda content: "right")
    good = '"metadata": {}, "draft_ms": [1, 1], "verify_ms": [[1, 1]], "by_requests": false, "max_tokens": '
    for table in ("[1]", "null", "{}", f"{{{good}3}}", f"{{{good}1000000000000}}", f"{{{good}1}}".replace("1, 1", "")):
        path.write_text(f'{{"schema_version": 1, "sha256": "right", "table": {table}}}')
        with pytest.raises(ValueError, match=r"table\.json holds no cost table .*profile again"):
            CostTable.load(path)
    path.write_text("[" * 200_000)
    with pytest.raises(ValueError, match=r"table\.json is not a complete"):
        CostTable.load(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_prompts": -1}, "prompts is -1"),
        ({"steps": 0}, "steps is 0"),
        ({"num_prompts": 0, "num_texts": 0}, "texts is 0"),
    ],
)
def test_training(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        command.run("dflash", "./no-such-folder", tmp_path, **arguments)


# ---- commands ----
@pytest.mark.parametrize(
    "command", ["quickstart", "simulate", "study", "bench", "train dflash", "profile", "trace", "selfcheck"]
)
def test_an_output_that_cannot_be_written_is_found_before_the_work(command: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("mine")
    for output in (tmp_path / "file" / "x", *([tmp_path] if command in ("profile", "trace", "selfcheck") else [])):
        assert cli.main([*command.split(), "--output", str(output)]) == 2
        assert f"--output is {str(output)!r}" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("simulate --trace ngram --table h100 --requests 100000", "up to"),
        ("bench --method foo", "a method is 'foo'"),
        ("bench --model TINY --method dflash --drafter ./nodir --blocks concurrency", "nodir"),
        ("quickstart --model TINY --method ngram --max-tokens 100000", "raise it to"),
        ("quickstart --method foo", "method is 'foo'"),
        ("train eagle --steps -1", "steps is -1"),
        ("""vllm-args --fixed --settings {"enable_adaptive_verification":true}""", "has an option of its own"),
    ],
)
def test_commands(arguments: str, message: str, folder: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([folder if word == "TINY" else word for word in arguments.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not list(tmp_path.rglob("*.jsonl"))


def test_a_method_among_the_drafters_is_named_too() -> None:
    with pytest.raises(ValueError, match="a method is 'foo'"):
        bench("./no-such-folder", drafters={"foo": None})


def test_a_small_target_goes_through_the_commands(folder: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Without an estimator, with fewer positions than 1,024, with workloads that were not reached, with n layers."""
    monkeypatch.setenv("AVREF_CACHE", str(tmp_path))
    pair = ["--model", folder, "--method", "ngram", "--max-tokens"]
    assert cli.main(["generate", "w5", *pair[:2], "--method", "layer_skip", "--drafter", "1", "--max-tokens", "3"]) == 0
    assert cli.main(["trace", *pair, "4", "--offsets", "5", "--output", str(tmp_path / "g.npz")]) == 0
    quick = ["quickstart", *pair, "2", "--concurrency", "1", "--repeats", "1", "--max-model-len", "600"]
    assert cli.main([*quick, "--output", str(tmp_path)]) == 0
    assert "no estimator" in capsys.readouterr().out and (tmp_path / "quickstart.json").is_file()


# Before anything is fetched, and where files lie


def test_a_drafter_that_is_not_shipped_is_named_before_the_target_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "load_model", lambda *a, **k: pytest.fail("fetched the target"))
    for method in ("eagle", "draft_model"):
        with pytest.raises(ValueError, match=f"no {method} drafter is shipped for 'org/large'"):
            LLM("org/large", {"method": method})


def test_a_hub_id_of_a_published_drafter_is_no_folder(target: Any) -> None:  # noqa: F811
    with pytest.raises(ValueError, match=r"'org/EAGLE-x', which is no folder; method 'eagle' takes one that"):
        LLM(target, {"method": "eagle", "model": "org/EAGLE-x"})


@pytest.mark.parametrize(
    ("device", "message"),
    [("mps", "avref runs on 'cpu' and 'cuda'"), ("meta", "avref runs on"), ("cuda:99", "CUDA device")],
)
def test_devices(device: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.choose_device(device)


def test_keywords_for_the_hub_reach_the_tokenizer(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, dict[str, Any]] = {}
    real = models._from_pretrained

    def spy(auto_class: Any, name: Any, **kwargs: Any) -> Any:
        seen[auto_class.__name__] = kwargs
        return real(auto_class, name, **kwargs)

    monkeypatch.setattr(models, "_from_pretrained", spy)
    LLM(folder, token="secret", revision="main", device_map=None)
    assert {"token": "secret", "revision": "main"} == seen["AutoTokenizer"]
    assert {"token", "revision", "device_map"} <= seen["AutoModelForCausalLM"].keys()
    with pytest.raises(ValueError, match="torch_dtype is 'float16'; give it as dtype"):
        LLM(folder, torch_dtype="float16")


def test_a_quantised_model_without_its_library_is_one_clear_error(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise ImportError("Loading an AWQ quantized model requires gptqmodel")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", missing)
    with pytest.raises(RuntimeError, match=r"could not load .*requires gptqmodel"):
        LLM(folder)


def test_a_command_drafts_what_the_drafter_was_trained_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}

    def stop(model: Any, config: Any, **_: Any) -> None:
        found.update(config)
        raise RuntimeError("far enough")

    monkeypatch.setattr("avref.LLM", stop)
    for method, depth in (("mtp", 5), ("dflash", 7), ("ngram", 7)):
        assert cli.main(["generate", "x", "--method", method]) == 2
        assert found["num_speculative_tokens"] == depth
    assert cli.main(["generate", "x", "--num-speculative-tokens", "0"]) == 2
    assert found["num_speculative_tokens"] == 0  # refused where it is read
