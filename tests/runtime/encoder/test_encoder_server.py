"""An encoder behind its socket, with real clients and a real scheduler; what it makes of files is scripted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zmq
from support.engine.scripted import ScriptedCore
from support.engine.scripted_deployment import SECRET, Deployment
from support.hanging_encoder import HangingEncoder
from support.waiting import eventually

from headwise.actors.front import Keys
from headwise.cache_controller.block_hash import ExtraKey
from headwise.errors import (
    HeadwiseError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    RequestAbortedError,
)
from headwise.runtime.cli.status_tables import render
from headwise.runtime.client import encoder_call, image_calls
from headwise.runtime.client.client import Client
from headwise.runtime.client.image_calls import ImageCalls, in_order
from headwise.runtime.encoder import job_queue, leaving_rows
from headwise.runtime.encoder import server as server_module
from headwise.runtime.encoder.job_queue import Job, JobQueue
from headwise.runtime.encoder.reports import Reporting
from headwise.runtime.encoder.server import EncoderServer
from headwise.runtime.frontend import encoders
from headwise.runtime.http.deployment_metrics import DeploymentMetrics
from headwise.runtime.loader.chat_images import ImageFile
from headwise.runtime.protocol import prompt_items, wire
from headwise.runtime.protocol.encoder_messages import (
    Encode,
    Encoded,
    EncodedRows,
    EncoderStatus,
    EndEncode,
    FilePart,
    WantsFile,
    WantsRows,
)
from headwise.runtime.protocol.images import EncodedImage, PromptImage, named
from headwise.runtime.protocol.messages import Failed, Ping, Pong
from headwise.runtime.protocol.prompt_items import digest
from headwise.runtime.protocol.request import GenerateRequest
from headwise.runtime.protocol.users import Users
from headwise.sockets.curve import ClientKeys, client_key, public_key
from headwise.sockets.pieces import split


class ScriptedEncoder:
    """Makes one token of an image, by its length, and so many of a video, each in a step of its own; waits while it is
    held; files of some contents fail.

    steps: what was done, one after the other
    """

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self.steps: list[bytes] = []
        self.free = threading.Event()
        self.free.set()

    def encode(self, file: ImageFile) -> Iterator[EncodedImage | None]:
        data = file.data
        self.seen.append(data)
        assert self.free.wait(60)
        if data == b"bad":
            raise InvalidRequestError("the image is bad")
        if data == b"defect":
            raise ZeroDivisionError("a defect")
        if not file.is_video:
            self.steps.append(data)
            yield made_of(np.full((1, 1), len(data), np.float32), len(data))
        for _ in range(len(data)):
            self.steps.append(data)
            yield None
            assert self.free.wait(60)
        yield video_of(file)

    def stats(self) -> dict[str, int]:
        kinds = len(set(self.seen))
        return {"images": kinds, "bytes": 4 * kinds, "hits": len(self.seen) - kinds, "misses": kinds}


class KeepingCore(ScriptedCore):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[GenerateRequest] = []

    def add(self, request: GenerateRequest, **how: Any) -> None:
        self.taken.append(request)
        super().add(request, **how)


def made_of(embeds: np.ndarray, token: int = 1) -> EncodedImage:
    length = len(embeds)
    return named(PromptImage(np.full(length, token, np.int32), (ExtraKey(0, length, ""),)), embeds)


def video_of(file: ImageFile) -> EncodedImage:
    """Of a row for each of its bytes, each of which takes a megabyte."""
    values = np.frombuffer(file.data, np.uint8).astype(np.float32) + np.float32(file.fps)
    return made_of(np.broadcast_to(values[:, None], (len(values), 1 << 18)).copy())


@pytest.fixture
def deployment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployment]:
    monkeypatch.setattr(encoders, "WAIT_S", 0.5)
    deployment = Deployment(without_images="")
    yield deployment
    deployment.close()


def encoder_of(deployment: Deployment, encoder: Any, name: str = "encoder-0", secret: str = "") -> EncoderServer:
    reporting = reporting_of(deployment, name)
    reporting = replace(reporting, secret=secret or reporting.secret)
    server = EncoderServer(
        encoder, "tcp://127.0.0.1:*", reporting=reporting, keys=deployment.keys.inner, users=deployment.keys.users
    )
    server.start()
    return server


@contextmanager
def connected(deployment: Deployment, server: EncoderServer) -> Iterator[Client]:
    """A client, once it can find the deployment's encoder, which is stopped behind it."""
    try:
        with Client(deployment.address) as client:
            eventually(lambda: client.stats()["encoders"])
            yield client
    finally:
        server.stop()


