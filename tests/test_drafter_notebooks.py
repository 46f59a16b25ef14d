"""What notebooks 06 and 07 lean on: the diagrams, the replayed sweeps, the Pareto explorer, the exercises."""

import dataclasses
import io
import itertools
import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import redraws
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.patches import FancyArrowPatch

from avref import exercises_drafters, exercises_end_to_end, plots, widgets, widgets_pareto
from avref.evidence import fits, hardware, simulate, tables, traces
from avref.evidence.pair import Pair
from avref.evidence.replay import Policy
from avref.plot_style import png
from avref.plots_drafters import FAMILY_COLORS, FED_BACK

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


def pixels(picture):
    return imread(io.BytesIO(picture), format="png")


def point(arm, requests, speed, to_none=1.0):
    return {
        "arm": arm,
        "requests": requests,
        "tokens_per_s": speed,
        "tokens_per_s_per_user": speed / requests,
        "to_none": to_none,
    }


ROWS = [
    *(point("none", n, s) for n, s in ((1, 20.0), (4, 60.0), (16, 130.0))),
    *(point("fixed-7", n, s, 0.9) for n, s in ((1, 30.0), (4, 61.0), (16, 100.0))),
    *(point("adaptive-7", n, s, 1.2) for n, s in ((1, 28.0), (4, 70.0), (16, 140.0))),
]
OTHER = [r | {"tokens_per_s": 2 * r["tokens_per_s"]} for r in ROWS]
RESULTS = {"dflash": {"CPU": ROWS, "GPU": OTHER}, "ngram": {"CPU": OTHER, "GPU": ROWS}}


# ---- the diagrams


def fed_back(axes):
    arrows = [p for p in axes.patches if isinstance(p, FancyArrowPatch)]
    return sum(p.get_edgecolor() == plt.matplotlib.colors.to_rgba(FED_BACK) for p in arrows)


@pytest.mark.parametrize("method", FAMILY_COLORS)
def test_a_diagram_shows_who_reads_drafts(method):
    figure = plots.plot_drafter(method)
    (axes,) = figure.axes
    assert axes.get_xlabel() and axes.get_ylabel() and axes.get_title("left").startswith(method)
    assert pixels(png(figure)).std() > 0.05
    # of three drafts the first two are read by the next pass; dspark's by the bias and by c; an n-gram copies three
    assert fed_back(axes) == {"dflash": 0, "dspark": 4, "ngram": 3}.get(method, 2)


def test_an_unknown_family_is_named():
    with pytest.raises(ValueError, match="medusa"):
        plots.plot_drafter("medusa")


def test_positions_that_few_blocks_reach_are_left_out():
    figure = plots.plot_overlaps(
        {"dflash": ([0.5, 0.4, 0.3], [100, 50, 20]), "dflash-greedy": ([0.6, 0.5, 0.4], [9e9] * 3)}
    )
    left, right = figure.axes
    np.testing.assert_array_equal(left.lines[0].get_ydata(), [0.5, 0.4, np.nan])
    np.testing.assert_allclose(right.lines[0].get_ydata(), [1, 0.5, 0.2])
    assert left.lines[0].get_color() == left.lines[1].get_color() and left.lines[1].get_linestyle() == "--"
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes)


def test_bars_stand_at_their_group():
    figure = plots.plot_groups({"none": {"a": 1.0, "b": 2.0}, "fixed-7": {"b": 3.0}}, ylabel="tokens/s", line=1.0)
    (axes,) = figure.axes
    bars = {round(p.get_x() + p.get_width() / 2, 2): p.get_height() for p in axes.patches}
    assert bars == {-0.21: 1.0, 0.79: 2.0, 1.21: 3.0}
    assert axes.get_xlabel() and axes.get_ylabel() == "tokens/s" and isinstance(figure, Figure)


def test_load_is_drawn_over_no_speculation():
    figure = plots.plot_load({"CPU": ROWS, "GPU": OTHER})
    assert len(figure.axes) == 2 and all(axes.get_xlabel() for axes in figure.axes)
    np.testing.assert_allclose(figure.axes[0].lines[2].get_ydata(), [1.2] * 3)


def test_the_frontier_is_ringed_and_what_is_too_slow_shaded():
    figure = plots.plot_frontier(ROWS, floor=10.0)
    (axes,) = figure.axes
    ringed = next(line for line in axes.lines if line.get_label() == "on the frontier")
    wanted = {
        (a["tokens_per_s_per_user"], a["tokens_per_s"])
        for a in ROWS
        if not any(
            b["tokens_per_s_per_user"] > a["tokens_per_s_per_user"] and b["tokens_per_s"] > a["tokens_per_s"]
            for b in ROWS
        )
    }
    assert set(zip(*ringed.get_data(), strict=True)) == wanted and len(wanted) == 3
    assert len(axes.patches) == 1 and not plots.plot_frontier(ROWS).axes[0].patches


