#!/usr/bin/env bash
# Builds, checks and measures the GPU code, as far as nine minutes allow, without a network:
#   bench/gpu.sh --results=gpu.json
# Needs nvcc and a python3 with torch; bench/gpu.py describes the steps and has the settings.
set -eu
cd "$(dirname "$0")/.."
nvidia-smi -L >/dev/null || { echo "bench/gpu.sh: no GPU here" >&2; exit 1; }
command -v nvcc >/dev/null || { echo "bench/gpu.sh: no nvcc here; it comes with the CUDA toolkit" >&2; exit 1; }
exec "${PYTHON:-python3}" -u bench/gpu.py "$@"
