"""Keys of ZeroMQ's encryption."""

from __future__ import annotations

import pickle
from contextlib import closing
from typing import Any

import pytest
import zmq
from support.waiting import eventually

from headwise.errors import ConfigError
from headwise.sockets.context import close_context, open_context
from headwise.sockets.curve import ClientKeys, ServerKeys, client_key, new_secret, public_key, secure_client
from headwise.sockets.listener import Listener
from headwise.sockets.pieces import PIECE_BYTES

TOKEN = "sk-somebodys-key"


def test_keys_survive_a_process_boundary_and_keep_their_secrets_to_themselves() -> None:
    server = ServerKeys(new_secret(), frozenset((client_key(TOKEN),)))
    client = ClientKeys(public_key(server.secret), TOKEN)
    for keys, secret in ((server, server.secret), (client, TOKEN)):
        assert pickle.loads(pickle.dumps(keys)) == keys
        assert secret not in repr(keys)


def test_a_token_has_one_key_which_does_not_tell_it() -> None:
    assert client_key(TOKEN) == client_key(TOKEN) != client_key(TOKEN + "s")
    assert TOKEN.encode().hex() not in client_key(TOKEN)


@pytest.mark.parametrize("key", ["", "abc", "A" * 64, "g" * 64, b"a" * 64, None])
def test_what_is_no_key_is_said_to_be_none_and_not_shown(key: Any) -> None:
    with pytest.raises(ConfigError, match="64 hexadecimal digits") as raised:
        ClientKeys(key, TOKEN)
    assert not key or str(key) not in str(raised.value)


@pytest.mark.parametrize("token", ["", None, 5])
def test_a_client_needs_a_token(token: Any) -> None:
    with pytest.raises(ConfigError, match="an API key besides"):
        ClientKeys("a" * 64, token)


def test_whose_key_is_none_any_more_is_heard_no_more_and_whose_is_new_is() -> None:
    context, secret = open_context(), new_secret()
    keys = ServerKeys(secret, frozenset((client_key(TOKEN),)))
    names = {client_key(token): token for token in (TOKEN, "sk-old-000001", "sk-new-000001")}
    heard: list[tuple[str, bytes]] = []
    with closing(
        Listener(
            context, "tcp://127.0.0.1:*", max_message_bytes=1 << 20, keys=keys, users=[client_key("sk-old-000001")]
        )
    ) as listener:

        def connected(token: str) -> zmq.Socket[bytes]:
            client = context.socket(zmq.DEALER)
            secure_client(client, ClientKeys(public_key(secret), token))
            client.connect(listener.endpoint)
            client.send(b"here")
            return client

        def look(count: int) -> bool:
            heard.extend((names[listener.sender_key], frames[0]) for _, frames in listener.receive(10))
            return len(heard) >= count

        clients = {token: connected(token) for token in names.values()}
        eventually(lambda: look(2))
        assert sorted(heard) == [("sk-old-000001", b"here"), (TOKEN, b"here")]
        listener.allow([client_key("sk-new-000001")])
        clients["sk-old-000001"].send(b"still here")
        eventually(lambda: look(2) and len(listener.peers()) == 1)
        clients[TOKEN].send(b"and here")
        clients["sk-new-000001"].close(linger=0)
        connected("sk-new-000001")
        eventually(lambda: look(4))
        assert sorted(heard[2:]) == [("sk-new-000001", b"here"), (TOKEN, b"and here")]
    close_context(context)


def test_what_somebody_sent_who_is_gone_is_not_taken_for_who_has_the_descriptor_now() -> None:
    """Messages may be read after their connection has ended, when another one has its number already."""
    context, secret = open_context(), new_secret()
    keys = ServerKeys(secret, frozenset((client_key(TOKEN), client_key("sk-guest-0001"))))
    heard: list[tuple[str, bytes]] = []
    with closing(Listener(context, "tcp://127.0.0.1:*", max_message_bytes=1 << 20, keys=keys)) as listener:
        clients = {}
        for token in (TOKEN, "sk-guest-0001"):
            clients[token] = context.socket(zmq.DEALER)
            secure_client(clients[token], ClientKeys(public_key(secret), token))
            clients[token].connect(listener.endpoint)

        def look(count: int) -> bool:
            heard.extend((listener.sender_key, frames[0]) for _, frames in listener.receive(10))
            return len(heard) == count

        for count, client in enumerate(clients.values(), 1):
            client.send(b"here")
            eventually(lambda count=count: look(count))
        operator, guest = listener._peers.values()
        del listener._peers[guest.identity]
        listener._connections[guest.fd] = operator
        clients["sk-guest-0001"].send(b"late")
        eventually(lambda: look(3))
    close_context(context)
    assert heard[-1] == (client_key("sk-guest-0001"), b"late")


def test_the_longest_frame_passes_encrypted_as_in_the_clear() -> None:
    context, secret = open_context(), new_secret()
    keys = ServerKeys(secret, frozenset((client_key(TOKEN),)))
    received: list[bytes] = []
    with closing(Listener(context, "tcp://127.0.0.1:*", max_message_bytes=1 << 20, keys=keys)) as listener:
        client = context.socket(zmq.DEALER)
        secure_client(client, ClientKeys(public_key(secret), TOKEN))
        client.connect(listener.endpoint)
        client.send(b"x" * PIECE_BYTES)

        def arrived() -> bool:
            received.extend(frames[0] for _, frames in listener.receive(1))
            return bool(received)

        eventually(arrived)
    close_context(context)
    assert received == [b"x" * PIECE_BYTES]
