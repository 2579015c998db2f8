"""The SOCKS5 handshake, by the letter of RFC 1928, and with any bytes in any pieces."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.socks import ACCEPTED, HELLO, ask, told

from headwise.sockets.endpoint import Endpoint
from headwise.sockets.socks import Acceptor, Reply, SocksError, connect

HOSTS = st.one_of(
    st.ip_addresses().map(str),
    st.from_regex(r"[a-zA-Z0-9.-]{1,255}", fullmatch=True),
)
PORTS = st.integers(0, 65535)
LONGEST = 2 + 255 + 4 + 1 + 255 + 2
"""Most bytes of a handshake."""


def converse(pieces: list[bytes]) -> tuple[bytes, Endpoint | None, bytes]:
    """All answers, the destination, and what came behind the request."""
    acceptor, answers = Acceptor(), b""
    for piece in pieces:
        try:
            answers += acceptor.take(piece)
        except SocksError as error:
            return answers + error.answer, None, b""
    return answers, acceptor.destination, acceptor.rest


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({cut % (len(data) + 1) for cut in cuts} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


# ---- the server's side ----


@given(HOSTS, PORTS, st.binary(max_size=40), st.lists(st.integers(0, 1000), max_size=8), st.binary(max_size=254))
def test_a_request_is_understood_in_any_pieces_and_what_follows_is_kept(
    host: str, port: int, rest: bytes, cuts: list[int], methods: bytes
) -> None:
    hello = bytes((5, len(methods) + 1)) + methods + b"\x00"
    said = pieces_of(hello + ask(host, port) + rest, cuts)
    assert converse(said) == (ACCEPTED, Endpoint.of(host, port), rest)


@given(st.binary(max_size=2 * LONGEST), st.booleans(), st.lists(st.integers(0, 2000), max_size=8))
def test_any_bytes_in_any_pieces_get_the_same_answer_and_no_more_is_kept_than_a_handshake_has(
    data: bytes, has_greeted: bool, cuts: list[int]
) -> None:
    data = HELLO * has_greeted + b"\x05" + data
    assert converse(pieces_of(data, cuts)) == converse([data])
    acceptor = Acceptor()
    try:
        for byte in data:
            acceptor.take(bytes((byte,)))
            assert len(acceptor._unread) < LONGEST
    except SocksError as error:
        assert len(error.answer) <= 10  # noqa: PT017


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (b"\x05\x01\x02", b"\x05\xff"),
        (b"\x05\x00", b"\x05\xff"),
        (b"\x04\x01\x00\x50", b""),
        (HELLO + b"\x04", ACCEPTED + told(Reply.FAILED)),
        (HELLO + b"\x05\x02", ACCEPTED + told(Reply.COMMAND_NOT_SUPPORTED)),
        (HELLO + b"\x05\x03", ACCEPTED + told(Reply.COMMAND_NOT_SUPPORTED)),
        (HELLO + b"\x05\x01\x00\x02", ACCEPTED + told(Reply.ADDRESS_NOT_SUPPORTED)),
    ],
)
def test_what_is_not_served_is_answered_with_its_code_as_soon_as_it_is_known(said: bytes, answer: bytes) -> None:
    assert converse([said]) == (answer, None, b"")
    with pytest.raises(SocksError):
        Acceptor().take(said)


def test_two_spellings_of_an_address_are_one() -> None:
    for host in ("::1", "0:0:0:0:0:0:0:1"):
        assert converse([HELLO + ask(host, 9)])[1] == Endpoint.parse("tcp://[0::1]:9")
    name = bytes((5, 1, 0, 3, 9)) + b"127.0.0.1" + (9).to_bytes(2, "big")
    assert converse([HELLO + name])[1] == Endpoint.parse("tcp://127.0.0.1:9")
    assert converse([HELLO + ask("Node.Example", 9)])[1] == Endpoint.parse("tcp://node.example:9")


@pytest.mark.parametrize(
    "text", ["", "tcp://a", "tcp://a:0", "tcp://a:65536", "tcp://a:x", "tcp://a b:1", "ipc://a:1", "tcp://::1:5"]
)
def test_what_is_no_endpoint_is_not_taken_for_one(text: str) -> None:
    with pytest.raises(ValueError, match="is not tcp://HOST:PORT"):
        Endpoint.parse(text)


@pytest.mark.parametrize("text", ["tcp://127.0.0.1:80", "tcp://[::1]:80", "tcp://node-7.example:65535"])
def test_an_endpoint_is_written_as_it_is_read(text: str) -> None:
    assert str(Endpoint.parse(text)) == text


# ---- the client's side ----


class Script:
    """A connection to a server whose answers are given beforehand."""

    def __init__(self, answers: bytes) -> None:
        self.said = b""
        self.reader = asyncio.StreamReader()
        self.reader.feed_data(answers)
        self.reader.feed_eof()

    def write(self, data: bytes) -> None:
        self.said += data


def ask_for(endpoint: str, answers: bytes) -> tuple[bytes, bytes]:
    """What is said, and what of the answers belongs to the connection behind the handshake."""

    async def run() -> tuple[bytes, bytes]:
        script = Script(answers)
        await connect(script.reader, script, Endpoint.parse(endpoint))
        return script.said, await script.reader.read()

    return asyncio.run(run())


@given(HOSTS, st.integers(1, 65535), st.binary(max_size=20))
def test_both_sides_understand_each_other(host: str, port: int, rest: bytes) -> None:
    endpoint = Endpoint.of(host, port)
    said, left = ask_for(str(endpoint), ACCEPTED + told(Reply.SUCCEEDED) + rest)
    assert converse([said]) == (ACCEPTED, endpoint, b"")
    assert left == rest


@pytest.mark.parametrize("address", [b"\x01" + bytes(6), b"\x04" + bytes(18), b"\x03\x04host" + bytes(2)])
def test_the_servers_own_address_may_be_of_any_kind(address: bytes) -> None:
    answers = ACCEPTED + b"\x05\x00\x00" + address + b"rest"
    assert ask_for("tcp://127.0.0.1:9", answers)[1] == b"rest"


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        (ACCEPTED + told(Reply.NOT_ALLOWED), "not allowed"),
        (ACCEPTED + told(Reply.REFUSED), "refused"),
        (ACCEPTED + told(77), "reply 77"),
        (b"\x05\xff", "authentication"),
        (b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f", "no relay listens there"),
        (b"HTTP/1.1 400 Bad Request\r\n", "no relay listens there"),
    ],
)
def test_a_server_that_does_not_lead_there_is_an_error_that_says_why(answers: bytes, error: str) -> None:
    with pytest.raises(SocksError, match=error):
        ask_for("tcp://127.0.0.1:9", answers)


@given(st.binary(max_size=300))
def test_whatever_a_server_says_the_client_neither_hangs_nor_fails_otherwise(answers: bytes) -> None:
    with suppress(SocksError, EOFError):
        ask_for("tcp://127.0.0.1:9", answers)
