#!/usr/bin/env bash
# All that a GPU is needed for, in one go of less than 8 minutes: `benchmarks/gpu_checks.sh [OUT] [options of gpu_checks.py]`.
#
# OUT (default: gpu-checks) gets gpu.log, all that was printed; gpu.json, the result; gpu.md, the table for docs/. The
# last two are whole after every row, so whoever stops the run, and however, has what was found until then.
#
# Nothing is installed or fetched. Needed: CuPy for the driver's CUDA, Triton, NumPy, ml_dtypes, safetensors, tokenizers,
# msgpack, PyYAML, jinja2, xxhash, rich. Compared with where there: torch, flashinfer. Used where there: compute-sanitizer.
#
# With SmolLM2's weights, two more options; the tokens are those of a CPU:
#
#     python benchmarks/gpu_checks.py --make-expected smol/expected.json --smollm2 SmolLM2-135M-Instruct.Q4_1.gguf    # on a CPU
#     benchmarks/gpu_checks.sh OUT --smollm2 SmolLM2-135M-Instruct.Q4_1.gguf --expect smol/expected.json       # on the GPU
#
# Where the machine with the GPU takes no file of 98 MB, send halves, one after the other, and join them there. It also
# needs the package gguf, which a wheel on the path is enough for:
#
#     split --number=2 --numeric-suffixes=1 SmolLM2-135M-Instruct.Q4_1.gguf smol/half-    # here
#     pip download --no-deps --dest smol gguf
#     cat smol/half-* > /tmp/smollm2.gguf                                                 # there, once both have come
#     PYTHONPATH=$(echo smol/gguf-*.whl) benchmarks/gpu_checks.sh OUT --smollm2 /tmp/smollm2.gguf --expect smol/expected.json
#
# A missing half is told (expected.json has the file's SHA-256), and the other sections run.
set -uo pipefail
out=${1:-gpu-checks}
shift $(( $# > 0 ))
mkdir -p "$out"
here=$(dirname "$(readlink -f "$0")")
python=${PYTHON:-python3}
rm -f "$out/gpu.json" "$out/gpu.md"
PYTHONUNBUFFERED=1 timeout --kill-after=5 475 "$python" "$here/gpu_checks.py" --markdown "$out/gpu.md" --result "$out/gpu.json" "$@" \
    2>&1 | tee "$out/gpu.log"
