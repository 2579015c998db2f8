"""Encodes dataclasses as msgpack, with one schema per class, taken from its type hints.

A message is ``[VERSION, tag, [field, ...]]``; a nested registered dataclass is its list of fields. NumPy arrays are
an extension type (dtype, shape, bytes), decoded as read-only views of the message. Decoding checks every field
against its hint, so the result of `decode` always has the right types, whoever sent it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack
import numpy as np

from headwise.cache_controller.tiers import NamedBlocks
from headwise.errors import HeadwiseError
from headwise.runtime.protocol.batch import (
    AskedPrompt,
    BatchRequest,
    KnownTokens,
    NewSequence,
    SharedRows,
    StepEmbeds,
    StepResult,
)
from headwise.runtime.protocol.copies import CopyReport, PeerFetch, SwapIn, SwapOut
from headwise.runtime.protocol.guided import Guided
from headwise.runtime.protocol.images import PromptImage
from headwise.runtime.protocol.prompt_items import EmbedsPlace, PromptEmbeds
from headwise.runtime.protocol.request import (
    GenerateRequest,
    OutputDelta,
    PeerHint,
    Retention,
    SamplingParams,
    Timings,
    TokenLogprobs,
    Usage,
)
from headwise.runtime.protocol.weights import AdapterChanges, Weights, WeightsToLoad
from headwise.transfer.stats import TransferStats

VERSION = 13

_ARRAY = 1
_HEADER = struct.Struct("<3sB4x")
_LARGE = 1 << 16
"""Bytes of an array from which on a copy of it takes longer than to do without."""
_DTYPES = frozenset({"|b1", "|u1", "<u2", "<i4", "<i8", "<f4", "<f8"})

T = TypeVar("T")
Convert = Callable[[Any], Any]


class WireError(HeadwiseError):
    """Bytes are not a message of this version: truncated, of another kind, or with a field of the wrong type."""


class _Mismatch(Exception):
    """A field does not have the type its hint asks for."""


class _Schema(Generic[T]):
    """Packs and unpacks one dataclass; fields that msgpack takes as they are cost nothing."""

    def __init__(self, cls: type[T], tag: str) -> None:
        hints = get_type_hints(cls)
        names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        converters = [_converter(hints[name]) for name in names]
        self.cls = cls
        self.tag = tag
        self.names = names
        self._values = attrgetter(*names) if len(names) > 1 else (lambda message: [getattr(message, n) for n in names])
        self._packers = [(i, pack) for i, (pack, _) in enumerate(converters) if pack is not None]
        self._unpackers = [unpack for _, unpack in converters]

    def pack(self, message: T) -> list[Any]:
        values = list(self._values(message))
        for i, pack in self._packers:
            if values[i] is not None:
                values[i] = pack(values[i])
        return values

    def unpack(self, values: Any) -> T:
        if type(values) is not list or len(values) != len(self.names):
            raise _Mismatch(f"{self.tag} must have {len(self.names)} fields")
        built = []
        for name, unpack, value in zip(self.names, self._unpackers, values, strict=True):
            try:
                built.append(unpack(value))
            except _Mismatch as mismatch:
                raise _Mismatch(f"{self.tag}.{name}: {mismatch}") from None
        return self.cls(*built)


_BY_TYPE: dict[type, _Schema[Any]] = {}
_BY_TAG: dict[str, _Schema[Any]] = {}


def register(cls: type[T]) -> type[T]:
    """Class decorator: let a dataclass cross the wire under its own name. Nested classes must be registered before."""
    schema = _Schema(cls, cls.__name__)
    _BY_TYPE[cls] = _BY_TAG[schema.tag] = schema
    return cls


def encode(message: Any) -> bytes:
    """The bytes of a registered dataclass. Equal messages have equal bytes."""
    schema = _BY_TYPE[type(message)]
    return msgpack.packb((VERSION, schema.tag, schema.pack(message)), default=_pack_array)  # type: ignore[no-any-return]


def decode(data: bytes | memoryview, *expected: type) -> Any:
    """The message in ``data``, of one of the ``expected`` classes (none given: of any registered one).

    Arrays are read-only. Raises `WireError` on anything else, and what the message's own constructor raises
    (`InvalidRequestError` for sampling parameters out of range).
    """
    try:
        message = msgpack.unpackb(data, ext_hook=_unpack_array, strict_map_key=False)
    except (ValueError, TypeError, RecursionError, _Mismatch) as error:
        raise WireError(f"{len(data)} bytes are not a message: {error or type(error).__name__}") from None
    if type(message) is not list or len(message) != 3:
        raise WireError("a message must be [version, kind, fields]")
    version, tag, values = message
    if version != VERSION:
        raise WireError(
            f"message of protocol version {version!r:.40}; this side speaks {VERSION}, install the same release"
        )
    schema = _BY_TAG.get(tag) if isinstance(tag, str) else None
    if schema is None or (expected and schema.cls not in expected):
        known = ", ".join(cls.__name__ for cls in expected) or ", ".join(sorted(_BY_TAG))
        raise WireError(f"unexpected message {tag!r:.80}; expected {known}")
    try:
        return schema.unpack(values)
    except _Mismatch as mismatch:
        raise WireError(str(mismatch)) from None


def _pack_array(value: Any) -> msgpack.ExtType:
    if not isinstance(value, np.ndarray) or value.dtype.str not in _DTYPES:
        kind = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
        raise WireError(f"cannot send a value of type {kind}")
    shape = struct.pack(f"<{value.ndim}q", *value.shape)
    content = value.data if value.nbytes > _LARGE and value.flags.c_contiguous else value.tobytes()
    return msgpack.ExtType(_ARRAY, b"".join((_HEADER.pack(value.dtype.str.encode(), value.ndim), shape, content)))


def _unpack_array(code: int, data: bytes) -> np.ndarray[Any, Any]:
    if code != _ARRAY or len(data) < _HEADER.size:
        raise _Mismatch(f"unknown extension type {code}")
    dtype, ndim = _HEADER.unpack_from(data)
    if dtype.decode("ascii", "replace") not in _DTYPES:
        raise _Mismatch(f"arrays of dtype {dtype!r} are not sent")
    start = _HEADER.size + 8 * ndim
    if ndim > 8 or len(data) < start:
        raise _Mismatch(f"an array of {ndim} dimensions is cut short")
    shape = struct.unpack_from(f"<{ndim}q", data, _HEADER.size)
    if min(shape, default=0) < 0:
        raise _Mismatch(f"array shape {shape} is negative")
    return np.frombuffer(data, dtype=dtype.decode(), offset=start).reshape(shape)


def _converter(hint: Any) -> tuple[Convert | None, Convert]:
    """(pack or None where msgpack takes the value as it is, unpack with check) of a type hint."""
    origin, args = get_origin(hint), get_args(hint)
    if hasattr(origin, "__value__"):  # an alias with a parameter (PEP 695), as NDArray is from NumPy 2.5 on
        return _converter(origin.__value__[args])
    if hint is Any:
        return None, lambda value: value
    if origin in (Union, UnionType) and NoneType in args and len(args) == 2:
        return _optional(next(arg for arg in args if arg is not NoneType))
    if origin in (Union, UnionType) and all(get_origin(arg) is np.ndarray for arg in args):
        return None, _array_check(*(_dtype(arg) for arg in args))
    if origin is tuple:
        return _tuple(args)
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        return None, _named_tuple(hint)
    if origin is dict:
        return _dict(*args)
    if origin is np.ndarray:
        return None, _array_check(_dtype(hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return (lambda value: value.value), _enum(hint)
    if is_dataclass(hint):
        schema = _BY_TYPE[hint]  # type: ignore[index]
        return schema.pack, schema.unpack
    return None, _scalar(hint)


def _optional(hint: Any) -> tuple[Convert | None, Convert]:
    pack, unpack = _converter(hint)
    pack_some = None if pack is None else (lambda value: None if value is None else pack(value))
    return pack_some, lambda value: None if value is None else unpack(value)


def _tuple(args: tuple[Any, ...]) -> tuple[Convert | None, Convert]:
    def sequence(value: Any) -> list[Any]:
        if type(value) is not list:
            raise _Mismatch(f"must be a list, not {type(value).__name__}")
        return value

    if len(args) == 2 and args[1] is Ellipsis:
        pack, unpack = _converter(args[0])
        many = None if pack is None else (lambda value: [pack(item) for item in value])
        return many, lambda value: tuple([unpack(item) for item in sequence(value)])

    converters = [_converter(arg) for arg in args]

    def unpack_fixed(value: Any) -> tuple[Any, ...]:
        if len(sequence(value)) != len(converters):
            raise _Mismatch(f"must have {len(converters)} items, got {len(value)}")
        return tuple([unpack(item) for (_, unpack), item in zip(converters, value, strict=True)])

    if any(pack is not None for pack, _ in converters):
        raise TypeError(f"tuples of fixed length must hold plain values, got {args}")
    return None, unpack_fixed


def _named_tuple(cls: Any) -> Convert:
    """Of plain values, which msgpack takes as a list."""
    hints = get_type_hints(cls)
    _, unpack_fields = _tuple(tuple(hints[name] for name in cls._fields))
    return lambda value: cls(*unpack_fields(value))


def _dict(key_hint: Any, value_hint: Any) -> tuple[Convert | None, Convert]:
    (_, unpack_key), (pack, unpack) = _converter(key_hint), _converter(value_hint)

    def unpack_dict(value: Any) -> dict[Any, Any]:
        if type(value) is not dict:
            raise _Mismatch(f"must be a mapping, not {type(value).__name__}")
        return {unpack_key(key): unpack(item) for key, item in value.items()}

    return None if pack is None else (lambda value: {key: pack(item) for key, item in value.items()}), unpack_dict


def _dtype(hint: Any) -> np.dtype[Any]:
    """Of an ``NDArray[...]``."""
    dtype: np.dtype[Any] = np.dtype(get_args(get_args(hint)[1])[0])
    return dtype


def _array_check(*dtypes: np.dtype[Any]) -> Convert:
    def check(value: Any) -> Any:
        if not isinstance(value, np.ndarray) or value.dtype not in dtypes:
            kind = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
            raise _Mismatch(f"must be an array of {' or '.join(map(str, dtypes))}, not {kind}")
        return value

    return check


def _enum(cls: type[Enum]) -> Convert:
    members = {member.value: member for member in cls}

    def unpack(value: Any) -> Enum:
        if not isinstance(value, str) or value not in members:
            raise _Mismatch(f"must be one of {', '.join(members)}, got {value!r:.80}")
        return members[value]

    return unpack


def _scalar(hint: type) -> Convert:
    accepted = (int, float) if hint is float else (hint,)

    def check(value: Any) -> Any:
        if type(value) not in accepted:
            raise _Mismatch(f"must be {hint.__name__}, not {type(value).__name__}")
        return value

    return check


for _cls in (
    Guided,
    SamplingParams,
    KnownTokens,
    AskedPrompt,
    NewSequence,
    TokenLogprobs,
    Usage,
    Timings,
    NamedBlocks,
    TransferStats,
    PeerFetch,
    SwapIn,
    SwapOut,
    CopyReport,
    SharedRows,
    StepEmbeds,
    Weights,
    WeightsToLoad,
    AdapterChanges,
    BatchRequest,
    StepResult,
    PeerHint,
    PromptEmbeds,
    EmbedsPlace,
    Retention,
    GenerateRequest,
    PromptImage,
    OutputDelta,
):
    register(_cls)
