"""Prompts that this engine computes for others, which read the blocks as they come: requests without an output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from headwise.errors import HeadwiseError, InvalidRequestError
from headwise.runtime.engine.arriving_embeds import ArrivingEmbeds
from headwise.runtime.engine.peers.base import Peers
from headwise.runtime.engine.peers.lending import Lending
from headwise.runtime.engine.sequence import Sequence as Running
from headwise.runtime.protocol.lease_messages import AskLease, LeaseEmbeds, LeaseWants
from headwise.runtime.protocol.messages import EmbedsPart, Submit
from headwise.runtime.protocol.prompt_items import EmbedsPlace
from headwise.runtime.protocol.request import GenerateRequest, SamplingParams

_WITHOUT_OUTPUT = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


class Prefills:
    """The requests whose only use is a lease: they end with it, and its blocks are all there when they end.

    embeds: of requests that are to come, also clients'
    check, add, abort: refuse a request with such embeddings, queue one, and end one: as an engine's core does
    timeout_s: embeddings of which nothing comes for so long are not waited for
    """

    def __init__(
        self,
        lending: Lending,
        peers: Peers,
        embeds: ArrivingEmbeds,
        block_size: int,
        *,
        check: Callable[[GenerateRequest, Sequence[EmbedsPlace]], None],
        add: Callable[[GenerateRequest], Running],
        abort: Callable[[str], None],
        timeout_s: float,
    ) -> None:
        self._lending, self._peers, self._block_size = lending, peers, block_size
        self._check, self._add, self._abort = check, add, abort
        self._embeds, self._timeout_s = embeds, timeout_s
        self._leases: dict[str, bytes] = {}  # by request
        self._asked: dict[str, AskLease] = {}  # of requests whose embeddings are on their way

    def __len__(self) -> int:
        return len(self._leases) + len(self._asked)

    def begin(self, reader: bytes, message: AskLease, prompt: GenerateRequest, now: float) -> None:
        """Compute a prompt, and lease its blocks to the reader; what is under way already is not begun again."""
        name = _name(message.lease)
        if name in self._leases or self._lending.is_known(message.lease):
            self._lending.renew(reader, message.lease, message.epoch, 0, now)
            return
        request = replace(
            prompt, request_id=name, sampling=_WITHOUT_OUTPUT, output_token_ids=(), prompt_told=0, peer=None, embeds=()
        )
        if not message.embeds:
            self._compute(reader, message, request, now)
            return
        if name not in self._asked:
            try:
                self._check(request, message.embeds)
            except HeadwiseError:  # as below
                self._lending.refuse(reader, message)
                return
            self._asked[name] = message
            self._embeds.begin(Submit(0, request, message.embeds), now)
        self._ask(reader, message.lease, message.epoch)

    def take(self, reader: bytes, message: LeaseEmbeds, now: float) -> None:
        """The next rows of the embeddings of a prompt that is to be computed."""
        name = _name(message.lease)
        asked = self._asked.get(name)
        if asked is None:
            if self._lending.is_known(message.lease):
                self._lending.renew(reader, message.lease, message.epoch, 0, now)
            else:
                self._lending.refuse(reader, message)
            return
        if (message.start, message.first) == self._embeds.wanted(name):
            try:
                request = self._embeds.take(EmbedsPart(name, message.start, message.first, message.values), now)
            except InvalidRequestError:
                self.forget(message.lease)
                self._lending.refuse(reader, asked)
                return
            if request is not None:
                del self._asked[name]
                self._compute(reader, asked, request, now)
                return
        self._ask(reader, message.lease, message.epoch)

    def _ask(self, reader: bytes, lease: bytes, epoch: int) -> None:
        wanted = self._embeds.wanted(_name(lease))
        if wanted is not None:
            self._peers.answer(reader, LeaseWants(lease, epoch, *wanted))

    def _compute(self, reader: bytes, message: AskLease, request: GenerateRequest, now: float) -> None:
        name = request.request_id
        try:
            sequence = self._add(request)
        except HeadwiseError:  # it is too much for this engine now: the reader computes it
            self._lending.refuse(reader, message)
            return
        self._leases[name] = message.lease
        path = sequence.block_hashes(sequence.num_tokens, self._block_size)[: len(message.wanted)]
        self._lending.lend(reader, message, path, now, is_growing=True)
        self.end_unleased(now)

    def forget(self, lease: bytes) -> None:
        """Wait no more for the embeddings of a lease's prompt."""
        name = _name(lease)
        self._asked.pop(name, None)
        self._embeds.drop(name)

    def ended(self, request_id: str) -> bool:
        """A request has ended; whether it was one of these."""
        lease = self._leases.pop(request_id, None)
        if lease is not None:
            self._lending.computed(lease)
        return lease is not None

    def end_unleased(self, now: float) -> None:
        """End those that nobody waits for any more, or of which nothing comes."""
        for name in self._embeds.stalled_since(now - self._timeout_s):
            if name in self._asked:
                self.forget(self._asked[name].lease)
        for name, lease in list(self._leases.items()):
            if not self._lending.is_known(lease):
                self._abort(name)

    def end_all(self) -> None:
        """Nothing is computed for a while: let readers compute it."""
        for asked in list(self._asked.values()):
            self.forget(asked.lease)
        for name in list(self._leases):
            self._abort(name)


def _name(lease: bytes) -> str:
    """Of the request whose blocks are leased so."""
    return f"prefill/{lease.hex()}"
