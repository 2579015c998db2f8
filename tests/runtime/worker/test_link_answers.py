"""Both ways of the link between two stages: what one sends, and what the other answers."""

from __future__ import annotations

import numpy as np
import pytest
from support.waiting import PATIENCE_S

from headwise.errors import EngineDiedError
from headwise.runtime.worker.network_link import NetworkLink
from headwise.sockets.curve import ClientKeys, ServerKeys, client_key, new_secret, public_key

SECRET = new_secret()
SERVER = ServerKeys(SECRET, frozenset((client_key("ours"),)))
CLIENT = ClientKeys(public_key(SECRET), "ours")


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_what_is_answered_comes_back_in_order_beside_what_is_sent(is_encrypted: bool) -> None:
    before, following = NetworkLink(PATIENCE_S), NetworkLink(PATIENCE_S)
    following.listen("tcp://127.0.0.1:*", SERVER if is_encrypted else None)
    before.connect(following.endpoint, CLIENT if is_encrypted else None)
    arrays = [np.arange(count, dtype=np.float32) for count in (3, 1, 4)]
    for array in arrays:
        before.send(array)
    for array in arrays:
        np.testing.assert_array_equal(following.receive(array.shape), array)
        following.answer(array + 1)
    for array in arrays:
        np.testing.assert_array_equal(before.answered(array.shape), array + 1)
    before.close()
    following.close()


def test_an_answer_that_never_comes_and_one_of_another_size_are_told_of() -> None:
    before, following = NetworkLink(0.05), NetworkLink(PATIENCE_S)
    following.listen("tcp://127.0.0.1:*", None)
    before.connect(following.endpoint, None)
    with pytest.raises(EngineDiedError, match="the stage of the pipeline behind this one sent nothing"):
        before.answered((1,))
    patient = NetworkLink(PATIENCE_S)
    other = NetworkLink(PATIENCE_S)
    other.listen("tcp://127.0.0.1:*", None)
    patient.connect(other.endpoint, None)
    patient.send(np.zeros(1, np.float32))
    other.receive((1,))
    other.answer(np.zeros(2, np.float32))
    with pytest.raises(EngineDiedError, match="behind this one is in another step: expected were 4 bytes in round 1"):
        patient.answered((1,))
    for link in (before, following, patient, other):
        link.close()
