"""Directories of other nodes, read by way of Ray."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from headwise.actors.calls import cause_of
from headwise.actors.placement import address_of, this_node
from headwise.actors.remote import remote
from headwise.errors import ModelError
from headwise.runtime.loader.directory_copies import CutOffError

FIND_S = 60.0
"""Longest wait for nodes to say whether they have a directory: each starts a process for that, if none is idle."""
PIECE_BYTES = 16 << 20
"""Of a file that a node sends at once, by Ray's object store."""
IN_FLIGHT = 3
"""Pieces that are asked for before the first of them is written."""
PIECE_S = 120.0
"""A piece that takes longer does not come."""
MAX_FILES = 4096
"""In a directory."""

_ray: Any = ray


def _sizes_in(directory: str) -> dict[str, int] | None:
    """Bytes of each file at the node where it runs, but for hidden ones; None: there is no such directory."""
    root = Path(directory)
    if not root.is_dir():
        return None
    files = sorted(path for path in root.rglob("[!.]*") if path.is_file())
    if len(files) > MAX_FILES:
        raise ModelError(f"{directory} has {len(files)} files; of weights there are at most {MAX_FILES}")
    return {path.relative_to(root).as_posix(): path.stat().st_size for path in files}


def _piece_of(file: str, start: int, count: int) -> NDArray[np.uint8]:
    return np.fromfile(file, np.uint8, count, offset=start)


_look: Any = remote(num_cpus=0, max_retries=0)(_sizes_in)
_read: Any = remote(num_cpus=0, max_retries=0)(_piece_of)


@dataclass(frozen=True)
class NodeDirectory:
    """One at another node. A `headwise.runtime.loader.directory_copies.Source`."""

    node: str
    path: Path
    sizes: Mapping[str, int]

    @property
    def where(self) -> str:
        return f"node {address_of(self.node)}"

    def pieces(self) -> Iterator[tuple[str, memoryview]]:
        read = _read.options(scheduling_strategy=_at(self.node))
        asked: deque[tuple[str, Any]] = deque()
        for name, start, count in self._parts():
            asked.append((name, read.remote(str(self.path / name), start, count)))
            if len(asked) >= IN_FLIGHT:
                yield self._had(*asked.popleft())
        while asked:
            yield self._had(*asked.popleft())

    def _parts(self) -> Iterator[tuple[str, int, int]]:
        for name, size in self.sizes.items():
            for start in range(0, size, PIECE_BYTES):
                yield name, start, min(PIECE_BYTES, size - start)

    def _had(self, name: str, piece: Any) -> tuple[str, memoryview]:
        try:
            return name, memoryview(ray.get(piece, timeout=PIECE_S))
        except ray.exceptions.RayError as error:
            raise CutOffError(f"{name} of {self.path} at {self.where} cannot be read: {cause_of(error)}") from None


def find_directory(path: Path, nodes: list[str] | None = None) -> NodeDirectory | None:
    """Who of these nodes has it, the first one that says so; None: none says so in `FIND_S`.

    nodes: all that live but this one, if None
    """
    if nodes is None:
        nodes = [node["NodeID"] for node in _ray.nodes() if node["Alive"] and node["NodeID"] != this_node()]
    asked = {_look.options(scheduling_strategy=_at(node)).remote(str(path)): node for node in nodes}
    waiting, found = list(asked), None
    while waiting and found is None:
        said, waiting = ray.wait(waiting, timeout=FIND_S)
        if not said:
            break
        for each in said:
            sizes = _said(each)
            if sizes:
                found = NodeDirectory(asked[each], path, sizes)
    for each in waiting:
        ray.cancel(each)
    return found


def _said(sizes: Any) -> dict[str, int] | None:
    """What a node says; one that is gone has nothing. Raises `ModelError` for what it has and is not to be copied."""
    try:
        said: dict[str, int] | None = ray.get(sizes)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ModelError):
            raise error.cause from None
        return None
    except ray.exceptions.RayError:
        return None
    return said


def _at(node: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node, soft=False)
