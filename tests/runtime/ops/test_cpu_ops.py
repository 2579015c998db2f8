"""Tensor operations on a CPU share memory with what they are given, and leave the cores to one library."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
from support.tensor_operations import normal
from threadpoolctl import ThreadpoolController

from headwise.errors import ConfigError
from headwise.runtime.ops.numpy_ops import NumpyOps
from headwise.runtime.ops.select import make_ops


@pytest.fixture(scope="module", params=["numpy", "paddle"])
def ops(request):
    if request.param == "paddle":
        pytest.importorskip("headwise.runtime.ops.paddle_import")
    return make_ops(request.param)


@pytest.fixture(scope="module", params=["numpy", "numba", "paddle"])
def every_ops(request):
    """Those too that pack their weights."""
    if request.param == "paddle":
        pytest.importorskip("headwise.runtime.ops.paddle_import")
    return make_ops(request.param)


def close(ops, tensor, expected) -> None:
    np.testing.assert_allclose(ops.numpy(tensor), expected, rtol=2e-5, atol=2e-5)


def test_a_tied_weight_is_in_the_memory_of_the_embedding(ops) -> None:
    embedding = ops.tensor(normal(9, 16))
    assert np.shares_memory(ops.numpy(ops.tied_weight(embedding, 0, 9)), ops.numpy(embedding))


def test_mapped_weights_are_not_copied_and_let_go_of_with_the_last_tensor(ops) -> None:
    mapped = normal(8, 16)
    mapped.flags.writeable = False
    memory, x = weakref.ref(mapped), normal(3, 16)
    whole, again, rows = ops.tensor(mapped), ops.tensor(mapped), ops.linear_weight(mapped[:5])  # as tied embeddings are
    assert all(np.shares_memory(ops.numpy(tensor), mapped) for tensor in (whole, again, rows))
    expected = x.astype(np.float64) @ mapped[:5].T.astype(np.float64)
    del mapped, whole, again
    assert memory() is not None
    close(ops, ops.linear(ops.tensor(x), rows), expected)
    del rows
    assert memory() is None


def test_kernel_arrays_share_memory_and_are_contiguous(every_ops) -> None:
    x = normal(4, 6, 8)
    tensor = every_ops.tensor(x)
    assert np.shares_memory(every_ops.kernel_array(tensor), x)
    part = every_ops.kernel_array(tensor[:, 2:4])
    assert part.flags.c_contiguous
    np.testing.assert_array_equal(part, x[:, 2:4])
    assert np.shares_memory(every_ops.numpy(every_ops.from_kernel_array(x)), x)


def test_read_only_weights_are_shared_and_stay_as_they_are(every_ops) -> None:
    weight = normal(8, 8)
    weight.flags.writeable = False
    tensor = every_ops.tensor(weight)
    assert np.shares_memory(every_ops.numpy(tensor), weight)
    close(every_ops, tensor + tensor, 2 * weight)


def test_tensors_of_arrays_of_tensors_can_die_in_any_order(every_ops) -> None:
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        chain: list = [every_ops.tensor(normal(64, 64))]
        chain.append(every_ops.numpy(chain[0]))
        chain.append(every_ops.from_kernel_array(chain[1]))
        for index in order:
            chain[index] = None


@pytest.mark.parametrize("weights_dtype", ["float32", "bfloat16", "int8"])
def test_packed_weights_are_copies_and_let_go_of_what_they_were_made_of(weights_dtype: str) -> None:
    ops = make_ops("numba", dtype="float32" if weights_dtype == "float32" else "bfloat16", weights_dtype=weights_dtype)
    mapped = normal(80, 64)
    memory = weakref.ref(mapped)
    packed = ops.linear_weight(mapped), ops.gated_weight(mapped), ops.embedding_table(mapped)
    assert not any(np.shares_memory(weight.packed, mapped) for weight in packed)
    del mapped
    assert memory() is None


def test_a_packed_tied_weight_is_in_the_memory_of_the_embedding_where_it_begins_a_panel() -> None:
    ops = make_ops("numba")
    table, x = normal(200, 16), normal(3, 16)
    embedding = ops.embedding_table(table)
    assert ops.tied_weight(embedding, 0, 200) is embedding
    for start, stop, is_shared in ((0, 100, True), (64, 200, True), (100, 200, False)):
        part = ops.tied_weight(embedding, start, stop)
        assert np.shares_memory(part.packed, embedding.packed) == is_shared
        close(ops, ops.linear(x, part), x.astype(np.float64) @ table[start:stop].T.astype(np.float64))


def test_paddle_leaves_the_cores_to_its_own_threads() -> None:
    pytest.importorskip("headwise.runtime.ops.paddle_import")
    openblas = ThreadpoolController().select(internal_api="openblas")
    if not openblas:
        pytest.skip("this NumPy has no OpenBLAS")

    def threads() -> set[int]:
        return {library["num_threads"] for library in openblas.info()}

    make_ops("numpy", 2)
    assert threads() == {2}
    make_ops("paddle", 2)
    assert threads() == {1}


def test_an_unknown_framework_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown tensor_ops 'jax'; choose auto, numba, paddle or numpy"):
        make_ops("jax")
    assert isinstance(make_ops("numpy"), NumpyOps)
