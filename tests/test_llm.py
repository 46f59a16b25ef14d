"""The facade: shapes and order of what comes back, loading, and one clear error for every kind of bad input.

An error must say what was seen, what is allowed and what to do; afterwards the LLM works as before.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from avref import arms
from avref.config import SamplingParams, SpeculativeConfig
from avref.cost_table import CostTable
from avref.drafters import weights
from avref.estimator import OnlineAcceptanceEstimator
from avref.llm import LLM, RequestOutput

WORDS = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(3, tiny.VOCAB))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.llama()


@pytest.fixture(scope="module")
def folder(target: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target and its tokenizer, saved as a user would have them on disk."""
    path = tmp_path_factory.mktemp("models") / "target"
    target.set_attn_implementation("eager")
    target.save_pretrained(path)
    tiny.tokenizer(WORDS).save_pretrained(path)
    return path


def make(model: Any, config: Any = None, **settings: Any) -> LLM:
    sizes = {"max_num_seqs": 3, "max_model_len": 64, "cost_table": tiny.flat_costs()}
    return LLM(model, config, **{**sizes, **settings})


def speculative(**changes: Any) -> dict[str, Any]:
    return {"method": "draft_model", "num_speculative_tokens": 3, **changes}


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in outputs]


# What comes back


def test_outputs_have_the_shape_and_order_of_the_prompts(target: Any) -> None:
    llm = make(target)
    prompts = [[3, 4, 5], [7], [9, 8], [5] * 20, [11]]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (9, 1, 4, 2, 7)]
    outputs = llm.generate(prompts, params)  # they end in another order than they came
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert [len(o.outputs) for o in outputs] == [1] * 5
    assert [len(t) for t in tokens(outputs)] == [9, 1, 4, 2, 7]
    assert tokens(outputs) == [tiny.greedy(target, p, s.max_tokens) for p, s in zip(prompts, params, strict=True)]
    assert {o.outputs[0].finish_reason for o in outputs} == {"length"}


def test_text_in_text_out(folder: Path, target: Any) -> None:
    llm = make(str(folder), dtype="float32")
    one = llm.generate("w5 w6 w7", GREEDY)
    assert one[0].prompt_token_ids == [5, 6, 7]
    assert tokens(one) == [tiny.greedy(target, [5, 6, 7], 8)]
    special = {WORDS[0], WORDS[tiny.EOS]}
    assert one[0].outputs[0].text.split() == [w for w in (WORDS[t] for t in tokens(one)[0]) if w not in special]
    both = llm.generate(["w5 w6 w7", "w9"], GREEDY)
    assert tokens(both) == [tokens(one)[0], tiny.greedy(target, [9], 8)]


def test_a_local_folder_of_a_drafter_works(folder: Path, target: Any) -> None:
    llm = make(folder, speculative(model=str(folder)), dtype="float32")
    assert tokens(llm.generate(["w5 w6"], GREEDY)) == [tiny.greedy(target, [5, 6], 8)]
    assert llm.stats.accepted_by_position.sum() == llm.stats.drafted_by_position.sum() > 0


def test_the_tokenizer_brings_its_end_of_text(folder: Path, target: Any) -> None:
    answer = tiny.greedy(target, [5, 6, 7], 8)
    llm = make(str(folder), dtype="float32")
    assert llm.eos_ids == {tiny.EOS}
    llm.eos_ids = frozenset({answer[3]})
    out = llm.generate("w5 w6 w7", SamplingParams(temperature=0.0, max_tokens=8))[0].outputs[0]
    assert (out.token_ids, out.finish_reason) == (answer[: answer.index(answer[3]) + 1], "stop")


def test_chat_needs_a_template(folder: Path) -> None:
    llm = make(str(folder), dtype="float32")
    with pytest.raises(ValueError, match="chat template"):
        llm.chat(["w5"])
    llm.tokenizer.chat_template = "{% for m in messages %}w9 {{ m.content }} {% endfor %}w8"
    assert llm.chat(["w5"], GREEDY)[0].prompt_token_ids == [9, 5, 8]
    llm.tokenizer.chat_template += "{% if short %} w7{% endif %}"
    assert llm.chat(["w5"], GREEDY, chat_template_kwargs={"short": True})[0].prompt_token_ids == [9, 5, 8, 7]
    with pytest.raises(ValueError, match="chat_template_kwargs is 5; give a dictionary"):
        llm.chat(["w5"], chat_template_kwargs=5)
    turns = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6"}]
    assert llm.chat([turns], GREEDY)[0].prompt_token_ids == [9, 5, 9, 6, 8]


