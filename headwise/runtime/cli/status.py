"""``headwise status`` and ``headwise index``: how a running deployment is, and what its engines have cached."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from headwise.errors import DeploymentError
from headwise.runtime.cli.options import Access, command

_Address = Annotated[str, typer.Option(metavar="HOST:PORT", help="The deployment's client address.")]

index = typer.Typer(no_args_is_help=True, help="Ask the index which engine has cached what.")


@command
def status(
    address: _Address,
    access: Access,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks of --watch.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print all statistics as one line of JSON instead.")] = False,
) -> None:
    """Show a deployment's engines, their load and cache tiers, the index, and the last faults.

    \b
    Examples:
      headwise status --address 127.0.0.1:8700
      headwise status --address 127.0.0.1:8700 --watch
    """
    from rich.console import Console

    from headwise.runtime.cli.status_tables import render

    with access.client(address) as client:
        if as_json:
            typer.echo(json.dumps(client.stats()))
        elif watch:
            _watch(client.stats, interval)
        else:
            Console().print(render(client.stats()))


def _watch(look: Callable[[], dict[str, Any]], interval: float) -> None:
    """Redraw in place. A deployment that does not answer for a while is shown as such, and looked at again."""
    from rich.console import Group
    from rich.live import Live

    from headwise.runtime.cli.status_tables import render
    from headwise.runtime.cli.terminal import until_signal

    with until_signal(), Live(render(look()), auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            try:
                shown = render(look())
            except DeploymentError as error:
                shown = Group(str(error))
            live.update(shown, refresh=True)


@index.command("match")
@command
def match(
    prompt: Annotated[str, typer.Argument(help="Text of the prompt, or with --chat the user's message.")],
    address: _Address,
    access: Access,
    chat: Annotated[bool, typer.Option("--chat", help="Take PROMPT as a chat message.")] = False,
    cache_salt: Annotated[str, typer.Option(help="The tenant's salt: it has a cache of its own.")] = "",
) -> None:
    """Show which engine holds how much of a prompt, on which tier.

    A tier's number is what it serves together with faster ones. Only whole blocks count. Only engines that have some
    of it are listed, and only tiers that the deployment has. What a request computes is in the index once it ends.

    \b
    Examples:
      headwise index match --address 127.0.0.1:8700 "$(cat contract.txt)"
      headwise index match --address 127.0.0.1:8700 --chat "What is a KV cache?"
    """
    from rich.console import Console

    from headwise.runtime.cli.status_tables import prefix_table, tiers_of

    with access.client(address) as client:
        found = (
            client.find_chat_prefix([{"role": "user", "content": prompt}], cache_salt=cache_salt)
            if chat
            else (client.find_prefix(prompt, cache_salt=cache_salt))
        )
        tiers = tiers_of(client.stats())
    Console().print(prefix_table(found["tokens"], found["engines"], tiers))
