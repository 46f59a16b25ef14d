"""How the arms of a comparison look in every figure, and the curve of throughput against speed per user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from avref.plot_style import POLICY_COLORS

_OTHERS = {"none": ("#7F7F7F", "D"), "oracle": ("#009E73", "*"), "head": ("#CC79A7", "^"), "q_max": ("#56B4E9", "v")}


def arm_name(arm: str) -> str:
    """What a legend calls an arm: "fixed-3" is "fixed K = 3"."""
    kind, _, rest = arm.partition("-")
    if kind in ("fixed", "adaptive") and rest:
        num, _, more = rest.partition("-")
        return f"{kind} K = {num}" + (", always drafts K" if more else "")
    name, comma, how = arm.partition(", ")
    names = {"none": "no speculation", "always-trim": "drafts, verifies nothing", "head": "trained head"}
    return names.get(name, name) + comma + how


def arm_look(arm: str) -> dict[str, Any]:
    """Colour, line and marker of an arm: fixed lengths from light to dark blue, adaptive ones thick, others dotted."""
    if arm.startswith("adaptive"):
        full = arm.endswith(("full-draft", "always drafts K"))
        color = "#E69F00" if full else POLICY_COLORS["adaptive-7"]
        return {"color": color, "linewidth": 2.4, "linestyle": "--" if full else "-", "marker": "s", "zorder": 4}
    if arm.startswith("fixed-"):
        shade = 0.3 + 0.1 * min(7, int(arm.removeprefix("fixed-")))
        return {"color": POLICY_COLORS.get(arm) or mpl.colormaps["Blues"](shade), "marker": "o", "linewidth": 1.3}
    color, marker = _OTHERS.get(arm.partition(",")[0], ("#000000", "x"))
    return {"color": color, "marker": marker, "linewidth": 1.6, "linestyle": "-" if arm == "none" else ":"}


def draw_per_user(axes: Axes, rows: Sequence[Mapping[str, Any]], load: str) -> None:
    """Tokens/s against tokens/s per user, a line per arm, a point per number of requests; both axes logarithmic.

    rows hold arm, tokens_per_s, tokens_per_s_per_user, and the number of requests under the name `load`. Each fixed
    length is named at its largest load.
    """
    for arm in dict.fromkeys(r["arm"] for r in rows):
        own = sorted((r for r in rows if r["arm"] == arm), key=lambda r: r[load])
        x, y = [r["tokens_per_s_per_user"] for r in own], [r["tokens_per_s"] for r in own]
        look = arm_look(arm)
        axes.plot(x, y, markersize=4.5, label=arm_name(arm), **look)
        if arm.startswith("fixed-"):
            note: Any = {"textcoords": "offset points", "fontsize": 8, "ha": "right", "color": look["color"]}
            axes.annotate(f"K={arm.removeprefix('fixed-')}", (x[-1], y[-1]), (-6, -3), **note)
    axes.margins(x=0.08)  # room for those names
    axes.set(xscale="log", yscale="log", xlabel="tokens/s per user", ylabel="tokens/s, all requests")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())


def number_loads(axes: Axes, rows: Sequence[Mapping[str, Any]], load: str) -> None:
    """Write the number of requests beside each of these points."""
    for r in rows:
        place = (r["tokens_per_s_per_user"], r["tokens_per_s"])
        axes.annotate(str(r[load]), place, (6, 4), textcoords="offset points", fontsize=8.5)
