#!/usr/bin/env bash
# All that a GPU is needed for, in one go of less than 8 minutes: `benchmarks/gpu_checks.sh [OUT] [options of gpu.py]`.
# OUT (default: gpu-checks) gets gpu.log, all that was printed; gpu.json, the result; gpu.md, the table for docs/.
set -uo pipefail
out=${1:-gpu-checks}
shift $(( $# > 0 ))
mkdir -p "$out"
here=$(dirname "$(readlink -f "$0")")
python=${PYTHON:-python3}
PYTHONUNBUFFERED=1 timeout --kill-after=5 475 "$python" "$here/gpu.py" --markdown "$out/gpu.md" "$@" 2>&1 | tee "$out/gpu.log"
status=$?
grep '^{"benchmark": "gpu"' "$out/gpu.log" | tail -1 > "$out/gpu.json"
exit $status
