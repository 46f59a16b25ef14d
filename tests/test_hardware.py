"""Cost tables of other machines: the published profile, the measured table that is shipped, rooflines by hand."""

import numpy as np
import pytest

from avref.evidence import hardware


def every_table():
    return [
        hardware.published_b300(),
        hardware.measured(),
        hardware.gpu_roofline("T4", "SmolLM2-1.7B", "SmolLM2-135M"),
        hardware.gpu_roofline("H100", "Qwen2.5-7B", "Qwen2.5-0.5B", parallel_draft=True, context=0),
    ]


@pytest.mark.parametrize("table", every_table(), ids=lambda table: table.metadata["machine"])
def test_more_tokens_requests_and_depth_never_cost_less(table):
    verify = np.atleast_2d(table.verify_ms)[-table.max_requests :, 1:]  # by requests from 1, by tokens from 1
    assert (np.nan_to_num(np.diff(verify, axis=1)) >= 0).all() and (verify[~np.isnan(verify)] > 0).all()
    for per_request in range(1, 9):  # measured rows are read off between each other at equal tokens per request
        by_load = [float(table.verify(r, per_request * r)) for r in range(1, table.max_requests + 1)]
        assert (np.diff(by_load) >= -2e-3).all()  # the measured table is kept to the microsecond
    assert (np.diff(table.draft_ms, axis=0) >= 0).all() and (np.diff(np.atleast_2d(table.draft_ms), axis=1) >= 0).all()
    for name in ("machine", "target", "drafter"):
        assert table.metadata[name]
    table.step_ms(table.max_requests, 8 * table.max_requests)  # every draft of every request can be looked up


def test_the_published_profile_is_a_staircase_with_the_published_values():
    table = hardware.published_b300()
    assert (table.max_requests, table.max_tokens) == (128, 1024)
    for tokens, ms in ((1, 5.11), (64, 7.9), (128, 9.47), (256, 11.51), (1024, 20.63)):  # running maximum of the marks
        assert table.verify(1, tokens) == pytest.approx(ms)
    assert table.verify(1, 120) == 9.47 and table.verify(1, 65) == table.verify(1, 72) == 8.21
    assert len(np.unique(table.verify_ms[1:])) < 88  # constant between the 88 sizes measured
    assert table.draft(1) == 0.88 and table.draft(33) == table.draft(40) == 1.88
    assert "vLLM" in table.metadata["source"] and "1024" in table.metadata["tail"]


def test_sizes_read_off_the_drawing_are_put_on_multiples_of_sixteen():
    table = hardware.published_b300()
    assert table.verify(1, 688) == table.verify(1, 687)  # read off as 687
    assert (np.flatnonzero(np.diff(table.verify_ms[257:])) % 16 == 15).all()  # every tread ends at one


def test_the_outlying_tail_is_left_out_unless_asked_for_and_never_blended_in():
    assert hardware.published_b300().verify_ms.max() < 21
    whole = hardware.published_b300(max_requests=8, max_tokens=16_384)
    np.testing.assert_array_equal(whole.verify_ms[1:1025], hardware.published_b300().verify_ms[1:])
    assert whole.verify(1, 1025) == whole.verify(1, 1536) == 104.49
    assert whole.verify(1, 16_384) == 234.89
    with pytest.raises(ValueError, match="cannot be made"):
        hardware.published_b300(max_requests=2000)


def test_the_measured_table_states_what_was_measured_and_equals_it_there():
    table = hardware.measured()
    assert table.max_requests >= 32 and table.max_tokens == 8 * table.max_requests
    for name in ("machine", "target", "drafter", "dtype", "context", "threads", "torch"):
        assert table.metadata[name], name
    assert table.metadata["dtype"] == "float32" and table.metadata["threads"] == 2
    for requests, tokens, ms in table.metadata["verify_points"]:
        assert table.verify(requests, tokens) >= ms - 0.01  # a running maximum of the medians
    ends = [p for p in table.metadata["draft_points"] if p[0] in (1, 32)]
    assert [table.draft(requests) for requests, _ in ends] == pytest.approx([ms for _, ms in ends], abs=0.01)


