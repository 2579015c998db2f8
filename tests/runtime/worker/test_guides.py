"""What may come next in an output of some form, as the worker that samples keeps it."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.tiny_models import byte_level_tokenizer, write_tokenizer_directory

from headwise.errors import InvalidRequestError
from headwise.runtime.loader.grammar import Vocabulary, check_grammar
from headwise.runtime.loader.tokenizer import Tokenizer
from headwise.runtime.protocol.batch import KnownTokens, NewSequence
from headwise.runtime.protocol.guided import Guided
from headwise.runtime.protocol.request import SamplingParams
from headwise.runtime.worker import guides as guides_module
from headwise.runtime.worker.guides import Guides
from headwise.runtime.worker.logit_editor import LogitEditor

VOCAB = 300
"""More than the tokenizer has."""
END = 2
AB = Guided(regex="ab(c|d)?")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = write_tokenizer_directory(
        tmp_path_factory.mktemp("tokenizer"), byte_level_tokenizer(), {"eos_token": "<|im_end|>"}
    )
    return Tokenizer.from_directory(Path(directory))


@pytest.fixture
def loads() -> list[str]:
    """The names of the threads that loaded the vocabulary."""
    return []


@pytest.fixture
def guides(tokenizer: Tokenizer, loads: list[str]) -> Guides:
    def load() -> Vocabulary:
        loads.append(threading.current_thread().name)
        return Vocabulary(tokenizer, VOCAB)

    guides = Guides(load)
    yield guides
    guides.close()


def allowed(mask: np.ndarray | None) -> set[int]:
    assert mask is not None
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def test_only_what_the_form_allows_may_come_and_the_end_where_it_may_end(tokenizer: Tokenizer, guides: Guides) -> None:
    a, b, c, d = (tokenizer.encode(letter)[0] for letter in "abcd")
    guide = guides.open(AB, [])
    found = [allowed(guide.mask())]
    for token in (a, b, c):
        guides.sampled([(guide, [token])])
        found.append(allowed(guide.mask()))
    assert found == [{a}, {b}, {c, d, END}, {END}]


def test_a_sequence_goes_on_behind_its_output(tokenizer: Tokenizer, guides: Guides) -> None:
    assert allowed(guides.open(AB, tokenizer.encode("ab")).mask()) == {*tokenizer.encode("cd"), END}


def test_sequences_of_one_form_share_what_was_compiled_and_nothing_else(
    tokenizer: Tokenizer, guides: Guides, loads: list[str]
) -> None:
    one, other = guides.open(AB, []), guides.open(AB, [])
    guides.sampled([(one, tokenizer.encode("a"))])
    assert allowed(one.mask()) == {tokenizer.encode("b")[0]}
    assert allowed(other.mask()) == {tokenizer.encode("a")[0]}
    assert len(guides._compiled) == 1
    assert loads == ["headwise-grammar_0"], "once, and not on the worker's thread"


def test_so_many_compiled_forms_are_kept(guides: Guides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guides_module, "KEPT", 2)
    for letter in "abca":
        assert guides.open(Guided(regex=letter), []).mask() is not None
    assert [guided.regex for guided in guides._compiled] == ["c", "a"]


def test_an_output_that_its_form_does_not_allow_is_told(tokenizer: Tokenizer, guides: Guides) -> None:
    guide = guides.open(AB, tokenizer.encode("x"))
    assert guide.mask() is None
    assert guide.failure is not None
    assert guide.failure.startswith("the output's form cannot be kept: ")


@pytest.mark.parametrize("form", [Guided(grammar="start: nothing"), Guided(json_schema="{")])
def test_a_form_that_nobody_has_checked_is_told(guides: Guides, form: Guided) -> None:
    guide = guides.open(form, [])
    assert guide.mask() is None
    assert guide.failure is not None


def test_a_vocabulary_that_cannot_be_loaded_fails_its_requests_and_not_the_worker(tokenizer: Tokenizer) -> None:
    faults = [ImportError("no module named llguidance")]

    def load() -> Vocabulary:
        if faults:
            raise faults.pop()
        return Vocabulary(tokenizer, VOCAB)

    guides = Guides(load)
    first, second = guides.open(AB, []), guides.open(AB, [])
    assert first.mask() is None
    assert first.failure == "the output's form cannot be kept: no module named llguidance"
    assert allowed(second.mask()) == set(tokenizer.encode("a"))
    guides.close()


@settings(max_examples=50, suppress_health_check=list(HealthCheck))
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8), min_size=1, max_size=4))
def test_any_texts_can_be_choices(tokenizer: Tokenizer, choices: list[str]) -> None:
    vocabulary = Vocabulary(tokenizer, VOCAB)
    for text in choices:
        matcher = vocabulary.matcher("choice", tuple(choices))
        matcher.take(tokenizer.encode(text))
        assert END in allowed(matcher.mask())


def test_a_row_that_cannot_go_on_has_no_token_and_says_why(tokenizer: Tokenizer, guides: Guides) -> None:
    editor = LogitEditor(VOCAB, guides)
    editor.open([introduced(0, tokenizer.encode("x")), introduced(1, tokenizer.encode("a"))])
    logits = np.zeros((2, VOCAB), np.float32)
    edits = editor.edits(np.array([0, 1], np.int32), np.array([5, 5]))
    assert edits is not None
    edits.apply(logits)
    assert np.isneginf(logits[0]).all()
    assert np.flatnonzero(np.isfinite(logits[1])).tolist() == tokenizer.encode("b")
    assert editor.failure(0) is not None
    assert editor.failure(1) is None


def introduced(row: int, output: list[int], ends_from: int = 0) -> NewSequence:
    none = np.empty(0, np.int32)
    known = KnownTokens(none, np.array(output, np.int32), np.array([END] if ends_from else [], np.int32), ends_from)
    return NewSequence(row, f"r{row}", SamplingParams(guided=AB), 0, known)


@pytest.mark.parametrize(("output", "ends"), [("a", False), ("ab", False), ("abc", True)])
def test_an_output_ends_early_only_where_its_form_allows_nothing_else(
    tokenizer: Tokenizer, guides: Guides, output: str, ends: bool
) -> None:
    editor = LogitEditor(VOCAB, guides)
    editor.open([introduced(0, tokenizer.encode(output), ends_from=50)])
    logits = np.zeros((1, VOCAB), np.float32)
    edits = editor.edits(np.array([0], np.int32), np.array([5]))
    assert edits is not None
    edits.apply(logits)
    assert np.isfinite(logits[0, END]) == ends
    assert np.isfinite(logits).any()


def test_what_no_model_could_ever_keep_is_refused_before() -> None:
    check_grammar("json_schema", '{"type":"integer","multipleOf":7}')
    with pytest.raises(InvalidRequestError, match="json_schema cannot be used: fuel exhausted"):
        check_grammar("json_schema", '{"type":"integer","multipleOf":999999937}')
    check_grammar("grammar", 'start: "a" <|im_end|>')
