#!/usr/bin/env bash
# reference.sh VENV: makes .work/reference, where verl and TRL (reference.lock, every hash checked) stand before the packages of VENV.
# What compares or measures itself against them runs there. Nothing is done where it is up to date already.
set -euo pipefail
venv=$(realpath "$1")
cd "$(dirname "$0")/.."
reference=.work/reference

wanted=$(cat requirements/reference.lock && echo "# behind $venv")
[ "$wanted" != "$(cat "$reference/.ready" 2>/dev/null)" ] || exit 0

. requirements/find_uv.sh
echo "reference: installing requirements/reference.lock into $reference"
"$uv" venv --quiet --clear --python "$venv/bin/python" "$reference"
"$uv" pip sync --quiet --python "$reference/bin/python" --require-hashes requirements/reference.lock || {
  echo "reference: the packages above are not to be had. The comparison with verl and TRL needs an index with what requirements/reference.lock lists" >&2
  echo "reference: (UV_DEFAULT_INDEX or UV_FIND_LINKS name another one); nothing else does: make test-unit test-engine test-flows works without." >&2
  exit 1
}
"$reference/bin/python" - "$venv" <<'PYTHON'
import sys, sysconfig
from pathlib import Path

behind = Path(sys.argv[1], "lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
Path(sysconfig.get_path("purelib"), "project.pth").write_text(f"import site; site.addsitedir({str(behind)!r})\n")
PYTHON
echo "$wanted" >"$reference/.ready"
