#!/bin/sh
# Set up, then run every check.     sh tests/run.sh     sh tests/run.sh --quick     sh tests/run.sh tests/unit -x
#
# On two cores all checks take 8 minutes on a quick machine and 26 on a slow one: three quarters of it are the tests, the rest kernels
# for every chip from Triton's cache (up to 10 minutes more the first time, which compiles them) and interpreted kernels. --quick
# takes two at most: the linter, the type checker, and the tests of the rooms below the engine. Other arguments go to pytest and
# replace the choice of tests. Every phase runs, even if one before it fails; the last lines say how long each took, and the exit
# status is 1 if any failed.
set -u
cd "$(dirname "$0")/.."
sh examples/setup.sh test || exit 1
python=.venv/bin/python
begun_all=$(date +%s) summary="" failed=0
# Hundreds of processes import the package and the tests: compiled once, not by each of them.
unset PYTHONDONTWRITEBYTECODE
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
parallel() {
    run -n auto --dist worksteal "$@"
}
case "$*" in
--quick)
    # The rooms below the engine, without what runs engines, draws tens of thousands of samples, or takes thousands of random steps.
    set -- tests/api tests/planning tests/sampling tests/scheduling tests/speculation tests/text tests/unit tests/weights
    long="tests/sampling/test_speculative_sampling.py tests/scheduling/test_scheduler_fuzz.py tests/weights/test_update.py"
    for slow in $long tests/unit/test_benchmark.py tests/unit/test_benchmark_speculation.py; do
        set -- "$@" --ignore "$slow"
    done
    phase pytest parallel "$@"
    ;;
"")
    # The test that compiles kernels for every chip keeps all cores busy by itself.
    compile=tests/kernels/test_ahead_of_time.py
    phase pytest parallel --ignore "$compile"
    phase "kernels, compiled ahead of time" run "$compile"
    if "$python" -c "import triton" 2>/dev/null; then
        phase "kernels, interpreted" env CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 TRITON_INTERPRET=1 \
            "$python" -m pytest -n auto --dist worksteal -m kernel tests/kernels
    fi
    ;;
*) phase pytest parallel "$@" ;; # arguments have named all tests that are wanted
esac
phase "mypy, beside the others" mypy_result
printf '%sall: %s s\n' "$summary" "$(($(date +%s) - begun_all))"
exit $failed
