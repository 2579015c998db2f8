"""Published models: our blocks waste little on any number of ranks, and hold no fewer requests than pages of layers."""

from __future__ import annotations

import pytest
from geometries import MOST_RANKS, Geometry, planned, published
from model_fits import MODEL_LENGTHS, fit_of

GEOMETRIES = published()


@pytest.fixture(params=sorted(GEOMETRIES))
def geometry(request: pytest.FixtureRequest) -> Geometry:
    return GEOMETRIES[request.param]


def test_padding_is_at_most_5_percent_on_all_numbers_of_ranks(geometry: Geometry) -> None:
    """With states cut to attention's blocks: `tests/runtime/config/test_published_models.py` has them as served.

    DeepSeek-V4's is of windows.
    """
    assert geometry.tp_sizes[0] == 1
    assert max(geometry.tp_sizes) <= MOST_RANKS
    for size in geometry.tp_sizes:
        assert planned(geometry, size).padding <= (0.3 if geometry is GEOMETRIES["deepseek-v4-flash"] else 0.05)


def test_no_fewer_requests_fit_than_in_pages_of_one_layer(geometry: Geometry) -> None:
    for size in geometry.tp_sizes:
        cache = planned(geometry, size)
        for tokens in MODEL_LENGTHS:
            own = cache.sequence_bytes(tokens, 2)
            assert cache.unified(2).padded_bytes(tokens) >= own
            assert cache.unified(2).lengthened_bytes(tokens) >= own


@pytest.mark.parametrize(
    ("name", "padded"),
    [("gemma-4-31b", 1.4), ("gemma-4-26b-a4b", 1.4), ("qwen3.5-397b-a17b", 15), ("gpt-oss-20b", 1.0)],
)
def test_more_fit_where_layers_differ_in_size(name: str, padded: float) -> None:
    fit = fit_of(GEOMETRIES[name], 40e9, in_flight=2)
    assert min(fit.padded) >= padded
    assert fit.keys()["over_padded_pages"] == round(min(fit.padded), 3)


def test_caches_are_those_of_the_published_models() -> None:
    states = GEOMETRIES["qwen3-next-80b-a3b"]
    assert (len(states.policies), len(states.states)) == (12, 36)
    assert states.states[0] == 3 * 8192 * 2 + 32 * 128 * 128 * 4
    beside_latents = GEOMETRIES["kimi-linear-48b-a3b"]
    assert (set(beside_latents.token_bytes), len(beside_latents.states)) == ({(512 + 64) * 2}, 20)
    assert beside_latents.states[0] == 32 * (3 * 128 * 3 * 2 + 128 * 128 * 4)
    shared = GEOMETRIES["gemma-4-e2b"]
    assert [row[0].window for row in shared.policies[:15]] == [512, 512, 512, 512, 0] * 3
    assert not any(shared.policies[15:])
    assert shared.token_bytes[3:5] == (2 * 256 * 2, 2 * 512 * 2)
    assert [len(row) for row in GEOMETRIES["gemma-4-31b"].policies[4:6]] == [16, 4]
    assert set(GEOMETRIES["deepseek-v3.2"].token_bytes) == {(512 + 64 + 128) * 2}
