"""Reported failures that no other file covers, by their numbers in the list of cases; the other numbers stand there.

Two do not apply: C70 (an end token replaced by padding), since answers are lists of their own length and nothing is
padded, and C146 (a slider's bounds changed one at a time), since no widget changes the bounds of a slider.
"""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from avref.cost_table import CostTable
from avref.pruning import choose_budget
from avref.speed import _crop

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_the_cache_compared_with_is_cut_back_whatever_crop_means(count):
    """C57: a positive number to `DynamicCache.crop` meant what to keep in transformers 5.0, and so did 0."""
    cache, entries = DynamicCache(), torch.arange(5.0).view(1, 1, 5, 1)
    cache.update(entries[:, :, :3], -entries[:, :, :3], 0)
    for _ in range(3):
        keys, _ = cache.update(entries[:, :, 3 : 3 + count], -entries[:, :, 3 : 3 + count], 0)
        assert keys.flatten().tolist() == list(range(3 + count))
        _crop(cache, count)
        assert cache.get_seq_length() == 3
    _crop(cache, 3)
    assert cache.get_seq_length() == 0


def test_the_depth_is_chosen_by_tokens_per_cost_and_not_by_the_acceptance_rate():
    """C116: at .8 acceptance depths 2, 4, 8, 16 accept .72, .59, .42, .24 of their drafts; 8 gives most per cost."""
    depths, alive = [2, 4, 8, 16], 0.8 ** np.arange(1, 17)
    assert np.round([alive[:k].mean() for k in depths], 2).tolist() == [0.72, 0.59, 0.42, 0.24]
    drafts = np.array([min(k for k in (0, *depths) if k >= n) for n in range(17)])  # a batch is padded to a depth
    costs = CostTable(np.zeros(2), np.concatenate([[0.0], 1 + 0.1 * drafts]))
    assert choose_budget(alive[None], costs, 1, "argmax") == 8
    assert choose_budget(alive[None], costs, 1, "lookahead", alive) == 8


def test_notebooks_import_the_installed_package_from_any_folder():
    """C157: no notebook changes the search path or the working folder, so it runs from wherever it is started."""
    for path in (ROOT / "notebooks").rglob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = "".join(itertools.chain.from_iterable(c["source"] for c in cells if c["cell_type"] == "code"))
        assert "sys.path" not in code and "chdir" not in code and "%cd" not in code, path.name
