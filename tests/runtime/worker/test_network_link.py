"""What a stage of a pipeline gives the next one, over real sockets."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from support.waiting import PATIENCE_S

from headwise.errors import EngineDiedError
from headwise.runtime.ops.select import make_ops
from headwise.runtime.ops.stage_links import HostIncoming, HostOutgoing, StageLostError
from headwise.runtime.worker.network_link import NetworkLink
from headwise.sockets import context
from headwise.sockets.curve import ClientKeys, ServerKeys, client_key, new_secret, public_key

SECRET = new_secret()
SERVER = ServerKeys(SECRET, frozenset((client_key("ours"),)))
CLIENT = ClientKeys(public_key(SECRET), "ours")
ANYWHERE = "tcp://127.0.0.1:*"


@contextmanager
def linked(
    endpoint: str = ANYWHERE, *, is_encrypted: bool = False, timeout_s: float = PATIENCE_S
) -> Iterator[tuple[NetworkLink, NetworkLink]]:
    """Of a stage and the next one."""
    opened = context.num_open()
    with closing(NetworkLink(PATIENCE_S)) as before, closing(NetworkLink(timeout_s)) as after:
        after.listen(endpoint, SERVER if is_encrypted else None)
        before.connect(after.endpoint, CLIENT if is_encrypted else None)
        yield before, after
    assert context.num_open() == opened


def part(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_arrays_come_as_they_were_sent_and_in_order(is_encrypted: bool) -> None:
    sent = [part(seed, rows, 37) for seed, rows in enumerate((3, 1, 1, 512, 2))]
    with linked(is_encrypted=is_encrypted) as (before, after):
        for array in sent:
            before.send(array)
        for array in sent:
            received = after.receive(array.shape)
            np.testing.assert_array_equal(received, array)
            received[:] = 0  # the caller's own


def test_an_array_may_change_once_it_is_sent() -> None:
    with linked() as (before, after):
        array = part(0, 300, 300)
        before.send(array)
        array[:] = np.nan
        np.testing.assert_array_equal(after.receive((300, 300)), part(0, 300, 300))


def test_a_part_of_an_array_is_sent_alone() -> None:
    whole = part(0, 6, 8)
    with linked() as (before, after):
        before.send(whole[::2, 1:5])
        np.testing.assert_array_equal(after.receive((3, 4)), whole[::2, 1:5])


def test_large_arrays_come_whole() -> None:
    with linked(is_encrypted=True) as (before, after):
        array = part(0, 2048, 4096)  # 32 MiB
        before.send(array)
        np.testing.assert_array_equal(after.receive(array.shape), array)


def test_ranks_of_one_machine_are_linked_by_a_file(tmp_path: Path) -> None:
    with linked(f"ipc://{tmp_path}/link") as (before, after):
        assert after.endpoint == f"ipc://{tmp_path}/link"
        before.send(part(0, 2, 3))
        np.testing.assert_array_equal(after.receive((2, 3)), part(0, 2, 3))


def test_what_is_sent_before_the_next_stage_listens_waits_for_it(tmp_path: Path) -> None:
    with closing(NetworkLink(PATIENCE_S)) as before, closing(NetworkLink(PATIENCE_S)) as after:
        before.connect(f"ipc://{tmp_path}/link", None)
        before.send(part(0, 2, 3))
        after.listen(f"ipc://{tmp_path}/link", None)
        np.testing.assert_array_equal(after.receive((2, 3)), part(0, 2, 3))


def test_stages_between_receive_and_send() -> None:
    """Each on its own link, of which it has both ends."""
    links = [NetworkLink(PATIENCE_S) for _ in range(3)]
    for before, after in pairwise(links):
        after.listen(ANYWHERE, None)
        before.connect(after.endpoint, None)
    for turn in range(20):
        links[0].send(part(turn, 4, 5))
        links[1].send(links[1].receive((4, 5)) + 1)
    for turn in range(20):
        np.testing.assert_array_equal(links[2].receive((4, 5)), part(turn, 4, 5) + 1)
    for link in links:
        link.close()


def test_tensors_of_a_step_are_those_of_the_stage_before() -> None:
    ops = make_ops("numpy")
    with linked() as (before, after):
        sender, receiver = HostOutgoing(ops, before), HostIncoming(ops, after, 16)
        for rows in (5, 1, 64):
            sender.send(ops.tensor(part(rows, rows, 16)))
            received = receiver.receive(rows)
            np.testing.assert_array_equal(ops.numpy(received), part(rows, rows, 16))
            received[:] = 0  # the caller may overwrite it


def test_a_stage_that_sends_nothing_in_time_is_told() -> None:
    with linked(timeout_s=0.2) as (before, after):
        with pytest.raises(StageLostError, match=r"the stage of the pipeline before this one sent nothing for 0\.2 s"):
            after.receive((1, 4))
        assert issubclass(StageLostError, EngineDiedError)
        before.send(part(0, 1, 4))
        with pytest.raises(StageLostError, match="in another step: expected were 16 bytes in round 2"):
            after.receive((1, 4))  # of the step that it was too late for


@pytest.mark.parametrize("shape", [(2, 4), (1, 3), (0, 4), (1, 5)])
def test_an_array_of_another_size_is_of_another_step(shape: tuple[int, ...]) -> None:
    with linked() as (before, after):
        before.send(part(0, *shape))
        with pytest.raises(StageLostError, match="is in another step: expected were 16 bytes in round 1"):
            after.receive((1, 4))


def test_a_stage_that_skipped_a_step_is_told() -> None:
    with linked() as (before, after):
        before._next.sent = 1
        before.send(part(0, 1, 4))
        with pytest.raises(StageLostError, match="in another step: expected were 16 bytes in round 1"):
            after.receive((1, 4))


@pytest.mark.parametrize("frames", [[b"?"], [b"\1" + bytes(7)], [b"\1" + bytes(7), bytes(16), b"more"], [b"", b""]])
def test_what_is_no_array_is_told(frames: list[bytes]) -> None:
    with linked() as (before, after):
        before._next.socket.send_multipart(frames)
        with pytest.raises(StageLostError, match="expected were 16 bytes in round 1"):
            after.receive((1, 4))


def test_who_has_no_key_sends_nothing() -> None:
    with linked(is_encrypted=True) as (before, after):
        strangers = [NetworkLink(PATIENCE_S) for _ in range(3)]
        for stranger, keys in zip(
            strangers,
            [ClientKeys(public_key(SECRET), "others"), ClientKeys(public_key(new_secret()), "ours"), None],
            strict=True,
        ):
            stranger.connect(after.endpoint, keys)
            stranger.send(part(1, 2, 3))
        before.send(part(0, 2, 3))
        np.testing.assert_array_equal(after.receive((2, 3)), part(0, 2, 3))
        assert not after._before.socket.poll(200, zmq.POLLIN)
        for stranger in strangers:
            stranger.close()


def test_a_link_is_closed_as_often_as_one_likes_also_before_it_is_one() -> None:
    opened = context.num_open()
    links = [NetworkLink(1.0) for _ in range(3)]
    links[0].listen(ANYWHERE, SERVER)
    links[1].connect(links[0].endpoint, CLIENT)
    links[1].send(part(0, 4, 4))  # which nobody takes
    for link in [*links, *links]:
        link.close()
    assert context.num_open() == opened


def process_main(endpoint: str, keys: ClientKeys) -> None:
    link = NetworkLink(PATIENCE_S)
    link.connect(endpoint, keys)
    for turn in range(50):
        link.send(part(turn, 3, 128))
    back = NetworkLink(PATIENCE_S)
    back.listen(ANYWHERE, None)
    link.send(np.array([int(back.endpoint.rpartition(":")[2])], np.float32))
    back.receive((1,))  # all has come
    for each in (link, back):
        each.close()


def test_a_stage_in_a_process_of_its_own() -> None:
    process: Any
    with closing(NetworkLink(PATIENCE_S)) as after, closing(NetworkLink(PATIENCE_S)) as back:
        after.listen(ANYWHERE, SERVER)
        process = multiprocessing.get_context("spawn").Process(target=process_main, args=(after.endpoint, CLIENT))
        process.start()
        for turn in range(50):
            np.testing.assert_array_equal(after.receive((3, 128)), part(turn, 3, 128))
        back.connect(f"tcp://127.0.0.1:{int(after.receive((1,))[0])}", None)
        back.send(np.zeros(1, np.float32))
        process.join(PATIENCE_S)
    assert process.exitcode == 0
