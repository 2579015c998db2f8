"""Write what llama.cpp computes from GGUF files of tiny random models: `gguf.json`.

    PYTHONPATH=.:tests python tests/references/make_gguf_references.py [name ...]

Needs xllamacpp, gguf, tokenizers and safetensors, in an environment of their own. `support.tiny_ggufs` writes the
files; whether they are as llama.cpp's own converter writes them shows in that llama.cpp loads them, and computes what
headwise does. For each model the file holds, by prompt:

    prompt_ids, output_ids    a prompt, and its greedy tokens
    gaps                      between the logarithms of the two largest probabilities, at each of them
    top_ids, top_logprobs     the likeliest first tokens, and the logarithms of their probabilities

and for each way to split text the tokens of some texts, by a vocabulary whose merges go over any characters, so that
where text is split shows in its tokens:

    merges                    of that vocabulary: bytes come first
    splits                    name of the way -> tokens of each of `TEXTS`
"""

from __future__ import annotations

import argparse
import http.client
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import xllamacpp
from support.tiny_ggufs import JUDGED_GGUFS, vocabulary, write_tiny_gguf
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from headwise.runtime.loader.gguf_splits import SPLITS

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

    def tokens(self, text: str) -> list[int]:
        found: list[int] = self._post("/tokenize", {"content": text, "add_special": False})["tokens"]
        return found

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        connection = http.client.HTTPConnection(str(self._at.hostname), self._at.port, timeout=120)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        found: dict[str, Any] = json.loads(connection.getresponse().read())
        return found

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
        found = self._post("/completion", body)
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


TEXTS = [
    "It'S 2026, don't we'LL say HelloWORLDs x/y/ and foo_bar(12345)?",
    "  two  spaces\n\n  a line\r\n\tand\ttabs   \n",
    "naïve über ελληνικά русский ქართული հայերեն 中文字ab漢字 ひらがなカタカナ 한국어 עברית",
    "３４ ½ Ⅻ 1,000.50€ -- ... !!! 😀🎉 ΑΒΓαβγ ǅ __init__ CamelCaseXMLHttp",
    "、。「引用」“quoted” ‘single’",
    "a\u0301e\u0301 हिन्दी \u3000wide\u00a0nbsp ",
]
MERGES = 900


def merges() -> list[str]:
    """Of a vocabulary that is learned from the texts without any split."""
    learning = Tokenizer(models.BPE())
    learning.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=len(alphabet) + MERGES, initial_alphabet=alphabet, min_frequency=1)
    learning.train_from_iterator([text[at : at + 12] for text in TEXTS for at in range(0, len(text), 4)], trainer)
    return [" ".join(pair) for pair in json.loads(learning.to_str())["model"]["merges"]]


def split_texts(scratch: Path, pre: str, known: list[str]) -> list[list[int]]:
    """What llama.cpp makes of the texts with a way to split them."""
    tokens = vocabulary(known)
    tiny = replace(JUDGED_GGUFS["ernie"], changes={"vocab_size": len(tokens)})
    keys = {
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.merges": known,
    }
    server = LlamaCpp(write_tiny_gguf(scratch / f"{pre}.gguf", tiny, keys=keys))
    return [server.tokens(text) for text in TEXTS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(dict.fromkeys([*JUDGED_GGUFS, *SPLITS])))
    place = Path(__file__).with_name("gguf.json")
    found: dict[str, Any] = json.loads(place.read_text()) if place.exists() else {"models": {}, "splits": {}}
    known, learned = found["models"], merges()
    with tempfile.TemporaryDirectory() as scratch:
        for name in parser.parse_args().models:
            if name in SPLITS:  # some of whose names are models', too
                found["splits"][name] = split_texts(Path(scratch), name, learned)
            if name not in JUDGED_GGUFS:
                continue
            tiny = JUDGED_GGUFS[name]
            keys = {"tokenizer.ggml.tokens": words(tiny.config["vocab_size"]), "tokenizer.ggml.eos_token_id": NEVER}
            server = LlamaCpp(write_tiny_gguf(Path(scratch) / f"{name}.gguf", tiny, keys=keys))
            known[name] = {prompt: server.answer(ids) for prompt, ids in prompts().items()}
            print(name, "done", flush=True)
    parts = {
        name: ",\n".join(f"{json.dumps(key)}: {json.dumps(entry)}" for key, entry in found[name].items())
        for name in ("models", "splits")
    }
    header = json.dumps({"xllamacpp": xllamacpp.__version__, "texts": TEXTS, "merges": learned})[:-1]
    place.write_text(f'{header}, "models": {{\n{parts["models"]}\n}}, "splits": {{\n{parts["splits"]}\n}}}}\n')


if __name__ == "__main__":
    main()
