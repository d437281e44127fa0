#!/bin/sh
# Set up, then run every check: about 50 minutes on two cores.     sh tests/run.sh     sh tests/run.sh tests/unit -x
#
# Arguments go to pytest and replace the choice of tests. Every phase runs, even if one before it fails; the last lines say how long each
# took, and the exit status is 1 if any failed.
set -u
cd "$(dirname "$0")/.."
sh examples/setup.sh test || exit 1
python=.venv/bin/python
summary="" failed=0
# mypy takes one core, for a minute without its cache: the tests run meanwhile.
types=$(mktemp)
"$python" -m mypy >"$types" 2>&1 &
mypy=$!
trap 'kill "$mypy" 2>/dev/null; rm -f "$types"' EXIT

phase() {
    name=$1
    shift
    echo "$name"
    begun=$(date +%s)
    if "$@"; then result=passed; else result=FAILED failed=1; fi
    summary="$summary$name: $result, $(($(date +%s) - begun)) s
"
}

mypy_result() {
    wait "$mypy"
    status=$?
    cat "$types"
    return $status
}

phase ruff "$python" -m ruff check .
run() { # one thread for arithmetic in each process: the tests' models are too small for more
    env OMP_NUM_THREADS=1 "$python" -m pytest "$@"
}
# As many processes as cores. Each begins with an equal part of the tests, file by file; one that has finished takes half of what
# another has left, so that no core is idle at the end.
if [ $# -gt 0 ]; then # arguments have named all tests that are wanted
    phase pytest run -n auto --dist worksteal "$@"
else
    # The test that compiles kernels for every chip keeps all cores busy by itself.
    compile=tests/kernels/test_ahead_of_time.py
    phase pytest run -n auto --dist worksteal --ignore "$compile"
    phase "kernels, compiled ahead of time" run "$compile"
    if "$python" -c "import triton" 2>/dev/null; then
        phase "kernels, interpreted" env CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 TRITON_INTERPRET=1 \
            "$python" -m pytest -n auto --dist worksteal -m kernel tests/kernels
    fi
fi
phase "mypy, beside the others" mypy_result
printf '%s' "$summary"
exit $failed
