"""Prompts that this engine computes for others, which read the blocks as they come: requests without an output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from headwise.errors import HeadwiseError
from headwise.runtime.engine.peers.lending import Lending
from headwise.runtime.engine.sequence import Sequence
from headwise.runtime.protocol.messages import AskLease
from headwise.runtime.protocol.request import GenerateRequest, SamplingParams

_WITHOUT_OUTPUT = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


class Prefills:
    """The requests whose only use is a lease: they end with it, and its blocks are all there when they end.

    add, abort: queue a request, and end one, as an engine's core does
    """

    def __init__(
        self,
        lending: Lending,
        block_size: int,
        add: Callable[[GenerateRequest], Sequence],
        abort: Callable[[str], None],
    ) -> None:
        self._lending, self._block_size, self._add, self._abort = lending, block_size, add, abort
        self._leases: dict[str, bytes] = {}  # by request

    def __len__(self) -> int:
        return len(self._leases)

    def begin(self, reader: bytes, message: AskLease, prompt: GenerateRequest, now: float) -> None:
        """Compute a prompt, and lease its blocks to the reader; what is under way already is not begun again."""
        name = f"prefill/{message.lease.hex()}"
        if name in self._leases or self._lending.is_known(message.lease):
            self._lending.renew(reader, message.lease, message.epoch, 0, now)
            return
        request = replace(
            prompt, request_id=name, sampling=_WITHOUT_OUTPUT, output_token_ids=(), prompt_told=0, peer=None
        )
        try:
            sequence = self._add(request)
        except HeadwiseError:  # it is too much for this engine now: the reader computes it
            self._lending.refuse(reader, message)
            return
        self._leases[name] = message.lease
        path = sequence.block_hashes(sequence.num_tokens, self._block_size)[: len(message.wanted)]
        self._lending.lend(reader, message, path, now, is_growing=True)
        self.end_unleased()

    def ended(self, request_id: str) -> bool:
        """A request has ended; whether it was one of these."""
        lease = self._leases.pop(request_id, None)
        if lease is not None:
            self._lending.computed(lease)
        return lease is not None

    def end_unleased(self) -> None:
        """End those that nobody waits for any more."""
        for name, lease in list(self._leases.items()):
            if not self._lending.is_known(lease):
                self._abort(name)

    def end_all(self) -> None:
        """Nothing is computed for a while: let readers compute it."""
        for name in list(self._leases):
            self._abort(name)
