"""Write what torch computes in float32 of tiny random EAGLE-3 heads: `eagle.json`.

    PYTHONPATH=tests python tests/references/make_eagle_references.py

Needs torch and transformers, which nothing else here does. Hidden states of the models, and attention, MLP and norms of
the heads, are those of transformers. What is written is as `make_draft_references.py` says it.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from make_draft_references import SECONDS
from make_tiny_references import for_transformers, load
from support.eagle_checkpoints import HEADS, drafted_tokens, head_config, head_weights
from support.reference import answers
from support.tiny_checkpoints import reference, write_checkpoint
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)


class HeadOfTorch:
    """A head, and the model that it drafts for."""

    def __init__(self, name: str, model: Any) -> None:
        known, own = head_config(name), head_weights(name)
        config = LlamaConfig(**known, attn_implementation="eager")
        hidden, at = config.hidden_size, HEADS[name].layer
        self._weights = {key: torch.tensor(values) for key, values in own.items()}
        self._model, self._norms_residual = model, known.get("norm_before_residual", False)
        layers = model.config.num_hidden_layers
        asked = known.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids", (2, layers // 2, layers - 3))
        self._taken = sorted(asked)
        self._attention, self._mlp = LlamaAttention(config, 0), LlamaMLP(config)
        for part in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(self._attention, part).out_features
            setattr(self._attention, part, nn.Linear(2 * hidden, rows, bias=False))
        self._rotary = LlamaRotaryEmbedding(config)
        norms = {part: f"{at}{part}" for part in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
        self._norms = {part: LlamaRMSNorm(hidden, config.rms_norm_eps) for part in (*norms, "norm")}
        for part, module in self._norms.items():
            module.weight = nn.Parameter(self._weights[f"{norms.get(part, part)}.weight"])
        for prefix, module in (("self_attn.", self._attention), ("mlp.", self._mlp)):
            start = at + prefix
            module.load_state_dict({k.removeprefix(start): v for k, v in self._weights.items() if k.startswith(start)})
        self._tokens = torch.tensor(drafted_tokens(name))

    def hidden(self, ids: list[int]) -> torch.Tensor:
        """What the head is given of the model's tokens."""
        found = self._model(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True)
        return (
            torch.cat([found.hidden_states[layer][0] for layer in self._taken], dim=-1) @ self._weights["fc.weight"].T
        )

    def draft(self, following: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """What the layer makes, before the last norm."""
        table = self._weights.get("embed_tokens.weight", self._model.get_input_embeddings().weight)
        embedded, normed = self._norms["input_layernorm"](table[following]), self._norms["hidden_norm"](hidden)
        x, count = torch.cat([embedded, normed], dim=-1)[None], len(following)
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        seen, _ = self._attention(x, self._rotary(x, torch.arange(count)[None]), mask)
        total = (normed if self._norms_residual else hidden) + seen[0]
        return total + self._mlp(self._norms["post_attention_layernorm"](total))

    def likeliest(self, made: torch.Tensor) -> list[tuple[int, float]]:
        best = torch.topk(self._norms["norm"](made) @ self._weights["lm_head.weight"].T, 2)
        gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
        tokens = self._tokens[best.indices[:, 0]].tolist()
        return [(token, round(gap, 6)) for token, gap in zip(tokens, gaps, strict=True)]


@torch.inference_mode()
def made(name: str) -> dict[str, Any]:
    known = reference(name)
    answer = next(answer for answer in answers(name) if answer.name == "more")
    ids, begin = answer.prompt_ids + answer.output_ids, len(answer.prompt_ids)
    with tempfile.TemporaryDirectory() as scratch:
        directory = write_checkpoint(Path(scratch), for_transformers(known["config"]), known["shapes"])
        head = HeadOfTorch(name, load(directory, is_mxfp4=False))
    hidden = head.hidden(ids[:-1])
    drafted = head.draft(ids[1:], hidden)
    first, second = head.likeliest(drafted)[begin - 1 :], {}
    for index in SECONDS:
        end = begin + index  # tokens whose hidden states are known
        again = torch.cat([hidden[:end], drafted[end - 1 : end]])
        found = head.draft([*ids[1 : end + 1], first[index][0]], again)
        second[index] = head.likeliest(found[-1:])[0]
    return {"first": first, "second": second}


def main() -> None:
    torch.set_num_threads(1)
    found = {name: made(name) for name in HEADS}
    for name, drafts in found.items():
        print(name, len({token for token, _ in drafts["first"]}), "different drafts", flush=True)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(drafts)}" for name, drafts in found.items())
    text = f'{{"transformers": {json.dumps(transformers.__version__)}, "models": {{\n{lines}\n}}}}\n'
    Path(__file__).with_name("eagle.json").write_text(text)


if __name__ == "__main__":
    main()
