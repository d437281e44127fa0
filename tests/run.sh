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
# As many processes as cores, each with one thread for arithmetic: the tests' models are too small for more.
echo "pytest"
OMP_NUM_THREADS=1 "$python" -m pytest -n auto --dist loadfile "$@"
if [ $# -eq 0 ] && "$python" -c "import triton" 2>/dev/null; then # whoever names tests has named all of them
    echo "kernels, interpreted"
    CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 TRITON_INTERPRET=1 "$python" -m pytest -n auto -m kernel tests/kernels
fi
