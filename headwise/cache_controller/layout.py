"""What lies inside a block. An attention backend describes it; nothing else knows what variant it serves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from headwise.cache_controller.dtypes import packed_bytes


@dataclass(frozen=True)
class Role:
    """One kind of data a member keeps per token, e.g. ``Role("key", (128,), "float16")``.

    is_state: it is kept once for all tokens
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_state: bool = False

    @property
    def token_bytes(self) -> int:
        return packed_bytes(self.dtype, prod(self.shape))

    def bytes_of(self, tokens: int) -> int:
        """Of a block of so many tokens."""
        return self.token_bytes * (1 if self.is_state else tokens)


@dataclass(frozen=True)
class BlockLayout:
    """The bytes of one block: ``slots`` members, ordered by layer, each with its roles one after the other.

        block  = | lead_bytes | slot 0            | slot 1            | ... | tail_bytes      slot_bytes each
        slot   = | role 0 [own_tokens, *shape] | role 1 ... |       each role starts on ``alignment``

    The layout is the same on the device, on the host, in storage and on the wire. Where members of a model differ in
    size, those of each have a layout, all of ``block_size`` tokens and equal ``block_bytes``: the rest of a block is
    empty, or other members' (``lead_bytes``, ``tail_bytes``).

    parts: of so many ranks each keeps the tokens of its `TokenShare` alone, ``block_size / parts`` of a block
    rate:  tokens that each entry of the roles stands for; a block has those that end in it, or room for one where an
           entry stands for more tokens than a block has
    """

    block_size: int
    slots: int
    roles: tuple[Role, ...]
    alignment: int = 64
    tail_bytes: int = 0
    parts: int = 1
    rate: int = 1
    lead_bytes: int = 0

    def __hash__(self) -> int:
        """Of numbers alone, for roles take a while: every layer of a step looks something up by its layout."""
        beside = self.lead_bytes, self.tail_bytes
        return hash((self.block_size, self.slots, self.alignment, *beside, self.parts, self.rate))

    @property
    def own_tokens(self) -> int:
        """Tokens, or entries, of a block that a rank keeps."""
        return max(1, self.block_size // self.rate) // self.parts

    @cached_property
    def own(self) -> BlockLayout:
        """The same bytes as blocks of the rank's own tokens, or of entries: what kernels are told."""
        is_own = self.parts == 1 and self.rate == 1
        return self if is_own else replace(self, block_size=self.own_tokens, parts=1, rate=1)

    @cached_property
    def role_offsets(self) -> dict[str, int]:
        """Byte offset of each role in a block's first slot, from the block's beginning."""
        offsets, at = {}, self.lead_bytes
        for role in self.roles:
            offsets[role.name] = at
            at += self._aligned(role.bytes_of(self.own_tokens))
        return offsets

    @cached_property
    def slot_bytes(self) -> int:
        return sum(self._aligned(role.bytes_of(self.own_tokens)) for role in self.roles)

    @cached_property
    def block_bytes(self) -> int:
        return self.lead_bytes + self.slot_bytes * self.slots + self.tail_bytes

    @property
    def identity(self) -> str:
        """A string that differs whenever the bytes of a block would be read differently."""
        beside = f"/l{self.lead_bytes}" if self.lead_bytes else ""
        beside += f"/t{self.tail_bytes}" if self.tail_bytes else ""
        return f"v1/b{self.block_size}{self._parts_text}/s{self.slots}/a{self.alignment}{beside}/{self._roles_text}"

    @property
    def slot_identity(self) -> str:
        """The same of one slot, however many a block has."""
        return f"v1/b{self.block_size}{self._parts_text}/a{self.alignment}/{self._roles_text}"

    @property
    def _parts_text(self) -> str:
        parts = f"/p{self.parts}" if self.parts > 1 else ""
        return f"{parts}/r{self.rate}" if self.rate > 1 else parts

    @property
    def _roles_text(self) -> str:
        return ",".join(f"{r.name}:{'x'.join(map(str, r.shape))}:{r.dtype}" for r in self.roles)

    def slot_range(self, first: int, last: int) -> tuple[int, int]:
        """Byte range ``[start, stop)`` inside a block of the slots ``[first, last)``."""
        return self.lead_bytes + first * self.slot_bytes, self.lead_bytes + last * self.slot_bytes

    def _aligned(self, size: int) -> int:
        return -(-size // self.alignment) * self.alignment
