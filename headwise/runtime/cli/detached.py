"""``headwise serve --detach`` and ``headwise stop``: deployments that outlive the command that starts them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headwise.runtime.cli.options import command

if TYPE_CHECKING:
    from headwise.runtime.config.engine_config import EngineConfig


def serve_detached(config: EngineConfig, cluster: str | None) -> None:
    """Start a detached deployment and print its address; also if it runs already, configured as this one."""
    if cluster is None:
        raise typer.BadParameter(
            "a deployment can be left to a Ray cluster only: name it by --address, or submit this as a Ray job",
            param_hint="--detach",
        )
    from headwise.actors.deployment import resolve_client
    from headwise.actors.detached import start_detached
    from headwise.actors.http_server import http_address
    from headwise.runtime.cli.terminal import progress
    from headwise.runtime.config.model_card import read_model_card
    from headwise.runtime.loader.resolve import resolve_model

    with progress() as bars:
        directory = resolve_model(config.model, config.cache_path, bars)
        read_model_card(config, directory, identify=False)  # what is wrong is told at once
        address, was_there = start_detached(config, cluster, bars)
    if config.is_encrypted:
        _, keys = resolve_client(cluster, config.name)
        assert keys is not None
        typer.echo(f"clients need an API key and the server key {keys.server}")
    typer.echo(f"{'already serving' if was_there else 'serving'} {config.model} at {address}")
    if config.http:
        typer.echo(f"OpenAI's API is at {http_address(config, address)}/v1")


@command
def stop(
    name: Annotated[str, typer.Option(help="Name of the deployment.")] = "headwise",
    address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The deployment's client address, instead of its name.")
    ] = "",
    ray: Annotated[
        str | None,
        typer.Option(metavar="RAY_ADDRESS", help="Its Ray cluster; by default the job's, or this machine's."),
    ] = None,
) -> None:
    """End a deployment that was started by `headwise serve --detach`, and leave nothing of it.

    Requests may end first, and what only an engine has cached goes to storage, for at most drain_timeout_s. Needs a
    node of its Ray cluster, or a Ray job.

    \b
    Examples:
      headwise stop
      headwise stop --name summaries --ray 10.0.0.4:6379
      ray job submit -- python -m headwise stop --address 10.0.0.4:8700
    """
    from headwise.actors.deployment import cluster_of_this_job
    from headwise.actors.detached import stop_detached

    stop_detached(name, ray or cluster_of_this_job() or "auto", address)
    typer.echo(f"stopped {address or name}")
