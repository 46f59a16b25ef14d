"""The shipped prompts: complete, distinct, and disjoint from each other and from what the drafters are trained on."""

import json
import re
from collections import Counter
from importlib.resources import files

import pytest

from avref import workloads
from avref.train.prompts import TEMPLATES, training_prompts

SPLITS = (*workloads.NAMES, "warmup")
WINDOW = 8  # words


def words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


def windows(text: str, size: int = WINDOW) -> set[tuple[str, ...]]:
    found = words(text)
    return {tuple(found[start : start + size]) for start in range(len(found) - size + 1)}


@pytest.fixture(scope="module")
def training() -> list[str]:
    return training_prompts(5000)


@pytest.mark.parametrize("name", SPLITS)
def test_each_file_has_40_distinct_prompts(name: str) -> None:
    record = json.loads((files("avref") / "data" / "workloads" / f"{name}.json").read_text(encoding="utf-8"))
    assert set(record) == {"name", "description", "prompts"} and record["name"] == name and record["description"]
    prompts = workloads.load(name)
    assert prompts == record["prompts"] and len(prompts) == 40
    assert len({tuple(words(prompt)) for prompt in prompts}) == 40
    assert all(prompt == prompt.strip() and 10 <= len(prompt.split()) <= 180 for prompt in prompts)


@pytest.mark.parametrize("name", SPLITS)
def test_prompts_of_a_split_differ_in_structure(name: str) -> None:
    openings = Counter(" ".join(words(prompt)[:4]) for prompt in workloads.load(name))
    assert max(openings.values()) <= 2, openings.most_common(3)


def test_no_text_is_shared_between_prompts() -> None:
    owner: dict[tuple[str, ...], str] = {}
    for name in SPLITS:
        for prompt in workloads.load(name):
            for window in windows(prompt):
                assert owner.setdefault(window, prompt) == prompt, f"{' '.join(window)!r} is in two prompts"


def test_no_text_is_shared_with_training(training: list[str]) -> None:
    trained = set().union(*(windows(prompt) for prompt in training))
    trained_whole = {tuple(words(prompt)) for prompt in training}
    for name in SPLITS:
        for prompt in workloads.load(name):
            assert tuple(words(prompt)) not in trained_whole
            assert not (windows(prompt) & trained), prompt


def test_windows_find_a_planted_copy(training: list[str]) -> None:
    source = next(prompt for prompt in training if len(words(prompt)) > 30)
    planted = "Something else first. " + " ".join(words(source)[5 : 5 + WINDOW])
    assert windows(planted) & windows(source)
    assert not windows(" ".join(words(source)[5 : 4 + WINDOW])) & windows(source)


def test_load_takes_a_prefix_and_refuses_what_it_does_not_know() -> None:
    assert workloads.load("math", 3) == workloads.load("math")[:3]
    assert workloads.load("math", 0) == []
    with pytest.raises(ValueError, match=r"'poetry'.*low_entropy, math, code, chat, high_entropy, warmup"):
        workloads.load("poetry")
    for num in (-1, 41):
        with pytest.raises(ValueError, match=rf"num is {num}.*0 to 40"):
            workloads.load("chat", num)


def test_mix_takes_the_workloads_in_turn() -> None:
    mixed = workloads.mix()
    assert len(set(mixed)) == 200
    for offset, name in enumerate(workloads.NAMES):
        assert mixed[offset::5] == workloads.load(name)
    assert workloads.mix(7) == mixed[:7] and workloads.mix(0) == []
    with pytest.raises(ValueError, match="num is 201"):
        workloads.mix(201)


def test_training_prompts_are_distinct_seeded_and_a_prefix_of_a_longer_list(training: list[str]) -> None:
    assert len(training) == 5000 and len(set(training)) == 5000
    assert training_prompts(103) == training[:103]
    assert training_prompts(5) != training_prompts(5, seed=1)
    assert training_prompts(0) == []
    with pytest.raises(ValueError, match="-1"):
        training_prompts(-1)


def test_training_prompts_leave_no_slot_open_and_no_wrong_article(training: list[str]) -> None:
    text = "\n".join(training)
    assert not re.search(r"\{[a-z]+\d?\}", text)
    assert not re.search(r"\b[Aa] (apologetic|otter|eerie|architect|old|absurd|angry|editor)", text)


def test_training_kinds_have_many_templates_and_equal_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuple(TEMPLATES) == workloads.NAMES
    assert all(len(set(templates)) >= 25 for templates in TEMPLATES.values())
    for kind in TEMPLATES:
        monkeypatch.setitem(TEMPLATES, kind, [f"{kind} {{big}} {{big2}}"])
    shares = Counter(prompt.lower().split()[0] for prompt in _without_frames(training_prompts(500)))
    assert shares == {kind: 100 for kind in TEMPLATES}


def _without_frames(prompts: list[str]) -> list[str]:
    kinds = "|".join(workloads.NAMES)
    return [re.search(rf"(?i)\b({kinds}) \d+ \d+", prompt).group(0) for prompt in prompts]  # type: ignore[union-attr]
