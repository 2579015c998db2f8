"""Processes that tokenise: what they answer, and what becomes of them and of what they were asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_models import CHAT_TEMPLATE, byte_level_tokenizer, write_tokenizer_directory
from support.waiting import PATIENCE_S, eventually

from headwise.errors import DeploymentError, InvalidRequestError, ModelError
from headwise.runtime.frontend import tokenizer_pool
from headwise.runtime.frontend.prompts import LocalPromptEncoder, TextLimits
from headwise.runtime.frontend.tokenizer_pool import TokenizerPool
from headwise.runtime.loader.chat import chat_of
from headwise.runtime.loader.tokenizer import Tokenizer

LIMITS = TextLimits(4096, 13)
CHAT = [{"role": "user", "content": "the <|im_end|>"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return write_tokenizer_directory(path, byte_level_tokenizer(), {"chat_template": CHAT_TEMPLATE})


@pytest.fixture(scope="module")
def pool(directory: Path) -> Iterator[TokenizerPool]:
    pool = TokenizerPool(directory, LIMITS, 1)
    yield pool
    pool.close()


def is_gone(pid: int) -> bool:
    """Whether a process has ended, also where nobody has asked for its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_pool_takes_tools_variables_and_another_template(directory: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ tools[0].function.name }} {{ day }} {{ messages[0].content }}")
    chat = chat_of(CHAT, [{"type": "function", "function": {"name": "add"}}], {"day": "Monday"})
    here = LocalPromptEncoder(Tokenizer.from_directory(directory, str(template)), LIMITS)
    pool = TokenizerPool(directory, LIMITS, 1, str(template))
    try:
        assert pool.chat(chat).tolist() == here.chat(chat).tolist()
    finally:
        pool.close()


def test_a_pool_encodes_as_this_process_does(pool: TokenizerPool, directory: Path) -> None:
    here = LocalPromptEncoder(Tokenizer.from_directory(directory), LIMITS)
    assert pool.text("the two words é").tolist() == here.text("the two words é").tolist()
    assert pool.chat(CHAT).tolist() == here.chat(CHAT).tolist()
    assert pool.text("").tolist() == []


@pytest.mark.parametrize("messages", [[{"role": "x", "content": "y"}], [{"role": np.arange(3)}], "hi", None, [2**70]])
def test_errors_are_those_of_this_process_and_the_next_text_is_another_matter(
    pool: TokenizerPool, messages: Any
) -> None:
    with pytest.raises(InvalidRequestError, match="a text of at least 57344 bytes cannot fit"):
        pool.text("1" * 4096 * 14)
    with pytest.raises(InvalidRequestError, match=r"messages|plain data"):
        pool.chat(messages)
    assert len(pool.text("abc")) == 3


def test_a_tokenizer_s_process_has_neither_ray_nor_paddle(pool: TokenizerPool) -> None:
    pool.text("abc")
    maps = Path(f"/proc/{pool.pids[0]}/maps").read_text()
    assert "tokenizers" in maps
    assert not any(f"/{name}/" in maps for name in ("ray", "paddle", "zmq", "numba"))


def test_a_process_that_died_is_replaced_and_the_text_is_tokenised(pool: TokenizerPool) -> None:
    os.kill(pool.pids[0], signal.SIGKILL)
    assert len(pool.text("abc")) == 3


def test_a_prompt_that_ends_processes_gets_an_answer(pool: TokenizerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = tokenizer_pool._Process.ask

    def ends(self: Any, question: bytes, longest_s: float) -> Any:
        os.kill(self.pid, signal.SIGKILL)
        return ask(self, question, longest_s)

    monkeypatch.setattr(tokenizer_pool._Process, "ask", ends)
    with pytest.raises(DeploymentError, match="ended twice over this prompt"):
        pool.text("abc")
    monkeypatch.undo()
    assert len(pool.text("abc")) == 3


def test_a_process_that_hangs_is_replaced_and_its_prompt_gets_an_answer(
    pool: TokenizerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.text("it has started")
    monkeypatch.setattr(tokenizer_pool, "ANSWER_S", 0.2)
    hanging = pool.pids[0]
    os.kill(hanging, signal.SIGSTOP)
    with pytest.raises(DeploymentError, match="not tokenised in time"):
        pool.text("abc")
    monkeypatch.undo()
    assert is_gone(hanging)
    assert len(pool.text("abc")) == 3


def test_prompts_that_are_being_tokenised_end_with_the_pool(directory: Path) -> None:
    pool = TokenizerPool(directory, LIMITS, 1)
    pid = pool.pids[0]
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(pool.text, "abc") for _ in range(2)]
        pool.close()
        pool.close()
        for each in waiting:
            with pytest.raises(DeploymentError, match="the deployment is stopping"):
                each.result(PATIENCE_S)
    assert is_gone(pid)


def test_a_model_without_a_tokenizer_is_the_error_of_each_prompt(tmp_path: Path) -> None:
    pool = TokenizerPool(tmp_path, LIMITS, 1)
    with pytest.raises(ModelError, match=r"lacks tokenizer\.json"):
        pool.text("abc")
    pool.close()


PARENT = """
import sys
from pathlib import Path
from headwise.runtime.frontend.prompts import TextLimits
from headwise.runtime.frontend.tokenizer_pool import TokenizerPool
busy, stopped = [TokenizerPool(Path(sys.argv[1]), TextLimits(10_000_000, 100), 1) for _ in range(2)]
print(len(busy.text("it has started")), len(stopped.text("it has started")), flush=True)
print(*busy.pids, *stopped.pids, flush=True)
busy.text("a b" * 2_000_000)
"""


def cpu_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


def test_processes_end_with_their_parent_in_the_middle_of_a_text_or_stopped(directory: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PARENT, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        busy, stopped = [int(pid) for pid in parent.stdout.readline().split()]
        os.kill(stopped, signal.SIGSTOP)
        before = cpu_ticks(busy)
        eventually(lambda: cpu_ticks(busy) >= before + 20)
        parent.kill()
    eventually(lambda: is_gone(busy) and is_gone(stopped))
