"""Text to ids, ids to streamed text, conversations to prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.tiny_models import (
    BYTE_TOKENS,
    CHAT_TEMPLATE,
    PIECES,
    SPACE,
    byte_level_tokenizer,
    write_tokenizer_directory,
)
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from headwise.errors import InvalidRequestError, ModelError
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.loader.resolve import resolve_model
from headwise.runtime.loader.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "Hello"}]


def wrap(backend: Backend) -> Tokenizer:
    return Tokenizer(backend, {}, None, None, ())


def sentencepiece_tokenizer(strip: int) -> Backend:
    vocabulary = {piece: index for index, piece in enumerate(PIECES)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", strip, 0)] if strip else steps)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<pad>", "<eos>", "<bos>")])
    return backend


def word_tokenizer() -> Backend:
    backend = Backend(models.WordLevel({"zero": 0, "one": 1, "two": 2, "[end]": 3}, unk_token="zero"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["[end]"])
    return backend


TINY = {
    "byte_level": wrap(byte_level_tokenizer()),
    "sentencepiece": wrap(sentencepiece_tokenizer(strip=0)),
    "sentencepiece_strip": wrap(sentencepiece_tokenizer(strip=1)),
    "words": wrap(word_tokenizer()),
}


@cache
def of_demo_model(name: str) -> Tokenizer:
    """Read once: it takes a second."""
    return Tokenizer.from_directory(resolve_model(name, EngineConfig().cache_path))


def streamed(tokenizer: Tokenizer, ids: Sequence[int], sizes: Sequence[int]) -> list[str]:
    """What comes out when ``ids`` are pushed in portions of ``sizes`` (again and again), and what flush adds."""
    detokenizer, at, texts = tokenizer.detokenizer(), 0, []
    while at < len(ids):
        size = sizes[len(texts) % len(sizes)]
        texts.append(detokenizer.push(ids[at : at + size]))
        at += size
    return [*texts, detokenizer.flush()]


@pytest.mark.parametrize("name", TINY)
@settings(max_examples=300)
@given(data=st.data())
def test_streamed_text_is_the_decoded_text(name: str, data: st.DataObject) -> None:
    tokenizer = TINY[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=8))
    assert "".join(streamed(tokenizer, ids, sizes)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "sentencepiece_strip"])
@settings(max_examples=200)
@given(text=st.text(max_size=30))
def test_streamed_valid_text_never_shows_half_a_character(name: str, text: str) -> None:
    tokenizer = TINY[name]
    parts = streamed(tokenizer, tokenizer.encode(text, add_special_tokens=False), [1])
    assert text.count("�") == "".join(parts).count("�")


@pytest.mark.parametrize("name", TINY)
@settings(max_examples=200)
@given(data=st.data())
def test_pushed_text_is_never_taken_back(name: str, data: st.DataObject) -> None:
    tokenizer = TINY[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    rest = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=10))
    settled = "".join(streamed(tokenizer, ids, [1])[:-1])
    assert tokenizer.decode(ids + rest).startswith(settled)


def test_a_character_appears_with_its_last_byte() -> None:
    tokenizer = TINY["byte_level"]
    euro = tokenizer.encode("€")
    assert len(euro) == 3
    assert streamed(tokenizer, euro, [1]) == ["", "", "€", ""]


def test_an_unfinished_character_is_flushed_as_a_replacement() -> None:
    tokenizer = TINY["byte_level"]
    assert streamed(tokenizer, tokenizer.encode("€")[:2], [1]) == ["", "", "�"]


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20))
def test_tokens_stand_for_the_bytes_of_their_text(name: str, text: str) -> None:
    assume(name != "sentencepiece" or "▁" not in text)  # it stands for a space there, and cannot be told from one
    tokenizer = TINY[name]
    pieces = [tokenizer.token_bytes(token) for token in tokenizer.encode(text)]
    assert b"".join(piece or b"" for piece in pieces) == text.encode()


def test_tokens_of_words_control_tokens_and_none_have_bytes_or_none() -> None:
    assert [TINY["words"].token_bytes(token) for token in (1, 3, 99)] == [b"one", b"[end]", None]


def test_special_tokens_are_hidden_and_added_ones_shown() -> None:
    tokenizer = TINY["byte_level"]
    ids = tokenizer.encode("the<|im_end|>two words")
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "thetwo words"


@pytest.mark.model
@pytest.mark.parametrize("examples", [100, pytest.param(1000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("model", ["smollm2-135m", "gemma3-270m"])
def test_demo_tokenizers_stream_what_they_decode(model: str, examples: int) -> None:
    tokenizer = of_demo_model(model)

    @settings(max_examples=examples)
    @given(
        st.lists(st.integers(0, tokenizer.vocab_size + 3) | st.integers(0, 600), max_size=40),
        st.lists(st.integers(1, 5), min_size=1, max_size=8),
    )
    def check(ids: list[int], sizes: list[int]) -> None:
        assert "".join(streamed(tokenizer, ids, sizes)) == tokenizer.decode(ids)

    check()


@pytest.mark.model
@pytest.mark.parametrize(
    ("model", "text", "ids"),
    [
        ("smollm2-135m", "The capital of France is", [504, 3575, 282, 4649, 314]),
        ("gemma3-270m", "The capital of France is", [2, 818, 5279, 529, 7001, 563]),
    ],
)
def test_demo_tokenizers_give_the_models_own_ids(model: str, text: str, ids: list[int]) -> None:
    tokenizer = of_demo_model(model)
    assert tokenizer.encode(text) == ids
    for sample in ("naïve café 😀", "  indented\n\n\n\tcode = 1234", "日本語 и русский"):
        assert tokenizer.decode(tokenizer.encode(sample)) == sample


@pytest.mark.model
def test_smollm2_ends_its_turn_with_im_end_and_has_a_chat_template() -> None:
    tokenizer = of_demo_model("smollm2-135m")
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_ids[-1]]
    assert tokenizer.render_chat(HELLO).endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")


@pytest.fixture
def chatty(tmp_path: Path) -> Path:
    return write_tokenizer_directory(tmp_path, byte_level_tokenizer(), {"chat_template": CHAT_TEMPLATE})


def with_template(directory: Path, template: str, **config: Any) -> Tokenizer:
    write_tokenizer_directory(directory, byte_level_tokenizer(), {"chat_template": template, **config})
    return Tokenizer.from_directory(directory)


def test_a_conversation_is_rendered_with_blocks_trimmed(chatty: Path) -> None:
    tokenizer = Tokenizer.from_directory(chatty)
    assert tokenizer.render_chat(HELLO) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat(HELLO, add_generation_prompt=False) == "<|im_start|>user\nHello<|im_end|>\n"


def test_an_older_checkpoint_s_template_is_in_a_file_of_its_own(chatty: Path) -> None:
    (chatty / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}?"}))
    tokenizer = Tokenizer.from_directory(chatty)
    assert tokenizer.render_chat([{"role": "user", "content": "Who"}]) == "Who?"


def test_a_template_file_comes_before_the_configuration(chatty: Path) -> None:
    (chatty / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert Tokenizer.from_directory(chatty).render_chat(HELLO) == "Hello!"


def test_the_default_of_several_templates_is_used(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    directory = write_tokenizer_directory(tmp_path, byte_level_tokenizer(), {"chat_template": templates})
    assert Tokenizer.from_directory(directory).render_chat(HELLO) == "yes"


def test_a_template_may_use_what_hugging_face_gives_it(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}{{ strftime_now('%%') }}{{ {'a': 'é'} | tojson }}{% for x in [1, 2] %}{% break %}{% endfor %}"
    )
    tokenizer = with_template(tmp_path, template, bos_token={"content": "<|im_start|>"})
    assert tokenizer.render_chat(HELLO) == '<|im_start|>%{"a": "é"}'


def test_no_template_says_to_send_a_plain_prompt() -> None:
    with pytest.raises(InvalidRequestError, match="send a plain prompt"):
        TINY["byte_level"].render_chat(HELLO)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "non-empty list"),
        ("hello", "non-empty list"),
        ({"role": "user", "content": "x"}, "non-empty list"),
        (None, "non-empty list"),
        (["hello"], r"messages\[0\] must be a mapping"),
        ([{"content": "x"}], r"messages\[0\]\['role'\] must be a string, got None"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\['content'\] must be a string, got 5"),
        ([*HELLO, {"role": "tool", "content": "x"}], "refuses these messages: no tools"),
    ],
)
def test_malformed_messages_are_named(chatty: Path, messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        Tokenizer.from_directory(chatty).render_chat(messages)


@pytest.mark.parametrize("role", ["usr", "user<|im_end|>", "System", ""])
def test_an_unknown_role_is_refused_with_the_known_ones(chatty: Path, role: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\['role'\] must be one of system, developer, user"):
        Tokenizer.from_directory(chatty).render_chat([{"role": role, "content": "x"}])


def test_content_may_be_a_list_of_text_parts_which_are_put_together(chatty: Path) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    tokenizer = Tokenizer.from_directory(chatty)
    assert tokenizer.render_chat([{"role": "user", "content": parts}]) == tokenizer.render_chat(HELLO)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "input_audio", "input_audio": {}}, "must be a text part .*, got one of type 'input_audio'"),
        ({"type": "image_url", "image_url": {"url": "x"}}, "is an image, which is not taken here"),
        ({"type": "image", "image": "x"}, "is an image, which is not taken here"),
        ({"type": "text"}, "must be a text part"),
        ("Hello", "must be a text part"),
        (None, "must be a text part"),
    ],
)
def test_parts_of_another_kind_are_named(chatty: Path, part: Any, message: str) -> None:
    content = [{"type": "text", "text": "Hello"}, part]
    with pytest.raises(InvalidRequestError, match=rf"messages\[0\]\['content'\]\[1\] {message}"):
        Tokenizer.from_directory(chatty).render_chat([{"role": "user", "content": content}])


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else "x"


def test_content_of_any_depth_is_refused_in_one_line(chatty: Path) -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    for message in ({"role": "user", "content": deep}, {**HELLO[0], "name": deep}, {"role": deep}, deep):
        with pytest.raises(InvalidRequestError, match=r"messages\[0\]") as caught:
            Tokenizer.from_directory(chatty).render_chat([message])
        assert len(str(caught.value)) < 250


@pytest.mark.parametrize("value", [nested(900), b"bytes", object(), {"deep": nested(40)}])
def test_what_is_no_plain_data_in_a_message_is_refused(chatty: Path, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\['name'\]"):
        Tokenizer.from_directory(chatty).render_chat([{**HELLO[0], "name": value}])


NAMED_TEMPLATE = CHAT_TEMPLATE.replace("{{ message.content }}", "{{ message.name }}{{ message.content | trim }}")
NAMED = Tokenizer(byte_level_tokenizer(), {}, NAMED_TEMPLATE, None, ())
PLAIN = Tokenizer(byte_level_tokenizer(), {}, CHAT_TEMPLATE, None, ())
PIECES_OF_CONTROL_TOKENS = st.lists(
    st.sampled_from(["<|im_end|>", "<|im_start|>", "<|im_", "end|>", "<", "|>", ">", " ", "\n", "the", "\U00100000"])
).map("".join)


@settings(max_examples=100)
@given(st.lists(st.tuples(PIECES_OF_CONTROL_TOKENS, PIECES_OF_CONTROL_TOKENS), min_size=1, max_size=3))
def test_users_text_never_becomes_control_tokens(texts: list[tuple[str, str]]) -> None:
    ids = NAMED.encode_chat(NAMED.render([{"role": "user", "name": n, "content": c} for n, c in texts]))
    control = [token for token in ids if token < 3]
    assert control == [1, 2] * len(texts) + [1]
    written = "".join(f"<|im_start|>user\n{n}{c.strip()}<|im_end|>\n" for n, c in texts) + "<|im_start|>assistant\n"
    assert NAMED._backend.decode(ids, skip_special_tokens=False) == written


@settings(max_examples=100)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), min_size=1, max_size=3))
def test_ordinary_chats_have_the_token_ids_of_their_text(texts: list[str]) -> None:
    messages = [{"role": "user", "content": text} for text in texts]
    text = "".join(f"<|im_start|>user\n{text}<|im_end|>\n" for text in texts) + "<|im_start|>assistant\n"
    assert PLAIN.encode_chat(PLAIN.render(messages)) == PLAIN.encode(text, add_special_tokens=False)


def test_users_text_that_is_a_control_token_only_once_normalised_stays_text() -> None:
    backend = byte_level_tokenizer()
    backend.normalizer = normalizers.Lowercase()
    backend.add_special_tokens([AddedToken("<end>", normalized=True)])
    end = backend.token_to_id("<end>")
    tokenizer = Tokenizer(backend, {}, "{{ messages[0].content }}<end>", None, ())
    ids = tokenizer.encode_chat(tokenizer.render([{"role": "user", "content": "<END>"}]))
    assert (ids.count(end), ids[-1], len(ids)) == (1, end, 6)


def test_what_the_vocabulary_does_not_know_may_stand_beside_what_looks_like_a_control_token() -> None:
    tokenizer = Tokenizer(word_tokenizer(), {}, "{{ messages[0].content }} [end]", None, ())
    ids = tokenizer.encode_chat(tokenizer.render([{"role": "user", "content": "one three [end] two"}]))
    assert ids == [1, 0, 0, 0, 0, 2, 3]  # "[end]" as "[", "end", "]", none of which is known


def test_a_template_s_own_control_tokens_of_spaces_stay() -> None:
    backend = byte_level_tokenizer()
    backend.add_special_tokens([AddedToken("\n\n", normalized=False)])
    tokenizer = Tokenizer(backend, {}, "{{ messages[0].content }}{{ '\n\n' }}", None, ())
    ids = tokenizer.encode_chat(tokenizer.render([{"role": "user", "content": "<|im_end|>\n\na"}]))
    assert ids.count(backend.token_to_id("\n\n")) == 1
    assert ids[-1] == backend.token_to_id("\n\n")


def test_a_plain_prompt_may_hold_control_tokens() -> None:
    assert TINY["byte_level"].encode("<|im_end|>") == [2]


def test_a_token_has_at_most_as_many_bytes_of_text_as_the_longest() -> None:
    assert TINY["byte_level"].longest_token == len("<|endoftext|>")
    assert TINY["sentencepiece"].longest_token == len("<0x00>")
    for text in ("ab abc é€", "the the12", "  two words"):
        for name in ("byte_level", "sentencepiece"):
            assert len(TINY[name].encode(text)) * TINY[name].longest_token >= len(text.encode())


def test_a_normaliser_that_may_shorten_texts_raises_the_longest_token() -> None:
    backend = byte_level_tokenizer()
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    assert wrap(backend).longest_token == 4 * TINY["byte_level"].longest_token
    for shorter in (normalizers.Replace("ab", "a"), normalizers.Strip()):
        backend.normalizer = shorter
        assert wrap(backend).longest_token == 4 * TINY["byte_level"].longest_token


def test_a_template_that_fails_on_messages_is_the_requests_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="refuses these messages"):
        with_template(tmp_path, "{{ messages[0].content + 5 }}").render_chat(HELLO)


def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path: Path) -> None:
    for escape in ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}"):
        with pytest.raises(InvalidRequestError):
            with_template(tmp_path, escape).render_chat(HELLO)


def test_a_template_that_is_not_jinja_is_the_models_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not valid Jinja"):
        with_template(tmp_path, "{% for %}").render_chat(HELLO)


def test_end_tokens_come_from_every_file_that_names_them(chatty: Path) -> None:
    (chatty / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}))
    (chatty / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    (chatty / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    tokenizer = Tokenizer.from_directory(chatty)
    assert tokenizer.eos_token_ids == (0, 2, 5, 7)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.vocab_size == len(BYTE_TOKENS) + 1


def test_truncation_in_tokenizer_json_does_not_cut_prompts(tmp_path: Path) -> None:
    backend = byte_level_tokenizer()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer.from_directory(write_tokenizer_directory(tmp_path, backend))
    assert len(tokenizer.encode("abcde")) == 5


@pytest.mark.parametrize("content", [None, "{", '{"version": "1.0"}'])
def test_an_unusable_tokenizer_file_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


def test_a_decoder_that_cannot_be_streamed_is_refused(tmp_path: Path) -> None:
    backend = byte_level_tokenizer()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="WordPiece, which cannot be streamed"):
        Tokenizer.from_directory(write_tokenizer_directory(tmp_path, backend))
