"""A deployment with keys, over real sockets: who has them is served as ever, and nobody else gets a word in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import pytest
from support.engine.scripted import ScriptedCore
from support.engine.scripted_deployment import SECRET, Deployment
from support.waiting import eventually

from headwise.actors.front import Keys
from headwise.errors import ConfigError, DeploymentError, EngineDiedError
from headwise.runtime.client.client import Client
from headwise.sockets.curve import ClientKeys, client_key, new_secret, public_key

TOKENS = ("sk-alice-0001", "sk-bob-00002")
KEYS = Keys(SECRET, new_secret(), frozenset(map(client_key, TOKENS)))
SERVER = public_key(KEYS.curve)


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    deployment = Deployment(keys=KEYS)
    deployment.add_engine(ScriptedCore())
    yield deployment
    deployment.close()


@pytest.mark.parametrize("token", TOKENS)
@pytest.mark.parametrize("relay", ["auto", "always", "never"])
def test_each_key_is_served_directly_and_through_the_relay(
    deployment: Deployment, token: str, relay: Literal["auto", "always", "never"]
) -> None:
    with Client(deployment.address, relay, ClientKeys(SERVER, token)) as client:
        assert client.generate("abc", max_tokens=3).text == "0 1 2 "
        assert client.generate([5] * 200_000, max_tokens=1).text == "0 "  # comes in pieces


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (None, r"it wants keys: give Client.*ClientKeys.*--server-key"),
        (ClientKeys(SERVER, "sk-nobody-01"), "it does not know this API key"),
        (ClientKeys(public_key(new_secret()), TOKENS[0]), "it hangs up: its server key is another one"),
    ],
    ids=["none", "wrong token", "wrong server"],
)
def test_strangers_are_told_why_and_get_nothing(deployment: Deployment, keys: ClientKeys | None, why: str) -> None:
    with pytest.raises(DeploymentError, match=rf"{deployment.address} refuses this client: {why}"):
        Client(deployment.address, keys=keys)


def test_what_is_no_pair_of_keys_is_said_to_be_none(deployment: Deployment) -> None:
    with pytest.raises(ConfigError, match=r"keys must be ClientKeys.*got a str"):
        Client(deployment.address, keys=TOKENS[0])


def test_a_client_with_keys_does_not_talk_to_a_deployment_without() -> None:
    deployment = Deployment()
    with pytest.raises(DeploymentError, match="refuses this client: it has no keys: connect without"):
        Client(deployment.address, keys=ClientKeys(SERVER, TOKENS[0]))
    deployment.close()


def test_an_engine_serves_only_those_that_have_keys_too() -> None:
    other = Deployment(keys=KEYS)
    other.add_engine(ScriptedCore(), keys=replace(KEYS, users=frozenset()).outer)
    with (
        Client(other.address, keys=ClientKeys(SERVER, TOKENS[0])) as client,
        pytest.raises(EngineDiedError, match="cannot be reached from here"),
    ):
        client.generate("abc", max_tokens=1)
    other.close()


def test_the_deployment_s_own_clients_need_no_api_key(deployment: Deployment) -> None:
    with Client(deployment.address, keys=KEYS.own) as client:
        eventually(lambda: client.stats()["engines"])
        assert client.generate("abc", max_tokens=1).text == "0 "
