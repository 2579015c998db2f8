"""Write what transformers computes in float32 for the demo models: the answers headwise is tested against.

    python tests/references/make_references.py [--cache-dir DIR] [model ...]

Needs torch and transformers, which nothing else here does. `SURE` prompts have a file of their own: every token of
their answers is the best by `LEAST_SURE` and more, so it is said with rounded weights, too. A file holds, per prompt:

    name, prompt_ids, output_ids   64 tokens, greedy, going on past end tokens
    gaps                           per output token, the best logit minus the second best: where a gap is under 1e-3,
                                   that token and all that follow it in this prompt may rightly differ
    top_ids, top_logits            the ten best at the prompt's last position
    sample_ids, sample_logits      logits there at 50 fixed ids
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from headwise.runtime.loader.resolve import resolve_model
from headwise.runtime.loader.tokenizer import Tokenizer

NEW_TOKENS = 64
SAMPLED_IDS = 50
MODELS = ("smollm2-135m", "gemma3-270m")

PROMPTS = {
    "prose": "The lighthouse keeper had not spoken to anyone for eleven days when, on the morning of the storm,",
    "fact": "The capital of France is",
    "code": "def merge_sorted(left: list[int], right: list[int]) -> list[int]:\n"
    '    """Merge two sorted lists into one."""\n    result = []\n',
    "list": "Things to pack for a week in the mountains:\n1. A warm sleeping bag\n2. A map and a compass\n3.",
    "french": "Il était une fois, dans un petit village au bord de la mer, une jeune fille qui",
    "german": "Die wichtigsten Zutaten für ein gutes Brot sind",
    "numbers": "2, 4, 8, 16, 32, 64,",
    "unicode": "Emoji and scripts: 😀 naïve café — 日本語のテキスト, Привет мир, ١٢٣.\nThe next line says:",
    "one_token": "Once",
    "json": '{"name": "Ada", "born": 1815, "fields": ["mathematics", "computing"]}\n{"name": "Alan", "born":',
}
CHATS: dict[str, list[dict[str, str]]] = {
    "chat": [{"role": "user", "content": "Explain in two sentences why the sky is blue."}],
    "chat_turns": [
        {"role": "system", "content": "You are a terse assistant."},
        {"role": "user", "content": "Name a prime number larger than 10."},
        {"role": "assistant", "content": "11"},
        {"role": "user", "content": "And the next one?"},
    ],
}
LEAST_SURE = 0.25
SURE = {
    "count": "12, 13, 14, 15, 16, 17, 18, 19, 20, 21,",
    "hundreds": "100, 200, 300, 400, 500, 600, 700, 800, 900,",
    "months": "January, February, March, April, May, June, July, August, September, October, November, "
    "December, January,",
    "seasons": "spring, summer, autumn, winter, spring, summer, autumn, winter, spring,",
    "days": "Day 1: rain. Day 2: rain. Day 3: rain. Day 4:",
    "steps": "Step 1: wait. Step 2: wait. Step 3: wait. Step 4:",
    "json": '{"id": 1, "ok": true}\n{"id": 2, "ok": true}\n{"id": 3, "ok": true}\n{"id": 4,',
    "addresses": "http://a.org/1\nhttp://a.org/2\nhttp://a.org/3\nhttp://a.org/",
    "french": "Il pleut sur la mer. Il pleut sur la mer. Il pleut sur la mer. Il",
    "unicode": "日本語 naïve café. 日本語 naïve café. 日本語 naïve café. 日本",
    "table": "| a | b |\n| 1 | 2 |\n| 1 | 2 |\n| 1 | 2 |\n|",
}
SURE_MODEL = "smollm2-135m"
LONG_TOKENS = {"long_700": 700, "long_1300": 1300, "long_2300": 2300}

_PEOPLE = ("Mara", "Tobias", "Ines", "the old captain", "Professor Lindqvist", "a girl from the harbour", "Yusuf")
_ACTS = ("carried", "measured", "repaired", "drew", "sold", "hid", "described", "counted", "painted", "remembered")
_THINGS = ("a brass telescope", "the broken clock", "seven letters", "a map of the northern coast", "the blue door")
_PLACES = ("near the mill", "in the upper library", "under the bridge", "at the end of the quay", "on the hill")
_ENDINGS = ("before the rain began", "although nobody had asked", "and wrote it down", "for the third time that year")


def long_text(sentences: int, seed: int = 7) -> str:
    """A deterministic chronicle of numbered entries: varied enough that attention has something to find."""
    draw = random.Random(seed)
    lines = []
    for day in range(1, sentences + 1):
        who, act, what, where, end = (draw.choice(x) for x in (_PEOPLE, _ACTS, _THINGS, _PLACES, _ENDINGS))
        lines.append(f"Day {day}: {who} {act} {what} {where}, {end}; it cost {draw.randint(2, 980)} crowns.")
    return " ".join(lines)


def prompts_of(tokenizer: Tokenizer, has_template: bool) -> dict[str, list[int]]:
    """Prompt ids by name."""
    prompts = {name: tokenizer.encode(text) for name, text in PROMPTS.items()}
    if has_template:
        for name, messages in CHATS.items():
            prompts[name] = tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)
    chronicle = tokenizer.encode(long_text(120))
    return prompts | {name: chronicle[:length] for name, length in LONG_TOKENS.items()}


@torch.inference_mode()
def greedy(
    model: PreTrainedModel, prompt_ids: list[int], new_tokens: int
) -> tuple[torch.Tensor, list[int], list[float]]:
    """The logits at the prompt's last position; greedy tokens; by how much each was the best."""
    step = model(torch.tensor([prompt_ids]), use_cache=True, logits_to_keep=1)
    first = step.logits[0, -1]
    output_ids, gaps = [], []
    for _ in range(new_tokens):
        best = torch.topk(step.logits[0, -1], 2)
        output_ids.append(int(best.indices[0]))
        gaps.append(round(float(best.values[0] - best.values[1]), 6))
        step = model(
            torch.tensor([[output_ids[-1]]]),
            past_key_values=step.past_key_values,
            position_ids=torch.tensor([[len(prompt_ids) + len(output_ids) - 1]]),  # Bamba does not count what is cached
            use_cache=True,
        )
    return first, output_ids, gaps


