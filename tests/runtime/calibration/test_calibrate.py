"""Calibration without weights: made-up texts, measured attention on a planted model, and the report's files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from headwise.cache_controller.head_pattern import HeadPattern, parse_pattern
from headwise.cache_controller.policy import FULL, HeadPolicy
from headwise.errors import ConfigError
from headwise.kernels.reference import ReferenceKernels
from headwise.runtime.calibration import calibrate as calibrate_module
from headwise.runtime.calibration.calibrate import DenseModel, SequenceAttention, measure_pattern, outside_mass
from headwise.runtime.calibration.passkeys import MAX_KEYS, PasskeyInput, held_out_text, passkey_input
from headwise.runtime.calibration.report import bytes_per_token, evaluate, write_heat_map, write_report
from headwise.runtime.cli.app import app
from headwise.runtime.loader.progress import SilentProgress
from headwise.runtime.models.base import Model
from headwise.runtime.models.model_config import ModelConfig
from headwise.runtime.models.position_config import RopeConfig
from headwise.runtime.ops.numpy_ops import NumpyOps

LAYERS, HEADS, KV_HEADS, DIM, VOCAB = 2, 4, 2, 16, 128
SINK, WINDOW = 4, 32
STREAMING = HeadPolicy(WINDOW, SINK)


class Characters:
    """A tokenizer of ASCII characters."""

    bos_token_id = 2

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: np.ndarray) -> str:
        return "".join(chr(int(i)) for i in ids)


class Planted(Model):
    """Two layers of two KV heads; KV head 1 of layer 0 looks for equal tokens wherever they are, all others look
    at what is near. The head that looks far is one of two query heads of its KV head.
    """

    def __init__(self) -> None:
        self.config = ModelConfig(
            architecture="planted", hidden_size=VOCAB, intermediate_size=1, num_layers=LAYERS, num_heads=HEADS,
            num_kv_heads=KV_HEADS, head_dim=DIM, vocab_size=VOCAB, max_position=4096, rms_norm_eps=1e-6,
            tie_embeddings=True, policies=((FULL,) * KV_HEADS,) * LAYERS, ropes=(RopeConfig(1e4),) * LAYERS,
            attention_scale=1.0,
        )  # fmt: skip
        self.codes = np.random.default_rng(0).choice([-1.0, 1.0], (VOCAB, DIM)).astype(np.float32)

    def forward(self, token_ids, positions, attention):
        codes = self.codes[token_ids]
        near = np.zeros_like(codes)
        near[:, 0], near[:, 1] = np.cos(positions / 250), np.sin(positions / 250)  # alike where positions are close
        outs = []
        unturned = (
            np.ones((len(token_ids), 1, DIM // 2), np.float32),
            np.zeros((len(token_ids), 1, DIM // 2), np.float32),
        )
        for layer in range(LAYERS):
            keys = np.stack([near, codes if layer == 0 else near], axis=1)
            queries = np.repeat(20_000 * near[:, None], HEADS, axis=1)
            if layer == 0:
                queries[:, 2] = 0
                queries[:, 3] = codes
            out = attention(layer, queries.astype(np.float32), keys, keys, unturned)
            outs.append(out.reshape(len(token_ids), -1))
        return np.concatenate(outs, axis=1)

    def scores(self, hidden):
        return hidden.copy()

    logits = scores


@pytest.fixture
def model() -> DenseModel:
    planted = Planted()
    return DenseModel(
        "planted", "id", planted.config, planted, NumpyOps(), ReferenceKernels(), SimpleNamespace()
    )  # fmt: skip


@pytest.fixture
def item() -> PasskeyInput:
    return passkey_input(Characters(), 700, 2, seed=0)


# ---- texts ----


@pytest.mark.parametrize("seed", range(5))
def test_every_pass_key_is_told_once_before_it_is_asked_for(seed: int) -> None:
    item = passkey_input(Characters(), 2000, 4, seed)
    text = Characters().decode(item.token_ids)
    assert 1700 < len(text) <= 2000
    assert len(item.answers) == 4
    for start, stop in item.answers:
        answer = text[start:stop]
        owner = text[:start].rpartition("The pass key of the ")[2].removesuffix(" is")
        assert f"Remember this: the pass key of the {owner} is{answer}." in text[: item.answers[0][0]]


def test_retrieving_positions_are_those_before_each_answer_token(item: PasskeyInput) -> None:
    start, stop = item.answers[0]
    assert item.retrieving[: stop - start].tolist() == list(range(start - 1, stop - 1))
    assert len(item.retrieving) == sum(stop - start for start, stop in item.answers)


def test_texts_depend_on_the_seed_alone() -> None:
    first, again, other = (passkey_input(Characters(), 1500, 3, seed).token_ids for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert first.tolist() != other.tolist()


@pytest.mark.parametrize("tokens", [100, 3000, 9000])
def test_held_out_text_is_as_long_as_asked_for_and_hides_no_pass_key(tokens: int) -> None:
    text = held_out_text(Characters(), tokens, seed=0)
    assert text.shape == (tokens,)
    assert "pass key" not in Characters().decode(text)


@pytest.mark.parametrize(
    ("tokens", "keys", "message"),
    [
        (2000, MAX_KEYS + 1, "choose from 1 to 10"),
        (2000, 0, "choose from 1"),
        (200, 4, "200 tokens have no room for 4"),
    ],
)
def test_inputs_that_cannot_be_made_are_refused(tokens: int, keys: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        passkey_input(Characters(), tokens, keys, 0)


# ---- measuring ----


@pytest.mark.parametrize("own", [FULL, HeadPolicy(50), HeadPolicy(40, sink=8)])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("tile_bytes", [1, 32 << 20])
def test_far_attention_is_what_a_loop_over_tokens_finds(
    own: HeadPolicy, softcap: float, tile_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate_module, "TILE_BYTES", tile_bytes)
    draw = np.random.default_rng(0)
    query, key = draw.standard_normal((3, 2, DIM), np.float32), draw.standard_normal((90, DIM), np.float32)
    positions = np.array([10, 45, 89])
    got = outside_mass(query, positions, key, own, STREAMING, 0.5, softcap)
    for row, position in enumerate(positions):
        for head in range(2):
            total = hidden = 0.0
            for k in range(position + 1):
                if not own.is_full and position - k >= own.window and k >= own.sink:
                    continue
                score = 0.5 * float(query[row, head].astype(float) @ key[k])
                weight = np.exp(softcap * np.tanh(score / softcap) if softcap else score)
                total += weight
                hidden += weight * (position - k >= WINDOW and k >= SINK)
            assert got[head, row] == pytest.approx(hidden / total, abs=1e-5)


def test_the_head_that_looks_far_has_the_highest_score(model: DenseModel, item: PasskeyInput) -> None:
    pattern = measure_pattern(model, [item], SINK, WINDOW, "test", SilentProgress())
    assert (pattern.model, pattern.identity) == ("planted", "id")
    assert np.unravel_index(pattern.scores.argmax(), pattern.scores.shape) == (0, 1)
    assert pattern.scores[0, 1] > 0.5
    others = np.delete(pattern.scores.ravel(), 1)
    assert others.max() < 0.4
    assert ((pattern.scores >= 0) & (pattern.scores <= 1)).all()


def test_inputs_that_hide_nothing_are_refused(model: DenseModel, item: PasskeyInput) -> None:
    with pytest.raises(ConfigError, match="sink and window reach over 1004: use longer inputs"):
        measure_pattern(model, [item], 4, 1000, "test", SilentProgress())


def test_whole_sequences_attend_by_the_policies_given(model: DenseModel) -> None:
    tokens = np.random.default_rng(0).integers(0, VOCAB, 200).astype(np.int32)
    full = model.forward(tokens, SequenceAttention(model, model.config.policies, 200))
    table = ((FULL, STREAMING), (FULL, FULL))
    windowed = model.forward(tokens, SequenceAttention(model, table, 200))
    np.testing.assert_allclose(full[:WINDOW], windowed[:WINDOW], atol=1e-6)
    limited = np.repeat([False, True, False, False], 2 * DIM)  # the two query heads of layer 0's KV head 1
    np.testing.assert_allclose(full[:, ~limited], windowed[:, ~limited], atol=1e-6)
    assert np.abs(full[150:, limited] - windowed[150:, limited]).max() > 0.01


# ---- the report ----


def test_the_report_says_what_each_sparsity_costs_and_saves(model: DenseModel, item: PasskeyInput) -> None:
    pattern = HeadPattern(np.array([[0.1, 0.9], [0.2, 0.3]]), "p")
    texts = [held_out_text(Characters(), 300, 0)]
    report = evaluate(
        model, pattern, [0.0, 0.5, 1.0], sink=SINK, window=WINDOW, inputs=[item], texts=texts, progress=SilentProgress()
    )
    assert report.rows[0] == report.full
    saved = [row.bytes_per_token / report.full.bytes_per_token for row in report.rows]
    assert saved == [1.0, 0.5, 0.0]
    assert [row.sparsity for row in report.rows] == [0.0, 0.5, 1.0]
    assert report.rows[2].perplexity != report.full.perplexity
    assert (report.passkeys, report.full.groups) == (2, 1)


def test_perplexity_and_recall_are_those_of_the_logits(model: DenseModel, item: PasskeyInput) -> None:
    class Oracle(Planted):
        """Knows every next token of the pass key input, but for the second answer's last."""

        def forward(self, token_ids, positions, attention):
            hidden = np.zeros((len(token_ids), VOCAB), np.float32)
            hidden[np.arange(len(token_ids) - 1), token_ids[1:]] = np.log(np.float32(127.0))
            if len(token_ids) == len(item.token_ids):
                wrong = item.answers[1][1] - 2
                hidden[wrong] = 0
                hidden[wrong, 0] = 1
            return hidden

    knowing = DenseModel(**{**vars(model), "model": Oracle()})
    texts = [held_out_text(Characters(), 300, 0)]
    report = evaluate(
        knowing, HeadPattern(np.zeros((2, 2)), "p"), [], sink=SINK, window=WINDOW, inputs=[item], texts=texts,
        progress=SilentProgress(),
    )  # fmt: skip
    assert report.full.recall == 0.5
    assert report.full.perplexity == pytest.approx(2.0, rel=1e-5)  # half of the mass is on the right one of 128 tokens


