"""A converted GGUF model keeps what was quantised as it was, beside its float32 weights, and gives the same parts."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file
from support.tiny_models import HEAD_DIM, HEADS, llama_tensors, write_gemma3_gguf, write_llama_gguf

from headwise.errors import ConfigError, ModelError
from headwise.runtime.config.engine_config import EngineConfig
from headwise.runtime.loader.block_file import BLOCKS, BlockFile
from headwise.runtime.loader.checkpoint import Checkpoint
from headwise.runtime.loader.gguf_blocks import FORMATS
from headwise.runtime.loader.gguf_cache import converted_directory
from headwise.runtime.loader.progress import SilentProgress
from headwise.runtime.loader.resolve import resolve_model

KINDS = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
"""What the gguf package can also write; blocks of 256 do not fit these models."""

QUERY, DOWN = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"


def convert(source: Path, cache: Path) -> Checkpoint:
    return Checkpoint(converted_directory(source, cache, SilentProgress()), blocks=True)


def write_quantised(path: Path, kind: str, but: tuple[str, ...] = ()) -> Path:
    matrices = [name for name, values in llama_tensors().items() if values.ndim == 2 and name not in but]
    kinds = dict.fromkeys(matrices, gguf.GGMLQuantizationType[kind])
    return write_llama_gguf(path, quantized=kinds)


@pytest.fixture
def mixed(tmp_path: Path) -> Checkpoint:
    return convert(write_quantised(tmp_path / "mixed.gguf", "Q4_1", but=("blk.0.ffn_up.weight",)), tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_every_matrix_has_the_numbers_of_its_float32_copy(tmp_path: Path, kind: str) -> None:
    checkpoint = convert(write_quantised(tmp_path / "q.gguf", kind), tmp_path)
    found = 0
    for name in checkpoint.names:
        shape = checkpoint.shape(name)
        if len(shape) == 2:
            matrix = checkpoint.kept_rows(name, 0, shape[0])
            assert matrix is not None
            assert (matrix.bits, matrix.group) == (FORMATS[kind].bits, FORMATS[kind].group)
            np.testing.assert_array_equal(matrix.dequantised(), checkpoint.tensor(name))
            found += 1
    assert found == 15


def test_query_rows_go_back_to_halves_of_a_head_with_their_scales(mixed: Checkpoint) -> None:
    stored = llama_tensors()["blk.0.attn_q.weight"].reshape(HEADS, HEAD_DIM, -1)
    matrix = mixed.kept_rows(QUERY, HEAD_DIM, 2 * HEAD_DIM)
    assert matrix is not None
    expected = np.concatenate([stored[1, 0::2], stored[1, 1::2]])
    np.testing.assert_allclose(matrix.dequantised(), expected, atol=0.2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_ranks_rows_and_columns_are_those_of_the_matrix(tmp_path: Path, kind: str) -> None:
    checkpoint = convert(write_quantised(tmp_path / "q.gguf", kind), tmp_path)
    rows, columns = checkpoint.kept_rows(DOWN, 5, 11), checkpoint.kept_columns(DOWN, 32, 64)
    assert rows is not None
    assert columns is not None
    np.testing.assert_array_equal(rows.dequantised(), checkpoint.rows(DOWN, 5, 11))
    np.testing.assert_array_equal(columns.dequantised(), checkpoint.columns(DOWN, 32, 64))


def test_what_the_file_has_in_floating_point_is_not_quantised(mixed: Checkpoint) -> None:
    assert mixed.kept_rows("model.layers.0.mlp.up_proj.weight", 0, 8) is None
    assert mixed.kept_columns("model.layers.0.mlp.up_proj.weight", 0, 8) is None
    assert mixed.kept_rows("model.norm.weight", 0, 8) is None


def test_without_being_asked_for_nothing_is_quantised(mixed: Checkpoint) -> None:
    plain = Checkpoint(mixed.directory)
    assert plain.names == mixed.names
    assert plain.kept_rows(QUERY, 0, 8) is None
    assert plain.kept_columns(DOWN, 0, 8) is None


def test_codes_of_four_bits_lie_two_a_byte(mixed: Checkpoint) -> None:
    blocks = BlockFile(mixed.directory / BLOCKS)
    rows, columns = mixed.shape(DOWN)
    assert blocks._file.stored(f"{DOWN}.codes").nbytes == rows * columns // 2
    assert blocks.code_form(DOWN) == ("uint8", 4, 32, True)
    assert blocks.code_form("model.layers.0.mlp.up_proj.weight") is None


def test_codes_of_eight_bits_are_mapped_and_not_read(tmp_path: Path) -> None:
    checkpoint = convert(write_quantised(tmp_path / "q.gguf", "Q8_0"), tmp_path)
    first, second = (checkpoint.kept_rows(DOWN, 0, 8) for _ in range(2))
    assert first is not None
    assert second is not None
    assert np.shares_memory(first.codes, second.codes)
    assert not first.codes.flags.writeable


def test_a_rank_whose_part_begins_within_a_group_is_refused_with_the_remedy(mixed: Checkpoint) -> None:
    says = (
        r"down_proj.weight in groups of 32 columns, .* \(columns 16 to 32\): choose another tp_size, or weights_dtype"
    )
    with pytest.raises(ConfigError, match=says):
        mixed.kept_columns(DOWN, 16, 32)


def test_parts_that_are_not_there_are_refused(mixed: Checkpoint) -> None:
    with pytest.raises(ModelError, match="no part 0:999 of axis 0"):
        mixed.kept_rows(DOWN, 0, 999)
    with pytest.raises(ModelError, match="lacks the tensor 'other'"):
        mixed.kept_columns("other", 0, 32)


def test_a_model_without_anything_quantised_keeps_an_empty_file(tmp_path: Path) -> None:
    checkpoint = convert(write_gemma3_gguf(tmp_path / "f32.gguf"), tmp_path)
    assert checkpoint.kept_rows(DOWN, 0, 8) is None
    assert set(BlockFile(checkpoint.directory / BLOCKS).kinds.values()) == {"F32"}


def test_no_program_takes_the_file_for_a_part_of_the_weights(mixed: Checkpoint) -> None:
    assert [path.name for path in mixed.directory.glob("*.safetensors")] == ["model.safetensors"]
    assert list(mixed.directory.glob("*.bin")) == []


def test_a_file_cut_short_is_refused(mixed: Checkpoint) -> None:
    path = mixed.directory / BLOCKS
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.gguf-blocks is truncated or corrupt"):
        Checkpoint(mixed.directory, blocks=True)


def test_a_file_that_does_not_say_what_is_in_it_is_refused(mixed: Checkpoint) -> None:
    save_file({"x": np.zeros(4, np.float32)}, mixed.directory / BLOCKS)
    with pytest.raises(ModelError, match=r"it does not say what is in it; delete"):
        Checkpoint(mixed.directory, blocks=True)


@pytest.mark.parametrize(
    ("kind", "message"),
    [(99, "'token_embd.weight' has the unknown type 99"), (9, "stored as Q8_1, which cannot be read; use a file quan")],
)
def test_a_type_that_nobody_knows_is_named(tmp_path: Path, kind: int, message: str) -> None:
    path = write_quantised(tmp_path / "odd.gguf", "Q8_0")
    raw = bytearray(path.read_bytes())
    at = raw.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 2 * 8  # behind its two dimensions
    raw[at : at + 4] = kind.to_bytes(4, "little")
    path.write_bytes(raw)
    with pytest.raises(ModelError, match=message) as error:
        convert(path, tmp_path)
    assert "\n" not in str(error.value)


class Stages(SilentProgress):
    """Remembers how far each stage came."""

    def __init__(self) -> None:
        self.reached: dict[str, tuple[int, int]] = {}
        self._stage = ""

    def stage(self, text: str) -> None:
        self._stage = text

    def update(self, done: int, total: int) -> None:
        self.reached[self._stage] = done, total


def test_the_work_is_shown_and_done_once(tmp_path: Path) -> None:
    source = write_quantised(tmp_path / "q.gguf", "Q4_0")
    first, again = Stages(), Stages()
    directory = converted_directory(source, tmp_path, first)
    done, total = first.reached["keeping the blocks of q.gguf"]
    assert done == total > 0
    assert converted_directory(source, tmp_path, again) == directory
    assert again.reached == {}


@pytest.mark.parametrize(
    ("model", "kinds"),
    [("smollm2-135m", {"Q4_1", "Q8_0"}), ("gemma3-270m", {"Q4_K", "Q5_0", "Q6_K", "Q8_0"})],
)
def test_the_demo_models_blocks_have_the_numbers_of_their_float32_copies(model: str, kinds: set[str]) -> None:
    checkpoint = Checkpoint(resolve_model(model, EngineConfig().cache_path), blocks=True)
    stored = BlockFile(checkpoint.directory / BLOCKS).kinds
    assert set(stored.values()) == kinds
    for name in stored:
        rows = min(4096, checkpoint.shape(name)[0])
        matrix = checkpoint.kept_rows(name, 0, rows)
        assert matrix is not None
        np.testing.assert_array_equal(matrix.dequantised(), checkpoint.rows(name, 0, rows))
