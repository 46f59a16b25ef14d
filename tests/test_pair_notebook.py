"""Notebook 08: the exercises' checkers, and what its text says of refusals, vLLM's settings and the toy pair."""

import importlib.util
import json
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import tiny

from avref import exercises_pair as exercises
from avref import models
from avref.vllm_args import VLLM_DEFAULTS, VLLM_KEYS

NOTEBOOK = Path(__file__).resolve().parents[1] / "notebooks" / "08_your_own_pair.ipynb"


# ---- the exercises


def for_vllm(config):
    known = {key: config[key] for key in VLLM_KEYS if key in config}
    return "--speculative-config " + shlex.quote(json.dumps(known))


def clashes(target, drafter):
    return sorted({token for token, _ in target.items() ^ drafter.items()})


CHECKS = [
    (exercises.check_accepted_needed, lambda plain, draft, verify: (draft + verify) / plain - 1),
    (exercises.check_came_from_a_draft, lambda p, q: min(1, q / p)),
    (exercises.check_clashes, clashes),
    (exercises.check_for_vllm, for_vllm),
]
MISTAKES = [
    (exercises.check_accepted_needed, lambda plain, draft, verify: verify / plain - 1),  # drafting is not free
    (exercises.check_accepted_needed, lambda plain, draft, verify: (draft + verify) / plain),
    (exercises.check_came_from_a_draft, lambda p, q: min(1, p / q)),  # the acceptance rule, not read backwards
    (exercises.check_came_from_a_draft, lambda p, q: min(p, q)),
    (exercises.check_clashes, lambda t, d: sorted(x for x in t if d.get(x) != t[x])),  # the drafter's own tokens
    (exercises.check_clashes, lambda t, d: sorted(set(t) ^ set(d))),  # swapped ids
    (exercises.check_clashes, lambda t, d: [] if len(t) == len(d) else sorted(t)),
    (exercises.check_for_vllm, lambda c: f"--speculative-config '{json.dumps(c)}'"),  # the apostrophe
    (exercises.check_for_vllm, lambda c: "--speculative-config " + shlex.quote(json.dumps(c))),  # keys of ours
    (exercises.check_for_vllm, lambda c: "--speculative-config " + shlex.quote(str(c))),
    (exercises.check_for_vllm, lambda c: json.dumps(c)),
    (exercises.check_for_vllm, lambda c: "--speculative-config " + shlex.quote('{"method": "draft_model"}')),
    (exercises.check_for_vllm, lambda c: for_vllm({"model": "another", "draft_sample_method": "probabilistic", **c})),
    (exercises.check_for_vllm, lambda c: for_vllm({**c, "num_speculative_tokens": 4})),
    (exercises.check_accepted_needed, lambda *_: float("nan")),
    (exercises.check_came_from_a_draft, lambda *_: float("nan")),
]


@pytest.mark.parametrize(("check", "solution"), CHECKS)
def test_a_solution_is_accepted(check, solution, capsys):
    assert check(solution) is True
    assert "right" in capsys.readouterr().out


@pytest.mark.parametrize(("check", "mistake"), MISTAKES)
def test_a_mistake_is_rejected_and_explained(check, mistake, capsys):
    assert check(mistake) is False
    out = capsys.readouterr().out
    assert out.startswith("✗") and "not written" not in out


def test_exercises_not_written_yet_are_told_so(capsys):
    """As they stand in the notebook."""
    cells = [c for c in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
    unsolved = ["".join(c["source"]) for c in cells if "exercises.check_" in "".join(c["source"])]
    assert len(unsolved) == len(CHECKS)
    for source in unsolved:
        exec(source, {"exercises": exercises})
    assert capsys.readouterr().out.count("not written yet") == len(CHECKS)


@pytest.mark.parametrize("change", [{}, {"b": 2, "c": 1}, {"<eos>": 3}])
def test_the_clashes_of_exercise_3_are_what_loading_refuses(change):
    words = ["a", "b", "<end>", "c"]
    target = tiny.tokenizer(words)
    drafter = tiny.tokenizer(sorted(words, key={**{w: i for i, w in enumerate(words)}, **change}.get))
    if clashes(target.get_vocab(), drafter.get_vocab()):
        with pytest.raises(ValueError, match="tokenizer differs"):
            models.check_same_tokenizer(target, drafter)
    else:
        models.check_same_tokenizer(target, drafter)


def test_the_notebook_names_the_settings_that_bring_vllm_s_back():
    text = "".join("".join(c["source"]) for c in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"])
    assert all(f"`{key}" in text for key in VLLM_DEFAULTS)


# ---- the first code cell of every notebook


def first_cells():
    cells = [json.loads(path.read_text(encoding="utf-8"))["cells"][1] for path in NOTEBOOK.parent.glob("*.ipynb")]
    return {"".join(cell["source"]) for cell in cells}


def test_every_notebook_begins_with_the_same_code():
    assert len(first_cells()) == 1


def test_the_first_cell_does_nothing_where_the_package_is_installed(monkeypatch):
    monkeypatch.setattr(subprocess, "check_call", lambda command: pytest.fail(f"ran {command}"))
    exec(first_cells().pop(), {})


def test_the_first_cell_installs_from_the_one_address_and_holds_torch_and_numpy(monkeypatch):
    """As on Colab: the package is missing, torch and numpy are there."""
    (cell,), find_spec, ran = first_cells(), importlib.util.find_spec, []
    gone = {"avref", "ipywidgets"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in gone else find_spec(name))
    monkeypatch.setattr(subprocess, "check_call", ran.append)
    with pytest.raises(RuntimeError, match="set AVREF_SOURCE above"):
        exec(cell, {})
    exec(cell.replace('AVREF_SOURCE = ""', 'AVREF_SOURCE = "git+https://example.org/avref"'), {})
    (command,) = ran
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    named = {argument for argument in command[4:] if not argument.startswith("-")}
    held = {f"{name}=={metadata.version(name)}" for name in ("torch", "numpy")}
    assert named == {"git+https://example.org/avref", "ipywidgets"} | held
    assert not {"-U", "--upgrade", "--force-reinstall"} & set(command)
    gone.remove("avref")  # pip install . without the extra
    exec(cell, {})
    assert "ipywidgets" in ran[-1] and held <= set(ran[-1]) and not any("example.org" in word for word in ran[-1])
