#!/usr/bin/env bash
# Makes .venv and installs hisparse with everything ./demo and ./test need. Idempotent: a second run takes no time.
#   PYTHON=python3.12            another interpreter (3.11 or newer)
#   HISPARSE_TORCH_INDEX=URL     a package index with CPU builds of torch (smaller than the default CUDA build)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

step() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }
die() { printf '\nFAILED: %s\n  fix: %s\n' "$1" "$2" >&2; exit 1; }

PYTHON=${PYTHON:-python3}
command -v "$PYTHON" >/dev/null || die "no $PYTHON on the PATH" "install Python 3.11 or newer, or set PYTHON=/path/to/python"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
  || die "$("$PYTHON" --version) is too old" "install Python 3.11 or newer, or set PYTHON=/path/to/python"

stamp=.venv/.hisparse-$(cat pyproject.toml scripts/bootstrap.sh | sha256sum | cut -c1-16)
[ -f "$stamp" ] && exit 0

if [ ! -x .venv/bin/python ]; then
  step "creating .venv ($("$PYTHON" --version))"
  "$PYTHON" -m venv .venv || die "could not create .venv" "Debian and Ubuntu: apt-get install python3-venv; then remove .venv and retry"
fi
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
install() { # install WHAT FIX ARGS...
  local what=$1 fix=$2; shift 2
  step "installing $what"
  pip install -q "$@" || die "could not install $what" "$fix"
}

offline="check the network and the package index of pip, then run this again (finished steps are kept)"
if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
  if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
    install "torch (CUDA build)" "$offline" torch
  elif [ -n "${HISPARSE_TORCH_INDEX:-}" ]; then
    install "torch (CPU build)" "check HISPARSE_TORCH_INDEX" torch --index-url "$HISPARSE_TORCH_INDEX"
  else
    step "installing torch"
    pip install -q torch==2.13.0 || install "torch (newest release)" "$offline" torch
  fi
fi
install "Ray, transformers and tools" "$offline" "ray[serve]==2.60.0" "transformers>=5.18,<6" safetensors pyyaml rich typer numpy pydantic fastapi jinja2 \
  coverage httpx openai opentelemetry-sdk hypothesis mypy playwright pytest pytest-timeout pytest-xdist ruff "schemathesis>=4.32,<5" types-PyYAML "setuptools>=77"
# Kernels are compiled, and Triton's run in its interpreter, without a GPU.
install "CuPy, NVRTC and Triton" "$offline" "cupy-cuda13x>=14.2" nvidia-cuda-nvrtc "triton==3.6.*"
# NIXL's meta package pulls both CUDA variants and torch; this is the part that is used. Last, so that pip has no
# dependency of it to complain about.
install "NIXL" "$offline" --no-deps nixl==1.5.1 nixl-cu13==1.5.1
install "hisparse (editable)" "read the error above; pyproject.toml may be damaged" --no-deps --no-build-isolation -e .

.venv/bin/python - <<'PY' || die "the installation is incomplete" "remove .venv and run this again"
import importlib
for name in ("torch", "ray", "transformers", "nixl", "pydantic", "hisparse"):
    importlib.import_module(name)
PY
rm -f .venv/.hisparse-*
touch "$stamp"
step "ready"