# ---- the replays


@pytest.fixture(scope="module")
def trace():
    return traces.load("dflash")


def test_a_sweep_is_the_replay_of_its_arms(trace):
    table = hardware.measured()
    rows = widgets_pareto.sweep(trace, table, (16, 999), steps=40)
    assert [r["arm"] for r in rows] == ["none", "fixed-1", "fixed-3", "fixed-7", "adaptive-7-full-draft", "adaptive-7"]
    first, second = fits.halves(trace)
    ours = simulate.measure(trace, table, Policy.fixed(3), 16, second, warmup=first, num_steps=40)
    none, three = rows[0], rows[2]
    assert three["tokens_per_s"] == pytest.approx(ours.tokens_per_s) and three["requests"] == 16
    assert three["to_none"] == pytest.approx(three["tokens_per_s"] / none["tokens_per_s"])
    assert three["tokens_per_s_per_user"] == pytest.approx(three["tokens_per_s"] / 16)
    assert none["to_none"] == 1.0 and none["emitted"] == 1.0 and none["verified"] == 0
    best = max(r["tokens_per_s"] for r in rows[:4])
    assert all(r["to_best_fixed"] == pytest.approx(r["tokens_per_s"] / best) for r in rows)
    full, adaptive = rows[4:]
    assert full["verified"] < rows[3]["verified"] and adaptive["drafted"] <= full["drafted"]


def test_a_sweep_of_one_workload_uses_its_answers_only(trace, monkeypatch):
    seen = []
    measure = simulate.measure

    def spy(*a, **k):
        seen.append(a[4])
        return measure(*a, **k)

    monkeypatch.setattr(simulate, "measure", spy)
    monkeypatch.setattr(widgets_pareto, "arms", lambda _: {"none": Policy.none()})
    widgets_pareto.sweep(trace, hardware.measured(), (1,), steps=40, workload="code")
    code = np.intersect1d(trace.answers_of("code"), fits.halves(trace)[1])
    np.testing.assert_array_equal(seen[0], code)


def test_a_trace_without_a_confidence_has_no_adaptive_arm(trace):
    bare = {name: None for name in ("logit_q_max", "margin", "entropy", "logit_q_sampled", "head", "stop")}
    assert not [a for a in widgets_pareto.arms(dataclasses.replace(trace, **bare)) if a.startswith("adaptive")]


def test_a_table_that_is_too_small_is_named(trace):
    with pytest.raises(ValueError, match="32"):
        widgets_pareto.sweep(trace, hardware.measured(), (64,))


def test_drafting_nearly_stops_when_a_draft_costs_a_forward(trace):
    costly = tables.drafting(hardware.measured(), "layer_skip", 7)
    by_arm = {r["arm"]: r for r in widgets_pareto.sweep(trace, costly, (16,), steps=240)}
    assert by_arm["adaptive-7"]["drafted"] < 1.5 < by_arm["adaptive-7-full-draft"]["drafted"]
    assert by_arm["adaptive-7"]["to_none"] > 2 * by_arm["adaptive-7-full-draft"]["to_none"]


def test_shipped_keeps_to_what_is_there():
    assert widgets_pareto.shipped("nothing", "dflash") == ["dflash"]
    assert widgets_pareto.shipped("nothing") == traces.shipped()[:1]


def test_a_head_is_scored_position_by_position(trace):
    """The cell on dspark, on a trace that is given a head which knows the overlap."""
    x = np.clip(trace.overlap.astype(float), 1e-3, 1 - 1e-3)
    pair = Pair("dspark", dataclasses.replace(trace, head=np.log(x / (1 - x)).astype(np.float16)))
    auc = [float(pair.scores(s, np.array([0])).auc(pair.weights[:1])[0]) for s in ("head", "logit_q_max")]
    assert 0.5 < auc[1] < auc[0] < 1


@pytest.mark.parametrize("floor", [0.0, 0.5, 0.9, 1.3, 1.5])
def test_the_choice_is_the_best_that_is_allowed(floor):
    best, least = widgets_pareto.choices(ROWS, floor)
    assert least == pytest.approx(20 * floor)
    allowed = [r for r in ROWS if r["tokens_per_s_per_user"] >= 20 * floor]
    assert best["tokens_per_s"] == max(r["tokens_per_s"] for r in allowed)
    best, least = widgets_pareto.choices(ROWS, 9.0)
    assert best["arm"] == "fixed-7" and best["tokens_per_s_per_user"] < least


# ---- the notebook's own cells