def requests_to(deployment: Deployment) -> list[GenerateRequest]:
    """Those that a new engine of it gets."""
    core = KeepingCore()
    deployment.add_engine(core)
    return core.taken


def film(data: bytes, fps: float = 0.0) -> list[dict[str, Any]]:
    part = {"type": "video", "video": data, **({"fps": fps} if fps else {})}
    return [{"role": "user", "content": [part]}]


def files_of(*files: bytes) -> list[ImageFile]:
    return list(map(ImageFile, files))


def chat(*files: bytes) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "image": file} for file in files]}]


def asked_of(key: int, data: bytes, is_video: bool = False) -> Encode:
    return Encode(key, data, len(data), is_video)


def asking(asked: list[Any]) -> Any:
    """What `ImageCalls` asks encoders by: it is only noted."""
    return lambda endpoint, call: (asked.append(call), lambda: None)[1]


class Peer:
    """Speaks to an encoder without our client."""

    def __init__(self, server: EncoderServer) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.connect(server.endpoint)

    def send(self, message: Any) -> None:
        for piece in split(wire.encode(message)):
            self.socket.send(piece)

    def answer(self) -> Any:
        assert self.socket.poll(60_000)
        return wire.decode(self.socket.recv())

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def scripted() -> ScriptedEncoder:
    return ScriptedEncoder()


@pytest.fixture
def server(scripted: ScriptedEncoder) -> Iterator[EncoderServer]:
    server = EncoderServer(scripted, "tcp://127.0.0.1:*")
    server.start()
    yield server
    scripted.free.set()
    server.stop()


@pytest.fixture
def peer(server: EncoderServer) -> Iterator[Peer]:
    peer = Peer(server)
    yield peer
    peer.close()


def test_images_are_answered_with_what_stands_for_them_or_why_not(peer: Peer) -> None:
    for key, image in enumerate((b"abc", b"bad", b"defect", bytes(300_000))):
        peer.send(asked_of(key, image))
    answers = [peer.answer() for _ in range(4)]
    assert isinstance(answers[0], Encoded)
    assert answers[0].image.tokens.tolist() == [3]
    assert [(each.error, each.message) for each in answers[1:3]] == [
        ("InvalidRequestError", "the image is bad"),
        ("HeadwiseError", "the image could not be encoded: ZeroDivisionError: a defect"),
    ]
    assert answers[3].image.tokens.tolist() == [300_000]


def test_it_answers_pings_while_it_encodes(peer: Peer, scripted: ScriptedEncoder) -> None:
    scripted.free.clear()
    peer.send(asked_of(1, b"abc"))
    eventually(lambda: scripted.seen)
    peer.send(Ping())
    assert isinstance(peer.answer(), Pong)
    scripted.free.set()
    assert isinstance(peer.answer(), Encoded)


def test_what_is_no_message_for_it_is_refused(peer: Peer) -> None:
    peer.socket.send(b"nonsense")
    assert isinstance(peer.answer(), Failed)
    peer.send(EncoderStatus("x", "y", "z", "", {}))
    assert "expected Encode, FilePart, WantsRows, EndEncode, Ping" in peer.answer().message


def test_more_images_than_may_wait_are_refused(
    peer: Peer, scripted: ScriptedEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_queue, "MAX_WAITING", 3)
    scripted.free.clear()
    peer.send(asked_of(0, b"a"))
    eventually(lambda: scripted.seen)
    for key in range(1, 4):
        peer.send(asked_of(key, b"abc"))
    refused = peer.answer()
    assert (refused.key, refused.error) == (3, "OverloadedError")
    assert "3 images wait to be encoded already; try again later" in refused.message
    scripted.free.set()
    assert [peer.answer().key for _ in range(3)] == [0, 1, 2]


def test_images_of_clients_that_have_gone_are_not_encoded(server: EncoderServer, scripted: ScriptedEncoder) -> None:
    scripted.free.clear()
    peers = [Peer(server) for _ in range(2)]
    peers[0].send(asked_of(0, b"first"))
    eventually(lambda: scripted.seen)
    for key in range(5):
        peers[1].send(asked_of(key, b"gone"))
    eventually(lambda: len(server._jobs) == 6)
    peers[1].close()
    eventually(lambda: len(server._jobs) == 1)
    peers[0].send(asked_of(1, b"last"))
    scripted.free.set()
    assert [peers[0].answer().key for _ in range(2)] == [0, 1]
    assert scripted.seen == [b"first", b"last"]
    peers[0].close()


