"""Files of keys."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from support.waiting import eventually

from headwise.errors import ConfigError
from headwise.runtime.config import keys as key_files
from headwise.runtime.config.keys import MAX_KEYS, ApiKey, KeyFile, KeyWatch, read_keys, server_secret

KEY = "sk-0123456789"


def test_keys_come_from_the_flag_and_from_lines_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# whose this is\nsk-first-0001\n\n  sk-second-002  \r\n")
    assert read_keys(KEY, str(file)) == [ApiKey(KEY), ApiKey("sk-first-0001"), ApiKey("sk-second-002")]
    assert read_keys("", "") == []


def test_behind_a_key_stands_whose_it_is(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        "sk-first-0001 tenant=a\nsk-second-002\tpriority=5  tenant=team_b.2 share=40\nsk-first-0001 tenant=a\n"
    )
    one, other, again = read_keys("", str(file))
    assert (one, other) == (ApiKey("sk-first-0001", "a"), ApiKey("sk-second-002", "team_b.2", 5, 40))
    assert again == one
    assert "sk-first" not in repr(one)


BEHIND = "API key 1: behind a key come tenant=NAME .*, priority=N and share=N .*, each once"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has no key"),
        ("# only a comment\n", "has no key"),
        ("short\n", "API key 1"),
        ("two words\n", "API key 1"),
        ("sk-first-0001 words", BEHIND),
        ("sk-first-0001 tenant=", BEHIND),
        ("sk-first-0001 tenant=a/b", BEHIND),
        ("sk-first-0001 tenant=a tenant=b", BEHIND),
        ("sk-first-0001 tenant=a priority=high", BEHIND),
        (f"sk-first-0001 tenant={'a' * 65}", BEHIND),
        ("sk-first-0001 tenant=a share=0", BEHIND),
        ("sk-first-0001 tenant=a share=1.5", BEHIND),
        ("sk-first-0001 tenant=a share=1000", BEHIND),
        ("sk-first-0001 priority=1", "API key 1 has a priority or share and no tenant"),
        ("sk-first-0001 share=2", "API key 1 has a priority or share and no tenant"),
        ("sk-first-0001 tenant=a share=2\nsk-second-002 tenant=a", "tenant a has keys with other shares"),
        ("sk-first-0001 tenant=a\nsk-first-0001 tenant=b", "given twice, and once as another tenant's"),
        ("sk-first-0001 tenant=a\nsk-first-0001", "given twice, and once as another tenant's"),
    ],
)
def test_files_without_usable_keys_are_told_and_their_text_is_not(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=told) as error:
        read_keys("", str(file))
    assert not text.strip() or text.strip() not in str(error.value)


def test_a_file_has_so_many_keys_at_most(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("".join(f"sk-{number:09}\n" for number in range(MAX_KEYS + 1)))
    with pytest.raises(ConfigError, match=f"{MAX_KEYS + 1} API keys are given; at most {MAX_KEYS}"):
        read_keys("", str(file))


def test_a_file_is_read_again_once_it_has_changed_and_stays_so(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-first-0001\n")
    keys = KeyFile("sk-flag-00001", str(file))
    assert keys.changed() == [ApiKey("sk-flag-00001"), ApiKey("sk-first-0001")]
    assert keys.changed() is None
    with file.open("a") as more:
        more.write("sk-second-002 tenant=")
    assert keys.changed() is None, "somebody is just writing it"
    with file.open("a") as more:
        more.write("a\n")
    assert keys.changed() is None, "it has changed again"
    assert keys.changed() == [ApiKey("sk-flag-00001"), ApiKey("sk-first-0001"), ApiKey("sk-second-002", "a")]
    assert keys.changed() is None


def test_a_file_without_keys_is_told_once(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-first-0001\n")
    keys = KeyFile("", str(file))
    assert keys.changed() == [ApiKey("sk-first-0001")]
    file.unlink()
    assert keys.changed() is None
    with pytest.raises(ConfigError, match="No such file"):
        keys.changed()
    assert keys.changed() is None
    file.write_text("short\n")
    assert keys.changed() is None
    with pytest.raises(ConfigError, match="API key 1"):
        keys.changed()
    assert keys.changed() is None


def test_a_file_is_watched_without_waiting_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, hangs = tmp_path / "keys", threading.Event()
    file.write_text("sk-first-0001\n")
    watch = KeyWatch(KeyFile("", str(file)), every_s=0.01)
    told: list[list[ApiKey]] = []

    def look() -> bool:
        if (keys := watch.news()) is not None:
            told.append(keys)
        return bool(told)

    eventually(look)
    assert told == [[ApiKey("sk-first-0001")]]
    file.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        eventually(watch.news)
    monkeypatch.setattr(key_files, "_stamp", lambda path: hangs.wait(60.0))
    assert watch.news() is None
    watch.close()
    hangs.set()


def test_who_looks_seldom_is_told_what_there_is_now(tmp_path: Path) -> None:
    class Changes(KeyFile):
        def __init__(self, *news: list[ApiKey] | ConfigError) -> None:
            super().__init__("", str(tmp_path))
            self.news = list(news)

        def changed(self) -> list[ApiKey] | None:
            told = self.news.pop(0) if self.news else None
            if isinstance(told, ConfigError):
                raise told
            return told

    def after(*news: list[ApiKey] | ConfigError) -> KeyWatch:
        watch = KeyWatch(Changes(*news), every_s=0.001)
        eventually(lambda: len(watch._news) == len(news))
        watch.close()
        return watch

    one, two, error = [ApiKey("sk-first-0001")], [ApiKey("sk-second-002")], ConfigError("there are none")
    assert after(one, two).news() == two
    assert after(one, error, two).news() == two
    assert after(error, two).news() == two
    last = after(one, two, error, error)
    assert last.news() == two
    with pytest.raises(ConfigError, match="there are none"):
        last.news()
    assert last.news() is None


def test_a_flag_of_spaces_is_no_key() -> None:
    with pytest.raises(ConfigError, match="API key 1 must have 8 to 512 characters"):
        read_keys("  ", "")


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_keys("", str(tmp_path / "absent"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys("", str(tmp_path / "binary"))


def test_the_server_s_key_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "key"
    secret = server_secret(str(file))
    assert server_secret(str(file)) == secret
    assert file.stat().st_mode & 0o777 == 0o600
    assert server_secret("") != server_secret("") != secret


def test_a_file_that_has_no_server_key_is_told_and_its_text_is_not(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("my secret")
    with pytest.raises(ConfigError, match=r"server_key_file .*64 hexadecimal digits") as raised:
        server_secret(str(tmp_path / "key"))
    assert "my secret" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"server_key_file .*No such file"):
        server_secret(str(tmp_path / "absent" / "key"))
