"""Ranks that keep latents together, as threads: each with an arena of its own tokens, and kernels on NumPy arrays."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from support.gpu.emulated_gpu import poisoned_array
from support.gpu.interpreted_latents import latent_kernels
from support.latent_scene import LatentCase, LatentScene
from support.waiting import PATIENCE_S

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.cache_controller.layout import BlockLayout
from headwise.cache_controller.token_share import TokenShare
from headwise.kernels.base import AttentionBatch, HostLengths
from headwise.kernels.cuda.mla_kernels import CudaLatentKernels
from headwise.kernels.dsa import INDEXER, index_scale_view, index_view
from headwise.kernels.mla import has_scales, latent_scale_view, latent_view
from headwise.kernels.mla_base import UpProjections
from headwise.kernels.mla_reference import ReferenceLatentKernels
from headwise.kernels.nibbles import GROUP, INT4


class Meeting:
    """Where ranks tell each other arrays. ``log`` has what was told, by rank."""

    def __init__(self, parts: int) -> None:
        self._barrier = threading.Barrier(parts, timeout=PATIENCE_S)
        self._told: list[Any] = [None] * parts
        self.log: list[list[tuple[Any, ...]]] = [[] for _ in range(parts)]

    def tell(self, part: int, name: str, x: np.ndarray) -> list[np.ndarray]:
        """What all of them say at the same time, which is of one kind."""
        kind = name, x.shape, x.dtype
        self.log[part].append(kind)
        self._told[part] = kind, x.copy()
        self._barrier.wait()
        told = list(self._told)
        self._barrier.wait()
        assert [other for other, _ in told] == [kind] * len(told), "ranks are out of step"
        return [values for _, values in told]

    def leave(self) -> None:
        """Nobody waits for one that has failed."""
        self._barrier.abort()


@dataclass(frozen=True)
class ThreadRanks:
    """`TokenRanks` of one thread."""

    share: TokenShare
    meeting: Meeting

    def all_gather(self, x: np.ndarray) -> np.ndarray:
        return _aligned(self.meeting.tell(self.share.part, "all_gather", x))

    def exchange(self, x: np.ndarray) -> np.ndarray:
        assert len(x) == self.share.parts
        return _aligned([told[self.share.part] for told in self.meeting.tell(self.share.part, "exchange", x)])


def _aligned(parts: list[np.ndarray]) -> np.ndarray:
    whole = poisoned_array((len(parts), *parts[0].shape), parts[0].dtype)
    whole[:] = parts
    return whole


class RanksScene:
    """A scene's latents over ``parts`` ranks; each has as many heads as the scene, whose numbers are its own.

    dtype: of what is computed with
    """

    reference: Any = ReferenceLatentKernels()

    def __init__(self, scene: LatentScene, parts: int, dtype: str = "float32", sms: int = 4) -> None:
        self.scene, self.parts, self.dtype = scene, parts, numpy_dtype(dtype)
        self.layout = self.own_layout(scene, parts)
        blocks = len(scene.arena) // scene.layout.block_bytes
        self.arenas = [np.full(blocks * self.layout.block_bytes, 0xFF, np.uint8) for _ in range(parts)]
        self.kernels = [self.make_kernels(sms) for _ in range(parts)]
        draw, case = np.random.default_rng(7), scene.case

        def numbers(*shape: int) -> np.ndarray:
            return self.narrow(draw.standard_normal(shape))

        self.queries = [numbers(*scene.query.shape) for _ in range(parts)]
        self.ups = [
            UpProjections(numbers(case.heads, case.plain, case.rank), numbers(case.heads, case.rank, case.value_dim))
            for _ in range(parts)
        ]
        scene.latents = [self.narrow(latents) for latents in scene.latents]

    def make_kernels(self, sms: int) -> Any:
        return latent_kernels(sms=sms)

    def own_layout(self, scene: LatentScene, parts: int) -> BlockLayout:
        """Of a rank's blocks of latents."""
        return replace(scene.layout, parts=parts).own

    def narrow(self, array: np.ndarray) -> np.ndarray:
        """As a GPU has it."""
        narrowed = poisoned_array(array.shape, self.dtype)
        narrowed[:] = array
        return narrowed

    def write(self) -> None:
        """All latents, as prefills of whole sequences: of each rank its own, and all to the scene's cache."""
        scene = self.scene
        cu = np.cumsum([0, *scene.case.seq_lens], dtype=np.int32)
        whole = AttentionBatch(cu, scene.batch.seq_lens, scene.batch.block_tables, 2)
        for part, arena in enumerate(self.arenas):
            self.write_own(part, arena, self.layout, whole, scene.heads, TokenShare(part, self.parts))
        scene.latents = [latents.astype(np.float32) for latents in scene.latents]
        scene.write(self.reference)

    def write_own(self, part: int, *where: Any) -> None:
        self.kernels[part].write_own(np.concatenate(self.scene.latents), *where)

    def attend(self, batch: AttentionBatch) -> tuple[list[np.ndarray], Meeting]:
        """What each rank's heads see, and what they told each other meanwhile."""
        meeting, case = Meeting(self.parts), self.scene.case

        def of_rank(part: int) -> np.ndarray:
            out = poisoned_array((len(self.queries[part]), case.heads, case.value_dim), self.dtype)
            where = self.arenas[part], self.layout, batch, self.scene.heads
            ranks = ThreadRanks(TokenShare(part, self.parts), meeting)
            try:
                self.attend_shared(part, *where, ranks, scale=self.scene.scale, out=out)
            except BaseException:
                meeting.leave()
                raise
            return out

        with ThreadPoolExecutor(self.parts) as threads:
            return list(threads.map(of_rank, range(self.parts))), meeting

    def attend_shared(self, part: int, *where: Any, **more: Any) -> None:
        self.kernels[part].attend_shared(self.queries[part], self.ups[part], *where, **more)

    def expected(self) -> list[np.ndarray]:
        """The same by the reference, in float32, over the cache that nobody shares."""
        seen, scene = [], self.scene
        for query, up in zip(self.queries, self.ups, strict=True):
            scene.query = query.astype(np.float32)
            scene.up = UpProjections(up.key.astype(np.float32), up.value.astype(np.float32))
            seen.append(scene.attend(self.reference))
        return seen

    def launched(self, part: int) -> list[tuple[str, Any]]:
        kernels: CudaLatentKernels = self.kernels[part]
        launched: list[tuple[str, Any]] = kernels._latents.launcher.launched
        return launched


