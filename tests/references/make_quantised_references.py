"""Writes quantised.json: matrices as compressed-tensors, vLLM, transformers and Model Optimizer pack and expand them.

Needs the environment of `make peers`, nvidia-modelopt and bitsandbytes:

.venv-peers/bin/python tests/references/make_quantised_references.py [--floats]

With --floats, only those of NVFP4, MXFP4, MXFP8 and bitsandbytes are made anew, for which vLLM is not needed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

OUTPUTS, INPUTS, GROUP, AT = 24, 64, 16, "layer."
DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
}


def main() -> None:
    path = Path(__file__).parent / "quantised.json"
    cases = json.loads(path.read_text()) if sys.argv[1:] == ["--floats"] else integers_and_fp8()
    cases |= small_floats()
    path.write_text(json.dumps(cases, indent=1) + "\n")
    print(f"{path}: {len(cases)} matrices")


def integers_and_fp8() -> dict[str, Any]:
    from vllm.scalar_type import scalar_types

    torch.manual_seed(7)
    cases = {}
    for bits, symmetric in ((4, True), (4, False), (8, True)):
        name = f"compressed int{bits} {'symmetric' if symmetric else 'zero points'}"
        args = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": GROUP}
        cases[name] = compressed("pack-quantized", args)
    cases["compressed int8 by row"] = compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"})
    cases["compressed fp8 by row"] = compressed(
        "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}
    )
    cases["fp8 by blocks"] = fp8_blocks((16, 32))
    cases["awq"] = transposed("awq", scalar_types.uint4, zero_points=True)
    cases["gptq symmetric"] = transposed("gptq", scalar_types.uint4b8, zero_points=False)
    cases["gptq 8 bits"] = transposed("gptq", scalar_types.uint8b128, zero_points=False)
    cases["gptq by importance"] = by_importance(cases["gptq symmetric"])
    cases["fp8 by blocks, powers of two"], cases["fp4 beside fp8"] = powers_of_two(), fp4()
    return cases


def small_floats() -> dict[str, Any]:
    torch.manual_seed(11)
    return {
        "compressed nvfp4": compressed_floats("nvfp4-pack-quantized", 4, 16, torch.float8_e4m3fn),
        "compressed mxfp4": compressed_floats("mxfp4-pack-quantized", 4, 32, torch.uint8),
        "compressed mxfp8 by blocks": compressed_floats("mxfp8-quantized", 8, 32, torch.uint8),
        "modelopt nvfp4": by_model_optimizer("NVFP4_DEFAULT_CFG"),
        "modelopt fp8": by_model_optimizer("FP8_DEFAULT_CFG"),
        "modelopt mxfp8 by blocks": by_model_optimizer("MXFP8_DEFAULT_CFG"),
        "bitsandbytes nf4": by_bitsandbytes("nf4", nested=False),
        "bitsandbytes nf4, scales in codes": by_bitsandbytes("nf4", nested=True),
        "bitsandbytes fp4": by_bitsandbytes("fp4", nested=True),
        "bitsandbytes int8": by_bitsandbytes_in_int8(),
    }


def by_bitsandbytes(kind: str, nested: bool) -> dict[str, Any]:
    """In float32, so that nothing is rounded behind the table."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    codes, state = quantize_4bit(drawn(), blocksize=64, compress_statistics=nested, quant_type=kind)
    beside = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return case(config, {"weight": codes, **beside}, dequantize_4bit(codes, state))


def by_bitsandbytes_in_int8() -> dict[str, Any]:
    from bitsandbytes.functional import int8_vectorwise_dequant, int8_vectorwise_quant

    codes, largest, _ = int8_vectorwise_quant(drawn().half())
    tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    exact = codes.float() * (largest / 127).reshape(-1, 1)
    assert torch.allclose(exact, int8_vectorwise_dequant(codes, largest), rtol=1e-6), "the same but for rounding"
    return case(config, tensors, exact)


def compressed_floats(form: str, bits: int, group: int, scale_dtype: torch.dtype) -> dict[str, Any]:
    """Scales as LLM Compressor chooses them: the largest number of a group becomes the format's."""
    strategy = "tensor_group" if form.startswith("nv") else "group"
    args = {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy, "group_size": group}
    weight, weights = drawn(), QuantizationArgs(**args, scale_dtype=scale_dtype)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    scale = weight.reshape(OUTPUTS, -1, group).abs().amax(-1) / (6.0 if bits == 4 else 448.0)
    state = {"weight": weight, "weight_scale": scale.log2().ceil().exp2()}
    if form.startswith("nv"):
        overall = 448.0 / scale.max()
        state = {"weight": weight, "weight_scale": (scale * overall).to(scale_dtype).float()}
        state["weight_global_scale"] = overall.reshape(1)
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(dict(stored), scheme)["weight"]
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": args}}}
    return case(config, stored, in_full(stored, expected, group))


