#!/bin/sh
# Set up, then run every check. Arguments go to pytest.     sh tests/run.sh     sh tests/run.sh tests/unit -x
set -eu
cd "$(dirname "$0")/.."
sh examples/setup.sh test
python=.venv/bin/python

echo "ruff"
"$python" -m ruff check .
echo "mypy"
"$python" -m mypy
echo "pytest"
"$python" -m pytest "$@"
if [ $# -eq 0 ] && "$python" -c "import triton" 2>/dev/null; then # whoever names tests has named all of them
    echo "kernels, interpreted"
    CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 "$python" -m pytest -m kernel tests/kernels
fi
