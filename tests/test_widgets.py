"""The damping explorer, its static twin, the simulation behind both, and the figure style.

Reported failures: an exception in a callback is swallowed (C142), figures stack up (C144), figures leak (C145).
"""

import io
import itertools

import matplotlib.pyplot as plt
import pytest
import redraws
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread

from avref import plot_style, plots, traffic, widgets
from avref.estimator import OnlineAcceptanceEstimator


def pixels(png):
    return imread(io.BytesIO(png), format="png")


# ---- the simulation


def test_a_simulated_round_equals_feeding_the_estimator_step_by_step():
    """The shortcut of one call per round against the plain loop, and the recorded loss against its definition."""
    history = traffic.simulate_damping(refit_interval=20, num_steps=70, damping=10.0, traffic="drifting", seed=3)
    data = traffic.make_traffic("drifting", num_steps=70, seed=3)
    est = OnlineAcceptanceEstimator(7, refit_interval=20, damping=10.0)
    losses = []
    for f, accepted, truth in zip(data.features[:60], data.num_accepted, data.log_odds, strict=False):
        graded = torch.arange(7) <= accepted[:, None]
        p, c = truth.sigmoid(), (est.slope * f + est.intercepts).sigmoid()
        losses.append((p * (p / c).log() + (1 - p) * ((1 - p) / (1 - c)).log())[graded])
        est.observe(f, accepted, torch.full((8,), 7))
        if est.steps_until_refit == 1:
            torch.testing.assert_close(history.slope[est.num_refits], est.slope)
            torch.testing.assert_close(history.intercepts[est.num_refits], est.intercepts)
            torch.testing.assert_close(history.num_graded[est.num_refits], est.sums[-1])
            torch.testing.assert_close(history.excess_log_loss[est.num_refits], torch.cat(losses).mean())
            losses.clear()
        est.end_step()
    assert est.num_refits == 3 == len(history.slope)  # the unfinished fourth round is left out
    assert history.edges.tolist() == [0, 20, 40, 60] and history.true_intercepts.shape == (60, 7)


def test_the_traffic_has_the_stated_coefficients():
    data = traffic.make_traffic("steady", num_steps=2400, seed=1)
    first = data.num_accepted > 0
    assert first.double().mean() == pytest.approx(data.log_odds[..., 0].sigmoid().mean().item(), abs=0.01)
    torch.testing.assert_close(data.log_odds, 0.5 * data.features + data.intercepts[:, None])
    flipping = traffic.make_traffic("flipping")
    assert (flipping.num_accepted[:800] == 7).double().mean() > 0.99
    assert (flipping.num_accepted[800:1600] == 0).double().mean() > 0.5


def test_on_flipping_traffic_the_published_update_is_thrown_and_the_other_holds():
    runs = {rule: traffic.simulate_damping(step=rule, traffic="flipping") for rule in ("newton", "self_concordant")}
    assert runs["newton"].intercepts.abs().max() > 1000
    assert runs["self_concordant"].intercepts.abs().max() < 30
    assert runs["self_concordant"].excess_log_loss[-1] < 0.1 < runs["newton"].excess_log_loss[-1]


def test_on_drifting_traffic_the_published_update_follows_faster():
    """The price of the safe rule, stated in the notebook: its steps are shortened, so it lags more."""
    runs = {rule: traffic.simulate_damping(step=rule, traffic="drifting") for rule in ("newton", "self_concordant")}
    assert runs["newton"].excess_log_loss[1:].mean() < runs["self_concordant"].excess_log_loss[1:].mean()


def test_a_starved_budget_comes_back_with_probes_only():
    with_probes, without = (traffic.simulate_starvation(interval, num_steps=2100) for interval in (64, 0))
    for history in (with_probes, without):
        assert history.budgets[:300].double().mean() > 4 and not history.budgets[900:1300].any()
    assert (with_probes.budgets[1300:] >= 6).any() and not without.budgets[1300:].any()
    axes = plots.plot_starvation(with_probes, without).axes[0]
    assert axes.get_xlabel() == "decode steps" and len(axes.lines) == 2


def test_the_lesson_figures_are_labelled():
    run = traffic.make_traffic("steady", num_steps=50)
    f, accepted = run.features.flatten(0, 1), run.num_accepted.flatten()
    figures = [
        plots.plot_newton_step(8.0, 0),
        plots.plot_labels(torch.tensor([0, 2]), torch.tensor([1, 2]), 3),
        plots.plot_acceptance(f[:, 0], accepted > 0, {"truth": run.log_odds.flatten(0, 1)[:, 0].sigmoid()}),
        plots.plot_hessian(torch.eye(3) * 9),
    ]
    for figure in figures[:3]:
        assert figure.axes[0].get_xlabel() and figure.axes[0].get_ylabel() and figure.axes[0].get_legend()
    names = [text.get_text() for text in figures[0].axes[0].get_legend().get_texts()]
    assert "newton: \N{MINUS SIGN}1,922" in names and "self_concordant" in names
    cells = [text.get_text() for text in figures[1].axes[0].texts]
    assert cells == ["0", "", "", "1", "1", ""]


@pytest.mark.parametrize("bad", [{"traffic": "wavy"}, {"refit_interval": 5000}, {"damping": -1}, {"step": "adam"}])
def test_settings_that_cannot_be_simulated_are_refused(bad):
    with pytest.raises(ValueError):
        traffic.simulate_damping(**bad)