def in_full(stored: Mapping[str, torch.Tensor], expanded: torch.Tensor, group: int) -> torch.Tensor:
    """What was expanded, before it was rounded to bfloat16."""
    scale = stored["weight_scale"]
    scale = (scale.float() - 127).exp2() if scale.dtype == torch.uint8 else scale.float()
    scale = scale / stored["weight_global_scale"] if "weight_global_scale" in stored else scale
    if "weight_packed" in stored:
        from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

        numbers = unpack_fp4_from_uint8(stored["weight_packed"], *expanded.shape).float()
    else:
        numbers = stored["weight"].float()
    exact = numbers * scale.repeat_interleave(group, 1)
    assert torch.allclose(exact, expanded.float(), rtol=2**-7, atol=0), "the same but for rounding"
    return exact


def by_model_optimizer(kind: str) -> dict[str, Any]:
    """A layer's matrix of a model that it quantised and exported."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import NVFP4QTensor
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": INPUTS, "intermediate_size": 2 * INPUTS, "num_hidden_layers": 1, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, architectures=["LlamaForCausalLM"])).bfloat16().eval()
    tokens = torch.randint(0, 128, (2, 16))
    mtq.quantize(model, getattr(mtq, kind), lambda model: model(tokens))
    with tempfile.TemporaryDirectory() as directory:
        export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=directory)
        tensors = load_file(f"{directory}/model.safetensors")
        config = json.loads(Path(f"{directory}/config.json").read_text())["quantization_config"]
    at = "model.layers.0.self_attn.k_proj."
    stored = {name.removeprefix(at): tensor for name, tensor in tensors.items() if name.startswith(at)}
    weight, scale = stored["weight"], stored["weight_scale"]
    if "weight_scale_2" in stored:
        packed = NVFP4QTensor(torch.Size((len(weight), INPUTS)), torch.float32, weight)
        blocks = {-1: 16}
        expected = packed.dequantize(scale=scale, double_scale=stored["weight_scale_2"], block_sizes=blocks)
    elif scale.dtype == torch.uint8:
        expected = weight.float() * (scale.float() - 127).exp2().repeat_interleave(32, 1)
    else:
        expected = weight.float() * scale
    return case(config, stored, expected)


def drawn() -> torch.Tensor:
    return torch.randn(OUTPUTS, INPUTS, dtype=torch.float32)


def case(config: dict[str, Any], tensors: dict[str, torch.Tensor], expected: torch.Tensor) -> dict[str, Any]:
    stored = {AT + name: encoded(tensor) for name, tensor in tensors.items()}
    return {"quantization_config": config, "tensors": stored, "expected": encoded(expected.float())}


def encoded(tensor: torch.Tensor) -> dict[str, Any]:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data": b64encode(raw).decode()}


def compressed(form: str, args: dict[str, Any]) -> dict[str, Any]:
    weight, weights = drawn(), QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    grouped = weight.reshape(OUTPUTS, -1, GROUP if args["strategy"] == "group" else INPUTS)
    largest = 448.0 if args["type"] == "float" else 2.0 ** (args["num_bits"] - 1) - 1
    zero = None
    if args.get("symmetric", True):
        scale = grouped.abs().amax(-1) / largest
    else:
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scale = (high - low) / (2 * largest + 1)
        zero = (-largest - 1 - low / scale).round().clamp(-largest - 1, largest).to(torch.int8)
    state = {"weight": weight.bfloat16(), "weight_scale": scale.bfloat16()}
    if zero is not None:
        state["weight_zero_point"] = zero
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(dict(stored), scheme)["weight"]
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": args}}}
    exact = exactly(stored, expected, args)
    return case(config, stored, exact)


def exactly(stored: dict[str, torch.Tensor], expanded: torch.Tensor, args: dict[str, Any]) -> torch.Tensor:
    """What was expanded, before it was rounded to bfloat16: codes that scales in float32 are multiplied with."""
    scale = stored["weight_scale"].float().repeat_interleave(INPUTS // stored["weight_scale"].shape[1], dim=1)
    codes = (expanded.float() / scale).round() if args["type"] == "int" else stored["weight"].float()
    exact = codes * scale
    assert torch.equal(exact.bfloat16(), expanded.bfloat16()), "the same but for rounding"
    return exact


def fp8_blocks(block: tuple[int, int]) -> dict[str, Any]:
    """As DeepSeek's are; the last block of a column is cut off."""
    weight, (rows, columns) = drawn(), block
    scales = torch.rand(-(-OUTPUTS // rows), -(-INPUTS // columns)) * 0.01 + 0.001
    spread = scales.repeat_interleave(rows, 0)[:OUTPUTS].repeat_interleave(columns, 1)[:, :INPUTS]
    stored = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block), "activation_scheme": "dynamic"}
    return case(config, {"weight": stored, "weight_scale_inv": scales}, stored.float() * spread)


