"""Break the package on purpose, one small mistake at a time, and count how many the tests notice.

    python .ci/mutants.py                     every mutant, in a copy of the project
    python .ci/mutants.py --only estimator    those of one file

A mutant is one line changed by one of the operators below. A test that fails kills it; so does running into the time
limit (said in the table). Exits with 1 when fewer than 95 % are killed, or when one cannot be imported and so says
nothing about the tests; survivors are listed, with the reason where no test could notice them. Every run is a fork of
this process, which has imported the libraries already but nothing of the package.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
REQUIRED = 0.95
# Tests of each file, the quickest to notice a mistake first, and which of them say nothing about it.
TESTS = {
    "estimator": ("test_estimator.py test_properties.py", "(test_estimator or round or draft or predict or refit) and "
                  "not (all_reduce or costs or starved)"),
    "pruning": ("test_pruning.py test_properties.py", "(test_pruning or budget or argmax or early_stop or slot or "
                "allocation or past_steps or survival) and not (simulated or millisecond)"),
    "sampling": ("test_sampling.py test_properties.py", "test_sampling or truncation or sample or emit or verdict"),
    "packed": ("test_properties.py test_packed.py", "test_packed or layout or cache or attention"),
    "layout": ("test_properties.py test_packed.py", "test_packed or layout or cache or attention"),
}  # fmt: skip


class Mutant(NamedTuple):
    file: str
    operator: str
    old: str  # occurs exactly once in the file
    new: str
    equivalent: str = ""  # why no test can notice it


# fmt: off
COMPARISON, MASK, POSITION, SWAP, CLAMP, AXIS, STALE = OPERATORS = (
    "flip a comparison", "drop a mask", "off by one", "swap p and q", "skip a clamp", "wrong axis", "stale for live",
)
LISTED: dict[str, list[tuple[str, ...]]] = {
    "estimator": [
        (COMPARISON, "(self._positions <= accepted) &", "(self._positions < accepted) &"),
        (COMPARISON, "& (self._positions < verified)", "& (self._positions <= verified)"),
        (COMPARISON, "(self.slope + slope_step < 0)", "(self.slope + slope_step > 0)"),
        (COMPARISON, "self.sums[-1] > 0,", "self.sums[-1] >= 0,"),
        (MASK, "usable = graded & ~f.isnan()", "usable = graded"),
        (MASK, "w = (c * (1 - c)).masked_fill(unusable, 0.0)", "w = c * (1 - c)"),
        (MASK, ".double() - c).masked_fill(unusable, 0.0)", ".double() - c)"),
        (MASK, "low, high = f.masked_fill(unusable, MAX_LOG_ODDS),", "low, high = f,"),
        (POSITION, "torch.arange(num_positions, device", "torch.arange(1, num_positions + 1, device"),
        (POSITION, "if self.num_steps < self.refit_interval", "if self.num_steps <= self.refit_interval"),
        (SWAP, "((self._positions < accepted).double() - c)", "(c - (self._positions < accepted).double())"),
        (CLAMP, "return f.double().clamp(-MAX_LOG_ODDS, MAX_LOG_ODDS)", "return f.double()"),
        (CLAMP, "(n + self.damping).clamp_min(1.0)", "(n + self.damping)"),
        (CLAMP, "slope_step = torch.maximum(slope_step, -self.slope)", "pass"),
        (AXIS, "d = moves.amax() if self.shared_slope else moves.amax(dim=0)", "d = moves.amax(dim=0)"),
        (AXIS, "d = moves.amax() if self.shared_slope else moves.amax(dim=0)", "d = moves.amax()"),
        (SWAP, "torch.minimum(self.feature_min, other", "torch.maximum(self.feature_min, other"),
        (STALE, "+= 1\n        self._clear_round()", "+= 1\n        self.num_steps = 0"),
    ],
    "pruning": [
        (COMPARISON, "np.argmax(ratio >= ", "np.argmax(ratio <= "),
        (COMPARISON, "np.arange(num_positions) < limits", "np.arange(num_positions) <= limits"),
        (MASK, "best = np.sort(values[live])[::-1]  # [N], descending", "best = np.sort(values.ravel())[::-1]"),
        (MASK, "np.where(live, values, -1.0).T", "values.T"),
        (MASK, "gain[:, : len(gain)][np.tri(len(gain), k=-1, dtype=bool)] = -np.inf", "pass"),
        (POSITION, "np.arange(num_requests, num_requests +", "-1 + np.arange(num_requests, num_requests +"),
        (POSITION, "np.tri(len(gain), k=-1,", "np.tri(len(gain), k=0,"),
        (CLAMP, "confidence.cumprod(-1).cummin(-1).values", "confidence.cumprod(-1)"),
        (CLAMP, "np.minimum(best, MAX_SCALE * tail)", "best"),
        (AXIS, "confidence.cumprod(-1)", "confidence.cumprod(0)"),
        (AXIS, "np.where(live, values, -1.0).T.reshape(-1)", "np.where(live, values, -1.0).reshape(-1)"),
        (AXIS, "fallback, values), axis=1)", "fallback, values), axis=0)"),
        (STALE, "self._old = dict(zip(request_ids, values,", "self._old.update(zip(request_ids, values,"),
        (STALE, "self._mean + self.rate * (seen - self._mean)", "self._mean"),
        (STALE, "depth=values.shape[1])", "depth=None)"),
    ],
    "sampling": [
        (COMPARISON, "likely = (threshold < p_x)", "likely = (threshold <= p_x)"),
        (COMPARISON, "rejected = (accepted[r] < num_verified[r])", "rejected = (accepted[r] <= num_verified[r])"),
        (COMPARISON, "(cumulative > level[:, None])", "(cumulative >= level[:, None])"),
        (COMPARISON, "(equal.cumsum(-1) > equals)", "(equal.cumsum(-1) >= equals)"),
        (MASK, "(threshold < p_x) & ~unbounded", "(threshold < p_x)"),
        (MASK, "above[row] + before - before[torch.searchsorted(row, row)]", "above[row] + before"),
        (MASK, "& (self.top_k < vocab_size)", ""),
        (POSITION, "logits.index_select(0, first_row[r] + k)", "logits.index_select(0, first_row[r] + k + 1)"),
        (POSITION, "device=p.device) >= k, 0)", "device=p.device) > k, 0)"),
        (POSITION, ">= accepted[:, None], -1)", "> accepted[:, None], -1)",
         "the slot at `accepted` is overwritten by the residual or bonus token"),
        (SWAP, "excess = (p - q).clamp_(min=0)", "excess = (q - p).clamp_(min=0)"),
        (SWAP, "threshold = u_accept * at_draft  # [R, K]", "threshold = u_accept  # [R, K]"),
        (CLAMP, "excess = (p - q).clamp_(min=0)", "excess = p - q"),
        (CLAMP, "limit = limit.clamp(min=0.5 / p.shape[1])", "pass"),
        (CLAMP, "keepdim=True).clamp(min=1)  # [n, 1] tokens that stay", "keepdim=True)"),
        (CLAMP, "level = torch.minimum(level, torch.nextafter(", "pass; (level, torch.nextafter("),
        (AXIS, "total = excess.sum(-1, keepdim=True)", "total = excess.sum(0, keepdim=True)"),
        (STALE, "first_row[r] + accepted[r])", "first_row[r])"),
        (STALE, "wide.index_copy_(1, ids, q[r, k])", "wide.index_copy_(1, ids, q[r, 0 * k])"),
    ],
    "packed": [
        (MASK, "torch.tanh(scores / softcap) + mask", "torch.tanh(scores / softcap)"),
        (POSITION, "rows = layout.row + layout.first_row if layout.first_row else layout.row", "rows = layout.row"),
        (SWAP, "values[rows, layout.position] = value", "values[rows, layout.position] = key"),
        (AXIS, ".permute(0, 3, 1, 2, 4).flatten(2, 3)  # [n, q, H, D]", ".permute(0, 3, 2, 1, 4).flatten(2, 3)"),
        (STALE, "new[:have_rows, :have_length] = buffer", "pass"),
        (STALE, "keys[target], values[target] = keys[source], values", "keys[target] = keys"),
    ],
    "layout": [
        (COMPARISON, "visible = keys <= query", "visible = keys < query"),
        (COMPARISON, "visible &= keys > query - window", "visible &= keys >= query - window"),
        (COMPARISON, "(within < first + width)", "(within <= first + width)"),
        (COMPARISON, "rows = (count > first)", "rows = (count >= first)"),
        (MASK, "x = x if self.every_token else x[self.tokens]", "x = x"),
        (MASK, "return x if self.every_row else x[self.rows]", "return x"),
        (POSITION, "start[row] + within, ends", "start[row] + within - 1, ends"),
        (POSITION, "within, ends - 1,", "within, ends - 2,"),
        (POSITION, "start[rows] + first", "start[rows]"),
        (CLAMP, "np.minimum(count, first + width)", "count", "a longer context is masked: slower, the same numbers"),
        (AXIS, "mask[:, None].repeat(1, 1, group, 1)", "mask[:, None].repeat_interleave(group, 2)"),
        (STALE, "key = (group, window, dtype)", "key = (group, dtype)"),
    ],
}
# fmt: on
MUTANTS = [Mutant(file, *entry) for file, entries in LISTED.items() for entry in entries]


def source(file: str, root: Path = ROOT) -> Path:
    return root / "avref" / f"{file}.py"


def unusable() -> list[str]:
    """Mutants whose old text is not there exactly once, so that the list cannot rot."""
    texts = {file: source(file).read_text(encoding="utf-8") for file in TESTS}
    counts = [(m, texts[m.file].count(m.old)) for m in MUTANTS]
    return [f"{m.file}.py has {n} times: {m.old}" for m, n in counts if n != 1]


class FirstFailure:
    """A pytest plugin that remembers the first test that failed."""

    name = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid.split("::", 1)[1]


def tests_of(file: str, copy: Path, mutated: bool, answer: Any) -> None:
    """In the fork: run the tests of a file on the copy and send pytest's exit code and the first failure."""
    import pytest

    os.chdir(copy)
    sys.path.insert(0, str(copy))
    sys.dont_write_bytecode = mutated  # what is compiled stays that of the untouched copy
    files, which = TESTS[file]
    first = FirstFailure()
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
        arguments = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-k", which]
        code = pytest.main([*arguments, *(f"tests/{name}" for name in files.split())], plugins=[first])
    assert str(copy) in sys.modules["avref"].__file__  # type: ignore[operator]  # not an installed one
    answer.send((int(code), first.name))


