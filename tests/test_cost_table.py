"""Cost tables: curves to tables, lookups, files."""

import json

import numpy as np
import pytest

from avref.cost_table import VERIFY_FLOOR_MS, CostTable

ONE_DRAFT = [(1, 2.0)]


def verify_curve(points, max_tokens, padded_up_to=0):
    table = CostTable.from_curves(ONE_DRAFT, points, max_requests=1, max_tokens=max_tokens, padded_up_to=padded_up_to)
    return table.verify_ms[1:]


def test_lookups_add_draft_and_verification():
    table = CostTable([[0, 0, 0], [0, 1, 2], [0, 3, 5]], [0, 10, 20, 30], metadata={"device": "cpu"})
    assert (table.max_requests, table.max_tokens, table.metadata) == (2, 3, {"device": "cpu"})
    assert table.draft(2) == 5 and table.draft(2, depth=1) == 3 and table.draft(1, depth=0) == 0
    np.testing.assert_array_equal(table.verify(1, [1, 3]), [10, 30])
    np.testing.assert_array_equal(table.step_ms(2, np.array([2, 3]), depth=1), [23, 33])
    assert table.step_ms(1, 2) == 22 and table.token_limit(2) == 3


def test_verification_by_requests_and_tokens():
    verify = [[np.nan] * 4, [np.nan, 1, 2, np.nan], [np.nan, 1, 3, 4]]
    table = CostTable([0, 0.5, 0.5], verify)
    assert table.step_ms(1, 2) == 2.5 and table.step_ms(2, 2) == 3.5 and table.draft(2, depth=7) == 0.5
    assert table.token_limit(1) == 2 and table.token_limit(2) == 3
    with pytest.raises(ValueError, match="covers 1 to 2 tokens"):
        table.verify(1, 3)


@pytest.mark.parametrize(
    ("lookup", "match"),
    [
        (lambda t: t.draft(3), "3 requests were not profiled: this cost table covers 1 to 2"),
        (lambda t: t.draft(0), "0 requests"),
        (lambda t: t.draft(1, depth=3), "depth 3 was not profiled"),
        (lambda t: t.verify(1, 4), "covers 1 to 3 tokens"),
        (lambda t: t.verify(1, [0, 1]), "0 to 1 tokens"),
        (lambda t: t.step_ms(2, [2, 9]), "2 to 9 tokens for 2 requests"),
    ],
)
def test_lookups_outside_name_what_was_profiled(lookup, match):
    with pytest.raises(ValueError, match=match):
        lookup(CostTable([[0, 0, 0], [0, 1, 2], [0, 3, 5]], [0, 10, 20, 30]))


@pytest.mark.parametrize(
    ("draft", "verify", "match"),
    [
        ([0, -1.0], [0, 1.0], "draft_ms must be finite"),
        ([0, np.nan], [0, 1.0], "draft_ms must be finite"),
        ([0, 1.0], [0, 0.0], "above 0"),
        ([0, 1.0], [0, np.inf], "finite"),
        ([0, 1.0], [0, 1.0, np.nan], "NaN"),
        ([0, 1.0], [[0, 1.0, 1.0], [0, np.nan, 1.0]], "NaN"),
        ([0, 1.0], [[0, 1.0]] * 3, "draft_ms has 2 rows and verify_ms 3"),
        ([0], [0, 1.0], "draft_ms must have"),
        ([0, 1.0], [[[0, 1.0]]], "verify_ms must have"),
    ],
)
def test_bad_tables_are_refused(draft, verify, match):
    with pytest.raises(ValueError, match=match):
        CostTable(draft, verify)


def test_tables_do_not_change_under_the_caller():
    verify = np.array([0.0, 1.0, 2.0])
    table = CostTable([0, 1], verify)
    verify[1] = 99
    assert table.verify(1, 1) == 1
    with pytest.raises(ValueError, match="read-only"):
        table.verify_ms[1] = 0


def test_lines_between_points_and_past_the_end():
    got = verify_curve([(8, 6.0), (2, 3.0), (4, 4.0)], 16)  # in any order
    np.testing.assert_allclose(got[:4], [3, 3, 3.5, 4])  # below the smallest size: its own cost
    np.testing.assert_allclose(got[[5, 7, 11, 15]], [5, 6, 8, 10])


