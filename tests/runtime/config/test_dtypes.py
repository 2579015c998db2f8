"""Which dtypes go with which device and tensor operations, and what auto stands for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
from support.tiny_models import write_llama_gguf

from headwise.cache_controller.dtypes import numpy_dtype
from headwise.errors import ConfigError, ModelError
from headwise.kernels.native_dtypes import multiplies_bfloat16
from headwise.runtime.config import device
from headwise.runtime.config.device import resolve_device
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.config.info import chosen
from headwise.runtime.config.model_card import check_unchanged, read_model_card
from headwise.runtime.loader.block_file import BLOCKS
from headwise.runtime.loader.gguf_cache import converted_directory
from headwise.runtime.loader.progress import SilentProgress
from headwise.runtime.ops.select import resolve_ops_name


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_config(tmp_path, head_dim=16)


def write_config(directory: Path, head_dim: int) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim, "vocab_size": 300,
        "max_position_embeddings": 4096,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that multiplies bfloat16, where auto makes use of it."""
    monkeypatch.setattr(device, "multiplies_bfloat16", lambda: True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtype": "float16"}, "dtype float16 does not go with device cpu: choose auto or float32 or bfloat16"),
        ({"kv_dtype": "float16"}, "kv_dtype float16 does not go with device cpu: choose auto or float32 or bfloat16"),
        ({"kv_dtype": "float16"}, "kv_dtype float16 does not go with device cpu: .*int8 or float8_e4m3fn"),
        ({"tensor_ops": "cupy"}, "tensor_ops cupy does not go with device cpu: choose auto or numba or paddle or nump"),
        ({"tensor_ops": "paddle", "dtype": "bfloat16"}, "tensor_ops paddle computes in float32 only, and dtype is bf"),
        ({"tensor_ops": "numpy", "dtype": "bfloat16"}, "numpy computes .*: choose tensor_ops numba, or dtype float32"),
        ({"tensor_ops": "numpy", "weights_dtype": "int8"}, "only, and weights_dtype is int8: choose tensor_ops numba"),
        ({"tensor_ops": "paddle", "weights_dtype": "gguf"}, "only, and weights_dtype is gguf: choose tensor_ops numba"),
        ({"weights_dtype": "int2"}, "weights_dtype must be one of auto, .*int8, int4, gguf, fp8, got 'int2'"),
        ({"weights_dtype": "fp8"}, "weights_dtype fp8 does not go with device cpu: choose auto or float32 or bfloat16"),
    ],
)
def test_what_a_cpu_cannot_is_refused_in_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        EngineConfig(device="cpu", **given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weights_dtype": "gguf", "tensor_ops": "paddle"}, "gguf does not go with device cuda: choose auto"),
        ({"weights_dtype": "bfloat16", "dtype": "float16"}, "does not go with device cuda: choose auto or int8"),
        ({"weights_dtype": "float32"}, "weights_dtype float32 does not go with device cuda: choose auto or bfloat16"),
        ({"tensor_ops": "numba"}, "tensor_ops numba does not go with device cuda: choose auto or cupy or paddle"),
    ],
)
def test_what_a_gpu_cannot_is_refused_in_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(device="cuda", **given)


def test_a_gpu_takes_weights_of_its_activations_dtype() -> None:
    assert EngineConfig(device="cuda", weights_dtype="bfloat16").weights_dtype_name == "bfloat16"
    assert EngineConfig(device="cuda", dtype="float32", weights_dtype="float32").weights_dtype_name == "float32"


def test_a_dtype_that_only_a_cpu_has_keeps_the_deployment_off_gpus() -> None:
    assert resolve_device(EngineConfig(weights_dtype="float32"), gpus=1).device == "cpu"
    assert resolve_device(EngineConfig(weights_dtype="bfloat16"), gpus=1).device == "cuda"
    assert resolve_device(EngineConfig(weights_dtype="gguf"), gpus=1).device == "cuda"


def test_weights_and_cache_follow_the_activations() -> None:
    config = EngineConfig(device="cpu", dtype="bfloat16")
    assert (config.weights_dtype_name, config.kv_dtype_name) == ("bfloat16", "bfloat16")
    mixed = EngineConfig(device="cpu", weights_dtype="int8", kv_dtype="int8")
    assert (mixed.dtype_name, mixed.weights_dtype_name, mixed.kv_dtype_name) == ("float32", "int8", "int8")


@pytest.mark.parametrize("given", [{"dtype": "bfloat16"}, {"weights_dtype": "int8"}, {"weights_dtype": "gguf"}])
def test_numba_computes_what_is_not_float32(given: dict[str, Any]) -> None:
    assert not EngineConfig(device="cpu", **given).computes_float32
    assert resolve_ops_name("auto") == "numba"


def test_auto_is_bfloat16_where_the_cpu_multiplies_it(native: None) -> None:
    assert resolve_device(EngineConfig(), gpus=0).dtype == "bfloat16"
    assert resolve_device(EngineConfig(device="cpu"), gpus=0).dtype == "bfloat16"
    assert resolve_device(EngineConfig(device="cpu", weights_dtype="gguf"), gpus=0).dtype == "bfloat16"


def test_auto_is_float32_where_the_cpu_does_not(native: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "multiplies_bfloat16", lambda: False)
    assert resolve_device(EngineConfig(device="cpu"), gpus=0).dtype == "float32"