def run(file: str, copy: Path, limit: float | None) -> tuple[str, float]:
    """What the tests of a file say of the copy ("" when all pass), and how many seconds that took."""
    started, context = time.perf_counter(), multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=tests_of, args=(file, copy, limit is not None, send))
    process.start()
    send.close()
    process.join(limit)
    if process.is_alive():
        process.kill()
        process.join()
        return "time limit", time.perf_counter() - started
    code, failed = receive.recv() if receive.poll() else (None, "")
    if code not in (0, 1):
        failed = f"NOT RUN: pytest ended with {code}"
    return failed, time.perf_counter() - started


def try_all(mutants: list[Mutant], copy: Path, say: Callable[[str], None]) -> list[tuple[Mutant, str]]:
    """Each mutant with what killed it; the untouched copy must pass first, and sets the time limit."""
    limits: dict[str, float] = {}
    results = []
    for mutant in mutants:
        if mutant.file not in limits:
            failed, seconds = run(mutant.file, copy, None)
            if failed:
                sys.exit(f"the tests of {mutant.file}.py fail without any mutant: {failed}")
            limits[mutant.file] = 60 + 10 * seconds
            say(f"{mutant.file:9}  untouched: all tests pass in {seconds:.0f} s")
        path = source(mutant.file, copy)
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        killer, seconds = run(mutant.file, copy, limits[mutant.file])
        path.write_text(text, encoding="utf-8")
        results.append((mutant, killer))
        say(f"{mutant.file:9}  {mutant.operator:17}  {seconds:5.1f} s  {mutant.old[:44]!r:48}  {killer or 'SURVIVED'}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Mutation check of the package's core.")
    parser.add_argument("--only", choices=TESTS, help="only mutants of this file")
    only = parser.parse_args().only
    if wrong := unusable():
        sys.exit("these mutants no longer fit the source:\n" + "\n".join(wrong))
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # a fork must not inherit threads
    import hypothesis.extra.numpy  # noqa: F401
    import pytest  # noqa: F401
    import scipy.stats  # noqa: F401
    import sklearn.linear_model  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    torch.set_num_threads(1)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        copy, left_out = Path(folder), shutil.ignore_patterns("__pycache__", "data", "weights")
        for name in ("avref", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=left_out)
        shutil.copy(ROOT / "pyproject.toml", copy)
        results = try_all([m for m in MUTANTS if only in (None, m.file)], copy, lambda line: print(line, flush=True))

    survived = [mutant for mutant, killer in results if not killer]
    broken = [mutant for mutant, killer in results if killer.startswith("NOT RUN")]
    for mutant in survived:
        print(f"survived: {mutant.file}.py: {mutant.old} -> {mutant.new}: {mutant.equivalent or 'NO TEST NOTICES IT'}")
    killed = len(results) - len(survived) - len(broken)
    timeouts = sum(killer == "time limit" for _, killer in results)
    minutes = (time.perf_counter() - started) / 60
    print(f"mutants: {killed} of {len(results)} killed ({timeouts} by the time limit), {len(survived)} survived, "
          f"{sum(bool(m.equivalent) for m in survived)} of them equivalent; {minutes:.0f} minutes")  # fmt: skip
    sys.exit(bool(broken) or killed < REQUIRED * len(results))


if __name__ == "__main__":
    main()
