"""Which nodes hold which token blocks, on which tier: as bit sets of nodes, over runs of blocks. No I/O, no clock.

Blocks that were reported together are kept together, as a `_Run`: one ``bytes`` of their hashes and one bit set of
nodes per tier and state, the same for all its blocks. A run is cut when a flush names only a part of it. Two runs are
joined again when a lookup goes through both and the same nodes hold them. So a flush takes a few bit operations per
run, not per block, and a lookup probes the dictionary once per run of its path and compares the rest as bytes. Nothing
relies on presence being monotone along a path: a run holds what was said of exactly its blocks. So a hole ends the
prefix, and the blocks behind it count again when it is filled.

    where:  hash -> number of its run    h0..h77 -> 0    h78..h156 -> 1     h'78..h'99 -> 2
    runs:   number -> hashes, bit sets   0: device {n1, n2, n3}   1: device {n1}   2: device {n2}, host {n3}

The large dictionary maps to numbers, not to the runs themselves: CPython's garbage collector (until 3.13) does not
track dictionaries of plain values, so it never stops the store to go through millions of entries.

Memory, measured by `benchmarks/index.py`: about 105 to 150 bytes a block in runs of 80 (the dictionary's entry and key,
which grow in steps, and 16 for the run); about 500 where no two neighbouring blocks are held alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, repeat
from operator import xor

from headwise.storage.index.hash_runs import count_unknown, exhaust, overlap, split, stretches
from headwise.storage.index.messages import HASH_BYTES, TIERS, Digest, digest_of
from headwise.storage.index.volumes import Volumes

MAX_BLOCKS = 4_000_000
MAX_RUN = 256
"""Most blocks of a run: a block must be found in it fast."""

_RUN_BYTES = MAX_RUN * HASH_BYTES
_MAX_KEPT = 1024
"""Most sets of nodes whose names are cached."""

_MAX_UNIT = 1e100

_STORAGE = len(TIERS) - 1
"""The plane of what is resident in storage."""
MAX_HEIRS = 64
"""Most volumes of which it is kept what nodes that left have stored there."""

PLANES = 2 * len(TIERS)
"""Bit sets of a run: per tier the nodes where it is resident, then per tier those where it is resumable too."""


_Depths = tuple[int, int, int]
"""Blocks that device, host and storage serve."""
_NOTHING: _Depths = (0, 0, 0)
_End = tuple[int, int, int, int]
"""Where a run of a path ends, in blocks, and the nodes that can resume there on device, host, storage."""


class _Run:
    """Blocks that the same nodes hold in the same way.

    number: unique, never used again
    hashes: at least one, at most `MAX_RUN`, no two equal
    nodes:  `PLANES` bit sets of nodes, at least one of them not empty
    asked:  how often a block of it was asked for, in the mean, in units of `PrefixIndex._unit`; to be reported first
            counts as once
    """

    __slots__ = ("asked", "hashes", "nodes", "number")

    def __init__(self, number: int, hashes: bytes, nodes: list[int], asked: float) -> None:
        self.number = number
        self.hashes = hashes
        self.nodes = nodes
        self.asked = asked


@dataclass(frozen=True)
class SoleBlocks:
    """Blocks that would be lost with one node, and how often each was asked for lately.

    in_memory: on its device or host, from where others can read them
    in_storage: in its storage, that nobody else has
    """

    asked: float
    hashes: bytes
    in_memory: bool = True
    in_storage: bool = False

    @property
    def count(self) -> int:
        return len(self.hashes) // HASH_BYTES


@dataclass
class _Node:
    """What the index knows of a node.

    bit:       the node's bit in the runs' bit sets
    blocks:    by plane, how many of its blocks are kept
    digests:   of all blocks that the node reported, kept or forgotten: per tier of the resident ones, then per tier of
               those that are not resumable. There are few of these, so most flushes change one digest only
    forgotten: blocks that the node holds, as far as is known, and that the index no longer keeps
    is_heir:   it is no node, but stands for those of a volume that have left: it has what they stored there
    """

    bit: int
    blocks: list[int] = field(default_factory=lambda: [0] * PLANES)
    digests: list[Digest] = field(default_factory=lambda: [Digest() for _ in range(PLANES)])
    forgotten: int = 0
    is_heir: bool = False


class PrefixIndex:
    """Keeps which blocks each node holds, and answers how much of a path each node could serve.

    Keeps at most ``max_blocks`` distinct blocks. When there are more, it forgets blocks of the least recently used run,
    its last ones first. (A run is used when it is flushed or looked up; a part that is cut off counts as used.)
    Forgotten blocks stay in their nodes' digests: those tell whether all messages arrived. A forgotten block is kept
    again when it is flushed again.

    A block that one node has in storage serves every node of its volume: see `set_volume`. It does so also when that
    node has left: see `bequeath`.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self.max_blocks = max_blocks
        self.forgotten = 0
        self._where: dict[bytes, int] = {}
        self._runs: OrderedDict[int, _Run] = OrderedDict()  # least recently used first
        self._numbers = count()
        self._nodes: dict[str, _Node] = {}
        self._by_bit: dict[int, _Node] = {}
        self._names: dict[int, tuple[str, ...]] = {}
        self._first: dict[_End, dict[str, _Depths]] = {}
        self._volumes = Volumes()
        self._heirs: dict[str, _Node] = {}  # by volume
        self._unit = 1.0  # what being asked once counts now

    def __len__(self) -> int:
        return len(self._where)

    @property
    def num_runs(self) -> int:
        return len(self._runs)

    # ---- what nodes say ----

    def apply(self, node: str, tier: str, block_hashes: bytes, resident: bool, resumable: bytes = b"") -> None:
        """These blocks are, or are not, resident on the node's tier; the arguments are those of a `Flush`."""
        known = self._nodes.get(node) or self._new_node(node)
        plane = TIERS.index(tier)
        touched: list[_Run] = []
        for hashes, is_resumable in stretches(block_hashes, resumable) if resumable else ((block_hashes, True),):
            if resident:
                self._add(known, plane, hashes, is_resumable, touched)
            else:
                self._remove(known, plane, hashes, is_resumable)
                if heir := self._heir_of(known, tier):  # what is not in storage is not there for anybody
                    self._remove(heir, plane, hashes, is_resumable)
        self._touch(touched)
        while len(self._where) > self.max_blocks:
            self._forget_oldest(len(self._where) - self.max_blocks)

    def set_volume(self, node: str, volume: str) -> None:
        """The node shares its storage with all nodes of this volume; empty: it shares it with none."""
        if volume or node in self._nodes:
            self._volumes.assign((self._nodes.get(node) or self._new_node(node)).bit, volume)

    def bequeath(self, node: str) -> None:
        """The node is about to be dropped, and what it put into its volume stays there: until a node of that volume
        finds it missing, or it is forgotten for lack of room. Goes through all runs."""
        known = self._nodes.get(node)
        volume = "" if known is None else self._volumes.of(known.bit)
        if known is None or not volume or not known.blocks[_STORAGE]:
            return
        heir = self._heirs.get(volume) or self._new_heir(volume)
        either = known.bit | heir.bit
        for run in self._runs.values():
            if run.nodes[_STORAGE] & known.bit:
                self._state(heir, _STORAGE, run, True, bool(run.nodes[_STORAGE + len(TIERS)] & either))

    def disinherit(self, node: str) -> None:
        """What nodes that left have put into this node's volume is not there any more. Goes through all runs."""
        known = self._nodes.get(node)
        heir = None if known is None else self._heirs.pop(self._volumes.of(known.bit), None)
        if heir is not None:
            self._erase(heir)

    def drop(self, node: str) -> None:
        """The node holds nothing; unknown nodes are ignored. Goes through all runs: about 0.3 us each."""
        gone = self._nodes.pop(node, None)
        if gone is not None:
            self._erase(gone)

    # ---- questions ----

    def match(self, block_hashes: bytes | Sequence[bytes]) -> dict[str, _Depths]:
        """By node, the blocks of the path that (device, host, storage) could serve; nodes that have none are left out.

        A tier serves a prefix together with faster tiers, without a hole, up to a block at which it is resumable there
        or on a faster tier; so the numbers grow from tier to tier.
        """
        path = block_hashes if isinstance(block_hashes, bytes) else b"".join(block_hashes)
        where, runs, shared, at, end = self._where, self._runs, self._volumes.shared, 0, len(path)
        unit = self._unit
        device = host = storage = -1
        previous: _Run | None = None
        walked: list[_Run] = []
        ends: list[_End] = []
        while at < end:
            number = where.get(path[at : at + HASH_BYTES])
            if number is None:
                break
            run = runs[number]
            hashes = run.hashes
            start, length = 0, len(hashes)
            if not path.startswith(hashes, at):
                start, length = overlap(hashes, path, at)
            on_device, on_host, on_storage, resumable, host_resumable, storage_resumable = run.nodes
            for nodes in shared:
                if on_storage & nodes:
                    on_storage |= nodes
                if storage_resumable & nodes:
                    storage_resumable |= nodes
            device &= on_device
            on_host |= on_device
            host &= on_host
            storage &= on_host | on_storage
            if not storage:
                break
            at += length
            run.asked += unit if length == len(hashes) else unit * length / len(hashes)
            host_resumable |= resumable
            storage_resumable |= host_resumable
            ends.append((at // HASH_BYTES, device & resumable, host & host_resumable, storage & storage_resumable))
            if start or length < len(hashes):
                previous = None
            elif (
                previous is not None
                and previous.nodes == run.nodes
                and previous is not run
                and len(previous.hashes) + length <= _RUN_BYTES
            ):
                previous = walked[-1] = self._join(previous, run)
                continue
            else:
                previous = run
            walked.append(run)
        self._touch(walked)
        return self._depths(ends)

    def sole_blocks(self, without: Collection[str] = ()) -> dict[str, list[SoleBlocks]]:
        """By node, the blocks that could be served by no other one once it and the nodes ``without`` have gone; the
        most asked for first. What shared storage has is not lost with a node, if one that stays shares it. Goes
        through all runs: about 1 us each.
        """
        going = self._bits(without) | sum(heir.bit for heir in self._heirs.values())  # an heir serves nobody itself
        found: dict[int, list[SoleBlocks]] = {}
        for run in self._runs.values():
            holders = 0
            for bits in run.nodes[:_STORAGE]:
                holders |= bits
            in_memory, in_storage = holders, run.nodes[_STORAGE]
            for nodes in self._volumes.shared:
                if in_storage & nodes:
                    in_storage |= nodes
            holders = (in_memory | in_storage) & ~going
            if holders and not holders & (holders - 1):
                where = bool(in_memory & holders), bool(in_storage & holders)
                found.setdefault(holders, []).append(SoleBlocks(run.asked / self._unit, run.hashes, *where))
        return {
            name: sorted(found.get(node.bit, ()), key=lambda blocks: -blocks.asked)
            for name, node in self._nodes.items()
            if not node.bit & going
        }

    def worth(self, without: Collection[str] = ()) -> dict[str, float]:
        """By node, what would be lost with it: blocks, each times how often it was asked for lately; see
        `sole_blocks`."""
        sole = self.sole_blocks(without)
        return {name: sum(blocks.asked * blocks.count for blocks in held) for name, held in sole.items()}

    def stored(self, node: str, leaving: Collection[str] = ()) -> Iterator[tuple[float, int]]:
        """What the node's volume has in storage, the least recently used first: stretch by stretch, how often it was
        asked for lately, or 0.0 if an engine that is not ``leaving`` has it in memory, too; and how many blocks."""
        known = self._nodes.get(node)
        if known is None:
            return
        volume = self._volumes.of(known.bit)
        theirs = known.bit | sum(bit for bit in self._by_bit if volume and self._volumes.of(bit) == volume)
        going = self._bits(leaving)
        for run in self._runs.values():
            if run.nodes[_STORAGE] & theirs:
                in_memory = 0
                for bits in run.nodes[:_STORAGE]:
                    in_memory |= bits
                yield 0.0 if in_memory & ~going else run.asked / self._unit, len(run.hashes) // HASH_BYTES

    def shares_storage(self, node: str, without: Collection[str] = ()) -> bool:
        """Whether what the node has in storage serves another one, once those ``without`` have gone."""
        known = self._nodes.get(node)
        if known is None:
            return False
        others = self._bits(name for name in self._nodes if name != node and name not in without)
        return any(nodes & known.bit and nodes & others for nodes in self._volumes.shared)

    def cool(self, share: float) -> None:
        """What was asked until now counts ``share`` times as much from now on. The owner of the clock calls it."""
        if not 0 < share <= 1:
            raise ValueError(f"share must be over 0 and at most 1, got {share}")
        self._unit /= share
        if self._unit > _MAX_UNIT:
            for run in self._runs.values():
                run.asked /= self._unit
            self._unit = 1.0

    def digests(self, node: str) -> tuple[int, ...]:
        """By plane, the digest of what the node said: see `Heartbeat.digests`."""
        known = self._nodes.get(node)
        if known is None:
            return (0,) * PLANES
        values = [digest.value() for digest in known.digests]
        resident, not_resumable = values[: len(TIERS)], values[len(TIERS) :]
        return (*resident, *map(xor, resident, not_resumable))

    def blocks(self, node: str) -> tuple[int, ...]:
        """By plane, how many blocks of the node are kept."""
        known = self._nodes.get(node)
        return tuple(known.blocks) if known else (0,) * PLANES

    def forgotten_blocks(self, node: str) -> int:
        """Blocks of the node, each once per tier, that were forgotten for lack of room."""
        known = self._nodes.get(node)
        return known.forgotten if known else 0

    def resident(self, node: str, tier: str, resumable: bool = False) -> frozenset[bytes]:
        """The blocks that are kept as resident (and resumable) on a node's tier. Goes through all runs."""
        known = self._nodes.get(node)
        if known is None:
            return frozenset()
        plane = TIERS.index(tier) + resumable * len(TIERS)
        return frozenset(
            key for run in self._runs.values() if run.nodes[plane] & known.bit for key in split(run.hashes)
        )

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless runs, dictionary, counts and digests say the same."""
        found: dict[bytes, int] = {}
        every = 0
        for node in (*self._nodes.values(), *self._heirs.values()):
            assert not node.bit & every, "two nodes have one bit"
            every |= node.bit
        self._volumes.check_integrity(every)
        for number, run in self._runs.items():
            assert run.number == number, f"run {run.number} is kept as {number}"
            assert 0 < len(run.hashes) <= _RUN_BYTES, f"a run of {len(run.hashes)} bytes"
            assert any(run.nodes), "a run that nobody holds"
            assert not any(bits & ~every for bits in run.nodes), "a run is held by an unknown node"
            for tier in range(len(TIERS)):
                assert not run.nodes[tier + len(TIERS)] & ~run.nodes[tier], "resumable, but not resident"
            found.update(zip(split(run.hashes), repeat(number), strict=False))
        assert found == self._where, "the dictionary differs from the runs"
        assert sum(len(run.hashes) for run in self._runs.values()) == len(found) * HASH_BYTES, "a block is in two runs"
        assert len(found) <= self.max_blocks, "more blocks than there may be"
        for name, node in self._nodes.items():
            for plane in range(PLANES):
                held = b"".join(run.hashes for run in self._runs.values() if run.nodes[plane] & node.bit)
                assert node.blocks[plane] * HASH_BYTES == len(held), f"count of {name}, plane {plane}"
                assert node.forgotten or digest_of(held) == self.digests(name)[plane], f"digest of {name}, {plane}"
        for volume, heir in self._heirs.items():
            lent = sum(len(run.hashes) for run in self._runs.values() if run.nodes[_STORAGE] & heir.bit)
            assert heir.blocks[_STORAGE] * HASH_BYTES == lent, f"count of the heir of {volume}"
            assert self._volumes.of(heir.bit) == volume, f"heir of {volume}"

    # ---- flushes ----

    def _add(self, node: _Node, plane: int, hashes: bytes, is_resumable: bool, touched: list[_Run]) -> None:
        bit, where, at, end, limit = node.bit, self._where, 0, len(hashes), _RUN_BYTES
        while at < end:
            number = where.get(hashes[at : at + HASH_BYTES])
            if number is None:
                run, limit = self._insert(hashes[at : at + limit], limit)
                length = len(run.hashes)
            else:
                run = self._runs[number]
                start, length = overlap(run.hashes, hashes, at)
                nodes = run.nodes
                if not (nodes[plane] & bit and bool(nodes[plane + len(TIERS)] & bit) == is_resumable):
                    run = self._cut_out(run, start, length)
            at += length
            touched.append(run)
            self._state(node, plane, run, True, is_resumable)

    def _remove(self, node: _Node, plane: int, hashes: bytes, was_resumable: bool) -> None:
        bit, where, at, end = node.bit, self._where, 0, len(hashes)
        while at < end:
            number = where.get(hashes[at : at + HASH_BYTES])
            run, length = None, HASH_BYTES
            if number is not None:
                run = self._runs[number]
                start, length = overlap(run.hashes, hashes, at)
            if run is not None and run.nodes[plane] & bit:
                run = self._cut_out(run, start, length)
                self._state(node, plane, run, False, False)
                if not any(run.nodes):
                    self._delete(run)
            elif node.forgotten:
                # Flushes are exact, so the node held these blocks, and the index forgot them. They leave its digest.
                node.forgotten = max(0, node.forgotten - length // HASH_BYTES)
                node.digests[plane].toggle(hashes[at : at + length])
                if not was_resumable:
                    node.digests[plane + len(TIERS)].toggle(hashes[at : at + length])
            at += length

    def _state(self, node: _Node, plane: int, run: _Run, resident: bool, resumable: bool) -> None:
        """All blocks of a run are (not) resident on the node's tier, and (not) resumable there."""
        nodes, bit, hashes = run.nodes, node.bit, run.hashes
        was_resident, was_resumable = bool(nodes[plane] & bit), bool(nodes[plane + len(TIERS)] & bit)
        blocks = len(hashes) // HASH_BYTES
        if was_resident != resident:
            nodes[plane] ^= bit
            node.blocks[plane] += blocks if resident else -blocks
            node.digests[plane].toggle(hashes)
        if was_resumable != resumable:
            nodes[plane + len(TIERS)] ^= bit
            node.blocks[plane + len(TIERS)] += blocks if resumable else -blocks
        if (was_resident != was_resumable) != (resident != resumable):
            node.digests[plane + len(TIERS)].toggle(hashes)

    # ---- runs ----

    def _insert(self, hashes: bytes, limit: int) -> tuple[_Run, int]:
        """Add a run of the leading unknown blocks of ``hashes`` (the first is one); and how many bytes to try next.

        Adds all of them at once, and undoes that if some were known: known and unknown blocks rarely alternate.
        """
        where, number = self._where, next(self._numbers)
        run = self._runs[number] = _Run(number, hashes, [0] * PLANES, self._unit)
        keys, before = split(hashes), len(where)
        exhaust(map(where.setdefault, keys, repeat(number)))
        if len(where) - before != len(keys):
            exhaust(map(where.__delitem__, {key for key in keys if where[key] == number}))
            leading = dict.fromkeys(keys[: count_unknown(keys, where)], number)
            where.update(leading)
            run.hashes = hashes[: len(leading) * HASH_BYTES]
            limit = len(run.hashes)
        return run, min(2 * limit, _RUN_BYTES)

    def _cut_out(self, run: _Run, start: int, length: int) -> _Run:
        """A run of exactly the bytes ``[start, start + length)`` of ``run``."""
        if start:
            run = self._cut(run, start)[1]
        if length < len(run.hashes):
            run = self._cut(run, length)[0]
        return run

    def _cut(self, run: _Run, at: int) -> tuple[_Run, _Run]:
        """Both parts of a run that is cut before byte ``at``. The longer part keeps the run's number."""
        head, tail = run.hashes[:at], run.hashes[at:]
        rest, part = (head, tail) if len(head) >= len(tail) else (tail, head)
        number = next(self._numbers)
        other = self._runs[number] = _Run(number, part, run.nodes.copy(), run.asked)
        run.hashes = rest
        self._where.update(zip(split(part), repeat(number), strict=False))
        return (run, other) if rest is head else (other, run)

    def _join(self, first: _Run, second: _Run) -> _Run:
        """Join two runs that the same nodes hold in the same way."""
        hashes = first.hashes + second.hashes
        kept, other = (first, second) if len(first.hashes) >= len(second.hashes) else (second, first)
        self._where.update(zip(split(other.hashes), repeat(kept.number), strict=False))
        kept.asked = (first.asked * len(first.hashes) + second.asked * len(second.hashes)) / len(hashes)
        kept.hashes = hashes
        del self._runs[other.number]
        return kept

    def _delete(self, run: _Run) -> None:
        exhaust(map(self._where.__delitem__, split(run.hashes)))
        del self._runs[run.number]

    # ---- what is forgotten ----

    def _touch(self, used: list[_Run]) -> None:
        """Runs of a path were used. The path's end is forgotten before its beginning: alone it would be of no use."""
        runs = self._runs
        for run in reversed(used):
            try:
                runs.move_to_end(run.number)
            except KeyError:
                continue  # a path that names a block twice: the run was joined with another since

    def _forget_oldest(self, excess: int) -> None:
        """Forget up to ``excess`` blocks, the last ones of the least recently used run."""
        run = next(iter(self._runs.values()))
        kept = max(0, len(run.hashes) - excess * HASH_BYTES)
        part = run.hashes[kept:]
        blocks = len(part) // HASH_BYTES
        for plane, bits in enumerate(run.nodes):
            while bits:
                node = self._by_bit[bits & -bits]
                bits &= bits - 1
                node.blocks[plane] -= blocks
                if plane < len(TIERS) and not node.is_heir:
                    node.forgotten += blocks
        self.forgotten += blocks
        exhaust(map(self._where.__delitem__, split(part)))
        if kept:
            run.hashes = run.hashes[:kept]
        else:
            del self._runs[run.number]

    # ---- nodes ----

    def _new_node(self, name: str) -> _Node:
        node = self._nodes[name] = self._with_bit(is_heir=False)
        return node

    def _new_heir(self, volume: str) -> _Node:
        """What no peer is and no answer names: it lends the volume's nodes what it has."""
        if len(self._heirs) >= MAX_HEIRS:
            self._erase(self._heirs.pop(next(iter(self._heirs))))
        heir = self._heirs[volume] = self._with_bit(is_heir=True)
        self._volumes.assign(heir.bit, volume)
        return heir

    def _with_bit(self, is_heir: bool) -> _Node:
        bit = 1
        while bit in self._by_bit:
            bit <<= 1
        node = self._by_bit[bit] = _Node(bit, is_heir=is_heir)
        self._first.clear()
        self._names.clear()
        return node

    def _erase(self, gone: _Node) -> None:
        """Nobody has this bit any more."""
        del self._by_bit[gone.bit]
        self._volumes.assign(gone.bit, "")
        self._first.clear()
        self._names.clear()
        if not any(gone.blocks):
            return
        others = ~gone.bit
        for run in list(self._runs.values()):
            nodes = run.nodes
            for plane, bits in enumerate(nodes):
                if bits & gone.bit:
                    nodes[plane] = bits & others
            if not any(nodes):
                self._delete(run)

    def _bits(self, names: Iterable[str]) -> int:
        """The bit set of these nodes, as far as they are known."""
        return sum(self._nodes[name].bit for name in set(names) if name in self._nodes)

    def _heir_of(self, node: _Node, tier: str) -> _Node | None:
        if tier != TIERS[-1] or not self._heirs:
            return None
        return self._heirs.get(self._volumes.of(node.bit))

    def _named(self, bits: int) -> tuple[str, ...]:
        """The names of a set of nodes."""
        names = self._names.get(bits)
        if names is None:
            if len(self._names) >= _MAX_KEPT:
                self._names.clear()
            names = self._names[bits] = tuple(name for name, node in self._nodes.items() if node.bit & bits)
        return names

    def _depths(self, ends: list[_End]) -> dict[str, _Depths]:
        """By node, its depths on every tier, given the ends of the runs of a path."""
        if not ends:
            return {}
        depths = self._depths_at(ends[0]).copy()
        for blocks, device, host, storage in ends[1:]:
            # A node that can resume here on one tier can do so on all slower tiers.
            on_device = blocks, blocks, blocks
            for name in self._named(device):
                depths[name] = on_device
            for name in self._named(host ^ device):
                depths[name] = depths.get(name, _NOTHING)[0], blocks, blocks
            for name in self._named(storage ^ host):
                device_blocks, host_blocks, _ = depths.get(name, _NOTHING)
                depths[name] = device_blocks, host_blocks, blocks
        return depths

    def _depths_at(self, end: _End) -> dict[str, _Depths]:
        """By node, its depths if the path has no other end. Cached: many paths begin with the same run."""
        depths = self._first.get(end)
        if depths is None:
            blocks, device, host, storage = end
            depths = dict.fromkeys(self._named(device), (blocks, blocks, blocks))
            depths.update(dict.fromkeys(self._named(host ^ device), (0, blocks, blocks)))
            depths.update(dict.fromkeys(self._named(storage ^ host), (0, 0, blocks)))
            if len(self._first) >= _MAX_KEPT:
                self._first.clear()
            self._first[end] = depths
        return depths
