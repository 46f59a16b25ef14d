"""The figures of the study, drawn from the numbers in `claims.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from avref.plot_style import POLICY_COLORS, STYLE, new_figure
from avref.plots_simulate import OUTSIDE, TABLES, plot_throughput

PAIRS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000")
MARKERS = "osD^vP*X"
FEATURES = ("logit_q_max", "loglog_q_max", "entropy", "margin", "log_q_max", "no fit", "head", "logit_q_sampled")
NAMES = {"logit_q_max": "logit q_max", "loglog_q_max": "-log(-log q_max)", "log_q_max": "log q_max"}
NAMES |= {"no fit": "q_max, no fit", "logit_q_sampled": "logit q_sampled (biased)"}
RULES = ("stale", "early_stop", "lookahead", "retrospective")


def figures(studies: Mapping[str, Any]) -> dict[str, Figure]:
    """Every figure that there are numbers for, by name."""
    made: dict[str, tuple[str, Callable[[Mapping[str, Any]], Figure]]] = {
        "features": ("features", plot_features),
        "positions": ("positions", plot_positions),
        "coefficients": ("coefficients", plot_coefficients),
        "throughput": ("speeds", plot_throughput),
        "workloads": ("speeds", plot_workload_gains),
        "tracking": ("tracking", plot_tracking),
        "rules": ("rules", plot_budget_rules),
        "wrong_tables": ("wrong_tables", plot_wrong_tables),
        "long_run": ("example", plot_long_run),
    }
    return {name: draw(studies) for name, (needed, draw) in made.items() if studies.get(needed)}


def _dots(axes: Axes, x: Any, values: Sequence[Mapping[str, Any]], **look: Any) -> None:
    """Points with their intervals; what is undefined is left out."""
    known = [(a, v) for a, v in zip(x, values, strict=True) if v and v["value"] is not None and v["low"] is not None]
    if known:
        at, y = [a for a, _ in known], np.array([[v[n] for n in ("value", "low", "high")] for _, v in known])
        spread = np.clip([y[:, 0] - y[:, 1], y[:, 2] - y[:, 0]], 0, None)
        axes.errorbar(at, y[:, 0], spread, elinewidth=0.9, capsize=2, markersize=5, **look)


def _look(i: int) -> dict[str, Any]:
    return {"color": PAIRS[i % len(PAIRS)], "marker": MARKERS[i % len(MARKERS)]}


@mpl.rc_context(STYLE)
def plot_features(studies: Mapping[str, Any]) -> Figure:
    """AUC, log-loss and calibration error on held-out answers of every feature, a mark per pair."""
    figure, panels = new_figure(1, 3, size=(12.0, 4.6))
    pairs = studies["features"]
    width = 0.7 / len(pairs)
    titles = {"auc": "AUC", "log_loss": "log-loss (nats)", "ece": "calibration error"}
    for axes, (measure, title) in zip(panels, titles.items(), strict=True):
        for i, (pair, table) in enumerate(pairs.items()):
            x = np.arange(len(FEATURES)) + (i - (len(pairs) - 1) / 2) * width
            _dots(
                axes, x, [table.get(f, {}).get(measure, {}) for f in FEATURES], label=pair, linestyle="none", **_look(i)
            )
        names = [NAMES.get(f, f) for f in FEATURES]
        axes.set_xticks(range(len(FEATURES)), names, rotation=40, ha="right", rotation_mode="anchor")
        axes.set(title=title)
        if measure != "auc":
            _cut(axes, pairs, measure, title)
    panels[2].legend(**OUTSIDE)
    return figure


def _cut(axes: Axes, pairs: Mapping[str, Any], measure: str, title: str) -> None:
    """End the axis above the fitted features; the title names what lies beyond."""
    shown = [(pair, f, table[f][measure]) for pair, table in pairs.items() for f in FEATURES if f in table]
    top = 1.1 * max(v["high"] for _, f, v in shown if f != "no fit" and v["high"] is not None)
    beyond = [f"{pair}, {NAMES.get(f, f)}: {v['value']:.2f}" for pair, f, v in shown if v["value"] and v["value"] > top]
    axes.set(ylim=(0 if measure == "ece" else None, top), title=title + "".join(f"\nbeyond: {b}" for b in beyond))


@mpl.rc_context(STYLE)
def plot_positions(studies: Mapping[str, Any]) -> Figure:
    """AUC by draft position, a panel per pair: the estimator, and the trained head where there is one.

    Within a position every rising function of q_max ranks alike, so the estimator's line is that of q_max too.
    Positions with fewer than 50 drafts are left out.
    """
    pairs = studies["positions"]
    columns = min(4, len(pairs))
    rows = -(-len(pairs) // columns)
    figure, panels = new_figure(rows, columns, size=(3.2 * columns + 1.2, 2.9 * rows), sharey=True, sharex=True)
    looks = {"logit_q_max": ("estimator, and q_max as it is", "#D55E00"), "head": ("trained head", "#0072B2")}
    deepest = max(len(table["logit_q_max"]) for table in pairs.values())
    for axes, (pair, table) in zip(panels, pairs.items(), strict=False):
        for name, (label, color) in looks.items():
            values = [m["auc"] if m["drafts"] >= 50 else {} for m in table.get(name, [])]
            _dots(axes, np.arange(1, len(values) + 1), values, color=color, marker="o", label=label)
        axes.axhline(0.5, color="#444444", linewidth=0.8)
        axes.set(title=pair, xticks=range(1, deepest + 1))
    for axes in panels[len(pairs) :]:
        axes.set_axis_off()
    for axes in panels[max(0, len(pairs) - columns) : len(pairs)]:
        axes.set_xlabel("draft position")
        axes.tick_params(labelbottom=True)
    panels[0].set_ylabel("AUC")
    handles = {name: h for axes in panels for h, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    panels[columns - 1].legend(handles.values(), handles.keys(), **OUTSIDE)
    return figure


@mpl.rc_context(STYLE)
def plot_coefficients(studies: Mapping[str, Any]) -> Figure:
    """Slope and first intercept against a workload's mean draft entropy: a mark per workload, a colour per pair."""
    figure, (slope, first) = new_figure(1, 2, size=(10.5, 4.0))
    for axes, name, title in ((slope, "slope", "slope"), (first, "first", "intercept of position 1")):
        for i, (pair, own) in enumerate(studies["coefficients"].items()):
            workloads = [c for w, c in own.items() if w != "all"]
            x = [c["entropy"]["value"] for c in workloads]
            _dots(axes, x, [c[name] for c in workloads], label=pair, linestyle="none", **_look(i))
        axes.set(xlabel="mean draft entropy of the workload (nats)", title=title)
    first.legend(**OUTSIDE)
    return figure


