"""Matrix products by cuBLAS: what is asked of it, executed in host memory."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from support.gpu.host_cublas import HostCublas, aligned

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.errors import ConfigError
from headwise.kernels.cuda.cublas import WORKSPACE_BYTES, Cublas

draw = np.random.default_rng(0)


class Streams:
    current = 0x5000

    def __call__(self) -> int:
        return self.current


def cublas(library: HostCublas | None = None, streams: Streams | None = None) -> Cublas:
    return Cublas(aligned, library or HostCublas(), streams or Streams())


def normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return draw.standard_normal(shape, dtype=np.float32).astype(numpy_dtype(dtype))


def product(blas: Cublas, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    out = np.full((x.shape[0], weight.shape[1]), np.nan, x.dtype)
    assert blas.product(x, weight, out)
    return out


def check(x: np.ndarray, weight: np.ndarray, blas: Cublas | None = None) -> None:
    expected = (x.astype(np.float64) @ weight.astype(np.float64)).astype(np.float32)
    tolerance = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}[str(x.dtype)]
    found = product(blas or cublas(), x, weight).astype(np.float32)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_a_weight_stored_by_its_outputs_is_multiplied_as_it_lies(dtype: str, tokens: int) -> None:
    check(normal(tokens, 24, dtype=dtype), normal(40, 24, dtype=dtype).T)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products_of_16_bits_may_stay_as_they_are_summed(dtype: str) -> None:
    x, weight, out = normal(3, 24, dtype=dtype), normal(40, 24, dtype=dtype).T, np.empty((3, 40), np.float32)
    assert cublas().product(x, weight, out)
    np.testing.assert_allclose(out, x.astype(np.float32) @ weight.astype(np.float32), rtol=1e-5, atol=1e-5)
    assert not cublas().product(x, weight, out.astype(np.float64))


def test_rows_and_columns_may_have_gaps_and_lie_either_way() -> None:
    wide, tall = normal(5, 40), normal(24, 30)
    for x in (wide[:, 8:32], wide[:, :24], normal(24, 5).T, normal(24, 9)[:, 2:7].T, wide[::2, 3:27], wide[1:2, :24]):
        for weight in (tall, tall[:, 4:19], normal(30, 24).T, normal(50, 24)[10:20].T, normal(12, 60)[:, 1:25].T):
            check(x, weight)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 24, 1), (3, 1, 5), (1, 1, 5), (4, 8, 1)])
def test_dimensions_of_one_are_like_others(shape: tuple[int, int, int]) -> None:
    tokens, inner, width = shape
    check(normal(tokens, inner), normal(width, inner).T)
    check(normal(tokens, inner), normal(inner, width))


def test_the_stride_of_a_dimension_of_one_says_nothing() -> None:
    check(normal(1, 72)[:, ::3], normal(24, 5))
    check(normal(5, 6)[:, 5:], normal(1, 7)[:, :4])
    check(normal(3, 24), normal(24, 9)[:, 8:])
    check(np.lib.stride_tricks.as_strided(normal(24), (1, 24), (0, 4)), normal(24, 5))


def test_what_it_cannot_read_it_leaves_to_others() -> None:
    library = HostCublas()
    blas, out = cublas(library), np.empty((4, 6), np.float32)
    x, weight = normal(4, 8), normal(8, 6)
    refused = [
        (normal(4, 16)[:, ::2], weight, out),
        (x, normal(8, 12)[:, ::2], out),
        (np.broadcast_to(normal(8), (4, 8)), weight, out),
        (x[:, ::-1], weight, out),
        (x, normal(7, 6), out),
        (x[:0], weight, out[:0]),
        (x[:, :0], weight[:0], out),
        (x.astype(np.float64), weight.astype(np.float64), out.astype(np.float64)),
        (x, weight.astype(np.float16), out),
        (x, weight, out.astype(np.float16)),
        (x, weight, np.empty((6, 4), np.float32).T),
        (x, weight, np.empty((4, 5), np.float32)),
    ]
    assert not any(blas.product(*arrays) for arrays in refused)
    assert library.calls == ["create"]


def test_each_stream_keeps_a_workspace_that_graphs_may_have_recorded() -> None:
    library, streams, made = HostCublas(), Streams(), []
    blas = Cublas(lambda size: made.append(aligned(size)) or made[-1], library, streams)
    x, weight = normal(2, 8), normal(8, 4)
    for streams.current in (1, 1, 2, 1):
        product(blas, x, weight)
        assert library.workspace == (made[0 if streams.current == 1 else 1].ctypes.data, WORKSPACE_BYTES)
    assert len(made) == 2
    assert library.calls[1:] == ["set_stream", "set_workspace", "gemm", "gemm"] + [
        "set_stream", "set_workspace", "gemm"
    ] * 2  # fmt: skip


def test_its_handle_goes_with_it() -> None:
    library = HostCublas()
    blas = cublas(library)
    del blas
    gc.collect()
    assert library.calls == ["create", "destroy"]


def test_refusals_are_told() -> None:
    class Refusing(HostCublas):
        status = 0

        def _create(self, handle: int) -> int:
            return super()._create(handle) or self.status

        def _gemm(self, *arguments: int) -> int:
            return 15

    library = Refusing()
    with pytest.raises(RuntimeError, match=r"float32 \[2, 8\] by \[8, 4\]: cublasStatus_t 15, the functionality"):
        product(cublas(library), normal(2, 8), normal(8, 4))
    library.status = 3
    with pytest.raises(ConfigError, match="cuBLAS does not start"):
        cublas(library)