# ---- the figures


def test_every_policy_has_a_colour_of_its_own():
    assert set(plots.POLICY_COLORS) == {
        "none", "fixed-1", "fixed-3", "fixed-7", "adaptive-7", "stale", "early_stop", "lookahead", "retrospective",
        "newton", "self_concordant",
    }  # fmt: skip
    rgb = [tuple(int(color[i : i + 2], 16) for i in (1, 3, 5)) for color in plots.POLICY_COLORS.values()]
    for first, second in itertools.combinations(rgb, 2):
        assert sum(abs(a - b) for a, b in zip(first, second, strict=True)) > 60


@pytest.mark.parametrize("rule", ["newton", "self_concordant"])
@pytest.mark.parametrize("kind", traffic.KINDS)
def test_the_damping_figure_is_complete(rule, kind):
    figure = widgets.damping_figure(step=rule, traffic=kind)
    assert isinstance(figure, Figure)
    slope, intercept, excess = figure.axes
    assert slope.get_ylabel() == "slope" and "log-odds" in intercept.get_ylabel() and "nats" in excess.get_ylabel()
    assert excess.get_xlabel() == "decode steps"
    assert {text.get_text() for text in slope.get_legend().get_texts()} == {"truth", rule}
    assert all(axes.patches for axes in figure.axes)
    notes = [text.get_text() for axes in (slope, intercept) for text in axes.texts if "leaves" in text.get_text()]
    assert bool(notes) == (kind == "flipping" and rule == "newton")


def test_several_runs_share_one_figure_and_none_is_refused():
    runs = [traffic.simulate_damping(step=rule, traffic="flipping") for rule in ("newton", "self_concordant")]
    figure = plots.plot_damping(*runs)
    assert len(figure.axes[1].patches) == 2
    with pytest.raises(ValueError, match="no history"):
        plots.plot_damping()


def test_a_saved_figure_is_a_picture_in_the_figures_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = plots.save(widgets.damping_figure(), "damping")
    assert path == tmp_path / "figures" / "damping.png"
    assert imread(path).std() > 0.01


def test_from_a_subfolder_of_a_checkout_figures_go_to_its_root(tmp_path, monkeypatch):
    """Where git ignores them: only whoever asks for it renews the pictures that come with a checkout."""
    (tmp_path / "avref").mkdir()
    (tmp_path / "avref" / "plots.py").touch()
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    monkeypatch.delenv("AVREF_FIGURES", raising=False)
    assert plots.save(plots.new_figure()[0], "empty").parent == tmp_path / "figures" / "local"
    monkeypatch.setenv("AVREF_FIGURES", "1")
    assert plots.save(plots.new_figure()[0], "empty").parent == tmp_path / "figures"


# ---- the widget


def test_every_control_redraws_the_one_picture_at_its_ends_and_middle():
    explorer = widgets.DampingExplorer()
    children = explorer.children
    seen = {explorer.picture.value}
    for control in (explorer.constant, explorer.refit_interval, explorer.step, explorer.traffic):
        start = control.value
        for value in {control.options[0], control.options[len(control.options) // 2], control.options[-1]} - {start}:
            before = explorer.picture.value
            control.value = value
            assert explorer.picture.value != before and pixels(explorer.picture.value).std() > 0.01
            assert "nats per draft" in explorer.summary.value
            seen.add(explorer.picture.value)
        control.value = start
    assert explorer.children is children  # nothing stacked up
    assert len(seen) == 1 + 3 + 2 + 1 + 2  # every setting draws a picture of its own


def test_the_static_twin_is_the_same_picture():
    explorer = widgets.DampingExplorer()
    explorer.traffic.value = "drifting"
    explorer.constant.value = 200
    twin = plot_style.png(widgets.damping_figure(constant=200, traffic="drifting"))
    assert (pixels(explorer.picture.value) == pixels(twin)).all()


def test_only_a_change_of_value_redraws(monkeypatch):
    explorer = widgets.DampingExplorer()
    draws = []
    monkeypatch.setattr(widgets, "plot_damping", lambda history: draws.append(history) or plots.new_figure()[0])
    explorer.constant.description = "C"
    explorer.traffic.disabled = True
    assert not draws
    explorer.constant.value = 5
    assert len(draws) == 1


def test_redrawing_leaks_no_figure():
    explorer = widgets.DampingExplorer()
    before = plt.get_fignums()
    for _ in range(3):
        for value in (20, 50):
            explorer.constant.value = value
    assert plt.get_fignums() == before


def test_a_failing_callback_raises_and_shows_why(monkeypatch):
    explorer = widgets.DampingExplorer()

    def fail(**_):
        raise ValueError("no <traffic> today")

    monkeypatch.setattr(widgets, "simulate_damping", fail)
    with pytest.raises(ValueError, match="no <traffic> today"):
        explorer.redraw({"name": "value"})
    assert "no &lt;traffic&gt; today" in explorer.summary.value
    with pytest.raises(ValueError):  # also when a control sets it off
        explorer.constant.value = 5


def test_a_redraw_takes_less_than_a_fifth_of_a_second():
    redraws.assert_quick(widgets.DampingExplorer().constant, (20, 50, 100, 200, 500, 50, 20, 100))
