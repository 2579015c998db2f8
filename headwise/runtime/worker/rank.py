"""One rank among the others: what it computes on, and how it reaches them."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.runtime.ops.base import TensorOps
from headwise.runtime.ops.comm import Collectives, Communicator
from headwise.runtime.ops.stage_links import HostLink, LinkedStage, StageLinks
from headwise.runtime.worker.agreement import Agreement
from headwise.runtime.worker.decode_graphs import padded_rows
from headwise.runtime.worker.device import Device
from headwise.runtime.worker.model_source import ModelSource
from headwise.runtime.worker.prefill_graphs import padded_tokens


@dataclass(frozen=True)
class Rank:
    """For as long as its worker lives, whatever model that serves.

    number:      of all stages' ranks
    layers:      of its stage
    comm:        of the ranks of its stage
    agreement:   of these
    collectives: of these, of tensors
    links:       to the ranks in its place in the other stages
    tokens_link: by which the last stage gives the first one what it samples; None: it does not
    """

    number: int
    layers: range
    device: Device
    comm: Communicator
    agreement: Agreement
    collectives: Collectives
    links: StageLinks
    tokens_link: HostLink | None

    @classmethod
    def connected(
        cls, number: int, device: Device, comm: Communicator, link: HostLink | None, source: ModelSource
    ) -> Rank:
        """With the others, all of which call this, too, within `Device.current`.

        link: None: there are no other stages

        Raises:
            DeploymentError: the devices cannot be connected.
        """
        layers = source.card.plan.stages[number // source.card.plan.tp_size]
        collectives = device.collectives(comm)
        links = StageLinks() if link is None else device.stage_links(link, _linked_stage(number, layers, source))
        tokens_link = link if source.config.returns_tokens else None
        return cls(number, layers, device, comm, Agreement(comm), collectives, links, tokens_link)

    @property
    def ops(self) -> TensorOps:
        """The device's."""
        return self.device.ops


def _linked_stage(number: int, layers: range, source: ModelSource) -> LinkedStage:
    model = source.card.config
    rows = max(padded_tokens(source.config.most_batched_tokens), padded_rows(source.card.spec.max_rows))
    return LinkedStage(number, model.stream_size, rows, layers.start == 0, layers.stop == model.num_layers)
