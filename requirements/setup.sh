#!/usr/bin/env bash
# setup.sh DEVICE VENV: makes VENV with the packages of DEVICE.lock, every hash checked, and this project in it.
set -euo pipefail
cd "$(dirname "$0")/.."
device=$1 venv=$2

. requirements/find_uv.sh

# The CPU build of torch is not on PyPI: uv must be shown where pip finds it, or PyTorch's own index.
if [ "$device" = cpu ]; then
  export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-https://download.pytorch.org/whl/cpu/torch/}}"
fi

[ -x "$venv/bin/python" ] || "$uv" venv --quiet --python 3.11 "$venv"
echo "setup: installing requirements/$device.lock into $venv (some minutes, 4 GB; compiled, so that every later start is fast)"
"$uv" pip sync --quiet --python "$venv/bin/python" --require-hashes --compile-bytecode "requirements/$device.lock"
"$uv" pip install --quiet --python "$venv/bin/python" --no-deps --no-build-isolation --editable .
