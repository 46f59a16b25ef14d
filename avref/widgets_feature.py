"""The feature explorer: how a feature goes with acceptance, and whether the confidence made of it is calibrated."""

from __future__ import annotations

from functools import lru_cache

import ipywidgets as widgets
import numpy as np
from matplotlib.figure import Figure

from avref import metrics
from avref.evidence import traces
from avref.evidence.fits import Drafts
from avref.evidence.pair import FEATURE, Pair
from avref.evidence.resampling import Floats
from avref.features import FEATURES
from avref.plots_feature import FEWEST, plot_feature
from avref.widgets_explorer import LABEL, WIDE, Explorer

BINS = (5, 10, 15, 30, 60)


def feature_figure(pair: Pair, *, feature: str = FEATURE, position: int = 0, num_bins: int = 15) -> Figure:
    """The picture of `FeatureExplorer` at one setting; position counts from 1, and 0 stands for all.

    Raises ValueError for a feature or a position that the pair does not have.
    """
    drafts, values, confidence = _predicted(pair, feature, position)
    return plot_feature(feature, values, drafts.label, drafts.position, confidence, num_bins)


def positions(pair: Pair) -> list[int]:
    """Positions (from 1) at which the held-out half has enough drafts for a picture, of both labels."""
    counts = np.bincount(pair.held.position, minlength=pair.trace.num_positions)
    accepted = np.bincount(pair.held.position, weights=pair.held.label, minlength=pair.trace.num_positions)
    return (np.flatnonzero((counts >= FEWEST) & (accepted > 0) & (accepted < counts)) + 1).tolist()


class FeatureExplorer(Explorer):
    """Any of the eight features on a pair's held-out drafts, fitted on the other half (q_max as it is).

    Left: acceptance and confidence against the feature by position; right: the reliability diagram. All fits are made
    at the start, so that a control only draws. Source: article, section "Scoring the distribution" and its table.
    """

    def __init__(self, pair: Pair | None = None) -> None:
        self.pair = Pair("dflash", traces.load("dflash")) if pair is None else pair
        self.feature = widgets.Dropdown(options=list(FEATURES), value=FEATURE, description="feature", style=LABEL)
        places = [("all", 0), *((str(k), k) for k in positions(self.pair))]
        self.position = widgets.ToggleButtons(options=places, description="draft position", style=LABEL)
        self.num_bins = widgets.SelectionSlider(options=BINS, value=15, description="bins", style=LABEL, layout=WIDE)
        for name in FEATURES:
            _predicted(self.pair, name, 0)
        super().__init__(self.feature, self.position, self.num_bins)

    def draw(self) -> tuple[Figure, str]:
        feature, position, bins = self.feature.value, self.position.value, self.num_bins.value
        drafts, _, c = _predicted(self.pair, feature, position)
        y, kept = drafts.label, "lossless" if FEATURES[feature].lossless else "reads the drawn token: not lossless"
        scores = (
            f"{len(y):,} held-out drafts: AUC <b>{metrics.auc(y, c):.4f}</b>, log-loss "
            f"<b>{metrics.log_loss(y, c):.4f}</b>, ECE <b>{metrics.ece(y, c, bins):.4f}</b> ({kept})"
        )
        return feature_figure(self.pair, feature=feature, position=position, num_bins=bins), scores


def _predicted(pair: Pair, feature: str, position: int) -> tuple[Drafts, Floats, Floats]:
    """The held-out drafts of a position (0: all), the feature at each, and the confidence in it."""
    if feature not in FEATURES:
        raise ValueError(f"feature is {feature!r}; allowed are {', '.join(map(repr, FEATURES))}")
    if position and position not in positions(pair):
        raise ValueError(f"position {position} has too few held-out drafts; choose 0 (all) or one of {positions(pair)}")
    values, confidence = _of_all(pair, feature)
    if not position:
        return pair.held, values, confidence
    own = pair.held.position == position - 1
    return pair.held.where(own), values[own], confidence[own]


@lru_cache(maxsize=4 * len(FEATURES))
def _of_all(pair: Pair, feature: str) -> tuple[Floats, Floats]:
    """Feature and confidence of every held-out draft, [M] each."""
    values = pair.values(feature)[pair.held.row, pair.held.position]
    return values, pair.confidence("no fit" if feature == "q_max" else feature, pair.held)