def cell(notebook, start):
    cells = json.loads((NOTEBOOKS / notebook).read_text(encoding="utf-8"))["cells"]
    return next(text for text in ("".join(c["source"]) for c in cells) if text.startswith(start))


def test_the_ceiling_of_a_parallel_drafter_by_listing_every_path():
    scope = {"np": np}
    exec(cell("06_drafters.ipynb", "def acceptance"), scope)
    random = np.random.default_rng(0)
    P, depth = random.dirichlet(np.ones(4), size=4), 3
    start = np.eye(4)[1]
    for bias in (0.0, random.normal(size=(4, 4))):
        mass = np.zeros(depth)
        for path in itertools.product(range(4), repeat=depth):
            accepted, before, law = 1.0, 1, start
            for k, x in enumerate(path):
                law = law @ P
                q = law * np.exp(bias[before] if k and np.ndim(bias) else 0.0)
                accepted *= min(P[before, x], (q / q.sum())[x])
                before = x
                mass[k] += accepted / 4 ** (depth - 1 - k)
        np.testing.assert_allclose(scope["acceptance"](P, start, depth, bias), mass / np.append(1.0, mass[:-1]))


def test_what_the_notebook_says_about_parallel_drafters():
    scope = {"np": np}
    exec(cell("06_drafters.ipynb", "def acceptance"), scope)
    exec(cell("06_drafters.ipynb", "def chain"), scope)
    for rates in scope["curves"].values():
        assert rates[0] == pytest.approx(1) and rates[1] < 0.85 and rates[0] - rates[1] > rates[1] - rates[6]
    exec(cell("06_drafters.ipynb", "P = chain"), scope)
    last = [rates[6] for rates in scope["curves"].values()]  # no bias, ranks 2, 10, 40, 200
    assert last == sorted(last) and last[3] > 3 * last[0] and 0.9 < last[4] < 1


# ---- the widget


