"""The exercise checkers accept a solution, reject planted mistakes, and wait for what is not written yet."""

import itertools

import pytest
import torch

from avref import exercises


def arrowhead(a, b, h, g0, g1, ridge):
    slope = (g0 - b * g1 / (h + ridge)).sum() / (ridge + (a - b * b / (h + ridge)).sum())
    return slope, (g1 - b * slope) / (h + ridge)


def graded(num_accepted, num_verified, num_positions):
    k = torch.arange(num_positions)
    return (k <= num_accepted[:, None]) & (k < num_verified[:, None])


def expected_tokens(confidence, admitted):
    verified = torch.arange(confidence.shape[1]) < admitted[:, None]
    return len(confidence) + (confidence.cumprod(1) * verified).sum()


def grow(survivals, num_requests, step_ms):
    tokens = num_requests
    for budget, s in enumerate(survivals):
        if (tokens + s) / step_ms[budget + 1] <= tokens / step_ms[budget]:
            return budget
        tokens += s
    return len(survivals)


def grow_on_ties(survivals, num_requests, step_ms):
    tokens = num_requests
    for budget, s in enumerate(survivals):
        if (tokens + s) / step_ms[budget + 1] < tokens / step_ms[budget]:
            return budget
        tokens += s
    return len(survivals)


def rates(survivals, num_requests, step_ms):
    return [(num_requests + sum(survivals[:b])) / step_ms[b] for b in range(len(step_ms))]


def best_of_all(survivals, num_requests, step_ms):
    found = rates(survivals, num_requests, step_ms)
    return found.index(max(found))


def all_that_improve(survivals, num_requests, step_ms):
    found = rates(survivals, num_requests, step_ms)
    return sum(after > before for before, after in itertools.pairwise(found))


CHECKS = [
    (exercises.check_break_even, lambda tokens, ms, extra_ms: extra_ms * tokens / ms),
    (exercises.check_expected_tokens, expected_tokens),
    (exercises.check_growth, grow),
    (exercises.check_arrowhead, arrowhead),
    (exercises.check_graded, graded),
    (exercises.check_evidence, lambda share, damping: damping * share / (1 - share)),
]
MISTAKES = [
    (exercises.check_break_even, lambda tokens, ms, extra_ms: extra_ms / ms),
    (exercises.check_break_even, lambda tokens, ms, extra_ms: tokens / (ms + extra_ms)),
    (exercises.check_expected_tokens, lambda c, n: expected_tokens(c, n) - len(c)),  # without the last token
    (exercises.check_expected_tokens, lambda c, n: len(c) + c.cumprod(1).sum()),  # all verified
    (exercises.check_expected_tokens, lambda c, n: len(c) + (c * (torch.arange(3) < n[:, None])).sum()),  # no product
    (exercises.check_growth, best_of_all),
    (exercises.check_growth, all_that_improve),
    (exercises.check_growth, lambda s, r, ms: len(s)),
    (exercises.check_growth, lambda s, r, ms: sum(x > 0.5 for x in s)),
    (exercises.check_arrowhead, lambda a, b, h, g0, g1, ridge: (g0.sum() / (a.sum() + ridge), g1 / (h + ridge))),
    (exercises.check_arrowhead, lambda *sums: (arrowhead(*sums)[0], sums[4] / (sums[2] + sums[5]))),
    (exercises.check_arrowhead, lambda *sums: (arrowhead(*sums)[0], arrowhead(*sums)[1].sum())),
    (exercises.check_graded, lambda a, v, k: torch.arange(k) < v[:, None]),
    (exercises.check_graded, lambda a, v, k: torch.arange(k) <= a[:, None]),
    (exercises.check_graded, lambda a, v, k: torch.arange(k) < a[:, None]),
    (exercises.check_evidence, lambda share, damping: damping * share),
    (exercises.check_growth, grow_on_ties),
    (exercises.check_graded, lambda a, v, k: graded(a[:1], v[:1], k)),  # the first request alone
    (exercises.check_graded, lambda a, v, k: graded(a, v, 3)),  # always three positions
    (exercises.check_break_even, lambda *_: float("nan")),
    (exercises.check_expected_tokens, lambda *_: float("nan")),
    (exercises.check_evidence, lambda *_: float("nan")),
    (exercises.check_arrowhead, lambda *sums: (float("nan"), arrowhead(*sums)[1])),
    (exercises.check_arrowhead, lambda *sums: (arrowhead(*sums)[0], arrowhead(*sums)[1] * float("nan"))),
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


def test_looking_at_every_survival_is_named_as_the_mistake(capsys):
    assert exercises.check_growth(best_of_all) is False
    assert "looking at every survival" in capsys.readouterr().out
