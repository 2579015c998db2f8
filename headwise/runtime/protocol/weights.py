"""Which weights a deployment's model has: those that it was started with, or others that took their place."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from headwise.errors import InvalidRequestError

MOST_TEXT = 4096
"""Characters of a version, or of a model's name."""


@dataclass(frozen=True)
class Weights:
    """Weights that take the place of those that a deployment was started with.

    version: their name, which no others have; empty: they are those of the start
    model:   where they are, as ``model`` of the configuration says it; empty: that of the configuration
    """

    version: str = ""
    model: str = ""

    def check(self) -> None:
        """Raise `InvalidRequestError` unless they may be asked for."""
        for what, text in (("version", self.version), ("model", self.model)):
            if len(text) > MOST_TEXT:
                raise InvalidRequestError(f"{what} of weights has {len(text)} characters, of at most {MOST_TEXT}")
        if not self.version or not self.version.isprintable():
            raise InvalidRequestError(f"version of weights must be printable text, got {self.version!r:.80}")
        if not self.model:
            raise InvalidRequestError("give the directory of the new weights: model is empty")


FIRST = Weights()
"""Those of the start."""


@dataclass(frozen=True)
class WeightsToLoad:
    """What workers are told of weights that take the place of theirs.

    model:   see `Weights`; empty: that of the configuration
    digests: of what is there, as the engine has read it: that of a `ModelCard`'s weights, and of its blocks
    """

    model: str
    digests: tuple[str, str]


def some_version() -> str:
    """A name for weights that were given none."""
    return uuid.uuid4().hex[:12]