def test_clients_are_served_in_turn_and_bytes_that_are_here_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_queue, "MAX_WAITING_BYTES", 10)
    jobs = JobQueue()

    def put(client: bytes, key: int, size: int = 2) -> bool:
        job = Job(client, key, size)
        is_admitted = jobs.admit(job)
        if is_admitted:
            jobs.put(job)
        return is_admitted

    for client, key in ((b"a", 1), (b"a", 2), (b"a", 3), (b"b", 4), (b"c", 5)):
        assert put(client, key)
    assert not put(b"d", 6, 1)
    jobs.drop(b"c")
    assert put(b"d", 6)
    taken = [job for job in (jobs.get() for _ in range(5)) if job is not None]
    assert [job.key for job in taken] == [1, 4, 6, 2, 3]
    assert not put(b"e", 7)  # what is being encoded is here, too
    jobs.drop(b"a", 2)
    assert [jobs.is_wanted(job) for job in taken] == [True, True, True, False, True]
    for job in taken:
        jobs.done(job)
    assert len(jobs) == 0
    jobs.close()
    assert jobs.get() is None


def test_a_job_that_is_put_back_comes_after_those_of_others_and_of_its_own_client() -> None:
    jobs = JobQueue()
    video, image, other = Job(b"a", 1, 1), Job(b"a", 2, 1), Job(b"b", 3, 1)
    for job in (video, image, other):
        assert jobs.admit(job)
        jobs.put(job)
    assert jobs.get() is video
    jobs.put(video)
    assert [jobs.get() for _ in range(3)] == [other, image, video]
    jobs.drop(b"a", 1)
    jobs.put(video)
    assert not jobs._jobs


# ---- files and embeddings in parts ----


def test_a_large_file_and_what_is_made_of_it_go_in_parts_that_the_other_side_asks_for(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(range(1, 11))
    peer.send(Encode(7, data[:4], 10, is_video=True, fps=2.0))
    for first in (4, 7):
        wants = peer.answer()
        assert (type(wants), wants.key, wants.first) == (WantsFile, 7, first)
        peer.send(FilePart(7, first, data[first : first + 3]))
    encoded = peer.answer()
    whole = video_of(ImageFile(data, True, 2.0))
    assert encoded.image.items == whole.image.items
    rows = [encoded.embeds]
    assert len(rows[0]) == 4  # of a megabyte each
    while sum(map(len, rows)) < 10:
        peer.send(WantsRows(7, sum(map(len, rows))))
        told = peer.answer()
        assert (type(told), told.key, told.first) == (EncodedRows, 7, sum(map(len, rows)))
        rows.append(told.values)
    np.testing.assert_array_equal(np.concatenate(rows), whole.embeds)
    peer.send(WantsRows(7, 0))  # it is over: that is not answered
    peer.send(Ping())
    assert isinstance(peer.answer(), Pong)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (Encode(1, b"", 0), "0 bytes came of a file that is said to have 0"),
        (Encode(1, b"abc", 2), "3 bytes came of a file that is said to have 2"),
        (Encode(1, b"", 5), "0 bytes came of a file"),
        (Encode(1, b"abc", -1), "3 bytes came of a file that is said to have -1"),
        (Encode(1, b"abc", (12 << 20) + 1), "the image has 12582913 bytes; at most 12582912"),
        (Encode(1, b"abc", (128 << 20) + 1, is_video=True), "the video has 134217729 bytes; at most 134217728"),
        (Encode(1, b"abc", 3, is_video=True, fps=float("nan")), "fps must be from 0 to 100, got nan"),
        (Encode(1, b"abc", 3, is_video=True, fps=-1.0), "fps must be from 0 to 100, got -1"),
    ],
)
def test_what_is_no_file_is_refused(peer: Peer, message: Encode, says: str) -> None:
    peer.send(message)
    told = peer.answer()
    assert (told.key, told.error) == (1, "InvalidRequestError")
    assert says in told.message


@pytest.mark.parametrize(
    "part", [FilePart(1, 2, b"cd"), FilePart(1, 4, b"cd"), FilePart(1, 3, b""), FilePart(1, 3, bytes(8))]
)
def test_another_part_than_the_next_one_ends_its_file(peer: Peer, server: EncoderServer, part: FilePart) -> None:
    peer.send(Encode(1, b"abc", 10))
    assert isinstance(peer.answer(), WantsFile)
    peer.send(part)
    assert f"of a file from byte {part.first} on came where byte 3 of 10 is next" in peer.answer().message
    assert not len(server._jobs)
    peer.send(FilePart(1, 3, b"defghij"))
    peer.send(asked_of(2, b"abc"))
    assert peer.answer().key == 2