def test_messages_that_a_template_does_not_take(folder: Path) -> None:
    """What the template raises comes from another library; it is told as a mistake in the messages."""
    llm = make(str(folder), dtype="float32")
    llm.tokenizer.chat_template = "{% for m in messages %}{{ 'w9 ' + m.role + ' ' + m.content }} {% endfor %}w8"
    wrong: list[dict[str, Any]] = [
        {"text": "w5"},
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "w5"}]},
    ]
    for message in wrong:
        with pytest.raises(ValueError, match=r"template does not take .*'role' and 'content' as text"):
            llm.chat([[message]])
    with pytest.raises(ValueError, match="template does not take"):
        llm.chat(["w5"], chat_template_kwargs={"conversation": 1})
    assert llm.chat(["w5"], GREEDY)


def test_half_a_character_is_named(folder: Path) -> None:
    """As files hold it that were read with `surrogateescape`."""
    llm = make(str(folder), dtype="float32")
    with pytest.raises(ValueError, match=r"prompt 1 holds '.ud800', half of a UTF-16 pair"):
        llm.generate(["w5", "w6 \ud800"], GREEDY)


# Settings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_speculative_token": 3}, "'num_speculative_token'.*'num_speculative_tokens'"),
        ({"method": "medusa"}, "'medusa'.*'draft_model', 'eagle', 'mtp', 'dflash', 'dspark', 'layer_skip', 'ngram'"),
        ({"draft_sample_method": "beam"}, "'beam'.*'probabilistic', 'greedy'"),
        ({"budget_rule": "best"}, "'best'.*'lookahead', 'stale', 'early_stop'"),
        ({"feature": "q"}, "'q'.*'logit_q_max'"),
        ({"confidence": "oracle"}, "'oracle'.*'auto', 'estimator'"),
        ({"enable_adaptive_verification": "yes"}, "'yes'.*True, False"),
        ({"num_speculative_tokens": 0}, "is 0;.*from 1"),
        ({"num_speculative_tokens": 1000}, "is 1000;.*from 1"),
        ({"num_speculative_tokens": 2.5}, "is 2.5;.*whole number"),
        ({"num_speculative_tokens": True}, "is True;.*whole number"),
        ({"probe_interval": -1}, "is -1;.*from 0"),
        ({"estimator": {"stepp": "newton"}}, "'stepp'.*'step'"),
        ({"estimator": {"step": "sgd"}}, "'sgd'.*newton"),
        ({"estimator": "newton"}, "'newton'.*dictionary"),
    ],
)
def test_bad_speculative_config(change: dict[str, Any], message: str, target: Any) -> None:
    with pytest.raises(ValueError, match=message):
        make(target, speculative(model=target, enable_adaptive_verification=True) | change)


def test_other_bad_configurations(target: Any) -> None:
    with pytest.raises(ValueError, match=r"needs a 'method'.*draft_model, eagle"):
        make(target, {"num_speculative_tokens": 3})
    with pytest.raises(ValueError, match="str; give a dictionary"):
        make(target, "dflash")
    with pytest.raises(ValueError, match="needs speculative_config"):
        make(target, speculative())
    with pytest.raises(ValueError, match="max_num_seqs is 0; it must be"):
        make(target, max_num_seqs=0)
    with pytest.raises(ValueError, match="max_model_len=4096 is beyond the 512 positions"):
        make(target, max_model_len=4096)
    with pytest.raises(ValueError, match=r"'int3'.*float32"):
        LLM("nowhere/at-all", dtype="int3")
    with pytest.raises(ValueError, match="max_num_seq"):
        make(target, max_num_seq=3)


