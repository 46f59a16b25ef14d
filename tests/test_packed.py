"""The packed forward against separate plain Hugging Face runs, whatever way the tokens come in.

The oracle is the unmodified model with eager attention, one sequence at a time, without a cache. Differences are
measured in units of the logits' spread; in float32 they must stay below 1e-5. The same comparison must notice
mutants: a mask that looks ahead, positions that are off, a rollback that keeps rejected keys.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor

from avref import packed
from avref.layout import Block, Layout
from avref.packed import KVCache, PackedModel, attend, plain_attention
from avref.parity import check_parity

TOLERANCE = 1e-5
FAMILIES = {
    "llama": tiny.llama,
    "gpt2": tiny.gpt2,
    "qwen2": tiny.qwen2,
    "mistral, window 8": tiny.mistral,
    "gemma2, soft caps": tiny.gemma2,
    "gemma3, window 8": tiny.gemma3,
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return FAMILIES[request.param]()


@torch.inference_mode()
def plain(model: Any, ids: Sequence[int], implementation: str = "eager") -> Tensor:
    """Logits [len(ids), V] of one sequence on its own."""
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(before)


def sequences(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(tiny.VOCAB, size=n).tolist() for n in lengths]


def forward(
    packed_model: PackedModel, starts: Sequence[int], chunks: Sequence[Sequence[int]], first_row: int = 0
) -> list[Tensor]:
    """One packed forward -> the logits of each chunk."""
    layout = Layout(starts, [len(c) for c in chunks], first_row=first_row)
    logits, _ = packed_model.forward(torch.tensor(list(itertools.chain.from_iterable(chunks))), layout)
    return list(logits.split([len(c) for c in chunks]))


@torch.inference_mode()
def in_ragged_steps(model: Any, rows: Sequence[Sequence[int]], seed: int, max_rows: int = 3) -> list[Tensor]:
    """Logits of every token of every row, fed as the engine feeds them.

    At most `max_rows` run at once. A row enters behind the running ones with a prompt of random length; then every step
    gives each running row 1 to 4 tokens of its own and up to 3 wrong ones behind them, which are rolled back. When a
    row is done the last one moves into its place, so neighbours keep changing.
    """
    random = np.random.default_rng(seed)
    packed_model = PackedModel(model, max_rows, max(map(len, rows)) + 8)
    got: list[list[Tensor]] = [[] for _ in rows]
    done = [0] * len(rows)
    waiting, running = list(random.permutation(len(rows))), []

    def feed(which: Sequence[int], sizes: Sequence[int], first_row: int = 0, rejected: int = 0) -> None:
        right = [list(rows[r][done[r] : done[r] + n]) for r, n in zip(which, sizes, strict=True)]
        wrong = [random.integers(tiny.VOCAB, size=random.integers(rejected + 1)).tolist() for _ in which]
        chunks = [a + b for a, b in zip(right, wrong, strict=True)]
        logits = forward(packed_model, [done[r] for r in which], chunks, first_row)
        for r, kept, out in zip(which, right, logits, strict=True):
            got[r].append(out[: len(kept)])
            done[r] += len(kept)

    while waiting or running:
        entering = [waiting.pop() for _ in range(min(len(waiting), max_rows - len(running)))]
        if entering:
            feed(entering, [int(random.integers(1, len(rows[r]) + 1)) for r in entering], len(running))
            running += entering
        for row in reversed([i for i, r in enumerate(running) if done[r] == len(rows[r])]):
            last = len(running) - 1
            if row < last:
                packed_model.cache.move(last, row)
                running[row] = running[last]
            running.pop()
        if running:
            feed(running, [min(int(random.integers(1, 5)), len(rows[r]) - done[r]) for r in running], rejected=3)
    return [torch.cat(parts) for parts in got]


def difference(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest difference of any logit, in units of the spread of the expected logits."""
    spread = torch.cat(list(expected)).std()
    return max(float((a - b).abs().max() / spread) for a, b in zip(got, expected, strict=True))


LENGTHS = (14, 1, 23, 9, 31, 17)


def test_attention_matters_in_these_models(model: Any) -> None:
    """Otherwise the tests below would pass with no attention at all."""
    ids = sequences([12])[0]
    swapped = [ids[1], ids[0], *ids[2:6], (ids[6] + 1) % tiny.VOCAB, *ids[7:]]
    a, b = plain(model, ids), plain(model, swapped)
    assert (a[-1] - b[-1]).abs().max() > 0.1 * a.std()