def test_rows_that_are_not_there_end_what_is_under_way(peer: Peer, server: EncoderServer) -> None:
    peer.send(asked_of(1, bytes(range(9)), is_video=True))
    assert isinstance(peer.answer(), Encoded)
    peer.send(WantsRows(1, 9))
    assert "row 9 was asked for, of 9" in peer.answer().message
    assert not server._leaving.num_bytes


def test_what_is_not_asked_for_or_does_not_come_is_let_go_of(
    scripted: ScriptedEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_IDLE_MS", 5)  # each look at the clock counts for half a second at most
    now = [0.0]
    server = EncoderServer(scripted, "tcp://127.0.0.1:*", clock=lambda: now[0])
    server.start()
    peer = Peer(server)
    peer.send(Encode(1, b"abc", 10))
    assert isinstance(peer.answer(), WantsFile)
    peer.send(asked_of(2, bytes(range(9)), is_video=True))
    assert isinstance(peer.answer(), Encoded)
    told = []
    while len(told) < 2:
        now[0] += 1.0  # whoever does not look at a clock for long was stopped itself
        if peer.socket.poll(5):
            told.append(peer.answer())
    assert sorted(each.key for each in told) == [1, 2]
    assert all("nothing was heard for 30 s of an image under way" in each.message for each in told)
    assert not len(server._jobs)
    assert not server._leaving.num_bytes
    peer.close()
    server.stop()


def test_what_was_made_waits_until_there_is_room_for_it(
    peer: Peer, server: EncoderServer, scripted: ScriptedEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaving_rows, "MAX_KEPT_BYTES", 12 << 20)
    monkeypatch.setattr(job_queue, "MOST_VIDEOS", 8)
    scripted.free.clear()
    for key, size in ((1, 9), (2, 5), (3, 4)):
        peer.send(asked_of(key, bytes(size), is_video=True))
    eventually(lambda: len(server._jobs) == 3)
    scripted.free.set()
    assert [peer.answer().key for _ in range(2)] == [3, 2]  # the first is one part, the second leaves no room
    eventually(lambda: server._done)
    peer.send(WantsRows(2, 4))
    told = [peer.answer() for _ in range(2)]
    assert [(type(each), each.key) for each in told] == [(EncodedRows, 2), (Encoded, 1)]
    eventually(lambda: not server._done and not len(server._jobs))


def test_so_many_videos_are_under_way_and_of_a_client_half_as_many() -> None:
    jobs = JobQueue()
    for key in range(1, 5):
        for client in (b"a", b"b", b"c"):
            video = Job(client, key, 1, is_video=True)
            assert jobs.admit(video)
            jobs.put(video)
    image = Job(b"d", 9, 1)
    assert jobs.admit(image)
    jobs.put(image)
    begun = [job for job in (jobs.get() for _ in range(5)) if job is not None]
    assert [(job.client, job.key) for job in begun] == [(b"a", 1), (b"b", 1), (b"c", 1), (b"d", 9), (b"a", 2)]
    for job in begun[:3]:
        jobs.put(job)
    assert {jobs.get() for _ in range(3)} == set(begun[:3])  # no other one
    jobs.drop(b"b")
    later = jobs.get()
    assert later is not None
    assert (later.client, later.key) == (b"c", 2)
    jobs.done(begun[0])
    again = jobs.get()
    assert again is not None
    assert (again.client, again.key) == (b"a", 3)


def test_other_images_are_encoded_between_the_steps_of_a_video(
    peer: Peer, scripted: ScriptedEncoder, server: EncoderServer
) -> None:
    scripted.free.clear()
    peer.send(asked_of(1, b"video", is_video=True))
    eventually(lambda: scripted.seen)
    other = Peer(server)
    other.send(asked_of(2, b"image"))
    eventually(lambda: len(server._jobs) == 2)
    scripted.free.set()
    assert isinstance(other.answer(), Encoded)
    assert isinstance(peer.answer(), Encoded)
    assert scripted.steps.index(b"image") == 1
    assert scripted.steps.count(b"video") == 5
    other.close()


def test_a_video_that_nobody_waits_for_any_more_is_not_encoded_to_its_end(
    peer: Peer, scripted: ScriptedEncoder, server: EncoderServer
) -> None:
    scripted.free.clear()
    peer.send(asked_of(1, b"a long video", is_video=True))
    eventually(lambda: scripted.seen)
    peer.send(EndEncode(1))
    eventually(lambda: not len(server._jobs))
    scripted.free.set()
    peer.send(asked_of(2, b"image"))
    assert peer.answer().key == 2
    assert scripted.steps.count(b"a long video") <= 2


# ---- with a scheduler and our client ----


def test_a_client_finds_it_by_the_scheduler_and_equal_images_are_asked_for_once(deployment: Deployment) -> None:
    core, encoder = ScriptedCore(), ScriptedEncoder()
    deployment.add_engine(core)
    server = encoder_of(deployment, encoder)
    with connected(deployment, server) as client:
        encoder.free.clear()
        with ThreadPoolExecutor(8) as threads:
            calls = [threads.submit(client.chat, chat(b"same"), max_tokens=2) for _ in range(8)]
            eventually(lambda: encoder.seen)
            encoder.free.set()
            assert all(len(call.result().token_ids) == 2 for call in calls)
        assert encoder.seen.count(b"same") < 8
        eventually(lambda: client.stats()["encoders"]["encoder-0"]["encoded"] == len(encoder.seen))


def test_embeddings_go_to_the_engine_and_only_their_hashes_to_the_scheduler(deployment: Deployment) -> None:
    taken = requests_to(deployment)
    server = encoder_of(deployment, ScriptedEncoder())
    with connected(deployment, server) as client:
        client.chat(chat(b"abc", b"de"), max_tokens=1)
    (request,) = taken
    assert [(each.start, each.values.tolist()) for each in request.embeds] == [(1, [[3.0]]), (2, [[2.0]])]
    assert [each.content for each in request.extra_keys] == [digest(each.values) for each in request.embeds]


@pytest.mark.parametrize(
    ("file", "error", "says"),
    [(b"bad", InvalidRequestError, "the image is bad"), (b"defect", HeadwiseError, "could not be encoded")],
)
def test_what_an_encoder_refuses_fails_its_call_alone(
    deployment: Deployment, file: bytes, error: type[HeadwiseError], says: str
) -> None:
    deployment.add_engine(ScriptedCore())
    server = encoder_of(deployment, ScriptedEncoder())
    with connected(deployment, server) as client:
        with pytest.raises(error, match=says):
            client.chat(chat(b"good", file), max_tokens=1)
        assert client.chat(chat(b"good"), max_tokens=1).token_ids


def test_images_are_encoded_for_who_counts_their_tokens_and_for_prefixes(deployment: Deployment) -> None:
    deployment.add_engine(ScriptedCore())
    encoder = ScriptedEncoder()
    server = encoder_of(deployment, encoder)
    with connected(deployment, server) as client:
        found = asyncio.run(client.aencode_images(files_of(b"abc", b"de", b"abc")))
        assert [image.tokens.tolist() for image in found] == [[3], [2], [3]]
        with pytest.raises(InvalidRequestError, match="the image is bad"):
            asyncio.run(client.aencode_images(files_of(b"abc", b"bad")))
        told = client.chat(chat(b"abc", b"de"), max_tokens=1)
        assert client.find_chat_prefix(chat(b"abc", b"de"))["tokens"] == told.usage.prompt_tokens
        with pytest.raises(InvalidRequestError, match="the image is bad"):
            client.find_chat_prefix(chat(b"bad"))
        encoder.free.clear()
        closing = threading.Thread(target=lambda: (eventually(lambda: b"last" in encoder.seen), client.close()))
        closing.start()
        with pytest.raises(RequestAbortedError, match="closed"):
            asyncio.run(client.aencode_images(files_of(b"last")))
        closing.join()
        encoder.free.set()


def test_a_client_holds_so_many_bytes_of_images_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_calls, "MOST_HELD_BYTES", 10)
    asked: list[Any] = []
    calls = ImageCalls(lambda deliver: deliver(("tcp://a",)), asking(asked), lambda: 0)
    outcomes: list[Any] = []
    calls.encode(files_of(b"123456"), outcomes.append)
    for _ in range(2):  # the same file again is held again: it came with another call
        calls.encode(files_of(b"123456"), outcomes.append)
    assert [type(each) for each in outcomes] == [OverloadedError, OverloadedError]
    calls.encode(files_of(b"12", b"34"), outcomes.append)
    assert len(outcomes) == 2
    asked[1](InvalidRequestError("bad"))  # of the last call: its bytes are free
    calls.encode(files_of(b"1234"), outcomes.append)
    assert isinstance(outcomes[2], InvalidRequestError)
    assert len(outcomes) == 3
    asked[0](made_of(np.zeros((1, 1), np.float32)))
    calls.encode(files_of(b"123456"), outcomes.append)
    assert len(outcomes) == 4