@mpl.rc_context(STYLE)
def plot_workload_gains(studies: Mapping[str, Any]) -> Figure:
    """Adaptive verification over fixed verification of the same K by workload, at the highest load of each table."""
    speeds = [s for s in studies["speeds"] if s["workloads"]]
    tables = list(dict.fromkeys(s["table"] for s in speeds)) or ["measured"]
    figure, panels = new_figure(1, len(tables), size=(5.2 * len(tables) + 1.2, 3.9))
    for axes, table in zip(panels, tables, strict=True):
        own = [s for s in speeds if s["table"] == table]
        workloads = list(dict.fromkeys(w for s in own for w in s["workloads"]))
        width = 0.7 / max(1, len(own))
        for i, s in enumerate(own):
            x = np.arange(len(workloads)) + (i - (len(own) - 1) / 2) * width
            _dots(
                axes, x, [s["workloads"].get(w, {}) for w in workloads], label=s["pair"], linestyle="none", **_look(i)
            )
        axes.axhline(1.0, color="#444444", linewidth=0.8)
        axes.set_xticks(range(len(workloads)), [w.replace("_", "\n") for w in workloads])
        axes.set(title=TABLES.get(table, table), ylabel="tokens/s over fixed K")
    panels[-1].legend(**OUTSIDE)
    return figure


@mpl.rc_context(STYLE)
def plot_tracking(studies: Mapping[str, Any]) -> Figure:
    """Excess log-loss against the damping constant by traffic; a line per refit interval and step rule."""
    rows = studies["tracking"]
    kinds = list(dict.fromkeys(r["traffic"] for r in rows))
    figure, panels = new_figure(1, len(kinds), size=(12.0, 4.2))
    styles = {"self_concordant": "-", "newton": ":"}
    intervals = sorted({r["interval"] for r in rows if "interval" in r})
    for axes, kind in zip(panels, kinds, strict=True):
        own = [r for r in rows if r["traffic"] == kind]
        for step, line in styles.items():
            for interval, color in zip(intervals, ("#56B4E9", "#D55E00", "#000000"), strict=False):
                chosen = [r for r in own if r["step"] == step and r["interval"] == interval]
                x = range(len(chosen))
                axes.plot(x, [r["excess"] for r in chosen], line, color=color, label=f"{step}, every {interval}")
                axes.set_xticks(x, [f"{r['damping']:g}" for r in chosen])
        for name, style, label in (
            ("constant", "--", "hindsight: one set of constants"),
            ("each round in hindsight", "-.", "hindsight: each 100 steps fitted"),
        ):
            value = next(r["excess"] for r in own if r["step"] == name)
            axes.axhline(value, color="#009E73", linewidth=1.2, linestyle=style, label=label)
        low = min(r["excess"] for r in own)
        axes.set(yscale="log", ylim=(0.6 * low, min(2.0, 3 * max(r["excess"] for r in own))), title=kind)
        axes.set_xlabel("damping constant C (drafts)")
        if max(r["excess"] for r in own) > 2:
            axes.set_title(f"{kind} (lines that leave the picture diverge)")
    panels[0].set_ylabel("excess log-loss (nats per graded draft)")
    panels[-1].legend(**OUTSIDE)
    return figure


