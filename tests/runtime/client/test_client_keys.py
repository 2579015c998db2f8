"""A deployment with keys, over real sockets: who has them is served as ever, and nobody else gets a word in."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

import pytest
from support.engine.scripted import ScriptedCore
from support.engine.scripted_deployment import SECRET, Deployment
from support.waiting import eventually

from headwise.actors.front import Keys
from headwise.errors import ConfigError, DeploymentError, HeadwiseError, NotAllowedError
from headwise.runtime.client.client import Client
from headwise.runtime.frontend.scaling import FleetState
from headwise.runtime.protocol.request import GenerateRequest
from headwise.runtime.protocol.users import NO_USERS, Tenant, Users
from headwise.sockets.curve import ClientKeys, client_key, new_secret, public_key

TOKENS = ("sk-alice-0001", "sk-bob-00002")
KEYS = Keys(SECRET, new_secret(), Users(dict.fromkeys(map(client_key, TOKENS))))
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


def test_an_engine_that_knows_none_is_told_who_may_connect() -> None:
    other = Deployment(keys=KEYS)
    server = other.add_engine(ScriptedCore(), users=NO_USERS)
    eventually(lambda: server._users.users == KEYS.users)
    with Client(other.address, keys=ClientKeys(SERVER, TOKENS[0])) as client:
        assert client.generate("abc", max_tokens=1).text == "0 "
    other.close()


def test_a_scheduler_that_knows_less_than_engines_tells_them_nothing_until_it_knows() -> None:
    """As one that starts on a node without the file of keys, long after the deployment did."""
    news: list[Users] = []
    deployment = Deployment(keys=KEYS, users_source=lambda: news.pop() if news else None, users_are_known=False)
    later = Users({**KEYS.users.by_key, client_key("sk-new-00005"): None})
    server = deployment.add_engine(ScriptedCore(), users=later)
    with Client(deployment.address, keys=KEYS.own) as client:

        def silent_s() -> float:
            told: float = client.stats()["engines"]["engine-0"]["silent_s"]
            return told

        eventually(lambda: silent_s() > 0.3)
        eventually(lambda: silent_s() < 0.2)  # it has reported once more
        time.sleep(0.1)
        assert server._users.users == later
        news.append(KEYS.users)
        eventually(lambda: server._users.users == KEYS.users)
    deployment.close()


def test_keys_come_and_go_while_a_deployment_serves() -> None:
    """Who has a key that is none any more loses his requests; others' go on, and who has a new one is served."""
    news: list[Users | ConfigError] = []

    def source() -> Users | None:
        told = news.pop() if news else None
        if isinstance(told, ConfigError):
            raise told
        return told

    core = ScriptedCore()
    deployment = Deployment(keys=KEYS, users_source=source)
    server = deployment.add_engine(core)
    old, new = (Users(dict.fromkeys(map(client_key, tokens))) for tokens in (TOKENS, (TOKENS[1], "sk-new-00005")))
    with (
        Client(deployment.address, keys=ClientKeys(SERVER, TOKENS[0])) as leaves,
        Client(deployment.address, keys=ClientKeys(SERVER, TOKENS[1])) as stays,
        Client(deployment.address, keys=KEYS.own) as own,
    ):
        with pytest.raises(DeploymentError, match="it does not know this API key"):
            Client(deployment.address, keys=ClientKeys(SERVER, "sk-new-00005"))
        core.gate.clear()
        lost, kept = leaves.stream("abc", max_tokens=3), stays.stream("abc", max_tokens=3)
        eventually(lambda: len(core.live) == 2)
        news.append(ConfigError("the file cannot be read"))
        eventually(lambda: any("API keys stay as they were" in text for _, text in own.stats()["faults"]))
        news.append(new)
        eventually(lambda: server._users.users == new)
        with Client(deployment.address, keys=ClientKeys(SERVER, "sk-new-00005")) as comes:
            begun = comes.stream("abc", max_tokens=3)
            eventually(lambda: core.aborted)
            core.gate.set()
            assert [delta.text for delta in begun] == [delta.text for delta in kept] == ["0 ", "1 ", "2 "]
        with pytest.raises(HeadwiseError):
            list(lost)
        with pytest.raises(DeploymentError):
            Client(deployment.address, keys=ClientKeys(SERVER, TOKENS[0]))
    assert old != new
    deployment.close()


def test_the_deployment_s_own_clients_need_no_api_key(deployment: Deployment) -> None:
    with Client(deployment.address, keys=KEYS.own) as client:
        eventually(lambda: client.stats()["engines"])
        assert client.generate("abc", max_tokens=1).text == "0 "


# ---- tenants ----