def test_a_client_keeps_so_many_bytes_of_what_stands_for_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a call no more than a prompt may have; of all, those that are being served included, no more than there is
    room for. What is let go of is free again."""
    monkeypatch.setattr(prompt_items, "MAX_EMBED_BYTES", 24)
    monkeypatch.setattr(image_calls, "MOST_KEPT_BYTES", 32)
    asked: list[Any] = []
    outcomes: list[Any] = []
    served = 0
    calls = ImageCalls(lambda deliver: deliver(tuple("abcdef")), asking(asked), lambda: served)

    def encode(*sizes: int) -> Any:
        """A call of as many images, each with so many numbers."""
        calls.encode(files_of(*[bytes([len(outcomes), place]) for place in range(len(sizes))]), outcomes.append)
        answers, asked[:] = asked.copy(), []
        for size, answer in zip(sizes, answers, strict=True):
            answer(made_of(np.zeros((1, size), np.float32)))
        return outcomes[-1]

    assert len(encode(2, 2, 2)) == 3
    told = encode(2, 3, 2)
    assert isinstance(told, InvalidRequestError)
    assert "have 28 bytes; at most 24" in str(told)
    served = 16
    assert len(encode(2, 2)) == 2
    told = encode(2, 2, 1)
    assert isinstance(told, OverloadedError)
    assert "32 bytes of what stands for images are kept already" in str(told)
    served = 0
    assert len(encode(2, 2, 2)) == 3


def test_a_video_goes_to_its_encoder_and_to_its_engine_in_parts(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder_call, "PART_BYTES", 4)
    taken = requests_to(deployment)
    encoder = ScriptedEncoder()
    server = encoder_of(deployment, encoder)
    with connected(deployment, server) as client:
        assert client.chat(film(b"a short video"), max_tokens=1).token_ids
        client.chat(film(b"a short video", fps=0.5), max_tokens=1)
        outcomes = client.stats()["encoders"]["encoder-0"]
    assert encoder.seen == [b"a short video"] * 2
    assert [request.embeds[0].values[0, 0] for request in taken] == [ord("a"), ord("a") + 0.5]
    assert taken[0].embeds[0].values.shape == (13, 1 << 18)
    assert not outcomes["refused"]


def test_a_call_that_is_cancelled_ends_what_is_encoded_for_it_alone(deployment: Deployment) -> None:
    deployment.add_engine(ScriptedCore())
    encoder = ScriptedEncoder()
    server = encoder_of(deployment, encoder)
    with connected(deployment, server) as client:
        encoder.free.clear()
        streams = [client.stream_chat(film(b"long video"), max_tokens=1) for _ in range(2)]
        eventually(lambda: encoder.seen)
        streams[0].cancel()
        eventually(lambda: client.stats()["encoders"]["encoder-0"]["waiting"] == 1)
        assert len(server._jobs) == 1  # the other one wants it
        streams[1].cancel()
        eventually(lambda: not len(server._jobs))
        encoder.free.set()
        assert client.chat(chat(b"image"), max_tokens=1).token_ids
        assert encoder.steps.count(b"long video") <= 2


def test_an_image_that_nobody_wants_any_more_leaves_its_encoder_to_others() -> None:
    asked: list[Any] = []
    ended: list[str] = []
    calls = ImageCalls(
        lambda deliver: deliver(("a",)),
        lambda endpoint, call: (asked.append(call), lambda: ended.append(call.file.data.decode()))[1],
        lambda: 0,
    )
    outcomes: list[Any] = []
    ends = [calls.encode(files_of(*each), outcomes.append) for each in ((b"a", b"b"), (b"b", b"c"), (b"d",))]
    assert [each.file.data for each in asked] == [b"a", b"b"]
    ends[0]()
    assert ended == ["a"]  # the other call wants the other one
    assert [each.file.data for each in asked] == [b"a", b"b", b"c"]
    ends[2]()
    ends[0]()
    asked[2](made_of(np.zeros((1, 1), np.float32)))
    assert len(asked) == 3
    asked[1](made_of(np.ones((1, 1), np.float32)))
    assert [each.embeds[0, 0] for each in outcomes[0]] == [1.0, 0.0]
    assert (calls._held, calls._gathered, dict(calls._images), dict(calls._asked)) == (0, 0, {}, {})


def test_metrics_and_status_tell_what_encoders_did(deployment: Deployment) -> None:
    from prometheus_client import CollectorRegistry
    from rich.console import Console

    deployment.add_engine(ScriptedCore())
    server = encoder_of(deployment, ScriptedEncoder())
    with connected(deployment, server) as client:
        client.chat(chat(b"abc", b"de"), max_tokens=1)
        client.chat(chat(b"abc"), max_tokens=1)
        with pytest.raises(InvalidRequestError):
            client.chat(chat(b"bad"), max_tokens=1)
        eventually(lambda: client.stats()["encoders"]["encoder-0"]["refused"])
        stats = client.stats()
    registry = CollectorRegistry()
    registry.register(DeploymentMetrics(stats))

    def sample(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"headwise_encoder_{name}", {"encoder": "encoder-0", **labels})

    outcomes = [sample("images_total", outcome=each) for each in ("encoded", "refused", "overloaded", "malformed")]
    assert outcomes == [3, 1, 0, 0]
    assert [sample("cache_queries_total", outcome=each) for each in ("hits", "misses")] == [1, 3]
    assert (sample("images_waiting"), sample("cache_images"), sample("cache_bytes")) == (0, 3, 12)
    console = Console(width=140)
    with console.capture() as shown:
        console.print(render(stats))
    (line,) = (line for line in shown.get().splitlines() if "encoder-0" in line)
    assert line.split()[:4] == ["encoder-0", "0", "3", "1"]


def reporting_of(deployment: Deployment, name: str) -> Reporting:
    return Reporting(f"tcp://{deployment.address}", deployment.keys.secret, name, keys=deployment.keys.own)


def first_choice(endpoint: str, other: str) -> bytes:
    """A file for which the encoder at this endpoint is asked first."""
    files = (bytes(length) for length in range(1, 200))
    return next(file for file in files if in_order(ImageFile(file).digest, (endpoint, other))[0] == endpoint)


def test_an_encoder_is_asked_for_two_images_of_a_client_at_a_time_and_every_encoder_is() -> None:
    asked: list[tuple[str, Any]] = []
    calls = ImageCalls(
        lambda deliver: deliver(("a", "b")), lambda at, call: (asked.append((at, call)), lambda: None)[1], lambda: 0
    )
    ended: list[Any] = []
    calls.encode(files_of(*map(bytes, range(1, 30))), ended.append)
    assert sorted(at for at, _ in asked) == ["a", "a", "b", "b"]
    for at in range(29):
        asked[at][1](made_of(np.zeros((1, 1), np.float32)))
    assert len(ended[0]) == 29
    assert {at for at, _ in asked} == {"a", "b"}
    assert not calls._queues
    assert not calls._images


def test_images_are_asked_for_beside_videos_that_take_long() -> None:
    asked: list[Any] = []
    ended: list[Any] = []
    calls = ImageCalls(lambda deliver: deliver(("a",)), asking(asked), lambda: 0)
    for number in range(4):
        calls.encode([ImageFile(bytes([number]), is_video=True)], ended.append)
    calls.encode(files_of(b"x", b"y", b"z"), ended.append)
    assert [(each.file.data, each.file.is_video) for each in asked] == [
        (b"\x00", True), (b"\x01", True), (b"x", False), (b"y", False),
    ]  # fmt: skip
    asked[2](made_of(np.zeros((1, 1), np.float32)))
    assert asked[-1].file.data == b"z"
    asked[0](made_of(np.zeros((1, 1), np.float32)))
    assert asked[-1].file.data == b"\x02"
    for each in (asked[1], asked[3], *asked[4:]):
        each(made_of(np.zeros((1, 1), np.float32)))
    asked[-1](made_of(np.zeros((1, 1), np.float32)))
    assert len(ended) == 5
    assert not calls._queues
    assert not calls._asked


def test_the_images_of_a_lost_encoder_go_to_another_one(deployment: Deployment) -> None:
    deployment.add_engine(ScriptedCore())
    encoder, lost = ScriptedEncoder(), HangingEncoder(reporting_of(deployment, "encoder-1"))
    server = encoder_of(deployment, encoder)
    with Client(deployment.address) as client:
        eventually(lambda: len(client.stats()["encoders"]) == 2)
        file = first_choice(lost.endpoint, server.endpoint)
        stream = client.stream_chat(chat(file), max_tokens=1)
        assert lost.told() == file
        lost.kill()
        assert len(stream.read().token_ids) == 1
        assert encoder.seen == [file]
        eventually(lambda: list(client.stats()["encoders"]) == ["encoder-0"])
    server.stop()


def test_a_lost_encoder_that_was_the_last_one_is_named(deployment: Deployment) -> None:
    deployment.add_engine(ScriptedCore())
    lost = HangingEncoder(reporting_of(deployment, "encoder-0"))
    with Client(deployment.address) as client:
        eventually(lambda: client.stats()["encoders"])
        stream = client.stream_chat(chat(b"abc"), max_tokens=1)
        assert lost.told() == b"abc"
        lost.kill()
        with pytest.raises(NotReadyError, match=f"the encoder of images at {lost.endpoint} is gone.*started again"):
            stream.read()
        eventually(lambda: not client.stats()["encoders"])
        with pytest.raises(NotReadyError, match="no encoder of images is ready"):
            client.chat(chat(b"abc"), max_tokens=1)


def test_a_call_that_is_cancelled_while_its_image_is_encoded_is_never_routed(deployment: Deployment) -> None:
    deployment.add_engine(ScriptedCore())
    encoder = ScriptedEncoder()
    server = encoder_of(deployment, encoder)
    with connected(deployment, server) as client:
        encoder.free.clear()
        stream = client.stream_chat(chat(b"abc"), max_tokens=1)
        eventually(lambda: encoder.seen)
        stream.cancel()
        encoder.free.set()
        assert client.chat(chat(b"other"), max_tokens=1).token_ids
        assert client.stats()["scheduler"]["routed"] == 1
        encoder.free.clear()
        waiting = client.stream_chat(chat(b"more"), max_tokens=1)
        eventually(lambda: len(encoder.seen) == 3)
        client.close()
        with pytest.raises(RequestAbortedError):
            waiting.read()
        encoder.free.set()


def test_who_asks_while_no_encoder_serves_waits_for_one(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoders, "WAIT_S", 60.0)
    deployment.add_engine(ScriptedCore())
    with Client(deployment.address) as client:
        stream = client.stream_chat(chat(b"abc"), max_tokens=1)
        eventually(lambda: deployment.scheduler._encoders._known._waiting)
        server = encoder_of(deployment, ScriptedEncoder())
        assert len(stream.read().token_ids) == 1
    server.stop()


def test_an_overloaded_encoder_is_told_as_overload(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_queue, "MAX_WAITING", 0)
    deployment.add_engine(ScriptedCore())
    server = encoder_of(deployment, ScriptedEncoder())
    says = "images wait to be encoded already"
    with connected(deployment, server) as client, pytest.raises(OverloadedError, match=says):
        client.chat(chat(b"abc"), max_tokens=1)


def test_an_encoder_of_another_deployment_is_not_asked(deployment: Deployment) -> None:
    server = encoder_of(deployment, ScriptedEncoder(), secret=f"not-{SECRET}")
    with Client(deployment.address) as client:
        eventually(lambda: client.stats()["scheduler"]["strangers"])
        assert client.stats()["encoders"] == {}
        with pytest.raises(NotReadyError, match="no encoder of images is ready"):
            client.chat(chat(b"abc"), max_tokens=1)
    server.stop()


def test_a_deployment_without_encoders_says_what_enables_them() -> None:
    deployment = Deployment()
    with Client(deployment.address) as client, pytest.raises(InvalidRequestError, match="images are not enabled here"):
        client.chat(chat(b"abc"), max_tokens=1)
    with Client(deployment.address) as client:
        for ask in (
            lambda: client.find_chat_prefix(chat(b"abc")),
            lambda: asyncio.run(client.aencode_images(files_of(b"abc"))),
        ):
            with pytest.raises(InvalidRequestError, match="images are not enabled here"):
                ask()
    deployment.close()


def test_an_encrypted_deployment_s_encoder_wants_keys_and_relayed_clients_reach_it() -> None:
    from headwise import EngineConfig

    keys = replace(Keys.generate(EngineConfig(secure=True)), secret=SECRET)
    deployment = Deployment(keys=keys, without_images="")
    deployment.add_engine(ScriptedCore())
    encoder = ScriptedEncoder()
    server = encoder_of(deployment, encoder)
    stranger = Peer(server)
    stranger.send(asked_of(1, b"abc"))
    with Client(deployment.address, keys=keys.own, relay="always") as client:
        eventually(lambda: client.stats()["encoders"])
        assert client.chat(chat(b"abcd"), max_tokens=1).token_ids
        assert client.stats()["scheduler"]["relay"]["relayed"] >= 2
    assert encoder.seen == [b"abcd"]
    assert not stranger.socket.poll(0)
    stranger.close()
    server.stop()
    deployment.close()


def test_an_encoder_is_told_whose_keys_there_are() -> None:
    from headwise import EngineConfig

    news = [Users({client_key("sk-new-00005"): None})]
    keys = replace(Keys.generate(EngineConfig(secure=True)), secret=SECRET)
    deployment = Deployment(keys=keys, without_images="", users_source=lambda: news.pop() if news else None)
    deployment.add_engine(ScriptedCore())
    server = encoder_of(deployment, ScriptedEncoder())
    eventually(lambda: server._users.users != keys.users)
    with Client(deployment.address, keys=ClientKeys(public_key(keys.curve), "sk-new-00005")) as client:
        assert client.chat(chat(b"abcd"), max_tokens=1).token_ids
    server.stop()
    deployment.close()
