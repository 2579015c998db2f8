from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from support.index.model import Said, stated

from headwise.cache_controller.kv_events import KVEvents
from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.cache_controller.radix_tree import ROOT, RadixTree
from headwise.cache_controller.stored_blocks import AUDIT_BLOCKS, AUDIT_S, StoredBlocks
from headwise.cache_controller.windows import GroupWindows

PATH = [bytes([i]) * 16 for i in range(6)]
OTHER = [bytes([100 + i]) * 16 for i in range(4)]


class Stored:
    """What storage is known to have, with two groups: a full one, and one that sees two blocks."""

    def __init__(self, max_nodes: int = 100) -> None:
        self.tree = RadixTree(2, 8, 8, has_storage=True)
        self.events = KVEvents(self.tree, GroupWindows([FULL, HeadPolicy(window=9)], 4))
        self.blocks = StoredBlocks(self.tree, self.events, max_nodes)
        self.said: Said = {}

    def known(self, path=PATH) -> str:
        """Of each block of a path, what is said of storage: ``-`` that it is not there, else whether it resumes."""
        stated(self.events.drain(), self.said)
        assert self.said == stated(self.events.everything())
        self.tree.check_integrity()
        return "".join(str(self.said.get(("storage", block_hash), "-")) for block_hash in path)


@pytest.fixture
def stored() -> Stored:
    return Stored()


def rows(*held: str) -> np.ndarray:
    """By group, which blocks of a path are there."""
    return np.array([[c == "x" for c in group] for group in held]).T


def test_what_a_question_finds_is_said_with_the_depths_that_can_be_resumed(stored) -> None:
    stored.blocks.found(PATH, rows("xxxxx-", "xx-xxx"))
    assert stored.known() == "11001-"


def test_what_a_question_finds_gone_is_taken_back(stored) -> None:
    stored.blocks.found(PATH, rows("xxxxxx", "xxxxxx"))
    stored.blocks.found(PATH, rows("xxx---", "-xx---"))
    assert stored.known() == "001---"
    assert set(stored.tree.nodes) == set(PATH[:3])
    stored.blocks.found(PATH, rows("------", "------"))
    assert stored.known() == "------"
    assert len(stored.tree.nodes) == len(stored.blocks) == 0


def test_what_was_put_is_said_once_the_full_groups_are_there(stored) -> None:
    nodes = np.array(stored.tree.insert(PATH[:3], -1, 0))
    stored.blocks.put(nodes, np.array([1, 1, 1]))
    assert stored.known() == "------"
    stored.blocks.put(nodes[[0, 1, 1, 2]], np.array([0, 0, 1, 0]))
    assert stored.known() == "111---"


def test_a_miss_takes_back_what_depends_on_the_block_and_one_of_the_unknown_nothing(stored) -> None:
    stored.blocks.found(PATH, rows("xxxxxx", "xxxxxx"))
    stored.blocks.missed(PATH[3], 1)
    assert stored.known() == "111001"
    stored.blocks.missed(PATH[3], 0)
    assert stored.known() == "111-01"
    stored.blocks.missed(OTHER[0], 0)
    assert stored.known() == "111-01"


def test_a_reset_takes_all_back(stored) -> None:
    stored.blocks.found(PATH, rows("xxxxxx", "xxxxxx"))
    stored.known()
    stored.blocks.reset()
    assert stored.known() == "------"
    assert stored.blocks.begin_audit(1e9) == []


def test_the_least_recently_confirmed_is_forgotten_of_a_path_the_deepest_first() -> None:
    stored = Stored(max_nodes=6)
    everything = rows("xxxx", "xxxx")
    stored.blocks.found(PATH[:4], everything)
    stored.blocks.found(OTHER, everything)
    assert (stored.known(), stored.known(OTHER)) == ("11----", "1111")
    stored.blocks.found(PATH[:2], everything[:2])
    stored.blocks.found(PATH[:3], everything[:3])
    assert (stored.known(), stored.known(OTHER)) == ("111---", "111-")
    assert len(stored.tree.nodes) == 6


# ---- audits ----


def test_an_audit_asks_for_the_least_recently_confirmed_and_not_too_often(stored) -> None:
    stored.blocks.found(PATH, rows("xxxxxx", "xxxxxx"))
    stored.blocks.found(OTHER, rows("xxxx", "xxxx"))
    asked = stored.blocks.begin_audit(10.0)
    assert asked == [*reversed(PATH), *reversed(OTHER)]
    assert stored.blocks.begin_audit(99.0) == [], "the last one is not over"
    stored.blocks.end_audit(np.ones((10, 2), dtype=np.bool_))
    assert stored.blocks.begin_audit(10.0 + 0.9 * AUDIT_S) == []
    assert len(stored.blocks.begin_audit(10.0 + AUDIT_S)) == 10


