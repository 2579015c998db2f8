"""``headwise demo``: two questions over one long system prompt, on a local Ray cluster."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from headwise.runtime.protocol.messages import STATUS_INTERVAL_S
from headwise.runtime.protocol.request import GenerationResult, SamplingParams

if TYPE_CHECKING:
    from headwise.runtime.client.client import Client

SYSTEM_PROMPT = """\
You are the guide of the Harbour Museum. Answer visitors in two or three friendly sentences, from this handbook only.

Opening hours. The museum is open from Tuesday to Sunday, from ten in the morning to six in the evening. It is closed
on Mondays, on the first of January and on the twenty-fifth of December. The last visitors are let in at half past
five. On the first Thursday of each month the museum stays open until nine in the evening, and entry is free from six.

Tickets. A ticket for adults costs twelve euros. Students and visitors over sixty-five pay eight euros. Children under
twelve enter free. A family ticket for two adults and up to three children costs twenty-six euros. Tickets are sold at
the desk in the entrance hall and are valid for the whole day, so visitors may leave for lunch and come back.

The ground floor. The entrance hall shows the Aurora, a wooden fishing boat of nine metres, built in the year 1887 and
found in the river mud ninety years later. Behind it is the hall of knots, where visitors can try twelve knots with
their own hands. The room of maps keeps forty sea charts; the oldest one was drawn in 1612 and shows the harbour when
it had a single pier and a chapel.

The first floor. The lighthouse room has the great lens of the old North Light. The lens has twenty-four panels, weighs
two tons, and could be seen from thirty kilometres away. Beside it stands the desk of Marta Lind, who kept the light
for thirty-one years and wrote down the weather every evening. The room of storms tells of the winter of 1924, when
the harbour froze for six weeks and bread was brought over the ice on sledges.

The second floor. The gallery of engines shows seven ship engines, from a small steam engine to a diesel engine of
four cylinders. The steam engine runs on Saturdays at eleven and at three. The radio cabin can be entered by up to
four visitors at a time; a guide shows how a call for help was sent in Morse code.

Eating and resting. The cafe on the roof serves soup, bread, cakes and coffee from eleven to five, and has the best
view of the port. Benches are found in every second room. Lockers for bags are in the basement and take a one-euro
coin, which comes back when the locker is opened again.

Rules. Photographs are welcome without flash. Large bags and umbrellas stay in the lockers. Dogs wait outside, where a
bowl of water stands in the shade, but guide dogs are welcome everywhere. Please do not touch the lens or the charts;
everything else with a blue hand on its sign may be touched.

Getting here. The museum stands on the east quay, five minutes on foot from the central station. Tram line four stops
at the door. There are thirty places for bicycles and two for cars of visitors with a disability. A lift goes to all
floors and to the roof.
"""

QUESTIONS = ("When is the museum open, and when is it closed?", "Where is the museum?")


@dataclass(frozen=True)
class Answer:
    """What came back, and seconds to the first token as the client saw it."""

    result: GenerationResult
    ttft_s: float


def run_demo(client: Client) -> None:
    """Ask `QUESTIONS`, show the answers as they come, and then what prefix caching saved."""
    from rich.console import Console

    console = Console()
    answers = [ask(client, question) for question in QUESTIONS]
    console.print()
    console.print(comparison(answers))
    time.sleep(2 * STATUS_INTERVAL_S)  # so that the engine has reported what it did
    console.print(cache_table(client.stats()))


def ask(client: Client, question: str) -> Answer:
    """Stream one answer to stdout."""
    typer.echo(f"\n> {question}")
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
    result, ttft_s = GenerationResult(""), 0.0
    started = time.perf_counter()
    for delta in client.stream_chat(messages, SamplingParams(temperature=0.0, max_tokens=64, stop=("\n",))):
        if delta.token_ids and not result.token_ids:
            ttft_s = time.perf_counter() - started
        result.add(delta)
        typer.echo(delta.text, nl=False)
    typer.echo()
    return Answer(result, ttft_s)


def comparison(answers: list[Answer]) -> Any:
    """The answers' costs side by side, as a table."""
    from rich.table import Table

    out = Table(title="What prefix caching saved", title_justify="left")
    out.add_column("")
    for index in range(len(answers)):
        out.add_column(f"question {index + 1}", justify="right")
    results = [answer.result for answer in answers]
    out.add_row("prompt tokens", *(str(r.usage.prompt_tokens) for r in results))
    out.add_row("served from the cache", *(str(r.usage.cached_tokens) for r in results))
    out.add_row("time to first token", *(f"{1000 * answer.ttft_s:.0f} ms" for answer in answers))
    out.add_row("time per token after it", *(f"{1000 * r.timings.tpot_s:.0f} ms" for r in results))
    return out


def cache_table(stats: dict[str, Any]) -> Any:
    """The engines' caches, as a table."""
    from rich.table import Table

    out = Table(title="Cache", title_justify="left")
    for column in ("engine", "blocks", "cached", "free", "prompt tokens", "hits", "hit rate"):
        out.add_column(column, justify="left" if column == "engine" else "right")
    for name, engine in stats["engines"].items():
        cache = engine["cache"]
        rate = cache["hit_tokens"] / max(1, cache["queried_tokens"])
        counts = (
            cache[key] for key in ("total_blocks", "cached_blocks", "free_blocks", "queried_tokens", "hit_tokens")
        )
        out.add_row(name, *map(str, counts), f"{rate:.0%}")
    return out