@mpl.rc_context(STYLE)
def plot_budget_rules(studies: Mapping[str, Any]) -> Figure:
    """Tokens/s of the budget rules over the best fixed K, known probabilities; and what each rule leaks."""
    rules = studies["rules"]
    known = rules["known"]
    figure, (speed, leak) = new_figure(1, 2, size=(12.0, 4.2), width_ratios=[3.2, 1])
    for i, rule in enumerate(RULES):
        x = np.arange(len(known)) + (i - 1.5) * 0.2
        speed.bar(x, [r[rule] for r in known], 0.18, color=POLICY_COLORS[rule], label=rule.replace("_", " "))
        leak.barh(i, max(rules["leak"][rule], 1e-17), color=POLICY_COLORS[rule])
    names = [f"{r['table']}\nR = {r['requests']}\n{r['acceptance']:g}" for r in known]
    speed.set_xticks(range(len(known)), names, fontsize=8)
    speed.axhline(1.0, color="#444444", linewidth=0.8)
    speed.set(ylabel="tokens/s over the best fixed K", title="Speed (below: table, requests, mean acceptance)")
    leak.set_yticks(range(len(RULES)), [r.replace("_", " ") for r in RULES])
    leak.set(xscale="log", xlim=(1e-17, 1), xlabel="total variation", title="Bias of the output")
    speed.legend(ncols=4, loc="upper left", fontsize=9)
    speed.set_ylim(0, 1.45)
    return figure


@mpl.rc_context(STYLE)
def plot_wrong_tables(studies: Mapping[str, Any]) -> Figure:
    """Tokens/s when decisions believe a wrong cost table, over decisions by the right one."""
    rows = [r for r in studies["wrong_tables"] if not r["adaptive_drafting"]]
    kinds, tables = list(dict.fromkeys(r["wrong"] for r in rows)), list(dict.fromkeys(r["table"] for r in rows))
    figure, (axes,) = new_figure(size=(8.6, 4.0))
    for i, table in enumerate(tables):
        own = {r["wrong"]: r for r in rows if r["table"] == table}
        y = np.arange(len(kinds)) + (i - (len(tables) - 1) / 2) * 0.25
        requests = next(iter(own.values()))["requests"]
        look = _look(i)
        for place, kind in zip(y, kinds, strict=True):
            v = own[kind]["over"]
            axes.plot([v["low"], v["high"]], [place, place], color=look["color"], linewidth=1)
            label = f"{TABLES.get(table, table)}, {requests} requests" if kind == kinds[0] else None
            axes.plot(v["value"], place, linestyle="none", label=label, **look)
    axes.axvline(1.0, color="#444444", linewidth=0.8)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.invert_yaxis()
    axes.set(xlabel="tokens/s over decisions by the right table", title="What the decisions believe")
    axes.legend(**OUTSIDE)
    return figure


@mpl.rc_context(STYLE)
def plot_long_run(studies: Mapping[str, Any]) -> Figure:
    """The long-run objective over the ratio: in the worked example, and on the traces."""
    figure, (exact, traces) = new_figure(1, 2, size=(11.0, 3.8))
    colors = {"ratio": "#D55E00", "long run": "#0072B2", "best": "#7F7F7F"}
    for i, own in enumerate(studies["example"].values()):
        for j, (name, v) in enumerate(own.items()):
            label = {"best": "best pair of budgets"}.get(name, name) if i == 0 else None
            exact.plot(i + (j - 1) * 0.26, v["to_ratio"], "o", markersize=9, color=colors[name], label=label)
            exact.text(i + (j - 1) * 0.26, v["to_ratio"] + 0.012, f"{v['to_ratio']:.3f}", ha="center", fontsize=9)
    exact.set_xticks([0, 1], ["59 % of the steps\nare easy", "59 % of the tokens\nare easy"])
    exact.set(xlim=(-0.5, 1.5), ylim=(0.85, 1.06), ylabel="tokens/ms over the ratio's")
    exact.set_title("Worked out exactly, one request")
    exact.legend(loc="upper center", ncols=3, fontsize=9)
    rows = studies.get("long_run") or []
    settings = list(dict.fromkeys((r["table"], r["requests"]) for r in rows))
    pairs = list(dict.fromkeys(r["pair"] for r in rows))
    for i, pair in enumerate(pairs):
        own = {(r["table"], r["requests"]): r["over_ratio"] for r in rows if r["pair"] == pair}
        x = np.arange(len(settings)) + (i - (len(pairs) - 1) / 2) * 0.7 / max(1, len(pairs))
        _dots(traces, x, [own.get(s, {}) for s in settings], label=pair, linestyle="none", **_look(i))
    traces.axhline(1.0, color="#444444", linewidth=0.8)
    traces.set_xticks(range(len(settings)), [f"{t}\nR = {r}" for t, r in settings])
    traces.set(ylabel="tokens/s over the ratio's", title="On the traces")
    if rows:
        traces.legend(**OUTSIDE)
    return figure