def test_staircase_up_to_the_padded_limit_and_no_line_across_the_cliff():
    points = [(1, 1.0), (2, 2.0), (4, 3.0), (8, 50.0), (16, 58.0)]
    got = verify_curve(points, 20, padded_up_to=4)
    np.testing.assert_allclose(got[:4], [1, 2, 3, 3])  # 3 tokens run as 4
    np.testing.assert_allclose(got[4:8], 50)  # not 3 to 50: everything past the limit is at least the point above
    np.testing.assert_allclose(got[[8, 11, 15, 19]], [51, 54, 58, 62])
    np.testing.assert_allclose(verify_curve(points[:3], 8, padded_up_to=8), [1, 2, 3, 3, 3.5, 4, 4.5, 5])
    np.testing.assert_allclose(verify_curve(points, 16, padded_up_to=16)[8:], 58)


def test_a_noisy_dip_costs_what_came_before_and_never_turns_negative():
    np.testing.assert_array_equal(verify_curve([(8, 5.0), (16, 3.0)], 64), 5)  # C107: a straight line gives -1 at 32
    got = verify_curve([(1, 5.0), (2, 7.0), (4, 6.0), (8, 9.0)], 8)
    np.testing.assert_allclose(got, [5, 7, 7, 7, 7.5, 8, 8.5, 9])
    np.testing.assert_array_equal(verify_curve([(1, 0.0), (2, 0.0)], 4), VERIFY_FLOOR_MS)


def test_draft_curves_by_requests_and_by_depth():
    table = CostTable.from_curves([(1, 1.0), (4, 4.0)], [(4, 1.0)], max_requests=4, max_tokens=4)
    assert [table.draft(r) for r in (1, 2, 3, 4)] == [1, 2, 3, 4]
    points = [(1, 2, 2.0), (3, 2, 4.0), (1, 4, 6.0), (3, 4, 12.0)]
    table = CostTable.from_curves(points, [(4, 1.0)], max_requests=3, max_tokens=4)
    assert table.draft_ms.shape == (4, 5)
    assert [table.draft(1, d) for d in range(5)] == [0, 1, 2, 4, 6]  # drafting nothing takes no time
    assert [table.draft(2, d) for d in range(5)] == [0, 1.5, 3, 6, 9]


def plane(requests, tokens):
    """A surface like the one measured on two cores: caches to read by requests, arithmetic by tokens."""
    return 20.0 + 0.7 * requests + 0.5 * tokens


def surface_points(rows, depth):
    return [(r, r * (1 + k), plane(r, r * (1 + k))) for r in rows for k in range(depth + 1)]


def test_verification_surface_between_measured_requests():
    points = surface_points([1, 2, 4, 8], 7)
    table = CostTable.from_curves([(8, 1.0), (16, 1.0)], points, max_requests=16, max_tokens=128)
    for requests in (1, 2, 3, 5, 7, 8, 12, 16):
        tokens = np.arange(requests, 8 * requests + 1)
        np.testing.assert_allclose(table.verify(requests, tokens), plane(requests, tokens))
    assert table.verify(4, 32) > table.verify(2, 16) and table.verify(8, 8) > table.verify(1, 8)


def test_verification_surface_ends_where_nothing_was_measured():
    table = CostTable.from_curves([(4, 1.0)], surface_points([1, 4], 3), max_requests=4, max_tokens=64)
    assert table.token_limit(1) == 16 and table.token_limit(4) == 64  # four times the 4 tokens per request measured
    with pytest.raises(ValueError, match="17 to 17 tokens for 1 requests"):
        table.verify(1, 17)


def test_verification_surface_with_padding_keeps_its_stairs():
    points = [(r, t, 10.0 * r + t) for r in (1, 4) for t in (4, 8, 16)]
    table = CostTable.from_curves([(4, 1.0)], points, max_requests=4, max_tokens=16, padded_up_to=16)
    np.testing.assert_allclose(table.verify(1, [1, 4, 5, 8, 9]), [14, 14, 18, 18, 26])
    np.testing.assert_allclose(table.verify(2, [3, 5, 16]), [24, 28, 36])


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"max_tokens": 33}, "table for 33 tokens .* up to 8: ask for 1 to 32"),
        ({"max_tokens": 0}, "0 tokens"),
        ({"max_requests": 9}, "table for 9 requests .* up to 2"),
        ({"verify_points": []}, "verify_points must hold"),
        ({"verify_points": [(1, 2.0), (1, 2, 3.0)]}, "verify_points must hold"),
        ({"verify_points": [(1, 2.0), (1, 3.0)]}, "twice"),
        ({"verify_points": [(8, np.nan)]}, "finite and not negative"),
        ({"draft_points": [(2, -1.0)]}, "draft_points must be finite"),
        ({"verify_points": [(8, 1.0)], "max_tokens": 9}, "second one"),
        ({"draft_points": [(2, 1, 1.0), (1, 7, 2.0)], "max_requests": 5}, "depth 7"),
    ],
)
def test_curves_that_cannot_become_a_table_are_refused(kwargs, match):
    points = {"draft_points": [(1, 1.0), (2, 1.0)], "verify_points": [(1, 1.0), (8, 2.0)]}
    with pytest.raises(ValueError, match=match):
        CostTable.from_curves(**(points | {"max_requests": 2, "max_tokens": 8} | kwargs))