def test_every_control_redraws_the_one_picture_at_its_ends_and_middle():
    explorer = widgets.ParetoExplorer(RESULTS)
    children = explorer.children
    for control in (explorer.drafter, explorer.table, explorer.floor):
        start = control.value
        options = control.options
        for value in (options[0], options[len(options) // 2], options[-1]):
            before = explorer.picture.value
            changed = value != control.value
            control.value = value
            assert (explorer.picture.value != before) == changed and pixels(explorer.picture.value).std() > 0.01
            assert "per user" in explorer.summary.value
        control.value = start
    assert explorer.children is children  # nothing stacked up


def test_the_summary_names_the_best_choice():
    explorer = widgets.ParetoExplorer(RESULTS)
    assert "<b>adaptive-7</b> with 16 requests" in explorer.summary.value and "140" in explorer.summary.value
    explorer.floor.value = 1.25
    assert "<b>fixed-7</b> with 1 request at once, <b>30</b>" in explorer.summary.value
    assert "on the frontier: 2" in explorer.summary.value


def test_the_static_twin_is_the_same_picture():
    explorer = widgets.ParetoExplorer(RESULTS)
    explorer.drafter.value, explorer.table.value, explorer.floor.value = "ngram", "GPU", 0.75
    twin = png(widgets.pareto_figure(RESULTS, drafter="ngram", table="GPU", floor=0.75))
    assert (pixels(explorer.picture.value) == pixels(twin)).all()
    with pytest.raises(ValueError, match="abacus"):
        widgets.pareto_figure(RESULTS, table="abacus")
    with pytest.raises(ValueError, match="empty"):
        widgets.ParetoExplorer({})


def test_redrawing_leaks_no_figure_and_heeds_values_only(monkeypatch):
    explorer = widgets.ParetoExplorer(RESULTS)
    before, draws = plt.get_fignums(), []
    drawn = widgets_pareto.plot_frontier
    monkeypatch.setattr(widgets_pareto, "plot_frontier", lambda *a, **k: draws.append(1) or drawn(*a, **k))
    explorer.floor.value = 0.5
    explorer.floor.description = "per user"
    assert len(draws) == 1 and plt.get_fignums() == before


def test_a_failing_callback_raises_and_shows_why(monkeypatch):
    explorer = widgets.ParetoExplorer(RESULTS)

    def fail(*_, **__):
        raise ValueError("no <frontier> today")

    monkeypatch.setattr(widgets_pareto, "plot_frontier", fail)
    with pytest.raises(ValueError, match="no <frontier> today"):
        explorer.redraw({"name": "value"})
    assert "no &lt;frontier&gt; today" in explorer.summary.value
    with pytest.raises(ValueError):  # also when a control sets it off
        explorer.floor.value = 0.5


def test_a_redraw_takes_less_than_a_fifth_of_a_second():
    redraws.assert_quick(widgets.ParetoExplorer(RESULTS).floor, (0.25, 0.5, 0.75, 1.0, 1.25, 1.5))


# ---- the exercises


def passes(method, num_requests, depth):
    if method == "ngram":
        return 0, 0
    return (1, num_requests * depth) if method in ("dflash", "dspark") else (depth, num_requests)


def pooled(rates, depth):
    k = np.arange(1, depth + 1)[:, None]
    return (rates**k).sum(1) / (rates ** (k - 1)).sum(1)


def second_overlap(joint):
    return np.minimum(joint, np.outer(joint.sum(1), joint.sum(0))).sum()


def conditional(joint):
    return joint / joint.sum(1, keepdims=True)


READS = {
    "dspark: the state of slot k": True,
    "dspark: the embedding of x_(k-1)": True,
    "dspark: the embedding of x_k": False,
    "dspark: the logits at slot k+1, bias included": False,
    "dflash: the logits at slot k+1": True,
    "eagle: the state after it has read x_k": False,
    "ngram: how often matches of this length were right": True,
}


def frontier(points):
    return [i for i, (x, y) in enumerate(points) if not any(a > x and b > y for a, b in points)]


def verdict(low, high, above):
    return "confirmed" if low > above else "clearly not" if high <= above else "within the noise"


HOLDS = {
    "a longer acceptance length means more tokens per second": False,
    "in a given step, trimming lowers the number of accepted drafts, or leaves it": True,
    "trimming saves drafting time": False,
    "the emitted text follows the target's law at any load": True,
    "choosing the depth, 0 included, costs nothing: exploring is free": False,
    "what pays at one request pays at sixty-four": False,
}
d, e = exercises_drafters, exercises_end_to_end
SOLUTIONS = [
    (d.check_passes, passes),
    (d.check_pooled, pooled),
    (d.check_second_overlap, second_overlap),
    (d.check_what_a_head_may_read, READS),
    (e.check_break_even, lambda draft, verify, plain: (draft + verify) / plain),
    (e.check_frontier, frontier),
    (e.check_verdict, verdict),
    (e.check_what_follows, HOLDS),
]
MISTAKES = [
    (d.check_passes, lambda method, r, k: (k, r)),
    (d.check_passes, lambda method, r, k: (1, k) if method == "dflash" else passes(method, r, k)),
    (d.check_passes, lambda method, r, k: passes("eagle" if method == "dspark" else method, r, k)),
    (d.check_pooled, lambda rates, depth: np.full(depth, rates.mean())),
    (d.check_pooled, lambda rates, depth: [(rates**k).mean() for k in range(1, depth + 1)]),  # unconditional
    (d.check_second_overlap, lambda joint: np.minimum(conditional(joint), joint.sum(0)).sum(1).mean()),  # unweighted
    (d.check_second_overlap, lambda joint: 1.0),
    (d.check_what_a_head_may_read, READS | {"dflash: the logits at slot k+1": False}),
    (d.check_what_a_head_may_read, READS | {"dspark: the embedding of x_k": True}),
    (e.check_break_even, lambda draft, verify, plain: (draft + verify) / plain - 1),
    (e.check_break_even, lambda draft, verify, plain: verify / plain),
    (
        e.check_frontier,
        lambda points: [i for i, p in enumerate(points) if not any(a >= p[0] and b >= p[1] for a, b in points)],
    ),
    (e.check_frontier, lambda points: list(range(len(points)))),
    (e.check_verdict, lambda low, high, above: "confirmed" if (low + high) / 2 > above else "clearly not"),
    (e.check_verdict, lambda low, high, above: "confirmed" if low > above else "clearly not"),
    (e.check_what_follows, HOLDS | {"trimming saves drafting time": True}),
    (e.check_what_follows, dict.fromkeys(HOLDS, False)),
]
TABLES = (d.check_what_a_head_may_read, e.check_what_follows)


@pytest.mark.parametrize(("check", "solution"), SOLUTIONS)
def test_a_solution_is_accepted(check, solution, capsys):
    assert check(solution) is True
    assert "right" in capsys.readouterr().out


@pytest.mark.parametrize(("check", "mistake"), MISTAKES)
def test_a_mistake_is_rejected_and_explained(check, mistake, capsys):
    assert check(mistake) is False
    out = capsys.readouterr().out
    assert out.startswith("✗") and "not written" not in out


@pytest.mark.parametrize("check", [check for check, _ in SOLUTIONS])
@pytest.mark.parametrize("nothing", [None, ...])
def test_an_exercise_not_written_yet_is_told_so(check, nothing, capsys):
    names = READS if check is d.check_what_a_head_may_read else HOLDS
    assert check(dict.fromkeys(names, nothing) if check in TABLES else lambda *_: None) is False
    assert "not written yet" in capsys.readouterr().out
