"""The studies beside the ledger as Markdown, from the numbers that `study.run` returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate


def markdown(studies: Mapping[str, Any]) -> str:
    """One section per study that was made."""
    parts = [
        ("Features, held out", _features, "features"),
        ("Coefficients by workload", _coefficients, "coefficients"),
        ("Tracking: damping, refit interval, step rule", _tracking, "tracking"),
        ("Budget rules", _rules, "rules"),
        ("Decisions by a wrong cost table", _wrong, "wrong_tables"),
        ("The long-run objective", _long_run, "long_run"),
    ]
    lines: list[str] = []
    for title, write, name in parts:
        if studies.get(name):
            lines += ["", f"## {title}", "", *write(studies)]
    return "\n".join(lines) + "\n"


def table(rows: Sequence[Sequence[Any]], header: Sequence[str]) -> str:
    """Rows as a Markdown table."""
    return tabulate(rows, header, tablefmt="pipe", disable_numparse=True)


def interval(value: Mapping[str, float | None], digits: int = 3) -> str:
    ends = ["?" if value[n] is None else f"{value[n]:.{digits}f}" for n in ("value", "low", "high")]
    return f"{ends[0]} [{ends[1]}, {ends[2]}]"


def _features(studies: Mapping[str, Any]) -> list[str]:
    rows = [
        [pair, name, *(interval(m[n], 4) for n in ("auc", "log_loss", "ece"))]
        for pair, table in studies["features"].items()
        for name, m in table.items()
    ]
    about = "One slope for all positions; `no fit` is q_max as it is, `head` the trained head. ECE has 15 equal bins."
    return [about, "", table(rows, ["pair", "feature", "AUC", "log-loss", "ECE"])]


def _coefficients(studies: Mapping[str, Any]) -> list[str]:
    rows = [
        [pair, w, f"{c['acceptance']:.3f}", *(interval(c[n], 2) for n in ("entropy", "slope", "first"))]
        for pair, own in studies["coefficients"].items()
        for w, c in own.items()
    ]
    header = ["pair", "workload", "accepted of graded", "draft entropy (nats)", "slope", "first intercept"]
    return ["All answers of a workload; each fitted by itself.", "", table(rows, header)]


def _tracking(studies: Mapping[str, Any]) -> list[str]:
    rows = studies["tracking"]
    kinds = list(dict.fromkeys(r["traffic"] for r in rows))
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for r in rows:
        key = (r["step"], r.get("interval", ""), "" if "damping" not in r else f"{r['damping']:g}")
        found.setdefault(key, {})[r["traffic"]] = r["excess"]
    lines = [
        [*key, *(f"{own[k]:.4f}" if own[k] < 10 else f"{own[k]:.3g}" for k in kinds)] for key, own in found.items()
    ]
    about = (
        "Synthetic traffic with known probabilities, 8 requests. Excess log-loss over the truth (which has 0), nats "
        "per graded draft; the last two rows are fitted in hindsight, to the verdicts they are judged on."
    )
    return [about, "", table(lines, ["step", "refit every (steps)", "damping", *kinds])]


def _rules(studies: Mapping[str, Any]) -> list[str]:
    rules = studies["rules"]
    names = list(rules["leak"])
    rows = [
        [r["table"], r["requests"], f"{r['acceptance']:.2f}", *(f"{r[n]:.2f}" for n in names)] for r in rules["known"]
    ]
    rows.append(["total variation", "", "", *(f"{rules['leak'][n]:.2g}" for n in names)])
    about = (
        "Synthetic drafts with known probabilities, a request's difficulty carried over from step to step (correlation "
        ".5): tokens/s over the best fixed K in hindsight. Below, what each rule leaks in the example of DSpark's "
        "appendix A, over two steps."
    )
    lines = [about, "", table(rows, ["table", "requests", "mean acceptance", *names])]
    if rules["trace"]:
        on_trace = [[r["table"], r["requests"], r["rule"], interval(r["over_lookahead"])] for r in rules["trace"]]
        lines += ["", "On a trace, by the estimator:", ""]
        lines += [table(on_trace, ["table", "requests", "rule", "tokens/s over lookahead"])]
    return lines


def _wrong(studies: Mapping[str, Any]) -> list[str]:
    rows = [
        [r["table"], r["requests"], r["wrong"], "yes" if r["adaptive_drafting"] else "no", interval(r["over"])]
        for r in studies["wrong_tables"]
    ]
    header = ["table", "requests", "believed", "depth chosen too", "tokens/s over the right table's decisions"]
    return ["Time is counted by the right table, decisions are made by a wrong one.", "", table(rows, header)]


def _long_run(studies: Mapping[str, Any]) -> list[str]:
    lines = []
    if studies.get("example"):
        about = (
            "One request, a step costs 1 + .312 B, drafts easy (.985) or hard (.5), worked out exactly. B for easy and "
            "hard, and tokens per ms over those of the ratio; 59 % are easy: of the steps, or of the tokens."
        )
        rows = [
            [case, name, "{} and {}".format(*v["budgets"]), f"{v['rate']:.3f}", f"{v['to_ratio']:.3f}"]
            for case, own in studies["example"].items()
            for name, v in own.items()
        ]
        header = ["easy share of", "objective", "B", "tokens/ms", "over the ratio"]
        lines = [about, "", table(rows, header), ""]
    rows = [
        [r["pair"], r["table"], r["requests"], interval(r["over_ratio"]), *(f"{v:.2f}" for v in r["verified"])]
        for r in studies["long_run"]
    ]
    header = ["pair", "table", "requests", "tokens/s over the ratio's", "verified: ratio", "long run"]
    return [*lines, "On the traces, the rate following what the policy itself reaches:", "", table(rows, header)]
