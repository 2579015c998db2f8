"""Files of requests and of answers: what is no request is told, and what was begun is gone on with."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from headwise.errors import ConfigError
from headwise.runtime.batch import requests as reading
from headwise.runtime.batch.answers import AnswerFile
from headwise.runtime.batch.requests import FileRequest, RequestFile

GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def requests(tmp_path: Path, *lines: object) -> RequestFile:
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return RequestFile(path)


def test_requests_are_found_again_where_they_are(tmp_path: Path) -> None:
    file = requests(tmp_path, GOOD, "", {**GOOD, "custom_id": "ü"}, {**GOOD, "custom_id": "c"})

    index = file.index({"a"})

    assert [file.read(offset).custom_id for offset in index.offsets] == ["ü", "c"]
    assert file.read(0) == FileRequest("a", "/v1/completions", {"prompt": "x"})
    assert len(index.pieces) == 2


def test_the_last_line_need_not_end(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps(GOOD))

    assert RequestFile(path).index().offsets == [0]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2: it is no JSON"),
        ("[" * 100_000, "line 2: it is no JSON"),
        ("[]", "line 2: a request is an object with body, custom_id, method, url"),
        ({**GOOD, "custom_id": 7}, "custom_id must be a text of 1 to 512 characters, got 7"),
        ({**GOOD, "custom_id": ""}, "custom_id must be a text"),
        ({**GOOD, "custom_id": "x" * 513}, "custom_id must be a text"),
        ({**GOOD, "custom_id": "first"}, "custom_id 'first' is that of line 1, too"),
        ({**GOOD, "method": "GET"}, "method must be POST, got 'GET'"),
        ({**GOOD, "url": "/v1/embeddings"}, "url must be one of /v1/chat/completions, "),
        ({**GOOD, "body": []}, r"body must be an object, got \[\]"),
        ({**GOOD, "body": {"stream": True}}, "body.stream: an answer in a file is whole"),
        ({**GOOD, "prompt": "x"}, "'prompt' is no field of a request"),
    ],
)
def test_what_is_no_request_is_told_by_its_line(tmp_path: Path, line: object, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        requests(tmp_path, {**GOOD, "custom_id": "first"}, line).index()


def test_a_file_of_nothing_but_errors_is_not_told_whole(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 5: .*, and more$") as raised:
        requests(tmp_path, *["{"] * 100).index()
    assert "line 6" not in str(raised.value)


def test_a_line_without_an_end_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_LINE_BYTES", 100)
    with pytest.raises(ConfigError, match="has a line of more than"):
        requests(tmp_path, "x" * 101).index()


def test_a_file_that_is_not_there_that_is_empty_or_can_be_read_once_only_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        RequestFile(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="has no requests"):
        requests(tmp_path, "", "").index()
    ours, theirs = os.pipe()
    os.close(theirs)
    with pytest.raises(ConfigError, match="give one that is on a disk"):
        RequestFile(Path(f"/dev/fd/{ours}"))
    os.close(ours)


def test_a_file_that_changed_meanwhile_is_told(tmp_path: Path) -> None:
    file = requests(tmp_path, GOOD)
    file.index()
    (tmp_path / "requests.jsonl").write_text("other\n")

    with pytest.raises(ConfigError, match="has changed since it was read first"):
        file.read(0)


def test_answers_of_other_requests_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is an answer to 'other', which is no request"):
        requests(tmp_path, GOOD).index({"other"})


def test_answers_are_in_the_file_as_soon_as_they_are_there(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    answers = AnswerFile(path)
    answers.add("ü", 200, {"text": "ä\n"})
    answers.add("\ud800", 200, {"text": "ä"})

    line, half = path.read_text().splitlines()
    assert (json.loads(half)["custom_id"], half.isascii()) == ("\ud800", True)
    assert json.loads(line) == {
        "custom_id": "ü",
        "response": {"status_code": 200, "body": {"text": "ä\n"}},
        "error": None,
    }


def test_what_was_begun_is_gone_on_with_and_refusals_are_asked_for_again(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    answers = AnswerFile(path)
    for name, status in (("a", 200), ("b", 400), ("a", 200), ("c", 200)):
        answers.add(name, status, {})
    answers.close()
    with path.open("ab") as file:
        file.write(b'{"custom_id": "d", "response": {"status_code": 200')  # when the power failed

    answers = AnswerFile(path, resume=True)
    answers.add("d", 200, {})

    assert answers.answered == {"a", "c"}
    assert [json.loads(line)["custom_id"] for line in path.read_text().splitlines()] == ["a", "c", "d"]
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text("mine\n")

    with pytest.raises(ConfigError, match="is there: go on with it by --resume"):
        AnswerFile(path)
    with pytest.raises(ConfigError, match=r"line 1 of .* is no answer"):
        AnswerFile(path, resume=True)
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        AnswerFile(tmp_path / "nowhere" / "answers.jsonl")
    assert path.read_text() == "mine\n"


def test_no_file_is_left_without_answers(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    AnswerFile(path).close()

    assert not path.exists()
