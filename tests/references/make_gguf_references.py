"""Write what llama.cpp computes from GGUF files of tiny random models: `gguf.json`.

    PYTHONPATH=.:tests python tests/references/make_gguf_references.py [name ...]

Needs xllamacpp, gguf, tokenizers and safetensors, in an environment of their own. `support.tiny_ggufs` writes the
files; whether they are as llama.cpp's own converter writes them shows in that llama.cpp loads them, and computes what
headwise does. For each model the file holds, by prompt:

    prompt_ids, output_ids    a prompt, and its greedy tokens
    gaps                      between the logarithms of the two largest probabilities, at each of them
    top_ids, top_logprobs     the likeliest first tokens, and the logarithms of their probabilities
"""

from __future__ import annotations

import argparse
import http.client
import json
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import xllamacpp
from support.tiny_ggufs import JUDGED_GGUFS, write_tiny_gguf

PROMPT_LENGTHS = {"few": 9, "some": 40, "more": 90}
FIRST_ID, VOCABULARY = 3, 259
OUTPUT_TOKENS, TOP = 32, 10
NEVER = 262
"""The token that would end an answer, and that llama.cpp therefore leaves out."""
LONGEST = 1024


def prompts() -> dict[str, list[int]]:
    draw = np.random.default_rng(5)
    return {name: draw.integers(FIRST_ID, VOCABULARY, length).tolist() for name, length in PROMPT_LENGTHS.items()}


def words(count: int) -> list[str]:
    """Tokens that are characters each: the server holds back what is a part of one, and says nothing of its chances."""
    return [f"<{at}>" for at in range(count)]


class LlamaCpp:
    """llama.cpp's server with one model, in this process."""

    def __init__(self, path: Path) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.hostnames, params.port = ["127.0.0.1"], 0
        params.n_parallel, params.n_ctx = 1, LONGEST
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.warmup, params.verbosity = False, 3
        self._server = xllamacpp.Server(params)
        self._at = urlsplit(self._server.listening_address)

    def answer(self, prompt: list[int]) -> dict[str, Any]:
        body = {
            "prompt": prompt,
            "n_predict": OUTPUT_TOKENS,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_tokens": True,
            "n_probs": TOP,
            "cache_prompt": False,
        }
        connection = http.client.HTTPConnection(str(self._at.hostname), self._at.port, timeout=120)
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        found = json.loads(connection.getresponse().read())
        if "tokens" not in found:
            raise SystemExit(f"llama.cpp answered {str(found)[:300]}")
        steps = [step["top_logprobs"] for step in found["completion_probabilities"]]
        first = steps[0]
        return {
            "prompt_ids": prompt,
            "output_ids": found["tokens"],
            "gaps": [round(step[0]["logprob"] - step[1]["logprob"], 5) for step in steps],
            "top_ids": [token["id"] for token in first],
            "top_logprobs": [round(token["logprob"], 5) for token in first],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(JUDGED_GGUFS))
    place = Path(__file__).with_name("gguf.json")
    known: dict[str, Any] = json.loads(place.read_text())["models"] if place.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in parser.parse_args().models:
            tiny = JUDGED_GGUFS[name]
            keys = {"tokenizer.ggml.tokens": words(tiny.config["vocab_size"]), "tokenizer.ggml.eos_token_id": NEVER}
            server = LlamaCpp(write_tiny_gguf(Path(scratch) / f"{name}.gguf", tiny, keys=keys))
            known[name] = {prompt: server.answer(ids) for prompt, ids in prompts().items()}
            print(name, "done", flush=True)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in known.items())
    place.write_text(f'{{"xllamacpp": {json.dumps(xllamacpp.__version__)}, "models": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    main()