def powers_of_two(block: tuple[int, int] = (8, 32)) -> dict[str, Any]:
    """As DeepSeek-V4's are; expanded by transformers."""
    weight, (rows, columns) = drawn(), block
    exponents = torch.randint(118, 122, (OUTPUTS // rows, INPUTS // columns), dtype=torch.uint8)
    spread = (exponents.float() - 127).exp2().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    stored, scales = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn), exponents.view(torch.float8_e8m0fnu)
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block), "scale_fmt": "ue8m0"}
    return case(config, {"weight": stored, "scale": scales}, expanded(stored, scales))


def fp4() -> dict[str, Any]:
    """As DeepSeek-V4's experts are."""
    stored = torch.randint(-128, 128, (OUTPUTS, INPUTS // 2), dtype=torch.int8)
    scales = torch.randint(110, 128, (OUTPUTS, INPUTS // 32), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    return case(config, {"weight": stored, "scale": scales}, expanded(stored, scales))


def expanded(stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    return Fp8Dequantize(None)._dequantize_one(stored, scales, torch.float32)


def transposed(method: str, kind: Any, zero_points: bool) -> dict[str, Any]:
    from vllm.model_executor.layers.quantization.utils import quant_utils

    bits = kind.size_bits
    expected, codes, scales, zeros = quant_utils.quantize_weights(drawn().T.contiguous(), kind, GROUP, zero_points)
    groups = INPUTS // GROUP
    config = {"quant_method": method, "bits": bits, "group_size": GROUP}
    scales = scales.half()
    if method == "awq":
        tensors = {
            "qweight": quant_utils.awq_pack(codes, bits, INPUTS, OUTPUTS),
            "qzeros": quant_utils.awq_pack(zeros, bits, groups, OUTPUTS),
            "scales": scales,
        }
        config |= {"zero_point": True, "version": "gemm"}
        integers = codes - zeros.repeat_interleave(GROUP, 0)
    else:
        middle = torch.full((groups, OUTPUTS), kind.bias - 1, dtype=torch.int32)
        tensors = {
            "qweight": quant_utils.gptq_pack(codes, bits, INPUTS, OUTPUTS),
            "qzeros": quant_utils.pack_cols(middle, bits, groups, OUTPUTS),
            "scales": scales,
            "g_idx": torch.arange(INPUTS, dtype=torch.int32) // GROUP,
        }
        config |= {"desc_act": False, "sym": True}
        integers = codes - kind.bias
    exact = integers * scales.float().repeat_interleave(GROUP, 0)
    assert torch.allclose(exact, expected, rtol=2e-3, atol=2e-3), "the same but for scales in float16"
    return case(config, tensors, exact.T)


def by_importance(plain: dict[str, Any]) -> dict[str, Any]:
    """The same codes, of which others share a scale (``desc_act``)."""
    from base64 import b64decode

    def read(entry: dict[str, Any]) -> torch.Tensor:
        kind = next(dtype for dtype, name in DTYPES.items() if name == entry["dtype"])
        return torch.frombuffer(bytearray(b64decode(entry["data"])), dtype=kind).reshape(entry["shape"])

    tensors = {name.removeprefix(AT): read(entry) for name, entry in plain["tensors"].items()}
    before, order = tensors["g_idx"].long(), torch.randperm(INPUTS) % (INPUTS // GROUP)
    scales = tensors["scales"].float()
    codes = (read(plain["expected"]).T / scales[before]).round()
    tensors["g_idx"] = order.int()
    return case({**plain["quantization_config"], "desc_act": True}, tensors, (codes * scales[order]).T)


if __name__ == "__main__":
    main()
