"""The bar of every redraw of a widget; a plain picture, timed alongside, says how slow the machine is at the moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets

from avref import plot_style, plots


def processor_seconds(work: Callable[[], object]) -> float:
    """Of this process alone, so that what else runs counts little."""
    start = time.process_time()
    work()
    return time.process_time() - start


def plain_picture() -> bytes:
    """Three panels with a line each, laid out by matplotlib: .14 s where the damping explorer's redraw takes .11 s."""
    figure, panels = plots.new_figure(1, 3)
    for panel in panels:
        panel.plot([0, 1], [0, 1])
    return plot_style.png(figure)


def assert_quick(control: ipywidgets.ValueWidget, values: Sequence[Any]) -> None:
    """The quickest redraw takes less than a fifth of a second, or than 1.4 plain pictures where those take longer."""
    plain, redraws = [], []
    for value in values:
        plain.append(processor_seconds(plain_picture))
        redraws.append(processor_seconds(lambda value=value: setattr(control, "value", value)))
    assert min(redraws) < max(0.2, 1.4 * min(plain)), (redraws, plain)