@pytest.mark.parametrize(
    ("settings", "what"),
    [({"feature": "logit_q_sampled"}, "logit_q_sampled"), ({"budget_rule": "retrospective"}, "retrospective")],
)
def test_lossy_settings_have_to_be_allowed(settings: dict[str, Any], what: str, target: Any) -> None:
    config = speculative(model=target, enable_adaptive_verification=True, **settings)
    with pytest.raises(ValueError, match=f"{what}.*bias.*allow_lossy=True"):
        make(target, config)
    make(target, {**config, "allow_lossy": True}).generate([[3]], GREEDY)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": None}, "temperature is None"),
        ({"top_p": 0.0}, r"top_p is 0.0; .*\(0, 1\]"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_k": -2}, "top_k is -2"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"stop_token_ids": (-2,)}, "stop token id is -2"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5"),
        ({"stop_token_ids": "</s>"}, "stop_token_ids is '</s>'"),
    ],
)
def test_bad_sampling_params(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**wrong)


def test_sampling_params_must_fit_the_prompts(target: Any) -> None:
    llm = make(target)
    with pytest.raises(ValueError, match="2 sampling_params for 3 prompts"):
        llm.generate([[3], [4], [5]], [GREEDY, GREEDY])
    with pytest.raises(ValueError, match="SamplingParams"):
        llm.generate([[3]], {"temperature": 0})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="SamplingParams"):
        llm.generate([[3]], [{"temperature": 0}])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="stop_token_ids holds 50; ids go from 0 to 49"):
        llm.generate([[3]], SamplingParams(stop_token_ids=(4, 50)))


# Prompts


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[3], []], "prompt 1 is empty; give at least one token"),
        ([[3], [4, tiny.VOCAB]], "prompt 1 holds token id 50; ids go from 0 to 49"),
        ([[3], [-1]], "prompt 1 holds token id -1; ids go from 0 to 49"),
        ([[3] * 64], "prompt 0 has 64 tokens; max_model_len=64.*[Ss]horten"),
        ([3, 4, 5], "prompt 0 is 3; a prompt is a string or a list of token ids"),
        ([[3], None], "prompt 1 is None; a prompt is"),
        ([[3.7]], "prompt 0 .*3.7.*token ids"),
        ([["w3"]], "prompt 0 .*'w3'.*token ids"),
        ("w3 w4", "text prompts need a tokenizer"),
    ],
)
def test_bad_prompts(prompts: Any, message: str, target: Any) -> None:
    """Found before anything runs: no request is left behind."""
    llm = make(target)
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, GREEDY)
    assert not llm.engine.waiting and not llm.engine.running
    assert tokens(llm.generate([[3]], GREEDY)) == [tiny.greedy(target, [3], 8)]


def test_the_longest_prompt_that_fits_gives_one_token(target: Any) -> None:
    out = make(target).generate([[3] * 63], GREEDY)
    assert tokens(out) == [tiny.greedy(target, [3] * 63, 1)]


def test_an_empty_text_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        make(str(folder), dtype="float32").generate(["w3", ""], GREEDY)


# NaN


POISON = 40  # its embedding is NaN, and the parity check's prompts do not hold it


def poisoned(model: Any) -> Any:
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = float("nan")
        model.get_output_embeddings().weight[POISON] = 0  # it is not emitted on its own
    return model


@pytest.mark.parametrize("where", ["plain", "target", "dflash target", "drafter"])
def test_nan_logits_are_one_clear_error_and_leave_nothing_behind(where: str) -> None:
    """NaN keys that stayed in the cache would turn a later, shorter request into NaN: 0 * NaN is NaN."""
    target, drafter = tiny.llama(), tiny.near(tiny.llama(), 0.05)
    with torch.no_grad():
        target.lm_head.weight[POISON] = drafter.lm_head.weight[POISON] = 0
    adaptive = speculative(enable_adaptive_verification=True)
    if where == "plain":
        llm = make(poisoned(target))
    elif where == "dflash target":
        llm = make(poisoned(target), {**adaptive, "method": "dflash", "model": tiny.dflash(target, 4)})
    elif where == "target":
        llm = make(poisoned(target), {**adaptive, "model": drafter})
    else:
        llm = make(target, {**adaptive, "model": poisoned(drafter)})
    good = [[5] * 20, [7], [9, 8]]
    before = tokens(llm.generate(good, GREEDY))
    for bad in ([[3] * 5, [POISON] * 30], [[POISON] * 30], [[3], [4], [5] * 10 + [POISON]]):
        with pytest.raises((ValueError, RuntimeError), match="NaN"):
            llm.generate(bad, GREEDY)
        assert tokens(llm.generate(good, GREEDY)) == before


