#!/bin/sh
# Install dsv4lite into .venv in the project's folder.     sh examples/setup.sh [EXTRAS]     e.g.  sh examples/setup.sh test
#
# Run it as often as you like: it installs again only when pyproject.toml has changed. Set PYTHON to choose an interpreter.
set -eu
cd "$(dirname "$0")/.."
extras=${1:-}
venv=.venv/bin/python
installed=.venv/installed-${extras:-plain}.toml # pyproject.toml as it was when these extras were installed

find_python() {
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "setup: dsv4lite needs Python 3.11 or newer; set PYTHON to one, e.g. PYTHON=/usr/bin/python3.12" >&2
    return 1
}

if ! "$venv" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    echo "setup: making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
fi

if cmp -s pyproject.toml "$installed"; then
    echo "setup: .venv is up to date"
    exit
fi

# A default torch brings gigabytes of CUDA libraries. Where they would be of no use, ask for torch by itself first: pip then
# prefers a CPU build of that version if it is configured to see one.
if ! command -v nvidia-smi >/dev/null 2>&1 && ! "$venv" -c 'import torch' 2>/dev/null; then
    echo "setup: no NVIDIA GPU here, installing torch for the CPU (a few minutes)"
    "$venv" -m pip install --quiet "torch==2.13.0"
fi

echo "setup: installing dsv4lite${extras:+ with extras: $extras} (a few minutes)"
"$venv" -m pip install --quiet --editable ".${extras:+[$extras]}"
cp pyproject.toml "$installed"
