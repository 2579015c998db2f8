"""The ``headwise`` command. Heavy modules are imported by the commands that need them: ``--help`` is instant."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from headwise import __version__
from headwise.runtime.cli.batch import batch
from headwise.runtime.cli.calibrate import calibrate
from headwise.runtime.cli.detached import serve_detached, stop
from headwise.runtime.cli.operations import reset_cache, roll, scale, sleep, update_weights, wake
from headwise.runtime.cli.options import Access, EngineOptions, RayCluster, command, config_reference
from headwise.runtime.cli.starting import client_of, local_engine, start_deployment
from headwise.runtime.cli.status import index, status

if TYPE_CHECKING:
    from headwise.runtime.client.client import Client
    from headwise.runtime.client.local_engine import LocalEngine
    from headwise.runtime.protocol.request import SamplingParams

logger = logging.getLogger(__name__)

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="LLM serving on Ray with a KV cache managed per attention head.",
    epilog="First steps: `headwise demo`, then `headwise serve --help`.",
)
bench = typer.Typer(no_args_is_help=True, help="Measure a running deployment.")
app.add_typer(bench, name="bench")
app.add_typer(index, name="index")
app.command()(batch)
app.command()(calibrate)
app.command()(status)
app.command()(sleep)
app.command()(wake)
app.command()(reset_cache)
app.command()(update_weights)
app.command()(scale)
app.command()(roll)
app.command()(stop)


def main() -> None:
    """Entry point of the ``headwise`` command."""
    app(prog_name="headwise")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headwise {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    from headwise.log_lines import show_log_lines

    show_log_lines()


# ---- generate ----


@app.command()
@command
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue, or with --chat the user's message.")],
    options: EngineOptions,
    access: Access,
    chat: Annotated[bool, typer.Option("--chat", help="Answer PROMPT as a chat message.")] = False,
    system: Annotated[str | None, typer.Option(help="System prompt of the chat.")] = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Use the deployment that listens there."),
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Compute without Ray: in this process, on a GPU in another one beside it.")
    ] = False,
    adapter: Annotated[str, typer.Option(metavar="NAME", help="Compute with this one of --adapters.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy; larger is more random.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep the K likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[
        float,
        typer.Option(help="Keep the smallest set of tokens that has this probability."),
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(help="Drop tokens less likely than this share of the likeliest."),
    ] = 0.0,
    seed: Annotated[
        int | None,
        typer.Option(help="Equal seeds give equal samples."),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End before this text; may be repeated."),
    ] = None,
    sampling: Annotated[
        str,
        typer.Option(metavar="JSON", help="Other sampling parameters, as docs/sampling.md has them."),
    ] = "{}",
) -> None:
    """Generate text from a prompt, streamed to stdout as it comes.

    Starts a deployment on a Ray cluster of its own for this one prompt, unless told otherwise by --address or
    --local.

    \b
    Examples:
      headwise generate --local --chat "What is a KV cache?"
      headwise generate --address 127.0.0.1:8700 --temperature 0 "The capital of France is"
      headwise generate --model ./model.gguf --seed 7 --stop "The end" "Once upon a time"
      headwise generate --local --sampling '{"guided": {"regex": "[0-9]+"}}' "Two and two is "
    """
    from headwise.runtime.protocol.request import SamplingParams

    if address and (local or options):
        raise typer.BadParameter(
            "the deployment has its own configuration: drop the other flags", param_hint="--address"
        )
    if system is not None and not chat:
        raise typer.BadParameter("a system prompt needs --chat", param_hint="--system")
    params = SamplingParams.of(
        SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            max_tokens=max_tokens,
            stop=tuple(stop or ()),
        ),
        _json_object(sampling, "--sampling"),
    )
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": prompt})
    with _serving(options, address, local, access) as server:
        _print_stream(server, messages if chat else prompt, params, adapter)


def _json_object(text: str, option: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"it is no JSON: {error}", param_hint=option) from None
    if not isinstance(value, dict):
        raise typer.BadParameter('it must be an object such as {"min_p": 0.1}', param_hint=option)
    return value


@contextmanager
def _serving(
    options: EngineOptions, address: str | None, local: bool, access: Access
) -> Iterator[Client | LocalEngine]:
    """What answers requests: this process, a deployment started for the command, or a running one."""
    if local:
        with local_engine(options.load()) as engine:
            yield engine
        return
    if address:
        with access.client(address) as client:
            yield client
        return
    config = replace(options.load(), standby=False)  # nobody waits for it
    with start_deployment(config, None) as deployment, client_of(deployment) as client:
        yield client


def _print_stream(
    server: Client | LocalEngine, prompt: str | list[dict[str, str]], sampling: SamplingParams, adapter: str = ""
) -> None:
    from headwise.runtime.protocol.request import GenerationResult

    asked = {"adapter": adapter} if adapter else {}
    if isinstance(prompt, str):
        stream = server.stream(prompt, sampling, **asked)
    else:
        stream = server.stream_chat(prompt, sampling, **asked)
    result = GenerationResult("")
    for delta in stream:
        result.add(delta)
        typer.echo(delta.text, nl=False)
    typer.echo()
    usage, timings = result.usage, result.timings
    typer.echo(
        f"{usage.completion_tokens} tokens ({result.finish_reason.value if result.finish_reason else 'cut short'}), "
        f"prompt {usage.prompt_tokens} of which {usage.cached_tokens} cached, first token after "
        f"{timings.ttft_s:.2f} s, then {1000 * timings.tpot_s:.0f} ms a token",
        err=True,
    )


# ---- serve, info, demo ----


@app.command()
@command
def serve(
    options: EngineOptions,
    address: RayCluster = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Leave the deployment to the Ray cluster, until `headwise stop`.")
    ] = False,
) -> None:
    """Start a deployment and keep it until SIGINT or SIGTERM; or with --detach, until `headwise stop`.

    Inside a Ray job the job's cluster is used; otherwise, without --address, a local one is started for it. The
    address that clients connect to is printed once the deployment answers. SIGTERM lets requests end first
    (drain_timeout_s); SIGINT, or a second SIGTERM, does not.

    \b
    Examples:
      headwise serve --model smollm2-135m --port 8700 --http 8000
      headwise serve --config deploy/gemma3.yaml --replicas 2
      headwise serve --config deploy/smollm2.yaml --address auto --detach
      ray job submit --working-dir . -- python -m headwise serve --config deploy/smollm2.yaml
    """
    from headwise.actors.deployment import cluster_of_this_job
    from headwise.runtime.cli.terminal import until_signal

    config, cluster = options.load(), address or cluster_of_this_job()
    if detach:
        serve_detached(config, cluster)
        return
    with start_deployment(config, cluster) as deployment:
        with until_signal() as caught:  # Ray sets handlers of its own when it starts
            if deployment.client_keys is not None:
                typer.echo(f"clients need an API key and the server key {deployment.client_keys.server}")
            typer.echo(f"serving {config.model} at {deployment.client_address}")
            if deployment.http_address:
                typer.echo(f"OpenAI's API is at {deployment.http_address}/v1")
            deployment.wait()
        if signal.SIGTERM in caught:
            logger.info("stopping, once all requests have ended; a second signal ends them at once")
            with until_signal():
                deployment.drain()


@app.command()
@command
def info(
    options: EngineOptions,
    reference: Annotated[
        bool, typer.Option("--config-reference", help="Print every configuration key as Markdown tables instead.")
    ] = False,
    length: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of a request, to see how many fit; may be repeated.")
    ] = None,
) -> None:
    """Show how a model's cache is laid out: head groups, blocks, pool, requests that fit. Loads no weights.

    Also what a decode step reads, and how long that takes at least: this machine's memory is measured for it.

    \b
    Examples:
      headwise info --model gemma3-270m --length 2000 --length 30000
      headwise info --model smollm2-135m --head-grouping per_head_index --kv-cache 2GiB
    """
    if reference:
        typer.echo(config_reference())
        return
    from headwise.kernels.cuda.cards import count_cards
    from headwise.runtime.cli.terminal import progress
    from headwise.runtime.config.device import resolve_device
    from headwise.runtime.config.info import describe
    from headwise.runtime.config.model_card import read_model_card
    from headwise.runtime.loader.resolve import resolve_model

    config = resolve_device(options.load(), count_cards())
    with progress() as bars:
        # A head pattern may have been measured on these very weights: only with them the two can be compared.
        directory = resolve_model(config.model, config.cache_path, bars, weights=bool(config.head_pattern))
    card = read_model_card(config, directory, identify=False)
    rows = list(describe(config, card, directory, length or ()))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        typer.echo(f"{name:<{width}}  {value}")


@app.command()
@command
def demo(options: EngineOptions) -> None:
    """Chat with a small model on a local Ray cluster, and see what prefix caching saves.

    Downloads the model once (93 MB).
    """
    from headwise.runtime.cli.demo import run_demo

    options.overrides.setdefault("port", 0)  # whatever else is served on this machine is left alone
    config = replace(options.load(), standby=False)  # nobody waits for it
    with start_deployment(config, None) as deployment, client_of(deployment) as client:
        run_demo(client)


# ---- bench ----


@bench.command("serve")
@command
def bench_serve(
    address: Annotated[str, typer.Option(metavar="HOST:PORT", help="The deployment's client address.")],
    access: Access,
    concurrency: Annotated[
        int | None,
        typer.Option(help="Closed loop: requests in flight at any time."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Open loop: requests per second, Poisson arrivals."),
    ] = None,
    num_requests: Annotated[int, typer.Option(help="Requests to send.")] = 100,
    lengths: Annotated[
        Literal["fixed", "uniform", "sharegpt"],
        typer.Option(
            help="Lengths: the means themselves, uniform from half to one and a half times the mean, or "
            "log-normal with a tail like that of chat logs."
        ),
    ] = "uniform",
    input_tokens: Annotated[int, typer.Option(help="Mean input tokens behind the shared prefix.")] = 200,
    output_tokens: Annotated[int, typer.Option(help="Mean output tokens.")] = 64,
    prefix_tokens: Annotated[int, typer.Option(help="Tokens of the shared prefixes.")] = 0,
    num_prefixes: Annotated[int, typer.Option(help="Distinct shared prefixes.")] = 1,
    max_tokens: Annotated[int, typer.Option(help="Longest request, prefix, input and output.")] = 2048,
    vocab_size: Annotated[int, typer.Option(help="Token ids are drawn below this.")] = 32000,
    seed: Annotated[int, typer.Option(help="Equal seeds send equal requests.")] = 0,
) -> None:
    """Load a deployment with random requests; print throughput, latencies and cache hits.

    Exactly one of --concurrency and --rate is needed. The last line of the output is the result as JSON. Latencies
    are as the client sees them; in the open loop they count from when a request was due.

    \b
    Examples:
      headwise bench serve --address 127.0.0.1:8700 --concurrency 8
      headwise bench serve --address 127.0.0.1:8700 --rate 2 --lengths sharegpt --prefix-tokens 512 --num-prefixes 4
    """
    from rich.console import Console

    from headwise.runtime.cli.bench import Load, bench_deployment, table
    from headwise.runtime.cli.bench_workload import Workload
    from headwise.runtime.cli.terminal import progress

    load = Load(concurrency, rate)
    workload = Workload(
        num_requests=num_requests,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        lengths=lengths,
        prefix_tokens=prefix_tokens,
        num_prefixes=num_prefixes,
        max_tokens=max_tokens,
        vocab_size=vocab_size,
        seed=seed,
    )
    with progress() as bars:
        summary = bench_deployment(partial(access.client, address), workload, load, bars)
    Console().print(table(summary, f"{num_requests} requests, {load}"))
    typer.echo(json.dumps(summary))
