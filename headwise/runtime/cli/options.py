"""The configuration as command line flags and as a reference page, both generated from `EngineConfig`'s fields."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from headwise.errors import ConfigError, HeadwiseError
from headwise.runtime.config.engine_config import GROUPS, EngineConfig
from headwise.runtime.config.options import field_default, number_or_words

if TYPE_CHECKING:
    from headwise.runtime.client.client import Client
    from headwise.runtime.client.ways import RelayMode
    from headwise.sockets.curve import ClientKeys

_ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE.yaml",
        help="Configuration: the flags below as keys, with '_' for '-'; flags override it.",
    ),
]

_ACCESS = {
    "relay": (
        "auto",
        Annotated[
            Literal["auto", "always", "never"],
            typer.Option(
                help="Whether engines are reached through the scheduler's port; auto: those that cannot be reached "
                "directly."
            ),
        ],
    ),
    "server_key": (
        "",
        Annotated[
            str, typer.Option(help="The deployment's server key, where it wants keys: `headwise serve` prints it.")
        ],
    ),
    "client_key_file": (
        "",
        Annotated[str, typer.Option(metavar="FILE", help="File whose first line is an API key of the deployment.")],
    ),
}


RayCluster = Annotated[
    str | None,
    typer.Option(metavar="RAY_ADDRESS", help="Ray cluster to run on; 'auto' is the one this machine is part of."),
]


class EngineOptions:
    """The configuration from the command line: a file, and the given flags."""

    def __init__(self, path: Path | None, overrides: dict[str, Any]) -> None:
        self.path = path
        self.overrides = overrides

    def __bool__(self) -> bool:
        """Whether anything was given at all."""
        return self.path is not None or bool(self.overrides)

    def load(self) -> EngineConfig:
        """The configuration; raises `ConfigError` if it is none."""
        return EngineConfig.load(self.path, self.overrides)


class Access:
    """How to connect to a running deployment, from the command line."""

    def __init__(self, relay: RelayMode, server_key: str, client_key_file: str) -> None:
        self.relay = relay
        self.server_key = server_key
        self.client_key_file = client_key_file

    def client(self, address: str) -> Client:
        """A client of the deployment there. Raises `ConfigError` for keys that are none, and what `Client` raises."""
        from headwise.runtime.client.client import Client

        return Client(address, self.relay, self._keys())

    def _keys(self) -> ClientKeys | None:
        from headwise.runtime.config.keys import read_keys
        from headwise.sockets.curve import ClientKeys

        if not (self.server_key or self.client_key_file):
            return None
        if not (self.server_key and self.client_key_file):
            raise ConfigError("--server-key and --client-key-file go together: give both, or none")
        return ClientKeys(self.server_key, read_keys("", self.client_key_file)[0].key)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """A CLI command: errors of headwise become one line and exit code 1, and engine flags are added.

    A parameter of type `EngineOptions` is replaced by ``--config`` and one flag per field of `EngineConfig`; one of
    type `Access` by flags of its own.
    """
    hints = get_type_hints(function, include_extras=True)
    options = next((name for name, hint in hints.items() if hint is EngineOptions), None)
    access = next((name for name, hint in hints.items() if hint is Access), None)
    own = [p.replace(annotation=hints[p.name]) for p in inspect.signature(function).parameters.values()]
    connecting = _access_parameters() if access else []
    parameters = [*(p for p in own if p.name not in (options, access)), *connecting]
    engine = _engine_parameters() if options else []

    @functools.wraps(function)
    def run(**given: Any) -> None:
        if options:
            flags = {p.name: given.pop(p.name) for p in engine}
            path = flags.pop("config")
            given[options] = EngineOptions(path, {name: value for name, value in flags.items() if value is not None})
        if access:
            given[access] = Access(**{p.name: given.pop(p.name) for p in connecting})
        try:
            function(**given)
        except HeadwiseError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None

    run.__signature__ = inspect.Signature([*parameters, *engine])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (*parameters, *engine)}
    return run


def _access_parameters() -> list[inspect.Parameter]:
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (default, annotation) in _ACCESS.items()
    ]


def _engine_parameters() -> list[inspect.Parameter]:
    hints = get_type_hints(EngineConfig)
    annotations = {"config": _ConfigFile} | {f.name: _flag(f, hints[f.name]) for f in fields(EngineConfig)}
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in annotations.items()
    ]


def _flag(f: Field[Any], hint: Any) -> Any:
    """The flag's default is None, "not given": the file's value or the field's default counts then."""
    name = f.name.replace("_", "-")
    declaration = f"--{name}/--no-{name}" if hint is bool else f"--{name}"
    text = f"{f.metadata['help']} [default: {_shown(field_default(f))}]"
    _, words = number_or_words(hint)
    if words:
        shown = "|".join(("INTEGER", *words))
        option = typer.Option(declaration, help=text, show_default=False, parser=_number_if_it_is, metavar=shown)
        return Annotated[Any, option]
    option = typer.Option(declaration, help=text, show_default=False)
    return Annotated[hint | None, option]


def _number_if_it_is(text: str) -> int | str:
    """What a number or a word is in YAML; whether the word may stand there, `EngineConfig` says."""
    try:
        return int(text)
    except ValueError:
        return text


def config_reference() -> str:
    """The fields of `EngineConfig` as Markdown tables, one for each group."""
    hints, by_name = get_type_hints(EngineConfig), {f.name: f for f in fields(EngineConfig)}
    lines = []
    for group in GROUPS:
        lines += [
            f"### {group.__doc__}",
            "",
            "| Key | Flag | Values | Default | Meaning |",
            "| --- | --- | --- | --- | --- |",
        ]
        lines += [_row(by_name[name], hints[name]) for name in group.__annotations__]
        lines.append("")
    return "\n".join(lines[:-1])


def _row(f: Field[Any], hint: Any) -> str:
    name, default = f.name.replace("_", "-"), _shown(field_default(f))
    flag = f"`--{name}`, `--no-{name}`" if hint is bool else f"`--{name}`"
    return f"| `{f.name}` | {flag} | {_values(f, hint)} | `{default}` | {f.metadata['help']} |"


def _values(f: Field[Any], hint: Any) -> str:
    if get_origin(hint) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(hint))
    low, high = f.metadata["low"], f.metadata["high"]
    hint, words = number_or_words(hint)
    kind = {bool: "`true`, `false`", int: "integer", float: "number", str: "text"}[hint]
    kind = ", ".join((*(f"`{word}`" for word in words), kind))
    if low == -math.inf:
        return kind
    return f"{kind}, at least {low:g}" if high == math.inf else f"{kind}, {low:g} to {high:g}"


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
