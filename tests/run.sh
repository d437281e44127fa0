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
exec "$python" -m pytest "$@"
