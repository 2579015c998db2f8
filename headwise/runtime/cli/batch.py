"""``headwise batch``: a file of requests becomes a file of answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headwise.runtime.cli.options import EngineOptions, RayCluster, command
from headwise.runtime.cli.starting import start_deployment

if TYPE_CHECKING:
    from headwise.runtime.batch.answers import AnswerFile
    from headwise.runtime.batch.requests import RequestFile, RequestIndex
    from headwise.runtime.batch.run import BatchOptions, Summary
    from headwise.runtime.batch.server import Server
    from headwise.runtime.config.keys import ApiKey
    from headwise.runtime.loader.progress import Progress

log = logging.getLogger(__name__)


@command
def batch(
    requests: Annotated[
        Path, typer.Argument(metavar="REQUESTS.jsonl", help="Requests, one a line, as OpenAI's batches.")
    ],
    options: EngineOptions,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="ANSWERS.jsonl", help="Where the answers go.")],
    url: Annotated[
        str, typer.Option(metavar="http://HOST:PORT", help="Ask the server there, instead of a deployment of its own.")
    ] = "",
    client_key_file: Annotated[
        str, typer.Option(metavar="FILE", help="File whose first line is an API key of the server at --url.")
    ] = "",
    ca_file: Annotated[
        str, typer.Option(metavar="FILE", help="PEM file of the certificate, or its CA's, of an https server at --url.")
    ] = "",
    address: RayCluster = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with ANSWERS.jsonl: ask for what it has no answers to.")
    ] = False,
    order: Annotated[
        Literal["shared", "file"],
        typer.Option(help="shared: requests with a common prefix one after the other; file: as they stand there."),
    ] = "shared",
    concurrency: Annotated[int, typer.Option(min=1, help="Most requests at a time for each engine.")] = 64,
    request_priority: Annotated[
        int, typer.Option(metavar="N", help="Priority of requests that say none; others' have 0, and lower is sooner.")
    ] = 1,
    answer_timeout_s: Annotated[float, typer.Option(min=1, help="Longest time until an answer is there.")] = 3600.0,
    patience_s: Annotated[
        float, typer.Option(min=0, help="How long to go on asking while nothing is answered at all.")
    ] = 600.0,
) -> None:
    """Answer a file of requests, and write the answers to a file as they come, in any order.

    Starts a deployment for it and ends it afterwards (inside a Ray job on the job's cluster), or asks the server at
    --url. Requests that share a prefix are sent one after the other, however they stand in the file, so that it is
    computed once and needs to be cached no longer than for them. Exit code 2: some requests were refused; their answers
    say why.

    \b
    Examples:
      headwise batch requests.jsonl -o answers.jsonl --model smollm2-135m
      headwise batch requests.jsonl -o answers.jsonl --url http://127.0.0.1:8000 --resume
      ray job submit --working-dir . -- python -m headwise batch /data/requests.jsonl -o /data/answers.jsonl \\
        --config deploy/smollm2.yaml
    """
    from headwise.runtime.batch.answers import AnswerFile
    from headwise.runtime.batch.requests import RequestFile
    from headwise.runtime.batch.run import BatchOptions
    from headwise.runtime.batch.server import Server
    from headwise.runtime.cli.terminal import progress, until_signal

    if url and (options or address):
        raise typer.BadParameter("the server there has its own configuration: drop the other flags", param_hint="--url")
    if client_key_file and not url:
        raise typer.BadParameter("a key is for a server at --url", param_hint="--client-key-file")
    if ca_file and not url.startswith("https:"):
        raise typer.BadParameter("certificates are for a server at --url https://...", param_hint="--ca-file")
    asked = BatchOptions(concurrency, request_priority, patience_s, order == "shared")
    with closing(RequestFile(requests)) as asking, closing(AnswerFile(output, resume=resume)) as answers:
        with progress() as bars:
            bars.stage(f"reading {requests}")
            index = asking.index(answers.answered, bars.update)
        if not index.offsets:
            typer.echo(f"{output} has answers to all requests")
            return
        with (
            _server(options, url, client_key_file, address) as (at, key),
            until_signal() as caught,  # Ray sets handlers of its own when it starts
            progress() as bars,
        ):
            bars.stage(f"{len(index.offsets)} requests")
            summary = asyncio.run(_run(asking, index, answers, Server(at, key, answer_timeout_s, ca_file), asked, bars))
    if caught:
        log.info("stopped: --resume goes on with %s", output)
        raise typer.Exit(128 + caught[0])
    typer.echo(str(summary))
    if summary.refused:
        raise typer.Exit(2)


@contextmanager
def _server(options: EngineOptions, url: str, key_file: str, address: str | None) -> Iterator[tuple[str, str]]:
    """The URL of the server to ask, and a key: one that runs, or one for the time of the block."""
    from headwise.runtime.config.keys import read_keys

    if url:
        yield url, _first(read_keys("", key_file))
        return
    from headwise.actors.addresses import free_ports
    from headwise.actors.deployment import cluster_of_this_job

    options.overrides.setdefault("port", 0)  # whatever else is served on this machine is left alone
    config = options.load()
    # Nobody else asks, and nobody waits for it when it is lost.
    http = config.http or free_ports(config.http_host)[0]
    config = replace(config, http=http, http_cert="", http_key="", standby=False)
    with start_deployment(config, address or cluster_of_this_job()) as deployment:
        yield deployment.http_address, _first(read_keys(config.api_key, config.api_key_file))


def _first(keys: list[ApiKey]) -> str:
    return keys[0].key if keys else ""


async def _run(
    requests: RequestFile,
    index: RequestIndex,
    answers: AnswerFile,
    server: Server,
    options: BatchOptions,
    progress: Progress,
) -> Summary:
    from headwise.runtime.batch.run import BatchRun

    async with server:
        await server.check()
        return await BatchRun(requests, index, answers, server, options, progress).run()