@pytest.mark.parametrize("by_requests", [False, True])
def test_a_saved_table_comes_back_bit_for_bit(tmp_path, by_requests):
    points = surface_points([1, 3], 2) if by_requests else [(1, 1 / 3), (7, np.pi)]
    metadata = {"device": "2 cores", "context": 256}
    table = CostTable.from_curves([(1, 3, 0.1), (3, 3, 0.7)], points, max_requests=3, max_tokens=25, metadata=metadata)
    path = tmp_path / "new" / "costs.json"
    table.save(path)
    table.save(path)  # over an existing file
    loaded = CostTable.load(path)
    np.testing.assert_array_equal(loaded.draft_ms, table.draft_ms)
    np.testing.assert_array_equal(loaded.verify_ms[1:], table.verify_ms[1:])
    assert loaded.metadata == metadata and loaded.token_limit(1) == table.token_limit(1)
    assert [file.name for file in path.parent.iterdir()] == ["costs.json"]


def test_entries_that_are_never_looked_up_may_be_anything_in_a_file_too(tmp_path):
    table = CostTable([0, 0.5, 0.5], [[np.nan] * 4, [np.nan, 1, 2, np.nan], [np.nan, 1, 3, 4]])
    table.save(tmp_path / "costs.json")
    loaded = CostTable.load(tmp_path / "costs.json")
    np.testing.assert_array_equal(loaded.verify_ms[1:, 1:], table.verify_ms[1:, 1:])


def test_damaged_files_are_refused_by_name(tmp_path):
    path = tmp_path / "costs.json"
    CostTable([0, 1.5], [0, 1, 2, 3]).save(path)
    text = path.read_text()
    document = json.loads(text)
    damaged = {
        "truncated": text[: len(text) // 2],
        "empty": "",
        "tampered": text.replace("1.5", "0.5"),
        "another file": json.dumps([1, 2]),
        "unsigned": json.dumps({k: v for k, v in document.items() if k != "sha256"}),
        "newer": json.dumps(document | {"schema_version": 99}),
    }
    for content in damaged.values():
        path.write_text(content)
        with pytest.raises(ValueError, match=r"costs\.json .*profile again"):
            CostTable.load(path)
    with pytest.raises(FileNotFoundError, match=r"missing\.json"):
        CostTable.load(tmp_path / "missing.json")


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "costs.json"
    CostTable([0, 1], [0, 1]).save(path)
    with pytest.raises(ValueError, match="do not fit into JSON"):
        CostTable([0, 2], [0, 1], metadata={"machine": object()}).save(path)
    assert CostTable.load(path).draft(1) == 1 and len(list(tmp_path.iterdir())) == 1


def test_a_table_whose_rows_all_end_early_comes_back(tmp_path):
    table = CostTable.from_curves([(1, 1), (2, 1)], [(8, 8, 1.0), (8, 16, 2.0)], max_requests=2, max_tokens=64)
    assert np.isnan(table.verify_ms[1:, 17:]).all()
    table.save(tmp_path / "table.json")
    again = CostTable.load(tmp_path / "table.json")
    np.testing.assert_array_equal(again.verify_ms[1:], table.verify_ms[1:])
    assert again.max_tokens == 64


def test_metadata_survive_or_are_refused(tmp_path):
    """JSON turns keys into text: the checksum is that of what will be read."""
    path = tmp_path / "table.json"
    CostTable([0, 1.0], [1.0, 1.0, 2.0], metadata={8: 1, 16: 2, 128: 3}).save(path)
    assert CostTable.load(path).metadata == {"8": 1, "16": 2, "128": 3}
    for wrong in ({"a": np.int64(3)}, {"a": float("nan")}, {"a": {1, 2}}):
        with pytest.raises(ValueError, match="metadata of this cost table do not fit into JSON"):
            CostTable([0, 1.0], [1.0, 1.0, 2.0], metadata=wrong).save(path)
    assert CostTable.load(path).metadata == {"8": 1, "16": 2, "128": 3}