def reference(model: PreTrainedModel, name: str, prompt_ids: list[int]) -> dict[str, Any]:
    """One prompt's answers."""
    first, output_ids, gaps = greedy(model, prompt_ids, NEW_TOKENS)
    top = torch.topk(first, 10)
    sample_ids = sorted(random.Random(11).sample(range(first.shape[0]), SAMPLED_IDS))
    return {
        "name": name,
        "prompt_ids": prompt_ids,
        "output_ids": output_ids,
        "gaps": gaps,
        "top_ids": top.indices.tolist(),
        "top_logits": [round(value, 5) for value in top.values.tolist()],
        "sample_ids": sample_ids,
        "sample_logits": [round(value, 5) for value in first[sample_ids].tolist()],
    }


def make(model_name: str, cache_dir: Path, references: Path) -> None:
    directory = resolve_model(model_name, cache_dir)
    tokenizer = Tokenizer.from_directory(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    has_template = "chat_template" in json.loads((directory / "tokenizer_config.json").read_text())

    def write(target: Path, prompts: dict[str, list[int]]) -> list[dict[str, Any]]:
        entries = []
        for name, prompt_ids in prompts.items():
            entries.append(reference(model, name, prompt_ids))
            print(model_name, name, len(prompt_ids), repr(tokenizer.decode(entries[-1]["output_ids"])), flush=True)
        lines = ",\n".join(json.dumps(entry) for entry in entries)
        header = json.dumps({"model": model_name, "dtype": "float32", "new_tokens": NEW_TOKENS})[:-1]
        target.write_text(f'{header}, "prompts": [\n{lines}\n]}}\n')
        return entries

    write(references / f"{model_name}.json", prompts_of(tokenizer, has_template))
    if model_name == SURE_MODEL:
        sure = {name: tokenizer.encode(text) for name, text in SURE.items()}
        for entry in write(references / f"{model_name}-sure.json", sure):
            assert min(entry["gaps"]) >= LEAST_SURE, entry["name"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--cache-dir", type=Path, default=Path("~/.cache/headwise"))
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    for name in arguments.models:
        make(name, arguments.cache_dir, Path(__file__).parent)


if __name__ == "__main__":
    main()
