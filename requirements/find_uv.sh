# To be sourced from the repository's root: $uv is the uv to call, put into .work/uv where none is installed.
uv=$(command -v uv || true)
if [ -z "$uv" ]; then
  uv=.work/uv/bin/uv
  if [ ! -x "$uv" ]; then
    echo "setup: uv is not installed; putting it into .work/uv"
    python3 -m venv .work/uv
    .work/uv/bin/python -m pip install --quiet uv
  fi
fi
