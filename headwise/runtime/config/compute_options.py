"""Fields of the configuration: the model, and how it computes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headwise.errors import ConfigError
from headwise.runtime.config.adapters import parse_adapters
from headwise.runtime.config.options import option

_CPU_CHOICES = {
    "tensor_ops": ("numba", "paddle", "numpy"),
    "kernels": ("numba", "reference"),
    "dtype": ("float32", "bfloat16"),
    "weights_dtype": ("float32", "bfloat16", "int8", "int4", "gguf"),
    "kv_dtype": ("float32", "bfloat16", "int8", "float8_e4m3fn", "int4"),
}
_CUDA_CHOICES = {"tensor_ops": ("cupy", "paddle"), "kernels": ("cuda",)}
"""What may be chosen besides auto, by device; the rest is free."""

_FLOAT32_OPS = ("paddle", "numpy")
"""Tensor operations that compute in nothing else on a CPU."""


@dataclass(frozen=True)
class ComputeOptions:
    """The model, and how it computes"""

    model: str = option(
        "smollm2-135m",
        "Model to serve: a demo alias (smollm2-135m, gemma3-270m), a GGUF file, a Hugging Face directory, "
        "or hf:organisation/name.",
    )
    adapters: str = option(
        "",
        "LoRA adapters in PEFT's format that requests may ask for: NAME=DIRECTORY,...; on every node. Empty: none.",
    )
    weights_from: str = option(
        "",
        "Directories from which a running deployment may be given other weights (`Client.update_weights`), as every "
        "client but a tenant's may; on every node, unless copy_weights, separated by commas. Empty: none are taken.",
    )
    copy_weights: bool = option(
        False,
        "Nodes that lack a directory of weights_from copy it, by way of Ray, from one that has it, to the same path, "
        "and delete the copy once its weights are no longer served. Else all nodes must have it.",
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "Where workers compute: on a GPU each, or on CPU cores; auto is cuda where all ranks can have a GPU."
    )
    tensor_ops: Literal["auto", "numba", "paddle", "numpy", "cupy"] = option(
        "auto",
        "Framework behind the model's tensor operations; auto is cupy on a GPU, and numba, our own kernels, on a "
        "CPU. There, paddle and numpy compute in float32 only.",
    )
    kernels: Literal["auto", "numba", "reference", "cuda"] = option(
        "auto",
        "Attention kernels; auto is cuda on a GPU, else numba. reference is plain NumPy, slow and the definition of "
        "what is right.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "Of weights and activations; auto is bfloat16 on a GPU and on a CPU that multiplies it natively, else float32. "
        "A CPU has no float16.",
    )
    weights_dtype: Literal["auto", "float32", "bfloat16", "int8", "int4", "gguf", "fp8"] = option(
        "auto",
        "Of weights in memory; auto is that of the activations. int8 has a scale for each 32 numbers. int4 computes "
        "from the codes of 4 bits of a checkpoint by awq, gptq or compressed-tensors, gguf from a GGUF file's own "
        "blocks; what these cannot compute from is bfloat16 on a CPU, of dtype on a GPU. fp8 computes from an FP8 "
        "checkpoint's own codes, on a GPU.",
    )
    cpu_threads: int = option(0, "Threads per worker on a CPU; 0 shares the machine's cores between ranks.", 0, 1024)
    cuda_graphs: bool = option(
        True, "Record steps on a GPU as CUDA graphs at start: a decode step as one, prefill as one for each layer."
    )
    prefill_graphs: int = option(
        -1,
        "Most tokens of a step that runs by prefill's graphs, padded to one of a few sizes: of larger ones the GPU "
        "takes longer than the host. 0: none does; -1: by an estimate for the model and the card, or 1,024 where "
        "there is none.",
        -1,
        65536,
    )
    prefill_tma: bool = option(
        True,
        "On GPUs of compute capability 9.0 on, let the tensor memory accelerator bring a prompt's keys and values, "
        "where heads are 128 or 256 numbers that the cache has as they are.",
    )
    overlap_kernels: bool = option(
        False,
        "On GPUs of compute capability 9.0 on, let kernels begin before those in front of them have ended, and read "
        "weights meanwhile; products of up to 16 rows are headwise's own then. Not measured yet.",
    )
    one_shot_all_reduce: bool = option(
        True,
        "Sum small tensors of ranks on GPUs in one launch, by memory that they share, where they can: else all go by "
        "NCCL.",
    )
    max_model_len: int = option(0, "Most tokens of a sequence, prompt and output; 0 is the model's own limit.", 0)
    max_num_seqs: int = option(0, "Most sequences in one step; 0: 256 on a GPU, 64 on a CPU.", 0, 65536)
    max_batched_tokens: int = option(
        0,
        "Token budget of a step, and of one prompt in all steps in flight: longer ones are computed in chunks. 0: 8192 "
        "on a GPU, 512 on a CPU, with `image_encoders` 576: one image of Gemma 4 is 280 tokens.",
        0,
    )
    prompt_order: Literal["fair", "arrival"] = option(
        "fair",
        "Which prompts an engine computes first, within a priority. fair: in the order in which they would be through "
        "if all were computed at once: short ones, and those of which most is cached, do not wait for long ones, nor "
        "these for ever more short ones. arrival: who came first.",
    )
    async_scheduling: bool = option(True, "Schedule step n+1 while step n runs.")
    speculation: int = option(
        0,
        "Most draft tokens of a sequence in a step: speculative decoding by prompt lookup, and by a layer of the model "
        "that drafts (`mtp`), or a head beside it (`draft_model`). Output that is guessed right takes fewer steps and "
        "stays the same; there are drafts where they pay, by what was measured. 0: none.",
        0,
        32,
    )
    mtp: bool = option(
        True,
        "With `speculation`, draft by the layer that a model has for it (multi-token prediction), if it has one: it "
        "takes a layer's memory and cache, and is written in each step.",
    )
    draft_model: str = option(
        "",
        "With `speculation`, draft by this EAGLE-3 head, which was made for the model, in place of a layer of its own: "
        "a directory of config.json and safetensors, on every node, or hf:organisation/name. Empty: none.",
    )
    packed_cache: bool = option(
        True,
        "Keep weights as a CPU's kernels read them in cache_dir, where loading them took over 2 s: the next start maps "
        "the file.",
    )
    cache_dir: str = option(
        "~/.cache/headwise", "Directory for downloaded and converted models, and for packed weights."
    )

    def _check_compute(self) -> None:
        """Refuse what the device cannot do, once it is known: ``auto`` is resolved where there are GPUs to count."""
        if not self.model.strip():
            raise ConfigError("model must name a model; try smollm2-135m")
        if self.draft_model and not self.speculation:
            raise ConfigError(
                f"draft_model {self.draft_model} drafts for speculation, which is 0: give speculation 3, or leave "
                "draft_model out"
            )
        own = tuple({self.dtype_name} & {"float32", "bfloat16"})
        packed = () if self.tensor_ops == "paddle" else ("int8", "int4", "gguf", "fp8")
        cuda_choices = {**_CUDA_CHOICES, "weights_dtype": (*own, *packed)}
        choices = {"cpu": _CPU_CHOICES, "cuda": cuda_choices}.get(self.device, {})
        for name, allowed in choices.items():
            if getattr(self, name) not in ("auto", *allowed):
                raise ConfigError(
                    f"{name} {getattr(self, name)} does not go with device {self.device}: choose "
                    f"{' or '.join(('auto', *allowed))}"
                )
        if self.device == "cpu" and self.tensor_ops in _FLOAT32_OPS and not self.computes_float32:
            name = "dtype" if self.dtype_name != "float32" else "weights_dtype"
            raise ConfigError(
                f"tensor_ops {self.tensor_ops} computes in float32 only, and {name} is {getattr(self, name)}: choose "
                f"tensor_ops numba, or {name} float32"
            )
        _ = self.adapter_paths
        for place in self.weights_places:
            if not place.is_absolute():
                raise ConfigError(f"weights_from names {str(place)!r}: give absolute paths, as every node knows them")
        if self.copy_weights and not self.weights_places:
            raise ConfigError("copy_weights is for what is in weights_from: give that, too")

    @property
    def adapter_paths(self) -> dict[str, Path]:
        """Directories of `adapters`, by name; raises ConfigError if they are written wrongly."""
        return parse_adapters(self.adapters, self.model)

    @property
    def weights_places(self) -> tuple[Path, ...]:
        """Directories of `weights_from`."""
        return tuple(Path(place.strip()).expanduser() for place in self.weights_from.split(",") if place.strip())

    @property
    def cache_path(self) -> Path:
        return Path(self.cache_dir).expanduser()

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def dtype_name(self) -> str:
        """Of activations. What ``auto`` is on a CPU, `resolve_device` decides: it is float32 until then."""
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if self.on_gpu else "float32"

    @property
    def weights_dtype_name(self) -> str:
        """Of weights in memory; ``gguf`` is that of each tensor in the file."""
        return self.dtype_name if self.weights_dtype == "auto" else self.weights_dtype

    @property
    def computes_float32(self) -> bool:
        """Whether both weights and activations are float32."""
        return self.dtype_name == self.weights_dtype_name == "float32"

    @property
    def computes_from_blocks(self) -> bool:
        """Whether weights are what a GGUF file has, as it has them."""
        return self.weights_dtype == "gguf"

    @property
    def keeps_codes(self) -> bool:
        """Whether weights that a checkpoint has as integers stay so."""
        return self.weights_dtype in ("int8", "int4")

    @property
    def keeps_fp8(self) -> bool:
        """Whether weights that a checkpoint has as FP8 stay so."""
        return self.weights_dtype == "fp8"

    @property
    def has_packed_weights(self) -> bool:
        """Whether matrices are kept as codes of few bits, with scales."""
        return self.keeps_codes or self.keeps_fp8 or self.computes_from_blocks

    @property
    def most_seqs(self) -> int:
        """Most sequences in one step."""
        return self.max_num_seqs or (256 if self.on_gpu else 64)