Case = TypeVar("Case", bound=LatentCase)


def kept_in(dtype: str, case: Case) -> Case:
    """The case over a cache of that dtype; in int4 with latents whose two parts are whole groups."""
    if dtype != INT4:
        return replace(case, dtype=dtype)
    return replace(case, dtype=dtype, rank=case.rank + -case.rank % GROUP, rotated=GROUP)


def knowing(batch: AttentionBatch) -> AttentionBatch:
    """As a step that is no graph."""
    return replace(batch, on_host=HostLengths(batch.cu_seqlens_q.copy(), batch.seq_lens.copy()))


def views(arena: np.ndarray, layout: Any) -> Iterator[np.ndarray]:
    """All that an arena has of latents, and of an indexer's keys, ``[blocks, slots, tokens, ...]``."""
    indexed = any(role.name == INDEXER for role in layout.roles)
    yield latent_view(arena, layout)
    if indexed:
        yield index_view(arena, layout)
    if has_scales(layout):
        yield latent_scale_view(arena, layout)
        if indexed:
            yield index_scale_view(arena, layout)


def assert_dealt(scene: LatentScene, own: np.ndarray, layout: Any, share: TokenShare) -> None:
    """Whether an arena has a share of what the scene's has, byte for byte, and nothing else."""
    expected = np.full_like(own, 0xFF)
    for to, whole in zip(views(expected, layout), views(scene.arena, scene.layout), strict=True):
        to.view(np.uint8)[:] = np.ascontiguousarray(whole[:, :, share.part :: share.parts]).view(np.uint8)
    np.testing.assert_array_equal(own, expected)
    assert (own != 0xFF).any()


def step_of(scene: LatentScene, every: list[np.ndarray], rows: int, dtype: str) -> np.ndarray:
    """Of ``every`` sequence's latents, or keys, those of the scene's step, with as many rows of padding, in memory as a
    GPU has it."""
    some = [each[len(each) - count :] for each, count in zip(every, scene.case.query_lens, strict=True)]
    step = poisoned_array((sum(map(len, some)) + rows, some[0].shape[1]), numpy_dtype(dtype))
    step[: len(step) - rows] = np.concatenate(some)
    return step
