#!/bin/sh
# Set up, then run every check: about 28 minutes on two cores.     sh tests/run.sh     sh tests/run.sh tests/unit -x
#
# Arguments go to pytest and replace the choice of tests. Every phase runs, even if one before it fails; the last lines say how long each
# took, and the exit status is 1 if any failed.
set -u
cd "$(dirname "$0")/.."
sh examples/setup.sh test || exit 1
python=.venv/bin/python
summary="" failed=0

phase() {
    name=$1
    shift
    echo "$name"
    begun=$(date +%s)
    if "$@"; then result=passed; else result=FAILED failed=1; fi
    summary="$summary$name: $result, $(($(date +%s) - begun)) s
"
}

phase ruff "$python" -m ruff check .
phase mypy "$python" -m mypy
# As many processes as cores, each with one thread for arithmetic: the tests' models are too small for more. Files run in the order of
# their names, in which the last ones are short, and not by their number of tests, in which the longest ones would come last.
phase pytest env OMP_NUM_THREADS=1 "$python" -m pytest -n auto --dist loadfile --no-loadscope-reorder "$@"
if [ $# -eq 0 ] && "$python" -c "import triton" 2>/dev/null; then # arguments have named all tests that are wanted
    phase "kernels, interpreted" env CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 TRITON_INTERPRET=1 "$python" -m pytest -n auto -m kernel tests/kernels
fi
printf '%s' "$summary"
exit $failed
