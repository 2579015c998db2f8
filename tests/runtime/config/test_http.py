"""What the configuration may say of HTTP, and that it keeps API keys to itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwise import EngineConfig
from headwise.errors import ConfigError
from headwise.runtime.config.http import read_keys

KEY = "sk-0123456789"


def test_http_is_served_at_loopback_unless_there_are_keys_or_it_is_open_to_all() -> None:
    assert EngineConfig(host="0.0.0.0", http=8000).http_host == "127.0.0.1"
    assert EngineConfig(host="0.0.0.0", http=8000, insecure=True).http_host == "0.0.0.0"
    assert EngineConfig(host="10.0.0.5", http=8000, api_key=KEY).http_host == "10.0.0.5"
    assert EngineConfig(host="10.0.0.5", http=8000, api_key_file="keys").http_host == "10.0.0.5"


def test_a_configuration_does_not_show_its_key() -> None:
    assert KEY not in repr(EngineConfig(api_key=KEY))
    with pytest.raises(ConfigError, match="api_key must be str, got a secret int") as error:
        EngineConfig(api_key=1234567890)  # type: ignore[arg-type]
    assert "1234567890" not in str(error.value)


def test_http_has_a_port_of_its_own() -> None:
    with pytest.raises(ConfigError, match="both 8700"):
        EngineConfig(http=8700)


@pytest.mark.parametrize("files", [{"http_cert": "cert.pem"}, {"http_key": "key.pem"}])
def test_a_certificate_needs_its_key(files: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="go together"):
        EngineConfig(**files)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", ["0", "10", "much"])
def test_bodies_must_have_some_room(size: str) -> None:
    with pytest.raises(ConfigError):
        EngineConfig(http_max_body=size)


def test_keys_come_from_the_flag_and_from_lines_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# whose this is\nsk-first-0001\n\n  sk-second-002  \r\n")
    assert read_keys(KEY, str(file)) == [KEY, "sk-first-0001", "sk-second-002"]
    assert read_keys("", "") == []


@pytest.mark.parametrize(
    ("text", "told"),
    [("", "has no key"), ("# only a comment\n", "has no key"), ("short\n", "API key 1"), ("two words\n", "API key 1")],
)
def test_files_without_usable_keys_are_told_and_their_text_is_not(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=told) as error:
        read_keys("", str(file))
    assert not text.strip() or text.strip() not in str(error.value)


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_keys("", str(tmp_path / "absent"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys("", str(tmp_path / "binary"))
