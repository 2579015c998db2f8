"""What it takes to bring a block from a slower tier, as measured, and by that whether to copy it or to compute it."""

from __future__ import annotations

import math

OUTLIER = 4.0
"""What is measured counts as at most so many times what was known: a process that was suspended has not become slow."""

RETRY_S = 60.0
"""Copies that seem slower than computing are not made, and so not measured: after so long they are tried again."""


class CopyCosts:
    """The one owner of copy speeds: `observe` writes them, everybody else reads.

    What was not measured yet is taken for worth it: only copies that are made are measured.

    groups, block_size: a token block has one block for each of so many groups, and so many tokens
    load_s:  seconds to bring a block from the host to the device; 0 if it was not measured yet
    fetch_s: seconds to bring one from storage to the host; likewise
    peer_s:  seconds to bring one from another engine's host to this one's; likewise
    token_s: seconds to compute a token of a prompt; infinite if it was not measured yet
    """

    def __init__(self, groups: int, block_size: int) -> None:
        self._groups, self._block_size = groups, block_size
        self._load_s = self._fetch_s = self._peer_s = 0.0
        self._token_s = math.inf
        self._slow_since: float | None = None

    def observe(
        self,
        *,
        load_s: float | None = None,
        fetch_s: float | None = None,
        peer_s: float | None = None,
        token_s: float | None = None,
    ) -> None:
        """Take in what copies of a block and a token's computing took; None: not measured again."""
        if load_s is not None:
            self._load_s = smooth(self._load_s, load_s)
        if fetch_s is not None:
            self._fetch_s = smooth(self._fetch_s, fetch_s)
        if peer_s is not None:
            self._peer_s = smooth(self._peer_s, peer_s)
        if token_s is not None:
            self._token_s = token_s

    def is_worth_loading(self, blocks: int, tokens: int) -> bool:
        """Whether copying so many blocks from the host is faster than computing so many tokens."""
        return blocks * self._load_s <= tokens * self._token_s

    def is_worth_fetching(self, blocks: int, tokens: int) -> bool:
        """Whether bringing so many blocks from storage to the device is faster than computing so many tokens."""
        return blocks * (self._load_s + self._fetch_s) <= tokens * self._token_s

    def is_worth_asking(self, blocks: int, tokens: int) -> bool:
        """Whether bringing so many blocks from another engine to the device is faster than computing so many tokens."""
        return blocks * (self._load_s + self._peer_s) <= tokens * self._token_s

    def computing_s(self, tokens: int) -> float:
        """Seconds to compute so many tokens; infinite if that was not measured yet."""
        return tokens * self._token_s if tokens else 0.0

    def retry(self, now: float) -> None:
        """Forget how slow copies were, `RETRY_S` after they ceased to be worth it: they are tried again.

        To be called now and then while there is something to do.
        """
        a_block = self._groups, self._block_size
        is_loaded, is_fetched = self.is_worth_loading(*a_block), self.is_worth_fetching(*a_block)
        is_asked = self.is_worth_asking(*a_block)
        if is_loaded and is_fetched and is_asked:
            self._slow_since = None
        elif self._slow_since is None:
            self._slow_since = now
        elif now - self._slow_since > RETRY_S:
            self._slow_since = None
            if not is_loaded:
                self._load_s = 0.0
            elif not is_fetched:
                self._fetch_s = 0.0
            else:
                self._peer_s = 0.0

    @property
    def host_token_s(self) -> float:
        """Seconds to bring a token's cache from the host to the device; 0: not measured."""
        return self._load_s * self._groups / self._block_size

    @property
    def storage_token_s(self) -> float:
        """Seconds to bring a token's cache from storage to the host; 0: not measured."""
        return self._fetch_s * self._groups / self._block_size

    @property
    def peer_token_s(self) -> float:
        """Seconds to bring a token's cache from another engine's host to this one's; 0: not measured."""
        return self._peer_s * self._groups / self._block_size


def smooth(old: float, new: float) -> float:
    """A moving average over about ten values; ``old`` is 0 before the first."""
    return 0.9 * old + 0.1 * min(new, OUTLIER * old) if old else new
