"""A file of answers, one a line as JSON, in the form of OpenAI's batches: each is in it once it is there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwise.errors import ConfigError
from headwise.runtime.loader.files import replacing


class AnswerFile:
    """Appends answers to a file. What was begun can be gone on with: answers that it has need not be asked for again.

    answered: names of requests whose answers it had when it was opened
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        """resume: keep the answers of a file that is there; those that are none (refusals, half a line) are left out.

        Raises:
            ConfigError: it is there without ``resume``, cannot be written, or has something else than answers.
        """
        self.path = path
        self.answered: set[str] = set()
        try:
            if resume and path.exists():
                self.answered = _keep_answers(path)
            self._file = path.open("ab" if resume else "xb")
        except FileExistsError:
            raise ConfigError(f"{path} is there: go on with it by --resume, or choose another file") from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None

    def add(self, custom_id: str, status: int, body: Any) -> None:
        """Append an answer. Raises `ConfigError` where it cannot, as on a full disk."""
        answer = {"custom_id": custom_id, "response": {"status_code": status, "body": body}, "error": None}
        try:
            self._file.write(_encoded(answer) + b"\n")
            self._file.flush()
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}") from None

    def close(self) -> None:
        """Leaves no file without answers."""
        is_empty = self._file.tell() == 0
        self._file.close()
        if is_empty:
            self.path.unlink(missing_ok=True)


def _encoded(answer: Mapping[str, Any]) -> bytes:
    """As JSON in UTF-8, or in ASCII where it has what UTF-8 has not: halves of characters."""
    text = json.dumps(answer, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(answer, separators=(",", ":")).encode()


def _keep_answers(path: Path) -> set[str]:
    """Rewrite a file with its answers alone; the names of their requests."""
    names = set[str]()
    with path.open("rb") as old, replacing(path) as new:
        for number, line in enumerate(old, 1):
            # The last line may not have been written to its end.
            name = _answered(line, f"line {number} of {path}") if line.endswith(b"\n") else None
            if name is not None and name not in names:
                names.add(name)
                new.write(line)
    return names


def _answered(line: bytes, where: str) -> str | None:
    """The name of the request that a line answers; None: it refuses it. Raises `ConfigError` if it is no answer."""
    try:
        answer = json.loads(line)
        name, status = str(answer["custom_id"]), answer["response"]["status_code"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ConfigError(f"{where} is no answer: --resume goes on with a file that this command has begun") from None
    return name if status == 200 else None
