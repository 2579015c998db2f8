"""Caches of simulated engines: least recently used blocks on the device, the host, and in a storage that all share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from simulation.machine import Hardware
from simulation.traced import Request


class Index(Protocol):
    """`headwise.storage.index.prefix_index.PrefixIndex`, as far as engines tell it of their caches."""

    def apply(self, node: str, tier: str, block_hashes: bytes, resident: bool, resumable: bytes = b"") -> None: ...


class Storage:
    """The shared storage: the least recently written or read blocks go first."""

    def __init__(self, capacity: int, index: Index) -> None:
        self.blocks: OrderedDict[bytes, str] = OrderedDict()  # and who wrote it
        self._capacity = capacity
        self._index = index

    @property
    def room(self) -> int:
        """Blocks that evict none."""
        return self._capacity - len(self.blocks)

    def put(self, blocks: Iterable[bytes], writer: str) -> None:
        new = [block for block in blocks if block not in self.blocks] if self._capacity else []
        self.blocks.update(dict.fromkeys(new, writer))
        if new:
            self._index.apply(writer, "storage", in_path_order(new), True)
        gone: dict[str, list[bytes]] = {}
        while len(self.blocks) > self._capacity:
            block, by = self.blocks.popitem(last=False)
            gone.setdefault(by, []).append(block)
        for by, theirs in gone.items():
            self._index.apply(by, "storage", in_path_order(theirs), False)


def in_path_order(evicted: Sequence[bytes]) -> bytes:
    """Blocks that were evicted, a path's last ones first: the index takes neighbours together if a path's first ones
    come first."""
    return b"".join(reversed(evicted))


class Cache:
    """One engine's device and host blocks."""

    def __init__(self, name: str, hardware: Hardware, storage: Storage, index: Index) -> None:
        self.held: dict[bytes, int] = {}
        self.free: OrderedDict[bytes, None] = OrderedDict()  # cached and not held, least recently used first
        self.host: OrderedDict[bytes, None] = OrderedDict()
        self.private = 0
        self._name, self._hardware, self._storage, self._index = name, hardware, storage, index

    @property
    def used(self) -> int:
        return len(self.held) + self.private

    def match(self, path: Sequence[bytes], most: int) -> tuple[int, int, int]:
        """Leading blocks, at most ``most``, that the device, device and host, and all tiers have."""
        held, free, host, storage = self.held, self.free, self.host, self._storage.blocks
        depth = 0
        while depth < most and ((block := path[depth]) in held or block in free):
            depth += 1
        device = depth
        while depth < most and ((block := path[depth]) in held or block in free or block in host):
            depth += 1
        with_host = depth
        while depth < most and ((block := path[depth]) in host or block in storage or block in free or block in held):
            depth += 1
        return device, with_host, depth

    def lend(self, path: Sequence[bytes], begin: int, most: int) -> int:
        """How far another engine may read the path here, from block ``begin`` on: what is read is on the host now."""
        depth = begin
        while depth < most and ((block := path[depth]) in self.held or block in self.free or block in self.host):
            depth += 1
        self._to_host(path[begin:depth])
        return depth

    def fetch(self, blocks: Sequence[bytes]) -> None:
        """Blocks of storage or another engine are in the host now."""
        for block in blocks:
            if block in self._storage.blocks:
                self._storage.blocks.move_to_end(block)
        self._to_host(blocks)

    def hold(self, request: Request, hits: int) -> bool:
        """Hold the ``hits`` leading blocks, and room for the rest; False: there is none, and nothing was changed."""
        path = request.path[:hits]
        more = request.blocks - sum(block in self.held for block in path)
        if self.used + more > self._hardware.device:
            return False
        for block in path:
            self.held[block] = self.held.get(block, 0) + 1
            self.free.pop(block, None)
        request.held = list(path)
        request.reserved = request.blocks - hits
        self.private += request.reserved
        evicted = []
        while self.used + len(self.free) > self._hardware.device:
            evicted.append(self.free.popitem(last=False)[0])
        if evicted:
            self._index.apply(self._name, "device", in_path_order(evicted), False)
            self._to_host(evicted)
        return True

    def computed(self, request: Request) -> None:
        """All blocks of the prompt are there, and others may use them."""
        for block in request.path[len(request.held) :]:
            self.held[block] = self.held.get(block, 0) + 1
            self.free.pop(block, None)
            request.reserved -= 1
            self.private -= 1
        request.held = request.path

    def release(self, request: Request) -> None:
        """The request has ended: its blocks are cached, last ones first to go; and the index hears of them."""
        self.private -= request.reserved
        for block in reversed(request.held):
            self.held[block] -= 1
            if not self.held[block]:
                del self.held[block]
                self.free[block] = None
        if request.held:
            self._index.apply(self._name, "device", b"".join(request.held), True)

    def _to_host(self, blocks: Sequence[bytes]) -> None:
        if not self._hardware.host:
            self._storage.put(blocks, self._name)
            return
        new = [block for block in blocks if block not in self.host]
        for block in blocks:
            self.host[block] = None
            self.host.move_to_end(block)
        if new:
            self._index.apply(self._name, "host", in_path_order(new), True)
        gone = []
        while len(self.host) > self._hardware.host:
            gone.append(self.host.popitem(last=False)[0])
        if gone:
            self._index.apply(self._name, "host", in_path_order(gone), False)
            self._storage.put(gone, self._name)


class OneCache(Cache):
    """A cache that all engines share, as large as all of theirs, at no cost: what no deployment can have."""

    def __init__(self, hardware: Hardware, engines: int, index: Index) -> None:
        super().__init__("oracle", hardware, Storage(0, index), index)
        self._capacity = engines * (hardware.device + hardware.host) + hardware.storage
        self.used_by: dict[int, int] = dict.fromkeys(range(engines), 0)

    def hold(self, request: Request, hits: int) -> bool:
        if self.used_by[request.engine] + request.blocks > self._hardware.device:
            return False
        self.used_by[request.engine] += request.blocks
        self.computed(request)
        return True

    def computed(self, request: Request) -> None:
        for block in reversed(request.path):
            self.free[block] = None
            self.free.move_to_end(block)
        while len(self.free) > self._capacity:
            self.free.popitem(last=False)

    def release(self, request: Request) -> None:
        self.used_by[request.engine] -= request.blocks
