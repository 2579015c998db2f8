"""``headwise calibrate``: measure a head pattern, draw it, and say what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwise import __version__
from headwise.errors import ConfigError
from headwise.runtime.cli.options import EngineOptions, command

if TYPE_CHECKING:
    from headwise.runtime.calibration.passkeys import PasskeyInput
    from headwise.runtime.config.engine_config import EngineConfig
    from headwise.runtime.loader.progress import Progress

MEASURING_SEED, JUDGING_SEED = 0, 1_000_000


@command
def calibrate(
    options: EngineOptions,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.json", help="Where the pattern goes.")],
    tokens: Annotated[int, typer.Option(help="Tokens of each input.")] = 2048,
    inputs: Annotated[int, typer.Option(help="Inputs to measure on, and as many again to judge by.")] = 4,
    passkeys: Annotated[int, typer.Option(help="Pass keys hidden in each input.")] = 6,
    sparsities: Annotated[
        str, typer.Option(help="Sparsities that the report compares, separated by commas.")
    ] = "0,0.25,0.5,0.75",
    heat_map: Annotated[bool, typer.Option(help="Draw the scores into a PNG beside the pattern.")] = True,
) -> None:
    """Measure which KV heads need full attention, for --head-pattern.

    Runs the model on made-up long texts in which pass keys are hidden, and notes how much of each head's attention
    goes past --sink and --window. Beside FILE.json it writes a heat map (FILE.png) and a report of what the pattern
    costs and saves (FILE.report.md and FILE.report.json). Minutes on a CPU for the demo models.

    \b
    Examples:
      headwise calibrate --model smollm2-135m -o smollm2.json
      headwise calibrate --model ./llama --sink 128 --window 512 --tokens 8192 -o llama.json
      headwise serve --model smollm2-135m --head-pattern smollm2.json --sparsity 0.5
    """
    from headwise.runtime.cli.terminal import progress

    shares = _sparsities(sparsities)
    config = _checked(options.load(), output, inputs)
    with progress() as bars:
        table = _calibrate(config, output, tokens, inputs, passkeys, shares, heat_map, bars)
    typer.echo(table, nl=False)


def _sparsities(text: str) -> list[float]:
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--sparsities must be numbers separated by commas, such as 0,0.5, got {text!r}") from None
    for share in shares:
        if not 0 <= share <= 1:
            raise ConfigError(f"--sparsities are shares of heads, from 0 to 1, got {share:g}")
    return shares


def _checked(config: EngineConfig, output: Path, inputs: int) -> EngineConfig:
    """Refuse before the model is loaded what would fail after minutes."""
    from headwise.cache_controller.head_pattern import check_streaming

    if config.head_pattern:
        raise ConfigError("calibrate measures the model as it is: drop --head-pattern")
    if inputs < 1:
        raise ConfigError(f"--inputs must be at least 1, got {inputs}")
    if not output.parent.is_dir():
        raise ConfigError(f"the directory {output.parent} does not exist: make it, or choose another --output")
    if output.suffix != ".json":
        raise ConfigError(f"--output must end in .json, got {output}: the pattern is written as JSON")
    check_streaming(0.5, config.sink, config.window, config.fewest_block_tokens)
    return config


def _calibrate(
    config: EngineConfig,
    output: Path,
    tokens: int,
    inputs: int,
    passkeys: int,
    sparsities: list[float],
    heat_map: bool,
    bars: Progress,
) -> str:
    from headwise.cache_controller.head_pattern import format_pattern
    from headwise.runtime.calibration.calibrate import DenseModel, measure_pattern
    from headwise.runtime.calibration.passkeys import held_out_text, passkey_input
    from headwise.runtime.calibration.report import as_markdown, evaluate, write_heat_map, write_report
    from headwise.runtime.loader.resolve import resolve_model

    directory = resolve_model(config.model, config.cache_path, bars)
    bars.stage("loading the weights")
    model = DenseModel.load(config, directory)
    if tokens > model.config.max_position:
        raise ConfigError(f"--tokens {tokens} is more than {config.model} can take, {model.config.max_position}")

    def made_up(seed: int) -> list[PasskeyInput]:
        return [passkey_input(model.tokenizer, tokens, passkeys, seed + index) for index in range(inputs)]

    measured_on, judged_by = made_up(MEASURING_SEED), made_up(JUDGING_SEED)
    pattern = measure_pattern(model, measured_on, config.sink, config.window, f"headwise {__version__}", bars)
    output.write_text(format_pattern(pattern), encoding="utf-8")
    if heat_map:
        write_heat_map(pattern, output.with_suffix(".png"))
    texts = [held_out_text(model.tokenizer, tokens, JUDGING_SEED)]
    report = evaluate(
        model, pattern, sparsities,
        sink=config.sink, window=config.window, inputs=judged_by, texts=texts, progress=bars,
    )  # fmt: skip
    write_report(report, output)
    return as_markdown(report, output.name)