TENANTS = {client_key("sk-carol-0003"): Tenant("carol"), client_key("sk-dave-00004"): Tenant("dave", 5, 3)}
OF_TENANTS = replace(KEYS, users=Users({**KEYS.users.by_key, **TENANTS}))


@pytest.fixture(scope="module")
def shared_core() -> ScriptedCore:
    return ScriptedCore()


@pytest.fixture(scope="module")
def shared(shared_core: ScriptedCore) -> Iterator[Deployment]:
    deployment = Deployment(keys=OF_TENANTS)
    deployment.add_engine(shared_core)
    yield deployment
    deployment.close()


def seen(shared: Deployment, core: ScriptedCore, keys: ClientKeys | None, **said: object) -> GenerateRequest:
    """A request of who has these keys, as the engine has it."""
    core.gate.clear()
    with Client(shared.address, keys=keys) as client:
        stream = client.stream("abc", max_tokens=2, **said)
        eventually(lambda: core.live)
        ((request, _),) = core.live.values()
        core.gate.set()
        assert "".join(delta.text for delta in stream) == "0 1 "
    return request


@pytest.mark.parametrize(
    ("token", "said", "tenant", "priority"),
    [
        ("sk-carol-0003", {}, "carol", 0),
        ("sk-carol-0003", {"priority": -7}, "carol", -7),
        ("sk-carol-0003", {"tenant": "dave"}, "carol", 0),
        ("sk-dave-00004", {}, "dave", 5),
        ("sk-dave-00004", {"priority": -7}, "dave", 5),
        ("sk-dave-00004", {"priority": 9}, "dave", 9),
        (TOKENS[0], {"priority": -7}, "", -7),
        (TOKENS[0], {"tenant": "dave"}, "dave", 0),
    ],
)
def test_a_request_is_that_tenant_s_whose_key_it_comes_by(
    shared: Deployment, shared_core: ScriptedCore, token: str, said: dict[str, object], tenant: str, priority: int
) -> None:
    request = seen(shared, shared_core, ClientKeys(SERVER, token), **said)
    assert (request.tenant, request.priority) == (tenant, priority)
    assert shared_core.share_of(request.tenant) == (3 if tenant == "dave" else 1)


def test_who_goes_straight_to_an_engine_is_the_tenant_there_too(shared: Deployment, shared_core: ScriptedCore) -> None:
    """A client that changes its ticket: the engine looks at the key, not at what the request says."""
    import zmq

    from headwise.runtime.protocol import wire
    from headwise.runtime.protocol.messages import Outputs, Submit
    from headwise.runtime.protocol.request import SamplingParams, as_token_ids
    from headwise.sockets.context import close_context, open_context
    from headwise.sockets.curve import secure_client

    context = open_context()
    socket = context.socket(zmq.DEALER)
    secure_client(socket, ClientKeys(SERVER, "sk-dave-00004"))
    socket.connect(shared.servers[0].endpoint)
    request = GenerateRequest("forged", as_token_ids([1]), SamplingParams(max_tokens=1), priority=-9, tenant="carol")
    shared_core.gate.clear()
    socket.send(wire.encode(Submit(1, request)))
    eventually(lambda: shared_core.live)
    ((came, _),) = shared_core.live.values()
    shared_core.gate.set()
    assert socket.poll(10_000)
    assert isinstance(wire.decode(socket.recv()), Outputs)
    close_context(context)
    assert (came.tenant, came.priority) == ("dave", 5)


def test_tenants_are_told_of_themselves_alone(shared: Deployment) -> None:
    told = dict[str, list[str]]()
    for token in ("sk-carol-0003", "sk-dave-00004", TOKENS[0], "sk-carol-0003"):
        with Client(shared.address, keys=ClientKeys(SERVER, token)) as client:
            client.generate("abc", max_tokens=1)
            told[token] = sorted(client.stats()["scheduler"]["tenants"])
    assert told == {"sk-carol-0003": ["carol"], "sk-dave-00004": ["dave"], TOKENS[0]: ["carol", "dave"]}


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.sleep(),
        lambda client: client.reset_cache(),
        lambda client: client.scale(0),
        lambda client: client.update_weights("/nowhere"),
    ],
    ids=["sleep", "reset_cache", "scale", "update_weights"],
)
def test_tenants_do_not_operate_the_deployment(
    shared: Deployment, shared_core: ScriptedCore, call: Callable[[Client], object]
) -> None:
    with Client(shared.address, keys=ClientKeys(SERVER, "sk-carol-0003")) as client:
        with pytest.raises(NotAllowedError, match=r"this API key is tenant carol's, and .* is for those of operators"):
            call(client)
        assert client.generate("abc", max_tokens=1).text == "0 "
    assert not shared_core.operations
    assert shared.exchange.swap(FleetState(1, "")).wish is None
