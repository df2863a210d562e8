#!/usr/bin/env bash
# Layers with experts on one H200, the most important rows first, within LIMIT seconds in all.
#
#   OUT=benchmarks/results bash benchmarks/h200_moe.sh        8 layers of Moonlight's shape: right? how fast?
#   OUT=... ATTENTION=flash bash benchmarks/h200_moe.sh       the same attention everywhere (flash, varlen)
#   OUT=... LIMIT=600 bash benchmarks/h200_moe.sh             peers too, if there is time for them
#
# First whether experts and stash compute what they should ($OUT/h200_moe_tests.log), then the pieces of one layer
# ($OUT/h200_moe_pieces.jsonl), then forward and backward by every way: rows are appended to
# $OUT/h200_moe_$ATTENTION.jsonl as they come, tables and messages to $OUT/h200_moe_$ATTENTION.log.
# Every command has a process of its own. A failed test does not stop what follows; it is said at the end, and by the
# exit code. PYTHON: the interpreter (default python3, with src on its path). COMMIT: what rows say, where there is no
# checkout. TESTS: 0 leaves the tests out.
set -u
cd "$(dirname "$0")/.."
OUT=${OUT:?name a folder: OUT=benchmarks/results bash benchmarks/h200_moe.sh}
PYTHON=${PYTHON:-python3}
ATTENTION=${ATTENTION:-own}
LIMIT=${LIMIT:-230}
TESTS=${TESTS:-1}
GRACE=15 # seconds for the rounds of ways that are ready when a command's time is up
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT"
NAME="$OUT/h200_moe_$ATTENTION"
FAILED=0

within() { # SECONDS COMMAND...: with a time limit; a command that fails is noted, and the next one runs
    local seconds=$1 code
    shift
    timeout -k 10 "$seconds" "$@"
    code=$?
    echo "$SECONDS s: exit $code of: $*" >>"$NAME.log"
    return $code
}

bench() { # SECONDS WORDS...: one benchmark that begins nothing further after SECONDS, or after what is left of LIMIT
    local seconds=$1 left=$((LIMIT - SECONDS - GRACE))
    shift
    if ((left < 10)); then
        echo "not run, the limit of $LIMIT seconds is near: $*" | tee -a "$NAME.log" >&2
        return
    fi
    ((seconds < left)) || seconds=$left
    within $((seconds + GRACE)) "$PYTHON" benchmarks/bench.py moe --attention "$ATTENTION" --buckets 3 --calls 4 \
        --seconds "$seconds" --device cuda --out "$NAME.jsonl" ${COMMIT:+--commit "$COMMIT"} "$@" 2>>"$NAME.log"
}

if [ "$TESTS" != 0 ]; then
    within 60 "$PYTHON" -m pytest -q -p no:cacheprovider tests/gpu/test_moe_gpu.py tests/gpu/test_stash_gpu.py \
        >"$OUT/h200_moe_tests.log" 2>&1 || FAILED=1
    tail -n 15 "$OUT/h200_moe_tests.log"
fi
within 45 "$PYTHON" benchmarks/moe_experts.py --seconds 25 --out "$OUT/h200_moe_pieces.jsonl" 2>>"$NAME.log" || FAILED=1

# The first way is what others are compared with. Ways that decide come next; then what else there is.
FIRST="host-splits chunk+compile chunk eager partial reduce-overhead chunk+stash"
bench 40 --tokens 1024 --rounds 6 --ways $FIRST
bench 40 --tokens 4096 --rounds 5 --ways $FIRST
bench 35 --tokens 16384 --rounds 4 --ways host-splits chunk+compile eager
for tokens in 4096 1024; do
    bench 40 --tokens $tokens --rounds 4 --ways host-splits compile transformers transformers+compile partial+compile
done
bench 40 --tokens 16384 --rounds 4 --ways host-splits chunk partial chunk+stash reduce-overhead --together 3
# Memory: experts of all layers with room for twice the rows that are routed, against eager with exactly these.
bench 60 --tokens 4096 --layers 26 --room 2 --rounds 3 --ways host-splits chunk+stash chunk chunk+compile+stash --together 2
((FAILED == 0)) || echo "something is wrong: see $OUT/h200_moe_tests.log and rows with ok: false or error in" \
    "$OUT/h200_moe_pieces.jsonl" >&2
exit $FAILED
