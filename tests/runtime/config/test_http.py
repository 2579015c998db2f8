"""What the configuration may say of HTTP, and that it keeps API keys to itself."""

from __future__ import annotations

from typing import Any

import pytest

from headwise import EngineConfig
from headwise.errors import ConfigError

KEY = "sk-0123456789"


def test_http_is_served_at_loopback_unless_there_are_keys_or_it_is_open_to_all() -> None:
    assert EngineConfig(host="0.0.0.0", http=8000).http_host == "127.0.0.1"
    assert EngineConfig(host="0.0.0.0", http=8000, insecure=True).http_host == "0.0.0.0"
    assert EngineConfig(host="10.0.0.5", http=8000, api_key=KEY).http_host == "10.0.0.5"
    assert EngineConfig(host="10.0.0.5", http=8000, api_key_file="keys").http_host == "10.0.0.5"


@pytest.mark.parametrize(
    ("options", "is_encrypted"),
    [
        ({}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "10.0.0.5"}, True),
        ({"host": "0.0.0.0", "insecure": True}, False),
        ({"host": "0.0.0.0", "insecure": True, "api_key": KEY}, True),
        ({"api_key": KEY}, True),
        ({"api_key_file": "keys"}, True),
        ({"server_key_file": "key"}, True),
        ({"secure": True}, True),
    ],
)
def test_clients_need_keys_where_there_are_some_and_where_others_could_connect(
    options: dict[str, Any], is_encrypted: bool
) -> None:
    assert EngineConfig(**options).is_encrypted == is_encrypted


def test_a_configuration_does_not_show_its_key() -> None:
    assert KEY not in repr(EngineConfig(api_key=KEY))
    with pytest.raises(ConfigError, match="api_key must be str, got a secret int") as error:
        EngineConfig(api_key=1234567890)
    assert "1234567890" not in str(error.value)


def test_http_has_a_port_of_its_own() -> None:
    with pytest.raises(ConfigError, match="both 8700"):
        EngineConfig(http=8700)


@pytest.mark.parametrize("files", [{"http_cert": "cert.pem"}, {"http_key": "key.pem"}])
def test_a_certificate_needs_its_key(files: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="go together"):
        EngineConfig(**files)


@pytest.mark.parametrize("given", [{}, {"http": 8000}, {"api_key": KEY}])
def test_operations_over_http_need_http_and_keys(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="http_operations need http, and API keys"):
        EngineConfig(http_operations=True, **given)
    assert EngineConfig(http_operations=True, http=8000, api_key=KEY).http_operations


def test_weights_are_copied_only_where_others_are_taken() -> None:
    with pytest.raises(ConfigError, match="copy_weights is for what is in weights_from"):
        EngineConfig(copy_weights=True)


@pytest.mark.parametrize("size", ["0", "10", "much"])
def test_bodies_must_have_some_room(size: str) -> None:
    with pytest.raises(ConfigError):
        EngineConfig(http_max_body=size)
