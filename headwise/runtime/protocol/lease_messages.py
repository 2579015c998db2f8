"""What engines say to each other, of blocks that one reads from another.

engine -> engine  AskLease     -> Leased ...      what is leased is read from host to host, by the workers
engine -> engine  LeaseEmbeds  -> LeaseWants ...  of a prompt that is to be computed: see `embed_parts`
engine -> engine  RenewLease   -> Leased | LeaseEnded
engine -> engine  EndLease     -> LeaseEnded
engine -> engine  Offer        -> Taken ...       by one that is about to end
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwise.runtime.protocol.prompt_items import EmbedsPlace
from headwise.runtime.protocol.request import GenerateRequest
from headwise.runtime.protocol.wire import register


@register
@dataclass(frozen=True)
class AskLease:
    """Let the sender read blocks from the receiver's host or device. Said again until it is answered.

    secret: of the deployment; without it nothing is leased
    lease:  16 random bytes, never used twice
    epoch:  of the cache that is meant
    hashes: of a path's blocks, one after the other; empty where there is a prompt to compute
    wanted: ``bool [blocks, groups]``, which blocks of the path are meant, by the receiver's groups
    prompt: is to be computed, and its blocks leased as they come: those of its first ``len(wanted)`` columns. Its
            sampling does not matter, for nothing is sampled that anybody hears of. When the lease ends, so does it
    embeds: of the prompt, that come when they are asked for by `LeaseWants`; it has none itself
    ways:   how all of the sender's workers can read GPUs' memory: on a node, by a transport; none: they cannot
    """

    lease: bytes
    epoch: int
    hashes: bytes
    wanted: NDArray[np.bool_]
    secret: str = ""
    prompt: GenerateRequest | None = None
    ways: tuple[str, ...] = ()
    embeds: tuple[EmbedsPlace, ...] = ()


@register
@dataclass(frozen=True)
class LeaseWants:
    """Of the embeddings of a lease's prompt, the rows from the ``first`` one of the item at ``start`` on are next."""

    lease: bytes
    epoch: int
    start: int
    first: int


@register
@dataclass(frozen=True, eq=False)
class LeaseEmbeds:
    """These are they, as of `EmbedsPart`."""

    lease: bytes
    epoch: int
    start: int
    first: int
    values: NDArray[np.float32] | NDArray[np.uint16]
    secret: str = ""


@register
@dataclass(frozen=True)
class Leased:
    """These blocks may be read until the reader ends the lease, or is silent for `load_timeout_s`.

    grant:   no other lease of this epoch has had it: a lease of the same name with another one is not the same
    first:   how many blocks of the lease were told before
    blocks:  ``int32 [m, 4]`` (column of the path, group, block, in which memory it is), those after the ``first``
    exports: where each rank is read: encoded `ExportAddress`es, by rank
    is_all:  no more will be leased
    """

    lease: bytes
    epoch: int
    grant: int
    first: int
    blocks: NDArray[np.int32]
    exports: tuple[tuple[bytes, ...], ...]
    is_all: bool


@register
@dataclass(frozen=True)
class RenewLease:
    """The reader is there still, and has been told of ``heard`` blocks."""

    lease: bytes
    epoch: int
    heard: int
    secret: str = ""


@register
@dataclass(frozen=True)
class EndLease:
    """The reader reads no more of what was granted. Said again until it is answered."""

    lease: bytes
    epoch: int
    grant: int
    secret: str = ""


@register
@dataclass(frozen=True)
class LeaseEnded:
    """held: all that was leased under this grant stayed what it was until the reader ended it. Else nothing that was
    read of it may be used.
    """

    lease: bytes
    epoch: int
    grant: int
    held: bool


@register
@dataclass(frozen=True)
class Offer:
    """The sender is about to end, and lets the receiver lease these paths of its host, the most valuable first. Said
    again until it is over.

    offer:  16 random bytes, never used twice
    epoch:  of the receiver's cache
    engine, engine_epoch: the sender, and the epoch of its cache
    paths:  of each the blocks' hashes, one after the other; none: how much room is there?
    evict:  token blocks that the receiver may evict for it at most
    """

    offer: bytes
    epoch: int
    engine: str
    engine_epoch: int
    paths: tuple[bytes, ...]
    evict: int = 0
    secret: str = ""


@register
@dataclass(frozen=True)
class Taken:
    """How far an offer is.

    blocks:  token blocks of its paths that can be served there now
    evicted: token blocks of room that were made for it
    free:    token blocks of the host that are free
    is_over: nothing more of it will be taken
    """

    offer: bytes
    epoch: int
    blocks: int
    evicted: int
    free: int
    is_over: bool