def test_a_model_of_nan_weights_is_refused_at_load() -> None:
    model = tiny.llama()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="NaN"):
        make(model)


# Where models come from


def test_missing_folder() -> None:
    with pytest.raises(ValueError, match="'/no/such/folder' does not exist; give an existing folder, a hub id"):
        LLM("/no/such/folder")


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"could not load .* as a folder"):
        LLM(str(tmp_path))


def test_a_folder_without_a_tokenizer_says_so(target: Any, tmp_path: Path) -> None:
    target.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"could not load the tokenizer in .* does the folder hold tokenizer.json"):
        LLM(str(tmp_path), dtype="float32")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"model.safetensors' is a file; give an existing folder"):
        LLM(tmp_path / "model.safetensors")


def test_truncated_weights(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        data = file.read_bytes()
        (tmp_path / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    with pytest.raises(RuntimeError, match="could not load"):
        LLM(str(tmp_path), dtype="float32")


def test_missing_weights_are_not_filled_with_random_ones(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match=r"no weights for model.layers.1.mlp.up_proj.weight \(1 missing\)"):
        LLM(str(tmp_path), dtype="float32")


def test_hub_id_without_a_network_fails_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_HUB_OFFLINE=1 is read when the library is imported, so its constant is set here."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"could not load 'someone/some-model.*as a hub id: .*network"):
        LLM("someone/some-model-that-is-in-no-cache")
    assert time.monotonic() - started < 20


def test_a_hub_that_does_not_answer_is_not_asked_again_and_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"could not load 'someone/some-model.*as a hub id"):
        LLM("someone/some-model-that-is-in-no-cache")
    assert time.monotonic() - started < 5


# Tokenizers


def test_different_tokenizers_are_refused(folder: Path, target: Any, tmp_path: Path) -> None:
    """C80: the same words under other ids."""
    target.save_pretrained(tmp_path)
    tiny.tokenizer([*WORDS[:3], *WORDS[:2:-1]]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer differs.* in 46 token\(s\) of 50 .*target id .*, drafter id"):
        make(str(folder), speculative(model=str(tmp_path)), dtype="float32")


@pytest.mark.parametrize("words", [WORDS[:-1], [*WORDS, "surplus"]], ids=["fewer", "more"])
def test_a_tokenizer_with_fewer_or_more_tokens_is_refused(
    folder: Path, target: Any, tmp_path: Path, words: Any
) -> None:
    target.save_pretrained(tmp_path)
    tiny.tokenizer(words).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="tokenizer differs from the target's in 1 token"):
        make(str(folder), speculative(model=str(tmp_path)), dtype="float32")


# Trained drafters on disk


@pytest.fixture
def saved(target: Any, tmp_path: Path) -> Path:
    weights.save(tiny.dflash(target, 4), tmp_path / "drafter", "dflash", "tiny")
    return tmp_path / "drafter"


def test_the_folder_of_a_training_run_is_refused_and_the_drafter_in_it_named(saved: Path, target: Any) -> None:
    saved.rename(saved.parent / "out")
    for config in (dflash_config(str(saved.parent)), speculative(model=str(saved.parent))):
        with pytest.raises(ValueError, match=r"holds a training run; pass the drafter that it made, '.*out'"):
            make(target, config)


def dflash_config(path: Any, **changes: Any) -> dict[str, Any]:
    return {"method": "dflash", "model": path, "num_speculative_tokens": 4, **changes}


def test_a_saved_drafter_works(saved: Path, target: Any) -> None:
    llm = make(target, dflash_config(str(saved)))
    assert tokens(llm.generate([[3, 4]], GREEDY)) == [tiny.greedy(target, [3, 4], 8)]
    assert llm.stats.drafted_by_position.sum() > 0


def test_more_drafts_than_the_block_that_was_trained(saved: Path, target: Any) -> None:
    with pytest.raises(ValueError, match=r"num_speculative_tokens=5.*trained to draft 4 tokens; use at most that many"):
        make(target, dflash_config(str(saved), num_speculative_tokens=5))


def test_a_drafter_of_another_width(saved: Path) -> None:
    with pytest.raises(ValueError, match=r"target of width 32.*has 64; train one"):
        make(tiny.llama(hidden_size=64), dflash_config(str(saved)))


def test_a_drafter_of_a_larger_vocabulary(saved: Path) -> None:
    with pytest.raises(ValueError, match=r"token id 49.*ids 0 to 47; train one"):
        make(tiny.llama(vocab_size=48), dflash_config(str(saved)))


def test_a_drafter_of_a_deeper_target(target: Any) -> None:
    deeper = tiny.dflash(tiny.llama(num_hidden_layers=4), 4)
    with pytest.raises(ValueError, match=r"hidden states 3, 4.*train one"):
        make(target, dflash_config(deeper))


def test_missing_drafter_folder(target: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is no dflash drafter: it holds no config.json; .*avref train dflash"):
        make(target, dflash_config(str(tmp_path)))
    with pytest.raises(ValueError, match="no dflash drafter is shipped for"):
        make(target, dflash_config(None))


def damage_truncate(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def damage_json(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text[: len(text) // 2])


def damage_bytes(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe\x00\x93")


def damage_list(folder: Path) -> None:
    (folder / "config.json").write_text("[1, 2]")


def edit(folder: Path, **changes: Any) -> None:
    """As in a file without a checksum, so that what stands behind it is met."""
    config = json.loads((folder / "config.json").read_text())
    del config["sha256"]
    (folder / "config.json").write_text(json.dumps({k: v for k, v in (config | changes).items() if v is not None}))


def damage_quietly(folder: Path) -> None:
    """Every value is allowed, and the drafter would draft, badly."""
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"rope_theta": 10000.0', '"rope_theta": 1.5'))


def damage_shape(folder: Path) -> None:
    edit(folder, intermediate_size=8)


def damage_key(folder: Path) -> None:
    edit(folder, hidden_size=None)


def damage_extra(folder: Path) -> None:
    edit(folder, dropout=0.1)


@pytest.mark.parametrize(
    "damage",
    [damage_truncate, damage_json, damage_bytes, damage_list, damage_quietly, damage_shape, damage_key, damage_extra],
)
def test_damaged_drafters(damage: Any, saved: Path, target: Any) -> None:
    damage(saved)
    with pytest.raises(RuntimeError, match=r"damaged( or of another version)?: .+; fetch or train it again"):
        make(target, dflash_config(str(saved)))


@pytest.mark.parametrize(
    "wrong",
    [{"rope_theta": "x"}, {"rope_theta": 0}, {"eps": float("nan")}, {"target_layers": [1.5, 2]}, {"depth": True}],
)
def test_a_drafter_with_numbers_that_cannot_be(wrong: dict[str, Any], saved: Path, target: Any) -> None:
    edit(saved, **wrong)
    with pytest.raises(ValueError, match=rf"a drafter's {next(iter(wrong))} is .*expected numbers"):
        make(target, dflash_config(str(saved)))


def test_a_drafter_of_another_method(saved: Path, target: Any) -> None:
    edit(saved, method="eagle")
    with pytest.raises(ValueError, match="not made for method 'dflash'"):
        make(target, dflash_config(str(saved)))


# The configuration object


def test_configuration_object_and_dictionary_are_the_same(target: Any) -> None:
    config = SpeculativeConfig.from_dict(speculative(model=target))
    assert config is not None
    assert SpeculativeConfig.from_dict(config) is config
    assert SpeculativeConfig.from_dict(None) is None
    assert tokens(make(target, config).generate([[3]], GREEDY)) == [tiny.greedy(target, [3], 8)]


def test_a_cost_table_that_is_too_small_is_named_and_can_be_replaced(target: Any) -> None:
    config = speculative(model=target, enable_adaptive_verification=True)
    prompts = [[3], [4], [5]]
    with pytest.raises(ValueError, match="cost table covers 2 requests, max_num_seqs is 3; profile"):
        make(target, config, cost_table=tiny.flat_costs(2, 8))
    llm = make(target, config)
    with pytest.raises(ValueError, match="cost table covers 2 requests, max_num_seqs is 3; profile"):
        llm.cost_table = tiny.flat_costs(2, 8)
    llm.cost_table = tiny.flat_costs()
    assert tokens(llm.generate(prompts, GREEDY)) == [tiny.greedy(target, p, 8) for p in prompts]


# Seeds given twice


def test_a_seed_given_twice_ties_no_two_requests_under_adaptive_verification(target: Any) -> None:
    """With the same draws, what one request drafts would tell what the other drafted, and its budget may depend on it.

    R = 2, K = 2: A has S_1 = .95 and S_2 = .9 or 0 by its first token, B has S_1 = .8, target (.7, .3), drafter
    (.5, .5), and the third draft does not pay. If both draw alike, B is verified just when it drew the second token,
    and emits (.55, .45).
    """
    same = SamplingParams(temperature=1.0, max_tokens=8, seed=7, ignore_eos=True)
    config = speculative(model=tiny.near(target, 0.3), enable_adaptive_verification=True)
    llm = make(target, config)
    states = [r.generator.initial_seed() for r in llm._requests([[3, 4]] * 3, same)]
    assert states[0] == 7 and len(set(states)) == 3
    again = make(target, config)
    assert [r.generator.initial_seed() for r in again._requests([[3, 4]] * 3, same)] == states
    own = [SamplingParams(seed=s) for s in (7, 9, 7)]
    assert [r.generator.initial_seed() for r in make(target, config)._requests([[3]] * 3, own)] == [7, 9, states[1]]
    plain = make(target, speculative(model=tiny.near(target, 0.3), enable_adaptive_verification=False))
    assert {r.generator.initial_seed() for r in plain._requests([[3, 4]] * 3, same)} == {7}
    one, two = tokens(plain.generate([[3, 4]] * 2, same))
    assert one == two


def test_what_was_learned_from_a_seed_meets_no_draws_of_that_seed(target: Any) -> None:
    """Each call has seeds of its own, the same on a twin; without adaptive verification seeds stay.

    What would leak otherwise is shown in test_lossless_end_to_end.
    """
    config = speculative(model=tiny.near(target, 0.3), enable_adaptive_verification=True)
    same = SamplingParams(temperature=1.0, max_tokens=8, seed=7, ignore_eos=True)
    llm, twin = make(target, config), make(target, config)
    calls = [[r.generator.initial_seed() for r in llm._requests([[3, 4]] * 3, same)] for _ in range(4)]
    assert calls[0][0] == 7 and len({s % 2**32 for call in calls for s in call}) == 12
    assert [[r.generator.initial_seed() for r in twin._requests([[3, 4]] * 3, same)] for _ in range(4)] == calls
    without = make(target, speculative(model=tiny.near(target, 0.3), enable_adaptive_verification=False))
    assert [r.generator.initial_seed() for _ in range(2) for r in without._requests([[3, 4]], same)] == [7, 7]
    learned = arms.Learned(llm)
    one = [r.generator.initial_seed() for r in llm._requests([[3]], same)]
    learned.restore()  # what one call taught is forgotten, and with it its seeds
    assert [r.generator.initial_seed() for r in llm._requests([[3]], same)] == one


def test_seeds_are_moved_by_what_an_estimator_brings_along(target: Any) -> None:
    """Coefficients that were learned, loaded or given, may know the draws of the seed; the default start knows none."""

    def first_seed(state: Any = None, **estimator: Any) -> int:
        config = speculative(model=tiny.near(target, 0.3), enable_adaptive_verification=True, estimator=estimator)
        llm = make(target, config)
        assert llm.estimator is not None
        if state is not None:
            llm.estimator.load_state_dict(state)
        return llm._requests([[3]], SamplingParams(seed=7))[0].generator.initial_seed()

    fresh = OnlineAcceptanceEstimator(3).state_dict()
    learned, begun = {**fresh, "slope": torch.tensor(0.61)}, {**fresh, "num_steps": 3}
    assert first_seed() == first_seed(fresh) == first_seed(damping=9.0) == 7
    moved = [first_seed(learned), first_seed(begun), first_seed(intercept=[0.1, 0.2, 0.3])]
    assert len({7, *moved}) == 4 and first_seed(learned) == moved[0]


def test_one_caller_at_a_time(target: Any) -> None:
    """A second thread is refused before it touches the caches, also while the cost table is measured."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    right = {p: tiny.greedy(target, [p, 5, 7], 12) for p in (3, 4, 5)}
    refused = 0
    for _ in range(20):
        llm, gate, seen = make(target), threading.Barrier(len(right)), dict[int, Any]()

        def ask(p: int, llm: LLM = llm, gate: Any = gate, seen: dict[int, Any] = seen) -> None:
            gate.wait()
            try:
                seen[p] = tokens(llm.generate([[p, 5, 7]], params))[0]
            except RuntimeError as error:
                seen[p] = str(error)

        threads = [threading.Thread(target=ask, args=(p,)) for p in right]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for p, got in seen.items():
            refused += isinstance(got, str) and "already running on this LLM" in got
            assert got == right[p] or "already running" in got
        assert len(seen) == len(right) and any(isinstance(got, list) for got in seen.values())
        assert tokens(llm.generate([[3, 5, 7]], params)) == [right[3]]
    assert refused > 0


def test_torch_s_default_dtype_changes_no_draw(target: Any) -> None:
    """In bfloat16 a uniform has 256 values, and acceptance and draws would be quantised to them."""
    config = speculative(model=tiny.near(target, 0.3), enable_adaptive_verification=True)
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=1, ignore_eos=True)
    expected = tokens(make(target, config).generate([[3, 4], [7]], params))
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert tokens(make(target, config).generate([[3, 4], [7]], params)) == expected
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("adaptive", [False, True])
def test_no_request_without_a_seed_draws_like_another(adaptive: bool, target: Any) -> None:
    """Its seed is made from a counter, which must not run into one that was given, before it or behind it."""
    config = speculative(model=tiny.near(target, 0.3), enable_adaptive_verification=adaptive)
    for own in ([2, None], [None, 1], [3, None, None, 4], [2 + 2**32, None], [None, None]):
        llm = make(target, config, seed=0)
        params = [SamplingParams(seed=s, max_tokens=8, ignore_eos=True) for s in own]
        seeds = [r.generator.initial_seed() for r in llm._requests([[3, 4]] * len(own), params)]
        assert len({s % 2**32 for s in seeds}) == len(own)
        assert all(got == s for got, s in zip(seeds, own, strict=True) if s is not None)
        answers = tokens(make(target, config, seed=0).generate([[3, 4]] * len(own), params))
        assert len(set(map(tuple, answers))) == len(own)


def test_a_seed_that_is_moved_meets_no_other(target: Any) -> None:
    """Seeds that agree in their last 32 bits are one to a CPU generator; a repeated one is moved, not onto another."""
    for own in ([0, 0, 1_000_003], [0, 2**32, 5], [1_000_003, 0, 0]):
        llm = make(target, speculative(model=tiny.near(target, 0.3), enable_adaptive_verification=True))
        requests = llm._requests([[3]] * 3, [SamplingParams(seed=s) for s in own])
        assert len({r.generator.initial_seed() % 2**32 for r in requests}) == 3
        kept = [r.generator.initial_seed() == s for r, s in zip(requests, own, strict=True)]
        assert kept.count(False) == 1 and kept[0]


def test_a_model_without_a_head_is_refused(target: Any) -> None:
    """As `AutoModel` loads one, whose `get_output_embeddings()` is None."""
    with pytest.raises(ValueError, match="model is LlamaModel; give a name, a folder, or a loaded Hugging Face causal"):
        LLM(target.model)
    with pytest.raises(ValueError, match="is LlamaModel; give a causal LM"):
        make(target, speculative(model=target.model))


def test_a_home_folder_is_found_for_drafters_too(saved: Path, target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(saved.parent))
    assert make(target, dflash_config(f"~/{saved.name}")).engine.drafter is not None


def test_a_cost_table_without_room_for_one_token_each_is_refused(target: Any) -> None:
    config = speculative(model=target, enable_adaptive_verification=True)
    narrow = CostTable(np.ones(9), np.ones(4))  # 8 requests, but 3 tokens
    assert make(target, config, cost_table=narrow).cost_table is narrow
    with pytest.raises(ValueError, match="covers 3 tokens for 4 requests, too few for one each; profile again"):
        make(target, config, cost_table=narrow, max_num_seqs=4)


def test_a_draft_model_elsewhere_is_refused(target: Any) -> None:
    with pytest.raises(ValueError, match="the draft model is on meta, the target on cpu; move it"):
        make(target, speculative(model=tiny.near(target, 0.3).to("meta")))


def test_the_device_is_where_the_model_is(folder: Path) -> None:
    llm = LLM(str(folder), max_num_seqs=1, max_model_len=32, device_map="cpu")
    assert llm.device == llm.model.device == torch.device("cpu")
