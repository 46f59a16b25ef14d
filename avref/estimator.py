"""Acceptance estimator: one logistic regression for all draft positions, refitted online from accept/reject verdicts.

    c[r, k] = sigmoid(slope * f[r, k] + intercept[k])

c is the probability that the target accepts draft k of request r, given that it accepted the drafts before it; f is the
feature, the log-odds of the draft distribution's top token (`avref.features.logit_q_max`). Slope and intercepts follow
the traffic by one damped Newton step (iteratively reweighted least squares) every `refit_interval` decode steps. With
w = c (1 - c) and r = label - c, a round is summed up per position by

    a = sum w f^2    b = sum w f    h = sum w    g0 = sum r f    g1 = sum r    n = count

and by the range of f: O(K) numbers, whatever the traffic. The Hessian of the log-loss is an arrowhead (the slope is
coupled to every intercept, no two intercepts to each other), so these sums hold all of it. When every position has its
own slope (`shared_slope=False`) there are K separate problems of two unknowns, and the same formulas apply.

Source: article, section "Fitting the coefficients" ("Ajuste de los Coeficientes"); vLLM, `acceptance_estimator.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MAX_LOG_ODDS = 40.0
STEP_RULES = ("self_concordant", "newton")


class OnlineAcceptanceEstimator:
    """Predict which drafts the target accepts, and learn from its verdicts while serving.

    Args:
        num_positions: K, draft positions per request.
        slope, intercept: cold start, dimensionless; `intercept` may list K values, `slope` too if it is not shared.
        damping: a step backed by n graded drafts is scaled by n / (n + damping); in drafts, 0 switches it off.
        ridge: added to the curvature, not to the loss: it keeps the system solvable and pulls no coefficient to 0.
        refit_interval: decode steps per round.
        step: "self_concordant" (never raises the loss of the round) or "newton" (the published update).
        shared_slope: one slope for all positions, or one per position.

    `slope` is a float64 tensor of shape [] ([K] when not shared), `intercepts` of shape [K]. A refit binds new tensors,
    so a caller may keep the old ones. `num_ignored` counts graded drafts with a NaN feature: they are left out of the
    fit. Raises ValueError for settings out of range.
    """

    sums: Tensor  # [6, K]: a, b, h, g0, g1, n of the round
    feature_min: Tensor  # [K]
    feature_max: Tensor  # [K]

    def __init__(
        self,
        num_positions: int,
        *,
        slope: float | Sequence[float] | Tensor = 0.5,
        intercept: float | Sequence[float] | Tensor = -0.2,
        damping: float = 50.0,
        ridge: float = 1e-3,
        refit_interval: int = 100,
        step: str = "self_concordant",
        shared_slope: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        _check_settings(num_positions, damping, ridge, refit_interval, step, shared_slope)
        self.num_positions, self.shared_slope, self.step = num_positions, shared_slope, step
        self.damping, self.ridge, self.refit_interval = damping, ridge, refit_interval
        self.device = torch.device(device or "cpu")
        shape = (num_positions,)
        self.slope = self._checked("slope", slope, () if shared_slope else shape, lowest=0)  # [] or [K]
        self.intercepts = self._checked("intercept", intercept, shape)  # [K]
        self.num_refits = 0
        self.num_ignored = torch.zeros((), dtype=torch.float64, device=self.device)
        self._positions = torch.arange(num_positions, device=self.device)  # [K]
        self._clear_round()

    @property
    def steps_until_refit(self) -> int:
        """Decode steps until `end_step` refits; at 1, replicas call `all_reduce` before `end_step`."""
        return self.refit_interval - self.num_steps

    def predict(self, f: Tensor) -> Tensor:
        """Confidence sigmoid(slope f + intercept): [R, K] float32 from features [R, K], clamped to +-40; NaN stays NaN.

        Raises ValueError when f is not [R, K].
        """
        return self._log_odds(self._features(f)).sigmoid().float()  # [R, K]

    def observe(self, f: Tensor, num_accepted: Tensor, num_verified: Tensor) -> None:
        """Add the verdicts of one decode step to the round's sums.

        Draft k (0-based) is graded when k <= num_accepted and k < num_verified, its label is k < num_accepted: these
        are the accepted drafts and the first rejection. A draft behind a rejection, or never verified, has no label.
        c is computed from f with the present coefficients, so no refit may fall between `predict` and `observe`.

        Shapes: f [R, K] as given to `predict`; num_accepted, num_verified [R], counts of drafts.
        Raises ValueError on a wrong shape or type and, when the counts are on the CPU (reading them on a GPU would
        stall the step), on counts out of order. Source: vLLM, `acceptance_estimator.py`.
        """
        f = self._features(f)  # [R, K]
        accepted, verified = self._counts(f.shape[0], num_accepted, num_verified)  # [R, 1], [R, 1]
        if f.shape[0] == 0:
            return
        graded = (self._positions <= accepted) & (self._positions < verified)  # [R, K]
        usable = graded & ~f.isnan()
        unusable = ~usable
        f = f.masked_fill(unusable, 0.0)  # before any product, since 0 * NaN is NaN
        c = self._log_odds(f).sigmoid()
        w = (c * (1 - c)).masked_fill(unusable, 0.0)
        residual = ((self._positions < accepted).double() - c).masked_fill(unusable, 0.0)
        wf = w * f
        # New tensors rather than in-place sums: a step under torch.inference_mode must not freeze the state.
        self.sums = self.sums + torch.stack((wf * f, wf, w, residual * f, residual, usable)).sum(dim=1)  # [6, K]
        low, high = f.masked_fill(unusable, MAX_LOG_ODDS), f.masked_fill(unusable, -MAX_LOG_ODDS)
        self.feature_min = torch.minimum(self.feature_min, low.amin(dim=0))  # [K]
        self.feature_max = torch.maximum(self.feature_max, high.amax(dim=0))  # [K]
        self.num_ignored = self.num_ignored + (graded & unusable).sum()

    def end_step(self) -> bool:
        """Count one decode step and refit when the round is full; returns whether it refitted."""
        self.num_steps += 1
        if self.num_steps < self.refit_interval:
            return False
        self.refit()
        return True

    def refit(self) -> None:
        """Take one damped Newton step on the round's log-loss, then clear the round.

        A position without graded drafts keeps its intercept bit for bit; the slope stays >= 0.
        """
        slope_step, intercept_step = self._newton_step() if self.step == "newton" else self._self_concordant_step()
        self.slope = (self.slope + slope_step).clamp_min(0)  # [] or [K]
        self.intercepts = torch.where(self.sums[-1] > 0, self.intercepts + intercept_step, self.intercepts)  # [K]
        self.num_refits += 1
        self._clear_round()

    def _newton_step(self) -> tuple[Tensor, Tensor]:
        """The published update, in the published order: the intercepts answer the slope step as damped and guarded."""
        _, b, h, _, g1, n = self.sums  # [K] each
        slope_step = self._undamped_slope_step() * self._evidence(self._pool(n))  # [] or [K]
        refused = ~slope_step.isfinite() | (self.slope + slope_step < 0)
        slope_step = slope_step.masked_fill(refused, 0.0)
        intercept_step = (g1 - b * slope_step) / (h + self.ridge) * self._evidence(n)  # [K]
        return slope_step, intercept_step.masked_fill(~intercept_step.isfinite(), 0.0)

    def _self_concordant_step(self) -> tuple[Tensor, Tensor]:
        """Newton in the coordinates where the system is diagonal, damped there, then shortened until it is safe.

        Write level_k = intercept_k + m_k slope, the log-odds at the weighted mean feature m_k = b_k / (h_k + ridge).
        In (slope, level_1, ..., level_K) the curvature has no off-diagonal entry, so each step may be damped alone. Let
        Q be the fall in loss per unit of that step, to first order, and d the largest change of an observed log-odds.
        The step's curvature is at most Q, and the logistic loss is generalised self-concordant, so for 0 <= t <= 1

            loss(t) - loss(0) <= -t Q + Q (exp(t d) - t d - 1) / d^2,

        lowest at t = log(1 + d) / d, where it is not above 0: the loss of the round never rises.
        """
        _, b, h, _, g1, n = self.sums  # [K] each
        mean_feature = b / (h + self.ridge)
        slope_step = self._undamped_slope_step() * self._evidence(self._pool(n))  # [] or [K]
        slope_step = torch.maximum(slope_step, -self.slope)
        level_step = g1 / (h + self.ridge) * self._evidence(n)  # [K]
        intercept_step = level_step - mean_feature * slope_step  # [K]
        ends = torch.stack((self.feature_min, self.feature_max)).masked_fill(n == 0, 0.0)  # [2, K]
        moves = (slope_step * ends + intercept_step).abs().masked_fill(n == 0, 0.0)  # [2, K], linear in f
        d = moves.amax() if self.shared_slope else moves.amax(dim=0)  # [] or [K]
        t = torch.where(d > 0, torch.log1p(d) / d, 1.0)
        return slope_step * t, intercept_step * t

    def _undamped_slope_step(self) -> Tensor:
        """Slope part of the arrowhead solution (the Schur complement of the intercepts): [] or [K]."""
        a, b, h, g0, g1, _ = self.sums  # [K] each
        gradient = self._pool(g0 - b * g1 / (h + self.ridge))
        curvature = self._pool(a - b * b / (h + self.ridge)).clamp_min(0)  # Cauchy-Schwarz: below 0 by rounding only
        return gradient / (curvature + self.ridge)

    def _pool(self, x: Tensor) -> Tensor:
        """Sum over positions when they share the slope: [K] -> [] or [K]."""
        return x.sum() if self.shared_slope else x

    def _evidence(self, n: Tensor) -> Tensor:
        """The damping factor n / (n + damping); 0 without drafts, even when damping is 0."""
        return n / (n + self.damping).clamp_min(1.0)

    def merge(self, other: OnlineAcceptanceEstimator) -> None:
        """Add the round of another replica with the same coefficients; the other keeps its own.

        Raises ValueError when the coefficients differ in number or value: sums taken at other ones do not add up.
        """
        if not torch.equal(self._coefficients(), other._coefficients().to(self.device)):
            raise ValueError(_UNEQUAL)
        self.sums = self.sums + other.sums.to(self.device)
        self.feature_min = torch.minimum(self.feature_min, other.feature_min.to(self.device))
        self.feature_max = torch.maximum(self.feature_max, other.feature_max.to(self.device))
        self.num_ignored = self.num_ignored + other.num_ignored.to(self.device)

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> None:
        """Pool the round over all ranks of a torch.distributed group, so that every rank refits alike.

        Called once a round by every rank, empty ones too, just before the refit (`steps_until_refit` is 1). An `LLM`
        does not call it: it refits by its own steps, and replicas that serve apart need not take equally many.
        `num_ignored`, which goes on over the rounds, stays each rank's own.
        Raises RuntimeError without an initialised process group, ValueError on every rank when coefficients differ.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError("all_reduce needs torch.distributed.init_process_group(); in one process use merge")
        theta = self._coefficients()
        extremes = torch.cat((self.feature_max, -self.feature_min, theta, -theta))
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
        feature_max, minus_min, highest, minus_lowest = extremes.split([self.num_positions] * 2 + [theta.numel()] * 2)
        if not torch.equal(highest, -minus_lowest):
            raise ValueError(_UNEQUAL)
        sums = self.sums.clone()
        dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
        self.sums, self.feature_max, self.feature_min = sums, feature_max, -minus_min

    def state_dict(self) -> dict[str, Any]:
        """Coefficients, counters and the round in progress, as copies (tensors and ints); settings are not included."""
        return {name: value.clone() if isinstance(value := getattr(self, name), Tensor) else value for name in _STATE}

    def taught(self) -> str:
        """What this knows beside the default cold start, as text to tell two of them apart; empty for nothing."""
        fresh = OnlineAcceptanceEstimator(self.num_positions, shared_slope=self.shared_slope).state_dict()
        now, then = ([torch.as_tensor(v).tolist() for v in s.values()] for s in (self.state_dict(), fresh))
        return "" if now == then else str(now)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` saved.

        Raises ValueError, and changes nothing, on missing or unknown keys, wrong shapes and impossible values.
        """
        if not isinstance(state, Mapping) or set(state) != set(_STATE):
            keys = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(f"state has keys {keys}; expected {sorted(_STATE)}")
        new: dict[str, Any] = {}
        for name, lowest in _STATE.items():
            old = getattr(self, name)
            shape = tuple(old.shape) if isinstance(old, Tensor) else ()
            try:
                found = tuple(torch.as_tensor(state[name]).shape)
            except (TypeError, ValueError, RuntimeError) as error:  # None, a text, rows of unequal length
                raise ValueError(f"{name} is {state[name]!r}; expected numbers of shape {list(shape)}") from error
            if found != shape:
                raise ValueError(f"{name} has shape {list(found)}; expected {list(shape)}")
            value = self._checked(name, state[name], shape, lowest=lowest)
            if not isinstance(old, Tensor) and value != value.round():
                raise ValueError(f"{name} is {state[name]!r}; expected a whole number")
            if name == "sums" and (value[-1] < 0).any():
                raise ValueError(f"sums counts {value[-1].tolist()} graded drafts by position; expected 0 or more")
            if name == "num_steps" and value >= self.refit_interval:
                raise ValueError(f"num_steps is {state[name]!r}; a round has {self.refit_interval} steps")
            new[name] = value if isinstance(old, Tensor) else int(value)
        vars(self).update(new)

    def _clear_round(self) -> None:
        self.num_steps = 0  # decode steps in this round
        self.sums = torch.zeros(6, self.num_positions, dtype=torch.float64, device=self.device)
        self.feature_min = torch.full_like(self.sums[0], MAX_LOG_ODDS)  # neutral: features are clamped
        self.feature_max = -self.feature_min

    def _coefficients(self) -> Tensor:
        return torch.cat((self.slope.reshape(-1), self.intercepts))

    def _log_odds(self, f: Tensor) -> Tensor:
        return self.slope * f + self.intercepts  # [R, K]

    def _features(self, f: Tensor) -> Tensor:
        f = torch.as_tensor(f, device=self.device).detach()
        if f.dim() != 2 or f.shape[1] != self.num_positions:
            raise ValueError(f"f has shape {list(f.shape)}; expected [R, {self.num_positions}], a row per request")
        return f.double().clamp(-MAX_LOG_ODDS, MAX_LOG_ODDS)

    def _counts(self, num_rows: int, num_accepted: Tensor, num_verified: Tensor) -> tuple[Tensor, Tensor]:
        accepted, verified = (torch.as_tensor(count, device=self.device) for count in (num_accepted, num_verified))
        for name, count in (("num_accepted", accepted), ("num_verified", verified)):
            if count.shape != (num_rows,):
                raise ValueError(f"{name} has shape {list(count.shape)}; expected [{num_rows}], one count per row of f")
            if count.is_floating_point() or count.dtype == torch.bool:
                raise ValueError(f"{name} has dtype {count.dtype}; expected integers (counts of drafts, not verdicts)")
        if self.device.type == "cpu":
            wrong = (accepted < 0) | (accepted > verified) | (verified > self.num_positions)
            if wrong.any():
                raise ValueError(
                    f"num_accepted {accepted[wrong].tolist()} with num_verified {verified[wrong].tolist()}; "
                    f"expected 0 <= num_accepted <= num_verified <= {self.num_positions}"
                )
        return accepted[:, None], verified[:, None]

    def _checked(self, name: str, value: Any, shape: tuple[int, ...], *, lowest: float = -math.inf) -> Tensor:
        """A fresh float64 tensor of the shape, from numbers or one number for all."""
        wanted = "a finite number" + (f" or {list(shape)} of them" if shape else "")
        expected = f"{name} is {value!r}; expected {wanted}{', at least 0' if lowest == 0 else ''}"
        try:
            tensor = torch.as_tensor(value, dtype=torch.float64, device=self.device).detach()
        except (TypeError, ValueError, RuntimeError) as error:  # None, a text, a dictionary, rows of unequal length
            raise ValueError(expected) from error
        if tensor.shape not in ((), shape) or not (tensor.isfinite() & (tensor >= lowest)).all():
            raise ValueError(expected)
        return tensor.expand(shape).clone()


# What `state_dict` saves, with the lowest value allowed.
_STATE = {
    **dict.fromkeys(("slope", "num_ignored", "num_steps", "num_refits"), 0.0),
    **dict.fromkeys(("intercepts", "sums", "feature_min", "feature_max"), -math.inf),
}
_UNEQUAL = "replicas have unequal coefficients; start them alike and refit them together, on pooled sums"


def _check_settings(
    num_positions: int, damping: float, ridge: float, refit_interval: int, step: str, shared_slope: bool
) -> None:
    def is_count(x: object) -> bool:
        return isinstance(x, int) and not isinstance(x, bool) and x >= 1

    def is_number(x: object) -> bool:
        return isinstance(x, (int, float)) and not isinstance(x, bool)

    for name, value, allowed, expected in (
        ("num_positions", num_positions, is_count(num_positions), "an integer of at least 1"),
        ("refit_interval", refit_interval, is_count(refit_interval), "an integer of at least 1"),
        ("damping", damping, is_number(damping) and 0 <= damping < math.inf, "a finite number of drafts, at least 0"),
        (
            "ridge",
            ridge,
            is_number(ridge) and 0 < ridge < math.inf,
            "a finite number above 0 (it keeps the system solvable)",
        ),
        ("step", step, step in STEP_RULES, f"one of {', '.join(STEP_RULES)}"),
        ("shared_slope", shared_slope, isinstance(shared_slope, bool), "True or False"),
    ):
        if not allowed:
            raise ValueError(f"{name} is {value!r}; expected {expected}")