def test_audits_are_bounded_and_come_to_all_in_turn() -> None:
    stored, many = Stored(max_nodes=10_000), [i.to_bytes(16, "big") for i in range(AUDIT_BLOCKS)]
    stored.blocks.found(many, np.ones((AUDIT_BLOCKS, 2), dtype=np.bool_))
    asked = []
    for now in (10.0, 20.0):
        asked.append(stored.blocks.begin_audit(now))
        stored.blocks.end_audit(np.ones((len(asked[-1]), 2), dtype=np.bool_))
    assert [len(hashes) for hashes in asked] == [AUDIT_BLOCKS // 2] * 2
    assert set(asked[0]) | set(asked[1]) == set(many)


def test_what_an_audit_finds_gone_is_taken_back(stored) -> None:
    stored.blocks.found(PATH, rows("xxxxxx", "xxxxxx"))
    assert stored.known() == "111111"
    asked = stored.blocks.begin_audit(10.0)
    stored.blocks.end_audit(np.array([[block_hash != PATH[4], block_hash != PATH[1]] for block_hash in asked]))
    assert stored.known() == "1001-1"


def test_an_audit_doubts_nothing_that_came_after_it_asked_and_finds_nothing_new(stored) -> None:
    stored.blocks.found(PATH, rows("xxxxxx", "xxxx--"))
    asked = stored.blocks.begin_audit(10.0)
    nodes = np.array([stored.tree.nodes[PATH[4]]])
    stored.blocks.put(nodes, np.array([1]))
    stored.blocks.end_audit(np.array([[True, block_hash in PATH[:4]] for block_hash in asked]))
    assert stored.known() == "111110"
    stored.blocks.begin_audit(20.0)
    stored.blocks.missed(PATH[0], 0)
    stored.blocks.end_audit(np.ones((6, 2), dtype=np.bool_))
    assert stored.known() == "-11110"


def test_an_audit_that_was_under_way_at_a_reset_says_nothing(stored) -> None:
    stored.blocks.found(PATH, rows("xxxxxx", "xxxxxx"))
    stored.blocks.begin_audit(10.0)
    stored.blocks.reset()
    stored.blocks.found(OTHER, rows("xxxx", "xxxx"))
    assert stored.blocks.begin_audit(20.0) == [], "its answer is yet to come"
    stored.blocks.end_audit(np.zeros((6, 2), dtype=np.bool_))
    assert (stored.known(), stored.known(OTHER)) == ("------", "1111")
    assert len(stored.blocks.begin_audit(30.0)) == 4


# ---- anything, in any order ----


class StoredMachine(RuleBasedStateMachine):
    """Storage says and loses what it will: what is said of it is what is known, and resumes where that suffices."""

    policies: ClassVar = (FULL, HeadPolicy(window=9, sink=5))

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree(2, 8, 8, has_storage=True, num_top=2)
        self.events = KVEvents(self.tree, GroupWindows(self.policies, 4))
        self.blocks = StoredBlocks(self.tree, self.events, max_nodes=9)
        self.said: Said = {}
        self.now = 1e9
        self.asked = 0

    paths = st.tuples(st.integers(1, 6), st.integers(0, 5), st.integers(0, 2))

    def path(self, shape: tuple[int, int, int]) -> list[bytes]:
        length, shared, tail = shape
        return [PATH[i] if i < shared else bytes([20 * tail + i, shared]) * 8 for i in range(length)]

    @rule(shape=paths, bits=st.integers(0, (1 << 12) - 1), all_there=st.booleans())
    def find(self, shape, bits: int, all_there: bool) -> None:
        path = self.path(shape)
        held = [[all_there or bool(bits >> (2 * i + g) & 1) for g in range(2)] for i in range(len(path))]
        self.blocks.found(path, np.array(held))

    @rule(shape=paths, group=st.integers(0, 1))
    def miss(self, shape, group: int) -> None:
        self.blocks.missed(self.path(shape)[-1], group)

    @rule()
    def begin_audit(self) -> None:
        self.now += 2 * AUDIT_S
        self.asked = len(self.blocks.begin_audit(self.now)) or self.asked

    @rule(bits=st.integers(0, (1 << 18) - 1))
    def end_audit(self, bits: int) -> None:
        if self.blocks.is_auditing:
            self.blocks.end_audit(
                np.array([[bool(bits >> (2 * i + g) & 1) for g in range(2)] for i in range(self.asked)])
            )

    @rule()
    def reset(self) -> None:
        self.blocks.reset()

    @rule()
    def drain(self) -> None:
        stated(self.events.drain(), self.said)
        assert self.said == stated(self.events.everything())
        assert len(self.blocks) <= 9
        known = {node for node in self.tree.nodes.values() if self.tree.storage.held[node].any()}
        assert known == set(self.blocks._confirmed)
        self.tree.check_integrity()
        for block_hash, node in self.tree.nodes.items():
            path = [node]
            while self.tree.parents[path[0]] != ROOT:
                path.insert(0, self.tree.parents[path[0]])
            held = self.tree.storage.held[path]
            resident = any(policy.is_full for policy in self.policies) is False or held[-1, 0]
            resumable = resident and all(
                held[token // 4, group]
                for group, policy in enumerate(self.policies)
                if not policy.is_full
                for token in range(4 * len(path))
                if token < policy.sink or 4 * len(path) - token < policy.window
            )
            places = [self.said.get((tier, block_hash)) for tier in ("device", "host", "storage")]
            assert (max((place for place in places if place is not None), default=None)) == (
                int(resumable) if resident else None
            )

    def teardown(self) -> None:
        self.drain()


class WindowsMachine(StoredMachine):
    """No group sees everything."""

    policies = (HeadPolicy(window=6, sink=3), HeadPolicy(window=9))


class ShortWindowsMachine(StoredMachine):
    """No window reaches further than a block."""

    policies = (HeadPolicy(window=4), HeadPolicy(window=2, sink=1))


@pytest.mark.parametrize("machine", [StoredMachine, WindowsMachine, ShortWindowsMachine])
def test_what_is_said_of_storage_is_what_is_known(machine) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=30))
