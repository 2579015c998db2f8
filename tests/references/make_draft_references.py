"""Write what torch computes in float32 of tiny random models' layers that draft: `drafts.json`.

    PYTHONPATH=tests python tests/references/make_draft_references.py

Needs torch and transformers, which nothing else here does. transformers makes the layer itself, as one of the
decoder's; what goes into it and comes out of it is computed here. Of each model, for the tokens of its prompt ``more``
and of its output:

    first   behind each token of the output but the last: the token that is drafted behind the next one, and by how
            much it is the best
    second  of some of these, by index: the same of the token behind that, drafted from what drafted the first
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from make_tiny_references import for_transformers
from support.drafting_checkpoints import DRAFTING, OTHERWISE, drafting_names, drafting_weights, number_of_layers
from support.reference import answers
from support.tiny_checkpoints import reference, write_checkpoint
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.masking_utils import create_sliding_window_causal_mask

SECONDS = range(0, 60, 7)


def model_with_one_more(name: str, directory: Path) -> Any:
    """The model, with the layer that drafts as its last one."""
    known, names, layers = reference(name), drafting_names(name), number_of_layers(name)
    config = {**for_transformers(known["config"]), "num_hidden_layers": layers + 1}
    if name == "deepseek-v4":
        config["layer_types"] = [*config["layer_types"], "sliding_attention"]
        config["mlp_layer_types"] = [*config["mlp_layer_types"], "moe"]
    elif names["layer"].startswith("mtp."):
        every = ["linear_attention"] * 3 + ["full_attention"]
        config["layer_types"] = [*every[:layers], "full_attention"]
    if name == "glm5-shared":
        config["indexer_types"] = [*config["indexer_types"], "full"]
    if name == "mimo-v2":
        config["layer_types"] = [*config["layer_types"], "sliding_attention"]
        config["mlp_layer_types"] = [*config["mlp_layer_types"], "dense"]
    weights = {
        key.replace(names["layer"], f"model.layers.{layers}."): array for key, array in drafting_weights(name).items()
    }
    for theirs, like in OTHERWISE.get(name, {}).items():  # by the decoder's names
        ours = f"model.layers.{layers}.{like.partition('.')[2]}"
        found = [key for key in weights if key.startswith(f"model.layers.{layers}.{theirs}")]
        weights |= {ours + key.removeprefix(f"model.layers.{layers}.{theirs}"): weights.pop(key) for key in found}
    write_checkpoint(directory, config, known["shapes"], weights)
    model, loading = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not loading["missing_keys"], loading
    return model.eval()


class Drafting:
    """The layer, taken out of the model."""

    def __init__(self, name: str, model: Any) -> None:
        weights, names = drafting_weights(name), drafting_names(name)
        self._model, self._decoder = model, model.model
        *layers, self._layer = self._decoder.layers
        self._layers, self._norm = nn.ModuleList(layers), self._decoder.norm
        self._types = getattr(model.config, "layer_types", None)
        norm = type(self._norm)
        self._norms = {}
        for part in ("embedding_norm", "hidden_norm", "final_norm"):
            self._norms[part] = norm(model.config.hidden_size, eps=model.config.rms_norm_eps)
            self._norms[part].weight = nn.Parameter(torch.tensor(weights[f"{names[part]}.weight"]))
        self._join = torch.tensor(weights[f"{names['join']}.weight"])
        self._has_hidden_first = name == "mimo"

    def hidden(self, ids: list[int]) -> torch.Tensor:
        """Hidden states behind the decoder's norm."""
        self._decoder.layers, self._decoder.norm = self._layers, self._norm
        if self._types is not None:
            self._model.config.layer_types = self._types[:-1]
        return self._decoder(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]

    def draft(self, following: list[int], hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states behind the layer's norm."""
        self._decoder.layers, self._decoder.norm = nn.ModuleList([self._layer]), self._norms["final_norm"]
        if self._types is not None:
            self._model.config.layer_types = self._types[-1:]
        embedded = self._norms["embedding_norm"](self._model.get_input_embeddings()(torch.tensor(following)))
        both = [embedded, self._norms["hidden_norm"](hidden)]
        joined = torch.cat(both[::-1] if self._has_hidden_first else both, dim=-1) @ self._join.T
        return self._decoder(inputs_embeds=joined[None], use_cache=False).last_hidden_state[0]

    def likeliest(self, hidden: torch.Tensor) -> list[tuple[int, float]]:
        best = torch.topk(self._model.lm_head(hidden), 2)
        gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
        return [(token, round(gap, 6)) for token, gap in zip(best.indices[:, 0].tolist(), gaps, strict=True)]


class DraftingOfStreams(Drafting):
    """DeepSeek-V4's: what it is given are all streams behind the decoder's layers, and what it gives is so, too."""

    def __init__(self, name: str, model: Any) -> None:
        weights = {key: torch.tensor(array) for key, array in drafting_weights(name).items()}
        self._model, self._decoder = model, model.model
        *layers, self._layer = self._decoder.layers
        self._layers, self._join = nn.ModuleList(layers), self._decoder.hc_head
        norm, size, eps = type(self._decoder.norm), model.config.hidden_size, model.config.rms_norm_eps
        self._norms = {}
        for part in ("enorm", "hnorm", "norm"):
            self._norms[part] = norm(size, eps=eps)
            self._norms[part].weight = nn.Parameter(weights[f"mtp.0.{part}.weight"])
        self._projections = {part: weights[f"mtp.0.{part}_proj.weight"] for part in "eh"}
        self._own_join = type(self._join)(model.config)
        for part in ("fn", "base", "scale"):
            setattr(self._own_join, f"hc_{part}", nn.Parameter(weights[f"mtp.0.hc_head_{part}"]))

    def hidden(self, ids: list[int]) -> torch.Tensor:
        caught = {}
        self._decoder.layers = self._layers
        hook = self._join.register_forward_pre_hook(lambda _, given: caught.update(streams=given[0]))
        self._decoder(input_ids=torch.tensor([ids]), use_cache=False)
        hook.remove()
        return caught["streams"][0]

    def draft(self, following: list[int], hidden: torch.Tensor) -> torch.Tensor:
        ids = torch.tensor([following])
        embedded = self._norms["enorm"](self._model.get_input_embeddings()(ids)) @ self._projections["e"].T
        streams = self._norms["hnorm"](hidden)[None] @ self._projections["h"].T + embedded[:, :, None]
        positions = torch.arange(len(following))[None]
        rotary = self._decoder.rotary_emb
        angles = {kind: rotary(embedded, position_ids=positions, layer_type=kind) for kind in ("main", "compress")}
        mask = create_sliding_window_causal_mask(
            config=self._model.config, inputs_embeds=embedded, attention_mask=None, past_key_values=None,
            position_ids=positions,
        )  # fmt: skip
        made = self._layer(
            streams, input_ids=ids, position_embeddings=angles, position_ids=positions, attention_mask=mask,
            past_key_values=None,
        )  # fmt: skip
        return made[0]

    def likeliest(self, hidden: torch.Tensor) -> list[tuple[int, float]]:
        return super().likeliest(self._norms["norm"](self._own_join(hidden[None]))[0])


@torch.inference_mode()
def made(name: str) -> dict[str, Any]:
    answer = next(answer for answer in answers(name) if answer.name == "more")
    ids, begin = answer.prompt_ids + answer.output_ids, len(answer.prompt_ids)
    with tempfile.TemporaryDirectory() as scratch:
        of_it = DraftingOfStreams if name == "deepseek-v4" else Drafting
        drafting = of_it(name, model_with_one_more(name, Path(scratch)))
    hidden = drafting.hidden(ids[:-1])
    drafted = drafting.draft(ids[1:], hidden)
    first, second = drafting.likeliest(drafted)[begin - 1 :], {}
    for index in SECONDS:
        end = begin + index  # tokens whose hidden states are known
        again = torch.cat([hidden[:end], drafted[end - 1 : end]])
        found = drafting.draft([*ids[1 : end + 1], first[index][0]], again)
        second[index] = drafting.likeliest(found[-1:])[0]
    return {"first": first, "second": second}


def main() -> None:
    torch.set_num_threads(1)
    found = {name: made(name) for name in DRAFTING}
    for name, drafts in found.items():
        print(name, len({token for token, _ in drafts["first"]}), "different drafts", flush=True)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(drafts)}" for name, drafts in found.items())
    text = f'{{"transformers": {json.dumps(transformers.__version__)}, "models": {{\n{lines}\n}}}}\n'
    Path(__file__).with_name("drafts.json").write_text(text)


if __name__ == "__main__":
    main()
