"""llama.cpp's server in this process, for `process.answer`; run by the Python of the peers' environment."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import xllamacpp

from runtimes.process import Served, answer

FORCED = 1000.0
"""A bias that no logit outweighs."""


class LlamaCpp:
    """options: `file`, a GGUF; `threads`; `slots`, the requests that run at once; `slot_tokens`, the most of one;
    `whole_cache`, whether what windows have left is kept, as `read` needs it
    """

    def __init__(self, options: dict[str, Any]) -> None:
        slots, threads = options["slots"], options["threads"]
        params = xllamacpp.CommonParams()
        params.model.path = options["file"]
        params.hostnames, params.port = ["127.0.0.1"], 0
        params.n_parallel, params.n_ctx = slots, slots * options["slot_tokens"]
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.n_threads_http = slots + 2  # a stream keeps one of them
        params.verbosity = 1
        params.swa_full = options.get("whole_cache", False)
        self._server = xllamacpp.Server(params)
        self._at = urlsplit(self._server.listening_address)
        self._senders = ThreadPoolExecutor(slots)
        isa = [name.split(" = ")[0].strip() for name in xllamacpp.get_system_info().split("CPU : ")[-1].split("|")]
        self.about = {
            "name": "llama.cpp",
            "version": f"xllamacpp {xllamacpp.__version__}",
            "threads": threads,
            "isa": " ".join(filter(None, isa)),
        }

    def serve(self, prompts: list[list[int]], output_tokens: int) -> list[Served]:
        send = partial(self._send, output_tokens=output_tokens, began=time.perf_counter())
        return list(self._senders.map(send, prompts))

    def _send(self, prompt: list[int], output_tokens: int, began: float) -> Served:
        served = Served([], -1)
        for event in self._stream(prompt, output_tokens):
            now, count = time.perf_counter() - began, event["timings"]["predicted_n"]
            if served.first < 0 and event["tokens"]:
                served.first = event["tokens"][0]
            if count > served.count:
                served.marks.append((now, count))
        return served

    def read(self, text: list[int]) -> dict[str, Any]:
        """See `Reader.read`. The server tells of generated tokens alone: each is made the text's, by a bias that its
        choice obeys and that what it tells of knows nothing of. Of the text before it all is cached but the last token.
        """
        surprise, likeliest = [], []
        for count in range(1, len(text)):
            asked = {
                "prompt": text[:count], "n_predict": 1, "n_probs": 1, "logit_bias": [[text[count], FORCED]],
                "cache_prompt": True, "return_tokens": True, "temperature": 0.0,
            }  # fmt: skip
            with self._answer(asked) as response:
                answer = json.load(response)
            told = answer["completion_probabilities"][0]
            if told["id"] != text[count]:
                raise SystemExit(f"llama.cpp chose token {told['id']} in place of {text[count]}, which it was told to")
            surprise.append(-told["logprob"])
            likeliest.append(told["top_logprobs"][0]["id"])
        return {"surprise": surprise, "likeliest": likeliest}

    def _stream(self, prompt: list[int], output_tokens: int) -> Iterator[dict[str, Any]]:
        body = {
            "prompt": prompt,
            "n_predict": output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "return_tokens": True,
            "timings_per_token": True,  # counts tokens whose text waits for the rest of a character, too
        }
        with self._answer(body) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    @contextmanager
    def _answer(self, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(str(self._at.hostname), self._at.port)
        try:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise SystemExit(f"llama.cpp answered {response.status}: {response.read()[:300]!r}")
            yield response
        finally:
            connection.close()


if __name__ == "__main__":
    answer(LlamaCpp)
