"""Has an engine have the weights that the scheduler wants: reads them while it serves on, then changes them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from headwise.errors import HeadwiseError, first_line
from headwise.runtime.config.model_card import ModelCard
from headwise.runtime.engine.base import Core
from headwise.runtime.engine.operations import NewWeights, Operation
from headwise.runtime.protocol.messages import WantedWeights
from headwise.runtime.protocol.weights import Weights

log = logging.getLogger(__name__)

ReadWeights = Callable[[Weights], ModelCard]
"""The card of the engine's model with these weights. Raises `HeadwiseError` if they cannot be served. Takes long."""


class WeightsFollower:
    """Used by the server's thread.

    weights:  that the engine has
    naming:   what its blocks' hashes start from
    refused:  those that it was told to have last and cannot, ``refusal`` says why; None: there are none
    """

    def __init__(
        self,
        read: ReadWeights,
        now: NewWeights,
        on_changed: Callable[[NewWeights], None] = lambda new: None,
    ) -> None:
        """
        now:        what the engine starts with
        on_changed: called when it has other weights
        """
        self.weights, self.naming = now.weights, now.card.naming
        self.refused: Weights | None = None
        self.refusal = ""
        self._read, self._on_changed = read, on_changed
        self._wanted: WantedWeights | None = None  # that are being read, or taken in
        self._reading: Future[ModelCard] | None = None
        self._new: NewWeights | None = None
        self._operation: Operation | None = None

    def follow(self, wanted: WantedWeights | None, core: Core | None) -> bool:
        """Go on; whether there are news for the scheduler.

        wanted: None: nobody wants any
        core:   that may be told; None: its workers are being started
        """
        if self._wanted is None:
            if wanted is None or wanted.weights in (self.weights, self.refused):
                return False
            self._wanted, self._reading = wanted, self._begin(wanted.weights)
            log.info("weights %s are wanted: reading them", wanted.weights.version or "of the start")
        if self._reading is not None and self._reading.done():
            return self._take(self._reading)
        if self._operation is not None and self._operation.is_done:
            return self._have_changed(self._operation.refusal)
        if self._new is not None and self._operation is None and core is not None:
            self._operation = core.change_weights(self._new)
        return False

    @property
    def told(self) -> dict[str, Any]:
        """What an `EngineStatus` says of it."""
        told = {"refused": self.refused, "refusal": self.refusal}
        return {"weights": self.weights, "identity": self.naming.identity, "adapters": self.naming.adapters, **told}

    def failed(self, error: HeadwiseError) -> None:
        """The core has died. If its workers were at other weights, these are not tried again; else the next core gets
        them."""
        operation, self._operation = self._operation, None
        if operation is not None and operation.is_done:
            self._have_changed(operation.refusal)  # it has died of something else
        elif operation is not None and operation.is_sent:
            self._refuse(str(error))

    def _begin(self, weights: Weights) -> Future[ModelCard]:
        reading: Future[ModelCard] = Future()

        def read() -> None:
            try:
                reading.set_result(self._read(weights))
            except BaseException as error:  # whoever asks for the result gets it
                reading.set_exception(error)

        threading.Thread(target=read, name="headwise-weights", daemon=True).start()
        return reading

    def _take(self, reading: Future[ModelCard]) -> bool:
        assert self._wanted is not None
        self._reading, error = None, reading.exception()
        if error is None:
            self._new = NewWeights(self._wanted.weights, reading.result(), self._wanted.keeps_running)
            return False
        if not isinstance(error, HeadwiseError):
            log.error("reading weights failed", exc_info=error)
        self._refuse(str(error) if isinstance(error, HeadwiseError) else f"{type(error).__name__}: {first_line(error)}")
        return True

    def _refuse(self, why: str) -> None:
        assert self._wanted is not None
        self.refused, self.refusal = self._wanted.weights, why
        log.error("weights %s cannot be had: %s", self.refused.version, why)
        self._wanted = self._new = self._operation = None

    def _have_changed(self, refusal: str) -> bool:
        assert self._new is not None
        new = self._new
        if refusal:
            self._refuse(refusal)
            return True
        self.weights, self.naming, self.refused, self.refusal = new.weights, new.card.naming, None, ""
        self._wanted = self._new = self._operation = None
        log.info("serves by weights %s", new.weights.version or "of the start")
        self._on_changed(new)
        return True
