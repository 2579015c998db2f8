"""Every error headwise raises on purpose. Each message names the value at fault and what is allowed."""

from __future__ import annotations


class HeadwiseError(Exception):
    """Base class of all errors raised by headwise."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, for use within another message."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


class ConfigError(HeadwiseError):
    """A configuration value, flag or file is not usable."""


class ModelError(HeadwiseError):
    """A model cannot be found, read or served."""


class InvalidRequestError(HeadwiseError):
    """A request can never be served as it stands; nothing was started for it."""


class NotAllowedError(HeadwiseError):
    """The API key by which a call came is a tenant's, and the call an operator's."""


class RequestAbortedError(HeadwiseError):
    """The request was cancelled before it finished."""


class OverloadedError(HeadwiseError):
    """The deployment's queue is full; the request may be sent again later."""


class NotReadyError(OverloadedError):
    """No engine is there that could serve the request: all are starting, or were lost."""


class EngineDiedError(HeadwiseError):
    """The engine, or one of its workers, died while it served the request."""


class GpuFailedError(HeadwiseError):
    """A GPU reported an error that it does not recover from within this process, whose worker has to end."""


class EngineLeavingError(EngineDiedError):
    """The engine is about to end on purpose and does not serve this request: another engine does."""


class EmbedsLackingError(EngineDiedError):
    """The engine needs embeddings that it did not ask for, since what it had cached then is gone: ask it again."""


class DeploymentError(HeadwiseError):
    """A deployment cannot be started, reached or stopped."""


class LayerSwapTimeoutError(HeadwiseError):
    """Cached blocks did not reach the device in time: what needs them is computed again."""