def test_ragged_steps_equal_separate_plain_runs(model: Any) -> None:
    rows = sequences(LENGTHS)
    expected = [plain(model, ids) for ids in rows]
    for seed in range(3):
        assert difference(in_ragged_steps(model, rows, seed), expected) < TOLERANCE


def test_order_of_neighbours_does_not_matter(model: Any) -> None:
    rows = sequences((5, 9, 7, 3))
    expected = [plain(model, ids) for ids in rows]
    for order in itertools.permutations(range(4)):
        got = forward(PackedModel(model, 4, 16), [0] * 4, [rows[i] for i in order])
        assert difference(got, [expected[i] for i in order]) < TOLERANCE


def test_hidden_states_and_chosen_logit_rows(model: Any) -> None:
    rows = sequences((6, 4))
    layout = Layout([0, 0], [6, 4])
    ids = torch.tensor(rows[0] + rows[1])
    logits, hidden = PackedModel(model, 2, 8).forward(ids, layout, layout.last, hidden_layers=(0, 2))
    expected = [plain(model, r)[-1:] for r in rows]
    assert difference([logits[:1], logits[1:]], expected) < TOLERANCE
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        separate = [model(input_ids=torch.tensor([r]), output_hidden_states=True).hidden_states for r in rows]
    states = torch.cat([torch.cat([h[0][0], h[2][0]], dim=-1) for h in separate])
    torch.testing.assert_close(hidden, states, rtol=0, atol=1e-5 * float(states.std()))


# Mutants: each must be seen by the comparison above, on GPT-2, where nothing hides an absolute position.


def mutated_difference(model: Any) -> float:
    rows = sequences(LENGTHS)
    return difference(in_ragged_steps(model, rows, 0), [plain(model, ids) for ids in rows])


@pytest.mark.parametrize("count", [1, 5, 6, 11, 15, 16, 17])
def test_rows_that_fill_the_head_up_are_not_seen(count: int) -> None:
    """A CPU computes logits of 6 to 15 rows as 16; none of the surplus comes back."""
    model = tiny.llama()
    ids = torch.arange(3, 3 + count)
    expected = plain(model, ids.tolist())
    logits, _ = PackedModel(model, 1, 64).forward(ids, Layout([0], [count]))
    assert logits.shape == expected.shape
    assert torch.allclose(logits, expected, atol=1e-5)
    chosen, _ = PackedModel(model, 1, 64).forward(ids, Layout([0], [count]), torch.arange(count).flip(0))
    assert torch.allclose(chosen, expected.flip(0), atol=1e-5)


def test_a_mask_that_sees_the_next_token_is_noticed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    correct = Block.mask

    def ahead(self: Layout, group: int, window: int | None, dtype: torch.dtype) -> Tensor:
        mask = correct(self, group, window, dtype).clone()
        mask[..., 1:] = torch.maximum(mask[..., 1:], mask[..., :-1])
        return mask

    monkeypatch.setattr(Block, "mask", ahead)
    assert mutated_difference(model) > 100 * TOLERANCE


def test_a_forgotten_window_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = Block.mask
    monkeypatch.setattr(Block, "mask", lambda self, group, window, dtype: correct(self, group, None, dtype))
    assert mutated_difference(tiny.mistral()) > 100 * TOLERANCE


def test_a_forgotten_soft_cap_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "attend", lambda *args: attend(*args[:-1], None))
    assert mutated_difference(tiny.gemma2()) > 100 * TOLERANCE