@pytest.mark.parametrize(
    "given",
    [
        {"tensor_ops": "numpy"},
        {"tensor_ops": "paddle"},
        {"kernels": "reference"},
        {"weights_dtype": "float32"},
        {"dtype": "float32"},
    ],
)
def test_auto_is_float32_beside_what_computes_in_that(native: None, given: dict[str, Any]) -> None:
    assert resolve_device(EngineConfig(device="cpu", **given), gpus=0).dtype == "float32"


def test_what_was_resolved_stays_so_on_another_machine(native: None, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = resolve_device(EngineConfig(), gpus=0)
    monkeypatch.setattr(device, "multiplies_bfloat16", lambda: False)
    assert resolve_device(EngineConfig.from_dict(resolved.to_dict()), gpus=0) == resolved


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16 avx512_vnni\n", True),
        ("flags\t\t: fpu avx512f amx_bf16 amx_tile\n", True),
        ("flags\t\t: fpu avx2 avx512f\n", False),
        ("Features\t: fp asimd sve i8mm bf16\n", True),
        ("Features\t: fp asimd\n", False),
        ("model name\t: bf16 avx512_bf16\n", False),
        ("", False),
    ],
)
def test_a_cpu_says_whether_it_multiplies_bfloat16(tmp_path: Path, cpuinfo: str, expected: bool) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(cpuinfo)
    assert multiplies_bfloat16(path) is expected


def test_a_system_that_does_not_tell_counts_as_one_that_does_not(tmp_path: Path) -> None:
    assert multiplies_bfloat16(tmp_path / "absent") is False


def test_blocks_computed_from_other_weights_never_share_an_identity(model: Path) -> None:
    def identity(**config: Any) -> str:
        return read_model_card(EngineConfig(model="tiny", device="cpu", **config), model).identity

    differ = [identity(dtype=dtype, weights_dtype=weights) for dtype in ("float32", "bfloat16") for weights in FLOATS]
    assert len(set(differ)) == len(differ)
    assert identity(dtype="bfloat16") == identity(dtype="bfloat16", weights_dtype="bfloat16")
    assert identity() == identity(dtype="float32", weights_dtype="float32")


FLOATS = ("float32", "bfloat16", "int8")


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    """A model with blocks of a GGUF file's."""
    kinds = {"blk.0.ffn_down.weight": gguf.GGMLQuantizationType.Q8_0}
    source = write_llama_gguf(tmp_path / "tiny.gguf", quantized=kinds)
    return converted_directory(source, tmp_path, SilentProgress())


FROM_BLOCKS = EngineConfig(model="tiny", device="cpu", weights_dtype="gguf")


def test_a_model_computed_from_its_blocks_is_another_one_with_the_same_weights(converted: Path) -> None:
    plain = read_model_card(EngineConfig(model="tiny", device="cpu"), converted)
    from_blocks = read_model_card(FROM_BLOCKS, converted)
    assert plain.identity != from_blocks.identity
    assert plain.weights == from_blocks.weights, "head patterns are of the model, however it is computed"
    with (converted / BLOCKS).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    assert read_model_card(FROM_BLOCKS, converted).identity not in (plain.identity, from_blocks.identity)
    check_unchanged(plain, EngineConfig(model="tiny", device="cpu"), converted)
    with pytest.raises(ModelError, match="no longer the one that the deployment was started with"):
        check_unchanged(from_blocks, FROM_BLOCKS, converted)


@pytest.mark.parametrize("identify", [False, True])
def test_a_model_that_is_no_gguf_file_cannot_be_computed_from_its_blocks(model: Path, identify: bool) -> None:
    with pytest.raises(
        ConfigError, match=r"gguf computes from .*, and tiny is no GGUF file: choose weights_dtype int8"
    ):
        read_model_card(FROM_BLOCKS, model, identify=identify)


def test_a_bfloat16_cache_is_laid_out_where_ml_dtypes_is_not_installed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model="tiny", device="cpu", dtype="bfloat16")
    numpy_dtype.cache_clear()
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    layout = read_model_card(config, model, identify=False).layout
    assert [role.token_bytes for role in layout.roles] == [2 * 16, 2 * 16]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_cache_of_four_bits_takes_heads_of_whole_groups(model: Path, device: str) -> None:
    config = EngineConfig(model="tiny", device=device, kv_dtype="int4")
    with pytest.raises(ConfigError, match="int4 takes heads of a multiple of 32 elements, not of 16: choose kv_dtype"):
        read_model_card(config, model, identify=False)


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_a_quantised_cache_of_heads_that_do_not_fit_is_refused_before_weights_are_read(
    tmp_path: Path, kv_dtype: str
) -> None:
    write_config(tmp_path, head_dim=24)
    (tmp_path / "model.safetensors").mkdir()  # reading it would fail
    config = EngineConfig(model="odd", device="cpu", kv_dtype=kv_dtype)
    says = (
        f"kv_dtype {kv_dtype} on a CPU takes heads of a multiple of 16, those of odd have 24: choose kv_dtype bfloat16"
    )
    with pytest.raises(ConfigError, match=says):
        read_model_card(config, tmp_path, identify=False)


def test_the_line_at_start_says_which_dtypes_were_chosen(model: Path) -> None:
    config = EngineConfig(model="tiny", device="cpu", dtype="bfloat16", weights_dtype="int8")
    line = chosen(config, read_model_card(config, model, identify=False), model)
    assert "tensor_ops=numba kernels=numba dtype=bfloat16 weights_dtype=int8 kv_dtype=bfloat16" in line
