"""Which weights a deployment's model has: those that it was started with, or others that took their place."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headwise.errors import InvalidRequestError
from headwise.runtime.protocol.request import as_string
from headwise.units import parse_pairs

MOST_TEXT = {"version": 256, "model": 4096, "adapters": 1 << 15}
"""Characters, by the field of `Weights`, which engines report twice a second: of 64 adapters, each with a path."""

MOST_CHANGES = 128
"""Adapters that come or go at once."""


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

    def over(self, former: Weights, changes: AdapterChanges | None = None, configured: str = "") -> Weights:
        """With what is left out of these, a model or adapters, as it was; and with these changes.

        configured: ``adapters`` of the configuration

        Raises `InvalidRequestError` for changes that cannot be made.
        """
        adapters = former.adapters if self.adapters is None else self.adapters
        if changes is not None:
            adapters = changes.made_to(configured if adapters is None else adapters)
        return Weights(self.version, self.model or former.model, adapters)


FIRST = Weights()
"""Those of the start."""


@dataclass(frozen=True)
class AdapterChanges:
    """Adapters that are to be there beside others, in place of those of their names, and such that are to go.

    add:  by name a directory
    drop: names
    """

    add: tuple[tuple[str, str], ...] = ()
    drop: tuple[str, ...] = ()

    def made_to(self, adapters: str) -> str:
        """What there are then. Raises `InvalidRequestError`: one that is to go is not there."""
        if (count := len(self.add) + len(self.drop)) > MOST_CHANGES:
            raise InvalidRequestError(f"{count} adapters come or go; at most {MOST_CHANGES} do at once")
        known = parse_pairs(adapters, "")
        for name in self.drop:
            if known.pop(name, None) is None:
                there = ", ".join(known) or "none at all"
                raise InvalidRequestError(f"there is no adapter {name!r:.80} that could go; there are: {there:.400}")
        return _text_of({**known, **dict(self.add)})


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
    text = None if adapters is None else _text_of(adapters)
    weights = Weights(as_string("version", version) or uuid.uuid4().hex[:12], as_string("model", model), text)
    weights.check()
    return weights


def adapter_changes(
    model: str, adapters: Mapping[str, str] | None, add: Mapping[str, str] | None, drop: Iterable[str]
) -> AdapterChanges | None:
    """What a caller asks for beside ``model`` and ``adapters``; None: no changes. Raises `InvalidRequestError` for what
    nobody may, and where nothing at all is asked for."""
    if isinstance(drop, str) or not isinstance(drop, Iterable):
        raise InvalidRequestError(f"adapters that go must be a list of names, got {drop!r:.80}")
    dropped = tuple(as_string("the name of an adapter", name) for name in drop)
    if not add and not dropped:
        if not model and adapters is None:
            raise InvalidRequestError("give the directory of new weights, or adapters, or both")
        return None
    if adapters is not None:
        raise InvalidRequestError("give either all adapters that there are to be, or those that come and go")
    _text_of(add or {})
    return AdapterChanges(tuple((add or {}).items()), dropped)


def _text_of(adapters: Mapping[str, str]) -> str:
    """As the configuration says them. Raises `InvalidRequestError` for what could not be read again."""
    if not isinstance(adapters, Mapping) or not all(
        isinstance(part, str) for each in adapters.items() for part in each
    ):
        raise InvalidRequestError(f"adapters must be directories by name, got {adapters!r:.80}")
    for name, directory in adapters.items():
        if not (name.strip() and directory.strip()) or set(",=") & {*name} or "," in directory:
            raise InvalidRequestError(
                f"an adapter must have a name and a directory, without commas, got {f'{name}={directory}'!r:.200}"
            )
    return ",".join(f"{name}={directory}" for name, directory in adapters.items())
