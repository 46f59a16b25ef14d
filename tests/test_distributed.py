"""`all_reduce` under torch.distributed: replicas that pool their rounds fit as one process that saw all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from avref import OnlineAcceptanceEstimator
from avref.estimator import STEP_RULES

K, ROUNDS, ROWS = 4, 3, 90
SHARES = {2: (50, 40), 4: (40, 0, 35, 15)}  # rows of each rank; one of four is empty throughout
KINDS = [(step, shared) for step in STEP_RULES for shared in (True, False)]


def estimators() -> list[OnlineAcceptanceEstimator]:
    return [OnlineAcceptanceEstimator(K, step=step, shared_slope=shared) for step, shared in KINDS]


def traffic(number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features [ROWS, K] and verdicts of one round, the same in every process; one feature in twenty is NaN."""
    g = torch.Generator().manual_seed(number)
    f = 3 * torch.randn(ROWS, K, generator=g)
    f[torch.rand(ROWS, K, generator=g) < 0.05] = float("nan")
    verified = torch.randint(K + 1, (ROWS,), generator=g)
    accepted = (torch.rand(ROWS, generator=g) * (verified + 1)).long()
    return f, accepted, verified


def coefficients(e: OnlineAcceptanceEstimator) -> list[Any]:
    return [e.slope.tolist(), e.intercepts.tolist(), e.num_refits]


def replica(rank: int, size: int, rendezvous: str) -> dict[str, Any]:
    """What one process of a group does; it runs in a Python of its own."""
    torch.set_num_threads(1)
    where = f"file://{rendezvous}"
    torch.distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=size)
    fitted, first = estimators(), sum(SHARES[size][:rank])
    mine = slice(first, first + SHARES[size][rank])
    for number in range(ROUNDS):
        for e in fitted:
            e.observe(*(x[mine] for x in traffic(number)))
            e.all_reduce()
            e.refit()
    odd = OnlineAcceptanceEstimator(K, slope=0.5 + (rank == size - 1))  # one replica went its own way
    odd.observe(*(x[mine] for x in traffic(0)))
    before, refused = odd.sums.clone(), ""
    try:
        odd.all_reduce()
    except ValueError as error:
        refused = str(error)
    torch.distributed.destroy_process_group()
    untouched = torch.equal(before, odd.sums)
    ignored = float(fitted[0].num_ignored)
    return {"fits": [coefficients(e) for e in fitted], "ignored": ignored, "refused": refused, "untouched": untouched}


@pytest.mark.parametrize("size", SHARES)
def test_replicas_fit_as_one_process_would(size: int, tmp_path: Path) -> None:
    """Invariant: equal to the single-process fit within 1e-5, and all ranks bit for bit alike, empty ones too."""
    whole = estimators()
    for number in range(ROUNDS):
        for e in whole:
            e.observe(*traffic(number))
            e.refit()
    command = [sys.executable, __file__, str(size), str(tmp_path / "rendezvous")]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}  # where the package is not installed
    ranks = [subprocess.Popen([*command, str(rank)], env=env, **pipes) for rank in range(size)]
    try:
        said = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size, [error for _, error in said]
    results = [json.loads(out.splitlines()[-1]) for out, _ in said]
    assert all(r["fits"] == results[0]["fits"] for r in results)
    for fit, alone in zip(results[0]["fits"], whole, strict=True):
        for mine, expected in zip(fit, coefficients(alone), strict=True):
            torch.testing.assert_close(torch.tensor(mine).double(), torch.tensor(expected).double(), atol=1e-5, rtol=0)
    assert sum(r["ignored"] for r in results) == whole[0].num_ignored > 0  # each counts its own
    assert all("unequal coefficients" in r["refused"] and r["untouched"] for r in results)


if __name__ == "__main__":
    print(json.dumps(replica(int(sys.argv[3]), int(sys.argv[1]), sys.argv[2])))
