"""A mixture of experts in one call: each token's experts are the rule's, and it gets what these give one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from support.thread_pools import NoCoreForOthers

from headwise.kernels.cpu import experts as experts_module
from headwise.kernels.cpu import experts_jit, matmul
from headwise.kernels.cpu.experts import Mlp, PackedExperts
from headwise.kernels.cpu.matmul import PackedWeight
from headwise.kernels.experts import SCORED_BY, Mixture, Routing, ScoredBy, route, tokens_by_expert
from headwise.runtime.ops.numpy_ops import NumpyOps

INPUTS, SIZE, EXPERTS, EACH = 96, 40, 12, 3
"""The size is no whole number of panels, nor of what narrow weights are padded to."""
PLAIN = Routing(EXPERTS, EACH, norm_min=1e-20)


def quantised(bits: int) -> Callable[[np.ndarray, bool], PackedWeight]:
    def pack(weight: np.ndarray, gated: bool) -> PackedWeight:
        groups = weight.reshape(len(weight), -1, 8 if weight.shape[1] % 16 else 16)
        most = 2 ** (bits - 1) - 1
        scale = np.abs(groups).max(axis=2) / most
        codes = np.rint(groups / scale[..., None]).astype(np.int8).reshape(weight.shape)
        return matmul.pack_quantised(codes, scale.astype(np.float32), None, bits, gated)

    return pack


KINDS: dict[str, Callable[[np.ndarray, bool], PackedWeight]] = {
    "float32": lambda weight, gated: matmul.pack_float(weight, "float32", gated),
    "bfloat16": lambda weight, gated: matmul.pack_float(weight, "bfloat16", gated),
    "int8": quantised(8),
    "int4": quantised(4),
}


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def mlp(kind: str, seed: int, has_bias: bool = False, size: int = SIZE, gated: bool = True) -> Mlp:
    width = 2 * size if gated else size
    into, down = 0.2 * random(seed, width, INPUTS), 0.2 * random(99 + seed, INPUTS, size)
    biases = matmul.pack_bias(random(seed, width), gated), matmul.pack_bias(random(seed, INPUTS))
    into_bias, down_bias = biases if has_bias else (None, None)
    return (KINDS[kind](into, gated), into_bias), (KINDS[kind](down, False), down_bias)


def packed(kind: str, has_bias: bool = False, size: int = SIZE, gated: bool = True) -> list[Mlp]:
    return [mlp(kind, expert, has_bias, size, gated) for expert in range(EXPERTS)]


def logits_of(tokens: int) -> np.ndarray:
    """Half of all tokens have one expert in common, and some experts have none."""
    logits = random(tokens, tokens, EXPERTS)
    logits[::2, EXPERTS - 1] = 8
    logits[:, :2] = -9
    return logits


def through(weights: Mlp, x: np.ndarray, activation: str) -> np.ndarray:
    (gate, gate_bias), (down, down_bias) = weights
    return matmul.matmul(matmul.matmul(x, gate, 1, gate_bias, activation), down, 1, down_bias)


def one_by_one(
    mixture: Mixture, experts: list[Mlp], shared: Mlp | None, x: np.ndarray, logits: np.ndarray
) -> np.ndarray:
    """As models compute them where they are not grouped."""
    biased = logits if mixture.logit_bias is None else logits + mixture.logit_bias
    correction = np.float32(0) if mixture.correction is None else mixture.correction
    chosen, weights = route(biased, correction, mixture.routing)
    weights = weights if mixture.scales is None else weights * mixture.scales[chosen]
    total = np.zeros_like(x) if shared is None else through(shared, x, mixture.activation)
    for expert, tokens, shares in tokens_by_expert(chosen, weights):
        given = x[tokens] * shares[:, None] if mixture.weighs_input else x[tokens]
        factors = np.ones_like(shares) if mixture.weighs_input else shares
        part = through(experts[expert], given, mixture.activation)
        NumpyOps().scatter_add_rows(total, tokens, part, factors)
    return total


def assert_equal_but_for_weights(found: np.ndarray, expected: np.ndarray, narrow: bool) -> None:
    """Of weights, exponentials and sums may differ in their last bit; narrow factors of inputs weighed by them more."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=(2e-2 if narrow else 2e-6) * np.abs(expected).max())


@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_each_token_gets_what_its_experts_and_the_shared_one_give_one_by_one(
    kind: str, tokens: int, has_shared: bool
) -> None:
    size = 64 if kind.startswith("int") else SIZE
    experts, shared = packed(kind, size=size), mlp("bfloat16", 77, size=3 * SIZE) if has_shared else None
    mixture, x, logits = Mixture(PLAIN, "silu"), random(7, tokens, INPUTS), logits_of(tokens)
    grouped = PackedExperts.of(mixture, experts, shared)
    assert grouped is not None
    found = grouped.mix(x, logits, threads=2)
    assert_equal_but_for_weights(found, one_by_one(mixture, experts, shared, x, logits), narrow=False)


