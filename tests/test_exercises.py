"""The exercise checkers accept a solution, reject planted mistakes, and wait for what is not written yet."""

import pytest
import torch

from avref import exercises


def arrowhead(a, b, h, g0, g1, ridge):
    slope = (g0 - b * g1 / (h + ridge)).sum() / (ridge + (a - b * b / (h + ridge)).sum())
    return slope, (g1 - b * slope) / (h + ridge)


def graded(num_accepted, num_verified, num_positions):
    k = torch.arange(num_positions)
    return (k <= num_accepted[:, None]) & (k < num_verified[:, None])


CHECKS = [
    (exercises.check_arrowhead, arrowhead),
    (exercises.check_graded, graded),
    (exercises.check_evidence, lambda share, damping: damping * share / (1 - share)),
]
MISTAKES = [
    (exercises.check_arrowhead, lambda a, b, h, g0, g1, ridge: (g0.sum() / (a.sum() + ridge), g1 / (h + ridge))),
    (exercises.check_arrowhead, lambda *sums: (arrowhead(*sums)[0], sums[4] / (sums[2] + sums[5]))),
    (exercises.check_arrowhead, lambda *sums: (arrowhead(*sums)[0], arrowhead(*sums)[1].sum())),
    (exercises.check_graded, lambda a, v, k: torch.arange(k) < v[:, None]),
    (exercises.check_graded, lambda a, v, k: torch.arange(k) <= a[:, None]),
    (exercises.check_graded, lambda a, v, k: torch.arange(k) < a[:, None]),
    (exercises.check_evidence, lambda share, damping: damping * share),
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


@pytest.mark.parametrize("check", [check for check, _ in CHECKS])
def test_an_exercise_not_written_yet_is_told_so(check, capsys):
    assert check(lambda *_: None) is False
    assert "not written yet" in capsys.readouterr().out
