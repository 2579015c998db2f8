"""Which weights a deployment's model has: those that it was started with, or others that took their place."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from headwise.errors import InvalidRequestError
from headwise.runtime.protocol.request import as_string

MOST_TEXT = {"version": 256, "model": 4096, "adapters": 1 << 15}
"""Characters, by the field of `Weights`, which engines report twice a second: of 64 adapters, each with a path."""


@dataclass(frozen=True)
class Weights:
    """Weights, and adapters, that take the place of those that a deployment was started with.

    version:  their name, which no others have; empty: they are those of the start
    model:    where they are, as ``model`` of the configuration says it; empty: that of the configuration
    adapters: all that there are, as ``adapters`` of the configuration says it; None: those of the configuration
    """

    version: str = ""
    model: str = ""
    adapters: str | None = None

    def check(self) -> None:
        """Raise `InvalidRequestError` unless they may be asked for."""
        for what, text in (("version", self.version), ("model", self.model), ("adapters", self.adapters or "")):
            if len(text) > MOST_TEXT[what]:
                raise InvalidRequestError(f"{what} of weights has {len(text)} characters, of at most {MOST_TEXT[what]}")
        if not self.version or not self.version.isprintable():
            raise InvalidRequestError(f"version of weights must be printable text, got {self.version!r:.80}")

    def over(self, former: Weights) -> Weights:
        """With what is left out of these, a model or adapters, as it was."""
        adapters = former.adapters if self.adapters is None else self.adapters
        return Weights(self.version, self.model or former.model, adapters)


FIRST = Weights()
"""Those of the start."""


@dataclass(frozen=True)
class WeightsToLoad:
    """What workers are told of weights that take the place of theirs.

    model, adapters: see `Weights`
    digests: of what is there, as the engine has read it: see `digests_of`
    """

    model: str
    adapters: str | None
    digests: tuple[str, ...]


def new_weights(model: str, version: str, adapters: Mapping[str, str] | None) -> Weights:
    """What a caller asks for; ``version`` is drawn if it is empty. Raises `InvalidRequestError` for what nobody may."""
    if not (model or adapters is not None):
        raise InvalidRequestError("give the directory of new weights, or adapters, or both")
    text = None
    if adapters is not None:
        if not isinstance(adapters, Mapping) or not all(
            isinstance(part, str) for each in adapters.items() for part in each
        ):
            raise InvalidRequestError(f"adapters must be directories by name, got {adapters!r:.80}")
        text = ",".join(f"{name}={directory}" for name, directory in adapters.items())
    weights = Weights(as_string("version", version) or uuid.uuid4().hex[:12], as_string("model", model), text)
    weights.check()
    return weights