def test_bytes_per_token_count_full_groups_only() -> None:
    assert bytes_per_token(((FULL, STREAMING),) * 4, 64) == (4 * 2 * 64 * 4, 2)
    assert bytes_per_token(((STREAMING,),) * 4, 64) == (0, 1)


def test_the_report_is_written_for_people_and_for_programs(
    model: DenseModel, item: PasskeyInput, tmp_path: Path
) -> None:
    texts = [held_out_text(Characters(), 300, 0)]
    report = evaluate(
        model, HeadPattern(np.zeros((2, 2)), "p"), [0.5], sink=SINK, window=WINDOW, inputs=[item], texts=texts,
        progress=SilentProgress(),
    )  # fmt: skip
    markdown, plain = write_report(report, tmp_path / "p.json")
    assert (markdown.name, plain.name) == ("p.report.md", "p.report.json")
    assert "| 0.5 |" in markdown.read_text()
    assert "# Head pattern of planted" in markdown.read_text()
    assert json.loads(plain.read_text())["rows"][0]["sparsity"] == 0.5


def test_the_heat_map_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_heat_map(HeadPattern(np.eye(3), "p", "tiny"), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_heat_map_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(
        ConfigError, match=r"needs matplotlib: `pip install 'headwise\[calibrate\]'`, or .*--no-heat-map"
    ):
        write_heat_map(HeadPattern(np.eye(3), "p"), tmp_path / "p.png")


# ---- the command ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sparsities", "0,half"], "--sparsities must be numbers separated by commas, such as 0,0.5, got '0,half'"),
        (["--sparsities", "0,1.5"], "--sparsities are shares of heads, from 0 to 1, got 1.5"),
        (["--inputs", "0"], "--inputs must be at least 1, got 0"),
        (["--head-pattern", "p.tsv"], "calibrate measures the model as it is: drop --head-pattern"),
        (["--sink", "512"], "sink 512 is more than window 256"),
        (["-o", "absent/p.json"], "the directory absent does not exist"),
        (["-o", "p.tsv"], "--output must end in .json, got p.tsv"),
    ],
)
def test_the_command_refuses_at_once_what_cannot_work(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["calibrate", "-o", "p.json", *arguments])
    assert (result.exit_code, result.stdout) == (1, "")
    assert message in result.stderr


@pytest.mark.model
def test_a_measured_pattern_can_be_served(tmp_path: Path) -> None:
    from headwise.runtime.config.engine_config import EngineConfig
    from headwise.runtime.config.model_card import read_model_card
    from headwise.runtime.loader.resolve import resolve_model

    output = tmp_path / "p.json"
    flags = ["--tokens", "160", "--inputs", "1", "--passkeys", "1", "--sparsities", "0.5", "--no-heat-map"]
    flags += ["--weights-dtype", "gguf", "--cpu-threads", "1"]
    result = CliRunner().invoke(app, ["calibrate", "-o", str(output), "--window", "64", "--sink", "16", *flags])
    assert result.exit_code == 0, result.stderr
    assert "| 0.5 |" in result.stdout
    assert parse_pattern(output.read_text(), "p").scores.shape == (30, 3)
    config = EngineConfig(head_pattern=str(output), window=64, sink=16)
    card = read_model_card(config, resolve_model(config.model, config.cache_path))
    assert [policy.is_full for policy in card.plan.policies] == [True, False]
