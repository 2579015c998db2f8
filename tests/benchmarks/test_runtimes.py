"""How runtimes in processes of their own are asked, and what follows from when their tokens came."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from peers import Measured, peers, ratios
from runtimes.control import Process, Spec
from runtimes.model_files import ModelFiles
from runtimes.process import Served
from runtimes.scenarios import decode_rate, output_rate, prefill_rate, scenarios
from support.waiting import eventually


def steady(first_s: float, tokens: int, step_s: float = 0.1) -> Served:
    """A request that gets a token every ``step_s`` seconds."""
    return Served([(first_s + index * step_s, index + 1) for index in range(tokens)], first=7)


def test_prefill_ends_with_the_first_token_of_the_last_request() -> None:
    assert prefill_rate([steady(0.5, 3), steady(2.0, 3)], 100) == 2 * 100 / 2.0


def test_output_counts_until_the_last_token() -> None:
    assert output_rate([steady(1.0, 11), steady(3.0, 11)], 100) == pytest.approx(22 / 4.0)


def test_decode_counts_only_what_came_while_all_requests_decoded() -> None:
    alone = steady(1.0, 11)
    assert decode_rate([alone], 100) == pytest.approx(10.0)
    assert decode_rate([alone, steady(1.5, 11)], 100) == pytest.approx(20.0)


def test_decode_is_the_same_where_the_tokens_of_a_step_come_one_after_the_other() -> None:
    late = [Served([(at + 0.02 * number, count) for at, count in steady(1.0, 11).marks], 7) for number in range(4)]
    assert decode_rate(late, 100) == pytest.approx(40.0)


def test_requests_that_never_decoded_together_have_no_decode_rate() -> None:
    with pytest.raises(SystemExit, match="needs more output tokens"):
        decode_rate([steady(0.0, 3), steady(5.0, 3)], 100)


def test_each_round_has_new_prompts_unless_they_are_to_be_cached() -> None:
    for scenario in scenarios():
        first, again, next_ = scenario.prompts(0), scenario.prompts(0), scenario.prompts(1)
        assert first == again
        assert (first == next_) == scenario.repeat
        assert [len(prompt) for prompt in first] == [scenario.input_tokens] * scenario.requests


def test_a_ratio_is_the_median_over_rounds_of_neighbouring_measurements() -> None:
    mine, theirs = Measured(), Measured()
    for a, b in ((10.0, 10.0), (30.0, 10.0), (8.0, 4.0)):
        mine.add("prefill", a, [1])
        theirs.add("prefill", b, [1])
    assert ratios(mine, theirs) == {"prefill": 2.0}


def test_peers_that_are_not_installed_are_left_out_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    files = ModelFiles("model", Path("model.gguf"), Path("model"))
    assert peers(Path("/nowhere/python"), ["llamacpp"], files, 64, 1) == {}
    assert "`make peers` installs them" in capsys.readouterr().out


def test_a_runtime_that_does_not_start_is_told_with_what_it_wrote_last() -> None:
    with pytest.raises(SystemExit, match=r"(?s)absent failed:.*No module named runtimes\.absent"):
        Process("absent", Spec("absent", Path(sys.executable), {}))


@pytest.fixture
def echo(tmp_path: Path) -> Spec:
    """A runtime that gives every request its own first token, again and again."""
    python = tmp_path / "python"
    body = """
import sys
sys.path.insert(0, sys.argv[3])
from runtimes.process import Served, answer
class Echo:
    def __init__(self, options):
        self.about = options
    def serve(self, prompts, output_tokens):
        print("not an answer")
        return [Served([(0.1 * (n + 1), n + 1) for n in range(output_tokens)], prompt[0]) for prompt in prompts]
answer(Echo)
"""
    python.write_text(f"#!{sys.executable}\n{body}")
    python.chmod(0o755)
    return Spec("echo", python, {"name": "echo"})


def test_a_runtime_answers_and_stands_still_between_questions(echo: Spec) -> None:
    scenario = scenarios()[-1]
    with Process("echo", echo) as process:
        assert process.about == {"name": "echo"}
        rate, firsts = process.measure(scenario, 0)
        assert rate == pytest.approx(10 * scenario.requests)
        assert firsts == [prompt[0] for prompt in scenario.prompts(0)]
        status = Path(f"/proc/{process.pid}/status")
        eventually(lambda: "State:\tT (stopped)" in status.read_text(), otherwise=status.read_text)
    assert not os.path.exists(f"/proc/{process.pid}")
