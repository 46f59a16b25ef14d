"""What every explorer shares: controls, a line that sums up, and one picture that is redrawn in place.

An explorer keeps a single PNG image and never an `Output` area: nothing stacks up under the controls, and an exception
in a callback is not swallowed. It is shown in place of the summary line and raised again.
"""

from __future__ import annotations

import html
from typing import Any

import ipywidgets as widgets
from matplotlib.figure import Figure

from avref.plot_style import png

LABEL: Any = {"description_width": "150px"}
WIDE: Any = {"width": "480px"}
"""Style of every control and layout of every slider."""


class Explorer(widgets.VBox):
    """The controls given, above the picture and the summary that `draw` makes at their present values."""

    def __init__(self, *controls: widgets.ValueWidget) -> None:
        self.picture = widgets.Image(format="png", layout={"max_width": "100%", "align_self": "flex-start"})
        self.summary = widgets.HTML()
        for control in controls:
            control.observe(self.redraw, names="value")
        super().__init__([*controls, self.summary, self.picture])
        self.redraw()

    def draw(self) -> tuple[Figure, str]:
        """The picture, and the summary as HTML."""
        raise NotImplementedError

    def redraw(self, _change: Any = None) -> None:
        """Replace picture and summary; an error takes the summary's place and is raised again."""
        try:
            figure, summary = self.draw()
            self.picture.value = png(figure)
            self.summary.value = summary
        except Exception as error:
            self.summary.value = f"<b>redrawing failed:</b> {html.escape(str(error))}"
            raise