@pytest.mark.parametrize(("has_bias", "weighs_input"), [(False, False), (True, True)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_experts_without_gates_and_a_shared_one_of_another_size(
    kind: str, tokens: int, has_bias: bool, weighs_input: bool
) -> None:
    size = 64 if kind.startswith("int") else SIZE
    experts = packed(kind, has_bias, size, gated=False)
    shared = mlp(kind, 77, has_bias, 5 * size // 2 // 32 * 32, gated=False)
    mixture = Mixture(replace(PLAIN, scored_by="sigmoid"), "relu2", 0.5 * random(3, EXPERTS), weighs_input=weighs_input)
    grouped = PackedExperts.of(mixture, experts, shared)
    assert grouped is not None
    x, logits = random(7, tokens, INPUTS), logits_of(tokens)
    expected = one_by_one(mixture, experts, shared, x, logits)
    assert_equal_but_for_weights(grouped.mix(x, logits, threads=2), expected, narrow=weighs_input)


ROUTINGS = {
    "divided": PLAIN,
    "not divided": replace(PLAIN, norm_min=None, scale=2.5),
    "divided by no less than": replace(PLAIN, norm_min=0.9),
    "sigmoids": replace(PLAIN, scored_by="sigmoid"),
    "roots of softplus": replace(PLAIN, scored_by="sqrtsoftplus"),
    "in groups": replace(PLAIN, groups=4, groups_per_token=2, best_of_group=2, scored_by="sigmoid", scale=1.5),
    "in groups, by softmax": replace(PLAIN, groups=3, groups_per_token=1, norm_min=None),
    "one of them": replace(PLAIN, per_token=1),
    "all of them": replace(PLAIN, per_token=EXPERTS),
}


@pytest.mark.parametrize("added", ["", "correction", "scales", "logit_bias"])
@pytest.mark.parametrize("name", ROUTINGS)
def test_every_routing_chooses_and_weighs_as_the_rule(name: str, added: str) -> None:
    own = {added: 0.5 * random(3, EXPERTS)} if added else {}
    mixture, experts = Mixture(ROUTINGS[name], "silu", **own), packed("float32")
    x, logits = random(7, 40, INPUTS), random(8, 40, EXPERTS)
    grouped = PackedExperts.of(mixture, experts, None)
    assert grouped is not None
    expected = one_by_one(mixture, experts, None, x, logits)
    assert_equal_but_for_weights(grouped.mix(x, logits, threads=2), expected, narrow=False)


@pytest.mark.parametrize("scored_by", SCORED_BY)
def test_of_equal_scores_the_first_counts_and_nan_is_chosen_last(scored_by: ScoredBy) -> None:
    mixture, experts = Mixture(replace(PLAIN, scored_by=scored_by), "silu"), packed("float32")
    logits = np.zeros((3, EXPERTS), np.float32)
    logits[1, 5], logits[2, :10] = np.nan, -np.inf
    x = random(7, 3, INPUTS)
    grouped = PackedExperts.of(mixture, experts, None)
    assert grouped is not None
    with np.errstate(invalid="ignore"):
        expected = one_by_one(mixture, experts, None, x, logits)
    found = grouped.mix(x, logits, threads=1)
    np.testing.assert_allclose(found[[0, 2]], expected[[0, 2]], rtol=1e-5, atol=1e-5)
    assert np.isnan(found[1]).all() == np.isnan(expected[1]).all(), "a router that fails does not go unnoticed"


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_biases_other_activations_and_weighed_inputs(kind: str) -> None:
    mixture, experts = Mixture(PLAIN, "clamped", weighs_input=True), packed(kind, has_bias=True)
    x, logits = random(7, 9, INPUTS), logits_of(9)
    grouped = PackedExperts.of(mixture, experts, None)
    assert grouped is not None
    expected = one_by_one(mixture, experts, None, x, logits)
    assert_equal_but_for_weights(grouped.mix(x, logits, threads=1), expected, narrow=kind != "float32")


@pytest.mark.parametrize("has_shared", [False, True])
def test_a_token_gets_the_same_in_any_company_on_any_number_of_threads(
    has_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts_module, "THREAD_BYTES", 1)  # a second thread is woken for anything
    shared = mlp("float32", 77) if has_shared else None
    grouped, x, logits = (
        PackedExperts.of(Mixture(PLAIN, "silu"), packed("bfloat16"), shared),
        random(7, 700, INPUTS),
        logits_of(700),
    )
    assert grouped is not None
    assert len(x) * EACH > 4 * experts_jit.SLOTS, "of which an expert's lie in two runs"
    whole = grouped.mix(x, logits, threads=1)
    np.testing.assert_array_equal(grouped.mix(x, logits, threads=2), whole)
    np.testing.assert_array_equal(grouped.mix(x[40:90], logits[40:90], threads=2), whole[40:90])
    monkeypatch.setattr(experts_module, "pool_of_this_process", NoCoreForOthers)
    np.testing.assert_array_equal(grouped.mix(x, logits, threads=2), whole)


def test_experts_that_are_not_alike_or_too_many_are_left_to_others() -> None:
    experts, mixture = packed("float32"), Mixture(PLAIN, "silu")
    grouped = PackedExperts.of(mixture, experts, None)
    assert grouped is not None
    assert grouped.mix(random(1, 0, INPUTS), random(1, 0, EXPERTS), threads=1).shape == (0, INPUTS)
    experts[3] = packed("bfloat16")[3]
    assert PackedExperts.of(mixture, experts, None) is None
    assert PackedExperts.of(mixture, experts[:1] * (experts_jit.MOST_EXPERTS + 1), None) is None
    with pytest.raises(ValueError, match="do not fit"):
        grouped.mix(random(1, 1, INPUTS + 1), random(1, 1, EXPERTS), threads=1)
    with pytest.raises(ValueError, match="do not fit"):
        grouped.mix(random(1, 1, INPUTS), random(1, 1, EXPERTS + 1), threads=1)
