"""Write what transformers makes of Gemma 3's long prompts, in float32: `gemma3-270m-long.json`.

    PYTHONPATH=tests python tests/references/make_long_references.py [--cache-dir DIR]

Needs torch and transformers, 6 GB of memory and some minutes. `tests/support/long_prompts.py` makes the prompts. Each
entry holds:

    name, digest    of the prompt and of its tokens
    output_ids      32 tokens, greedy, going on past end tokens
    gaps            per output token, the best logit minus the second best
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from make_references import greedy
from support.long_prompts import LONG_PROMPTS, MODEL, digest, prompt_ids
from transformers import AutoModelForCausalLM

from headwise.runtime.loader.resolve import resolve_model
from headwise.runtime.loader.tokenizer import Tokenizer

NEW_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache-dir", type=Path, default=Path("~/.cache/headwise"))
    directory = resolve_model(MODEL, parser.parse_args().cache_dir.expanduser())
    tokenizer = Tokenizer.from_directory(directory)
    torch.set_num_threads(2)
    # sdpa: eager attention would hold the weights of every pair of 8,000 tokens at once
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa").eval()
    lines = []
    for prompt in LONG_PROMPTS:
        ids = prompt_ids(prompt, tokenizer)
        _, output_ids, gaps = greedy(model, ids, NEW_TOKENS)
        entry = {"name": prompt.name, "digest": digest(ids), "output_ids": output_ids, "gaps": gaps}
        lines.append(json.dumps(entry))
        print(prompt.name, len(ids), repr(tokenizer.decode(output_ids)), flush=True)
    target = Path(__file__).with_name(f"{MODEL}-long.json")
    target.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
