#!/bin/sh
# Set up, then complete a text with the small checkpoint in the package.     sh examples/quickstart.sh "def fibonacci(n):"
set -eu
cd "$(dirname "$0")/.."
sh examples/setup.sh
exec .venv/bin/python -m dsv4lite generate "$@"