@pytest.mark.parametrize("family", [tiny.llama, tiny.gpt2])
def test_positions_that_restart_in_every_chunk_are_noticed(family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions counted within the chunk instead of from the request's own start (C56, C69)."""
    real, model = PackedModel.forward, family()

    def forward(self: PackedModel, ids: Tensor, layout: Layout, *args: Any) -> Any:
        plain_call, self.model = self.model, lambda **kw: model(**{**kw, "position_ids": layout.within[None]})
        self.model.config = plain_call.config  # type: ignore[attr-defined]
        try:
            return real(self, ids, layout, *args)
        finally:
            self.model = plain_call

    monkeypatch.setattr(PackedModel, "forward", forward)
    model.set_attn_implementation(packed.ATTENTION)
    assert mutated_difference(model) > 100 * TOLERANCE


def test_positions_of_the_longest_row_for_all_are_noticed_by_gpt2() -> None:
    """C69: one offset for the whole batch. Rotary embeddings hide a common shift, learned positions do not."""
    rows = sequences((9, 4))
    expected = [plain(m := tiny.gpt2(), ids) for ids in rows]
    cache = PackedModel(m, 2, 16)
    forward(cache, [0, 0], [r[:-1] for r in rows])
    wrong = forward(cache, [8, 8], [r[-1:] for r in rows])
    assert difference([wrong[0]], [expected[0][-1:]]) < TOLERANCE
    assert difference([wrong[1]], [expected[1][-1:]]) > 100 * TOLERANCE


def test_rejected_keys_are_out_of_the_softmax_not_zeroed() -> None:
    """C61: with a query [1, 0], keys [2, 0] and [1, 0], values 1 and 0, it is .731; two zeroed keys give .610."""
    query = torch.tensor([[[1.0, 0.0]]])  # [T, H, D]
    keys = torch.tensor([[[[2.0, 0.0]], [[1.0, 0.0]], [[0.0, 0.0]], [[0.0, 0.0]]]])  # [R, L, H_kv, D]
    values = torch.tensor([[[[1.0, 0.0]], [[0.0, 0.0]], [[0.0, 0.0]], [[0.0, 0.0]]]])
    kept = attend(query, keys[:, :2], values[:, :2], Layout([1], [1]), scaling=1.0)
    assert float(kept[0, 0, 0]) == pytest.approx(1 / (1 + np.exp(-1)), abs=1e-6)
    beside = attend(  # a longer neighbour makes the row's stale keys part of the buffer, behind the mask
        query.repeat(2, 1, 1), keys.repeat(2, 1, 1, 1), values.repeat(2, 1, 1, 1), Layout([1, 3], [1, 1]), scaling=1.0
    )
    assert float(beside[0, 0, 0]) == pytest.approx(1 / (1 + np.exp(-1)), abs=1e-6)
    assert float(beside[1, 0, 0]) == pytest.approx(np.exp(2) / (np.exp(2) + np.exp(1) + 2), abs=1e-6)


def test_a_prompt_of_one_token_continues_as_plain_greedy(model: Any) -> None:
    """C56: the position advances by every token kept, not by one a step."""
    expected = tiny.greedy(model, [10], 12)
    cache, ids = PackedModel(model, 1, 32), [10]
    logits = forward(cache, [0], [[10]])[0]
    for _ in range(12):
        ids.append(int(logits[-1].argmax()))
        logits = forward(cache, [len(ids) - 1], [[ids[-1]]])[0]
    assert ids[1:] == expected
    assert difference(forward(cache, [3], [ids[3:9]]), [plain(model, ids)[3:9]]) < TOLERANCE  # rolled back to 3


def test_window_shorter_than_the_context_survives_a_rollback() -> None:
    """C59: a rotating cache would have lost the keys that a rollback needs again; here nothing rotates."""
    model = tiny.mistral(window=8)
    ids = sequences([30])[0]
    cache = PackedModel(model, 1, 40)
    forward(cache, [0], [ids[:12]])
    forward(cache, [12], [[*ids[12:13], 7, 7, 7, 7]])  # K = 4, all rejected
    got = forward(cache, [13], [ids[13:]])[0]
    assert difference([got], [plain(model, ids)[13:]]) < TOLERANCE


# The cache


def test_cache_growth_keeps_what_is_in_it() -> None:
    """Past 256 tokens and past the rows of the first step the buffers are made anew."""
    model = tiny.gpt2()
    rows = sequences((380, 5, 40))
    expected = [plain(model, ids) for ids in rows]
    cache = PackedModel(model, 3, 400)
    got = [forward(cache, [0], [rows[0][:200]])]
    rows_held, length = next(iter(cache.cache.layers.values()))[0].shape[:2]
    assert rows_held == 1 and 200 <= length < 400
    got += [forward(cache, [0, 0], [rows[1][:2], rows[2][:30]], first_row=1)]
    assert next(iter(cache.cache.layers.values()))[0].shape[0] == 3
    got += [forward(cache, [200, 2, 30], [rows[0][200:], rows[1][2:], rows[2][30:]])]
    assert next(iter(cache.cache.layers.values()))[0].shape[1] >= 380
    joined = [torch.cat([got[0][0], got[2][0]]), torch.cat([got[1][0], got[2][1]]), torch.cat([got[1][1], got[2][2]])]
    assert difference(joined, expected) < TOLERANCE


def test_cache_full_is_refused_with_the_sizes() -> None:
    cache = PackedModel(tiny.llama(), 2, 8)
    with pytest.raises(ValueError, match="2 requests of 8 tokens; 1 requests of 9 tokens"):
        forward(cache, [0], [[3] * 9])
    with pytest.raises(ValueError, match="2 requests of 8 tokens; 3 requests"):
        forward(cache, [0, 0, 0], [[3]] * 3)


def test_move_copies_one_row_and_leaves_the_others() -> None:
    cache = KVCache(3, 4)
    key = torch.arange(3.0)[:, None, None].expand(3, 2, 4)  # row r holds the number r
    cache.update(0, Layout([0, 0, 0], [1, 1, 1]), key, -key)
    cache.move(2, 0)
    keys, values = cache.layers[0]
    assert keys[:, 0, 0, 0].tolist() == [2, 1, 2]
    assert values[:, 0, 0, 0].tolist() == [-2, -1, -2]


def test_layout_by_hand() -> None:
    layout = Layout([5, 0, 2], [2, 1, 3], first_row=4)
    assert layout.row.tolist() == [0, 0, 1, 2, 2, 2]
    assert layout.position.tolist() == [5, 6, 0, 2, 3, 4]
    assert (layout.first.tolist(), layout.last.tolist()) == ([0, 2, 3], [1, 2, 5])
    (block,) = layout.blocks
    assert (layout.num_tokens, layout.context, block.width, block.full) == (6, 7, 3, False)
    x = torch.arange(6)
    assert block.pad(x).tolist() == [[0, 1, 0], [2, 0, 0], [3, 4, 5]]
    assert block.unpad(block.pad(x)).tolist() == x.tolist()
    visible = block.mask(1, None, torch.float32)[:, 0] == 0
    assert visible[2].int().tolist() == [[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0]]
    windowed = block.mask(1, 2, torch.float32)[:, 0] == 0
    assert windowed[0, :2].int().tolist() == [[0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1, 1]]


def test_a_long_chunk_among_many_short_ones_gets_a_rectangle_of_its_own() -> None:
    layout = Layout([4] * 40, [1] * 20 + [9] + [1] * 19)
    narrow, rest = layout.blocks
    assert (narrow.width, len(narrow.rows), narrow.context, narrow.full) == (1, 40, 5, True)
    assert (rest.width, rest.rows.tolist(), rest.starts.tolist(), rest.context) == (8, [20], [5], 13)
    assert rest.tokens.tolist() == list(range(21, 29))
    assert len(Layout([4] * 40, [9] * 40).blocks) == len(Layout([4] * 4, [1, 1, 1, 9]).blocks) == 1


@pytest.mark.parametrize("counts", [[], [1, 0]])
def test_layout_refuses_a_row_without_tokens(counts: list[int]) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        Layout([0] * len(counts), counts)


# The check at load time


def test_check_parity_passes(model: Any) -> None:
    assert check_parity(model) < 1e-5


def test_check_parity_notices_a_wrong_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = Block.mask
    monkeypatch.setattr(Block, "mask", lambda self, *args: torch.zeros_like(correct(self, *args)))
    with pytest.raises(RuntimeError, match="packed logits differ"):
        check_parity(tiny.llama())


def test_check_parity_names_nan_weights() -> None:
    model = copy.deepcopy(tiny.llama())
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    with pytest.raises(RuntimeError, match="NaN"):
        check_parity(model)


def test_plain_attention_gives_the_model_back_as_it_was() -> None:
    model = tiny.llama()
    check_parity(model)
    model.set_attn_implementation(packed.ATTENTION)
    with pytest.raises(KeyError), plain_attention(model):
        assert model.config._attn_implementation == "sdpa"
        raise KeyError
    assert model.config._attn_implementation == packed.ATTENTION


def test_packed_attention_outside_a_packed_forward_is_refused() -> None:
    model = tiny.llama()
    model.set_attn_implementation(packed.ATTENTION)
    with pytest.raises(RuntimeError, match="packed"):
        model(input_ids=torch.tensor([[3, 4]]))


def test_bfloat16_stays_within_its_own_rounding() -> None:
    assert check_parity(tiny.llama().bfloat16()) < 8e-2


def test_on_a_gpu_only_a_long_chunk_gets_a_rectangle_of_its_own() -> None:
    """One call for a decode step; but a prompt of 3,500 tokens must not pad sixty short ones to its length."""
    decode = Layout([9] * 40, [1] * 39 + [9], "meta")
    prefill = Layout([0] * 61, [9] * 60 + [3500], "meta")
    assert len(decode.blocks) == 1 and len(prefill.blocks) == 2
    assert sum(len(b.rows) * b.width for b in prefill.blocks) < 2 * prefill.num_tokens
