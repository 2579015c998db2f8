"""Calls to actors with headwise's own errors, and the cause of an actor's end in one line."""

from __future__ import annotations

import re
from typing import Any

import ray

from headwise.errors import DeploymentError, HeadwiseError, first_line

_DEAD_BECAUSE = "The actor is dead because "
_NOT_MADE = "in its creation task"
_GUESSES = "Some common causes"
_USED = re.compile(r"\bwas ([0-9.]+ ?GB[^(),\n]*)")
_LONGEST = 400
"""Characters of a cause in a log line."""


def get(reference: Any) -> Any:
    """`ray.get` that raises headwise's own errors unchanged, and Ray's errors as `DeploymentError`."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        own = error_of(error)
        raise own from (None if own is getattr(error, "cause", None) else error)


def error_of(error: BaseException) -> HeadwiseError:
    """What an actor's call raised: headwise's own error unchanged, any other as `DeploymentError`."""
    if isinstance(error, ray.exceptions.RayTaskError):
        if isinstance(error.cause, HeadwiseError):
            return error.cause
        return DeploymentError(f"an actor failed: {error.cause!r}")
    return DeploymentError(f"an actor of the deployment died: {cause_of(error)}")


def cause_of(error: BaseException) -> str:
    """Why an actor's call ended so, in one line."""
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        text = first_line(cause) if isinstance(cause, HeadwiseError) else repr(cause)
        return _shortened(text)
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return _for_memory(str(error))
    lines = str(error).strip().splitlines()
    if lines and _NOT_MADE in lines[0]:
        return _shortened(lines[-1])
    told = [line for line in lines[1:] if line and not line.startswith("\t")]  # behind the actor's particulars
    line = told[-1] if told else first_line(error)
    return _shortened(line.removeprefix(_DEAD_BECAUSE).partition(_GUESSES)[0].strip(" ."))


def _for_memory(told: str) -> str:
    """What is left of Ray's page about it: who has taken the memory is in Ray's log."""
    used = _USED.search(told)
    return "Ray killed it for memory (OOM), which its node had too little of" + (f": {used[1].strip()}" if used else "")


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
