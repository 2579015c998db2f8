"""Starts runtimes in processes of their own, and lets one at a time compute."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import Any

from runtimes.process import Served
from runtimes.scenarios import Prompts, Scenario

BENCHMARKS = Path(__file__).resolve().parents[1]
LIMIT_S = 900.0
"""Of loading, and of one answer."""
SHOWN_LINES = 15
"""Of what a process wrote before it failed."""
_START = (
    "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); import runtimes; del sys.path[0]; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__')"
)
"""Other modules of the benchmarks are not on the path: packages of the same names may be looked for."""


@dataclass(frozen=True)
class Spec:
    """How a runtime is started.

    module:      of `runtimes`
    python:      of its environment
    options:     its first line, see the module
    environment: variables on top of ours; None removes one
    """

    module: str
    python: Path
    options: Mapping[str, Any]
    environment: Mapping[str, str | None] = field(default_factory=dict)


class Process:
    """A runtime that has loaded. It is stopped (SIGSTOP) while it is not asked, so that none of its threads spins.

    Raises SystemExit, with what the process wrote last, where it fails.
    """

    def __init__(self, name: str, spec: Spec) -> None:
        self.name = name
        self._log = TemporaryFile()  # noqa: SIM115, closed by close()
        self._process = subprocess.Popen(
            [str(spec.python), "-c", _START, str(BENCHMARKS), f"runtimes.{spec.module}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={name: value for name, value in {**os.environ, **spec.environment}.items() if value is not None},
            cwd=BENCHMARKS.parent,
            text=True,
        )
        self.pid = self._process.pid
        began = time.perf_counter()
        try:
            self.about: dict[str, Any] = self._ask(spec.options)
        except BaseException:
            self.close()
            raise
        self.load_s = time.perf_counter() - began

    def measure(self, scenario: Scenario, round_: int) -> tuple[float, list[int]]:
        """Tokens a second, and every request's first token."""
        prompts = scenario.prompts(round_)
        if scenario.repeat:
            self.serve(prompts, 1)
        served = self.serve(prompts, scenario.output_tokens)
        for one in served:
            if one.count != scenario.output_tokens:
                raise SystemExit(f"{self.name} gave {one.count} of {scenario.output_tokens} tokens of a request")
        return scenario.rate(served, scenario.input_tokens), [one.first for one in served]

    def serve(self, prompts: Prompts, output_tokens: int, at: Sequence[float] | None = None) -> list[Served]:
        """See `Runtime.serve`; at: see `Gradual.serve`."""
        gradually = {} if at is None else {"at": list(at)}
        answer = self._ask({"prompts": prompts, "output_tokens": output_tokens, **gradually})
        return [Served([(at, count) for at, count in one["marks"]], one["first"]) for one in answer["requests"]]

    def read(self, text: Sequence[int]) -> tuple[list[float], list[int]]:
        """See `Reader.read`: surprise and likeliest."""
        answer = self._ask({"text": list(text)})
        return answer["surprise"], answer["likeliest"]

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(LIMIT_S, self._process.kill)
        timer.start()
        self._process.send_signal(signal.SIGCONT)
        try:
            print(json.dumps(question), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            raise SystemExit(f"{self.name} failed:\n{self._last_lines()}")
        self._process.send_signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_lines(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-SHOWN_LINES:])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def warm_up(process: Process, scenarios: Sequence[Scenario]) -> None:
    """Let kernels be compiled and memory be touched: by the start of each prompt, a long one where it is alone."""
    for scenario in scenarios:
        length = 2000 if scenario.requests == 1 else 64
        process.serve([prompt[:length] for prompt in scenario.prompts(-1)], 4)


_BEGAN = time.monotonic()


def tell(text: str) -> None:
    """A line of progress."""
    print(f"[{time.monotonic() - _BEGAN:6.1f} s] {text}", flush=True)
