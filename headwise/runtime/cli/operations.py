"""``headwise sleep``, ``wake``, ``reset-cache``, ``update-weights``, ``scale``, ``roll``: operations on deployments."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from headwise.runtime.cli.options import Access, command
from headwise.units import parse_pairs

_Address = Annotated[str, typer.Option(metavar="HOST:PORT", help="The deployment's client address.")]
_Tier = Annotated[
    Literal["device", "host", "storage", "all"], typer.Option(help="Where to forget blocks; all: wherever they are.")
]


@command
def sleep(address: _Address, access: Access) -> None:
    """Have a deployment give back the memory of its weights and device cache; requests wait until `headwise wake`.

    Host cache and storage stay, and what the device has cached goes to the host as far as there is room.

    \b
    Examples:
      headwise sleep --address 127.0.0.1:8700
    """
    with access.client(address) as client:
        client.sleep()


@command
def wake(address: _Address, access: Access) -> None:
    """Have a deployment that sleeps load its weights again and go on with all requests.

    \b
    Examples:
      headwise wake --address 127.0.0.1:8700
    """
    with access.client(address) as client:
        client.wake()


@command
def reset_cache(address: _Address, access: Access, tier: _Tier = "all") -> None:
    """Have a deployment forget every cached block that no running request needs.

    Prints how many blocks each engine has forgotten.

    \b
    Examples:
      headwise reset-cache --address 127.0.0.1:8700
      headwise reset-cache --address 127.0.0.1:8700 --tier host
    """
    with access.client(address) as client:
        for engine, blocks in client.reset_cache(tier).items():
            typer.echo(f"{engine}: {blocks} blocks")


@command
def update_weights(
    address: _Address,
    access: Access,
    model: Annotated[str, typer.Argument(help="The weights: a directory that every engine's node has.")] = "",
    version: Annotated[str, typer.Option(help="Their name, which no others may have; by default one is drawn.")] = "",
    keep_running: Annotated[
        bool, typer.Option("--keep-running", help="Requests that run go on behind what was computed of them before.")
    ] = False,
    adapters: Annotated[
        str | None, typer.Option(metavar="NAME=DIRECTORY,...", help="All LoRA adapters that there are to be.")
    ] = None,
    add_adapters: Annotated[
        str, typer.Option(metavar="NAME=DIRECTORY,...", help="LoRA adapters that come to those that there are.")
    ] = "",
    drop_adapters: Annotated[str, typer.Option(metavar="NAME,...", help="LoRA adapters that go.")] = "",
) -> None:
    """Have a deployment serve by other weights of its model, or with other adapters, without a new start.

    No request is lost. Prints the weights' version once all engines have them, and they must stay where they are until
    the next ones are had. The deployment must have been started with --weights-from, a directory that they are in.

    \b
    Examples:
      headwise update-weights /shared/step-100 --address 127.0.0.1:8700
      headwise update-weights /shared/step-101 --version step-101 --keep-running --address 127.0.0.1:8700
      headwise update-weights --adapters sql=/shared/sql-2,chat=/shared/chat --address 127.0.0.1:8700
      headwise update-weights --add-adapters sql=/shared/sql-3 --drop-adapters chat --address 127.0.0.1:8700
    """
    example = "adapters such as sql=/models/sql-lora"
    named = None if adapters is None else parse_pairs(adapters, example)
    added, dropped = parse_pairs(add_adapters, example), [each for each in drop_adapters.split(",") if each]
    with access.client(address) as client:
        changed = client.update_weights(
            model,
            version=version,
            keep_running=keep_running,
            adapters=named,
            add_adapters=added,
            drop_adapters=dropped,
        )
        typer.echo(changed)


@command
def scale(
    address: _Address,
    access: Access,
    replicas: Annotated[
        str | None, typer.Option(metavar="N|auto", help="So many engines; auto: as many as a target needs.")
    ] = None,
    prefill: Annotated[int | None, typer.Option(min=0, help="So many of them compute prompts only.")] = None,
    decode: Annotated[int | None, typer.Option(min=0, help="So many of them decode only.")] = None,
) -> None:
    """Have a deployment run so many engines. Prints what was decided; engines then start, or end what they have and go.

    \b
    Examples:
      headwise scale --address 127.0.0.1:8700 --replicas 3
      headwise scale --address 127.0.0.1:8700 --replicas auto
      headwise scale --address 127.0.0.1:8700 --prefill 1 --decode 3
    """
    split = None if prefill is None and decode is None else (prefill or 0, decode or 0)
    if replicas is None and split is None:
        raise typer.BadParameter("give a number of engines, or auto", param_hint="--replicas")
    if replicas is None:
        replicas = str(sum(split or ()))
    if replicas != "auto" and not replicas.isdecimal():
        raise typer.BadParameter(f"give a number of engines, or auto, not {replicas!r}", param_hint="--replicas")
    with access.client(address) as client:
        typer.echo(client.scale(None if replicas == "auto" else int(replicas), split))


@command
def roll(address: _Address, access: Access) -> None:
    """Have a deployment replace all its engines by new ones, one after the other, so that no request is lost.

    Prints what was decided and returns; `headwise status` shows which engines are still to be replaced.

    \b
    Examples:
      headwise roll --address 127.0.0.1:8700
    """
    with access.client(address) as client:
        typer.echo(client.roll())
