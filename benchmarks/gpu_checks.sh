#!/usr/bin/env bash
# All that a GPU is needed for, in calls of less than 8 minutes: `benchmarks/gpu_checks.sh [OUT] [options of gpu_checks.py]`.
# It says at once what the machine has. One go gets through where sections take half of their limits, and which ones it had
# no time for, the table says. Three parts get through in any case:
#
#     WORK=/tmp/work benchmarks/gpu_checks.sh OUT-1 --part 1/3        # and 2/3, and 3/3, into folders of their own
#
# WORK is a folder for compiled kernels and random checkpoints, kept from call to call; without it they go with the run.
# Kernels that are there already are taken: of this Triton or a newer one, for this card and its driver's CUDA. Where there
# is no GPU, they are made by
#
#     python benchmarks/gpu_checks.py --precompile 90,12 --work WORK                    # compute capability, CUDA
#
# and WORK/kernels, a few MB, is what to send.
#
# OUT (default: gpu-checks) gets gpu.log, all that was printed; gpu.json, the result; gpu.md, the table for docs/. The
# last two are whole after every row, so whoever stops the run, and however, has what was found until then.
# `python benchmarks/gpu/join.py benchmarks/results/gpu-CARD OUT-1 OUT-2 OUT-3` makes one of several parts' results.
#
# Nothing is installed or fetched. Needed: CuPy for the driver's CUDA, Triton, NumPy, ml_dtypes, safetensors, tokenizers,
# msgpack, PyYAML, jinja2, xxhash; the first row names those that are missing. headwise need not be installed. Compared
# with where there: torch, flashinfer. Used where there: compute-sanitizer, rich.
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
# A missing half is told (expected.json has the file's SHA-256), and the other sections run. Where pyzmq is there, too, a
# worker in a process of its own says the same tokens.
set -uo pipefail
out=${1:-gpu-checks}
shift $(( $# > 0 ))
mkdir -p "$out"
here=$(dirname "$(readlink -f "$0")")
python=${PYTHON:-python3}
rm -f "$out/gpu.json" "$out/gpu.md"
echo "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2> /dev/null || echo no nvidia-smi), $("$python" --version)," \
    "$("$python" -m pip list 2> /dev/null | awk '/^(cupy|triton|numpy|torch|ml.dtypes|nvidia-cuda-nvrtc|flashinfer)/ { printf "%s %s ", $1, $2 }')"
PYTHONUNBUFFERED=1 timeout --kill-after=5 475 "$python" "$here/gpu_checks.py" ${WORK:+--work "$WORK"} --markdown "$out/gpu.md" --result "$out/gpu.json" "$@" \
    2>&1 | tee "$out/gpu.log"
