"""Plain text that ships with Python: its language reference (`pydoc` topics) and the docstrings of its library.

Any text is training data here, sampled from the target or not: at every position the label is the target's whole
distribution. Reading a given text is one forward, several times faster than sampling one.
"""

from __future__ import annotations

import ast
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

SHORTEST, LONGEST = 300, 900  # characters of one piece


def _topics() -> Iterator[str]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name]


def _docstrings() -> Iterator[str]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.glob("*.py")) + sorted(library.glob("*/*.py")):
        if "site-packages" in path.parts or "test" in path.parts or path.name.startswith("_"):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                yield ast.get_docstring(node) or ""


def _pieces(text: str) -> Iterator[str]:
    """Whole paragraphs, joined up to a readable length; those too short to learn from are dropped."""
    piece = ""
    for paragraph in textwrap.dedent(text).split("\n\n"):
        if piece and len(piece) + len(paragraph) > LONGEST:
            yield piece
            piece = ""
        piece = f"{piece}\n\n{paragraph}" if piece else paragraph.strip("\n")
    yield piece


def python_texts(num: int, seed: int = 0) -> list[str]:
    """Return up to `num` different pieces of text, shuffled; the same Python and seed give the same list.

    Raises ValueError when `num` is negative.
    """
    if num < 0:
        raise ValueError(f"num is {num}; it must be 0 or more")
    sources = [p for texts in (_topics(), _docstrings()) for t in texts for p in _pieces(t)]
    pieces = [p[:LONGEST] for p in dict.fromkeys(sources) if len(p) >= SHORTEST]
    random.Random(seed).shuffle(pieces)
    return pieces[:num]