def test_a_roofline_by_hand():
    """1e9 parameters of 2 bytes: 2e9 bytes at 1e11 bytes/s take 20 ms, 2e9 operations per token at 1e12 take 2 ms."""
    table = hardware.roofline(1e9, flops=1e12, bandwidth=1e11, overhead_ms=1.0, max_requests=2, max_tokens=20)
    np.testing.assert_allclose(table.verify(1, [1, 10, 11, 20]), [21, 21, 23, 41])
    cached = hardware.roofline(
        1e9, flops=1e12, bandwidth=1e11, kv_bytes_per_token=1e5, context=1000, max_requests=20, max_tokens=20
    )
    np.testing.assert_allclose([cached.verify(r, r) for r in (1, 10, 20)], [21, 30, 40])  # 1 ms of cache per request
    int4 = hardware.roofline(1e9, flops=1e12, bandwidth=1e11, bytes_per_parameter=0.5, max_requests=1)
    np.testing.assert_allclose(int4.verify(1, [1, 8]), [5, 16])


def test_drafting_by_hand():
    """1e8 parameters: one pass reads 2 ms of weights; a token computes .2 ms; .5 ms of overhead for every pass."""
    options = {"draft_parameters": 1e8, "draft_overhead_ms": 0.5, "num_speculative_tokens": 3, "max_requests": 20}
    block = hardware.roofline(1e9, flops=1e12, bandwidth=1e11, **options)
    np.testing.assert_allclose([block.draft(1, d) for d in range(4)], [0, 2.5, 2.5, 2.5])
    np.testing.assert_allclose([block.draft(20, d) for d in range(4)], [0, 4.5, 8.5, 12.5])
    steps = hardware.roofline(1e9, flops=1e12, bandwidth=1e11, parallel_draft=False, **options)
    np.testing.assert_allclose([steps.draft(1, d) for d in range(4)], [0, 2.5, 5, 7.5])
    np.testing.assert_allclose([steps.draft(20, d) for d in range(4)], [0, 4.5, 9, 13.5])


def test_a_t4_is_memory_bound_at_one_token_and_compute_bound_at_many():
    gpu, model = hardware.GPUS["T4"], hardware.MODELS["SmolLM2-1.7B"]
    table = hardware.gpu_roofline("T4", "SmolLM2-1.7B", "SmolLM2-135M", context=0, max_requests=64)
    reading = 1e3 * model.parameters * 2 / gpu.bandwidth
    assert table.verify(1, 1) == table.verify(1, 8) == pytest.approx(reading + 0.5)
    turning = int(gpu.flops / gpu.bandwidth)  # 16 bits: 2 bytes and 2 operations per parameter
    assert table.verify(64, turning) == table.verify(64, 1) < table.verify(64, turning + 1)
    assert table.verify(64, 512) == pytest.approx(1e3 * 2 * model.parameters * 512 / gpu.flops + 0.5)
    assert 5 < table.verify(1, 1) < 50  # milliseconds, not seconds or microseconds


def test_gpus_are_in_order_of_age():
    flops, bandwidth = zip(*((g.flops, g.bandwidth) for g in hardware.GPUS.values()), strict=True)
    assert list(flops) == sorted(flops) and list(bandwidth) == sorted(bandwidth)


@pytest.mark.parametrize("bad", [{"flops": 0}, {"bandwidth": -1.0}, {"context": -1}, {"overhead_ms": float("nan")}])
def test_values_that_make_no_sense_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        hardware.roofline(1e9, **({"flops": 1e12, "bandwidth": 1e11} | bad))


def test_an_unknown_gpu_or_model_lists_those_known():
    with pytest.raises(ValueError, match="T4, A100"):
        hardware.gpu_roofline("V100", "Qwen2.5-7B", "Qwen2.5-0.5B")
    with pytest.raises(ValueError, match=r"Qwen2\.5-7B"):
        hardware.gpu_roofline("T4", "Qwen2.5-8B", "Qwen2.5-0.5B")
