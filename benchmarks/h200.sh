#!/usr/bin/env bash
# The grid of docs/benchmarks/step.md on one H200, the most important rows first, within LIMIT seconds in all.
#
#   OUT=benchmarks/results bash benchmarks/h200.sh            every way with the attention of its own stack
#   OUT=... ATTENTION=flash bash benchmarks/h200.sh           the same attention everywhere (flash, varlen)
#   OUT=... LIMIT=900 bash benchmarks/h200.sh                 everything, if there is time for it
#
# Rows are appended to $OUT/h200_$ATTENTION.jsonl as they come, tables and messages to $OUT/h200_$ATTENTION.log.
# Every command has a process of its own: what one of them breaks, or the profiler that it loads, ends with it.
# PYTHON: the interpreter (default python3, with src on its path). COMMIT: what rows say, where there is no checkout.
set -u
cd "$(dirname "$0")/.."
OUT=${OUT:?name a folder: OUT=benchmarks/results bash benchmarks/h200.sh}
PYTHON=${PYTHON:-python3}
ATTENTION=${ATTENTION:-own}
LIMIT=${LIMIT:-415}
GRACE=25 # seconds for the rounds of ways that are ready when a command's time is up
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT"
NAME="$OUT/h200_$ATTENTION"

bench() { # SECONDS WORDS...: one benchmark that begins nothing further after SECONDS, or after what is left of LIMIT
    local seconds=$1 left=$((LIMIT - SECONDS - GRACE))
    shift
    if ((left < 10)); then
        echo "not run, the limit of $LIMIT seconds is near: $*" | tee -a "$NAME.log" >&2
        return
    fi
    ((seconds < left)) || seconds=$left
    timeout -k 10 $((seconds + GRACE)) "$PYTHON" benchmarks/bench.py "$@" --seconds "$seconds" --device cuda \
        --out "$NAME.jsonl" ${COMMIT:+--commit "$COMMIT"} 2>>"$NAME.log"
    local code=$?
    echo "$SECONDS s: exit $code of: $*" >>"$NAME.log"
}

# Ways that decide, everywhere; then what else there is, as long as there is time.
FIRST="eager compile reduce-overhead chunk+compile auto+compile chunk"
SECOND="eager graphed-callables whole-padded layer layer+compile auto"
THIRD="eager graphed-callables+compile whole-padded+compile"
STEP="step --part layers --attention $ATTENTION --buckets 3 --calls 4"

bench 55 $STEP --model qwen3-0.6b --tokens 1024 --rounds 8 --ways $FIRST
bench 50 $STEP --model qwen3-0.6b --tokens 2048 --rounds 7 --ways $FIRST
bench 50 $STEP --model qwen3-0.6b --tokens 4096 --rounds 6 --ways $FIRST
bench 50 $STEP --model qwen3-0.6b --tokens 8192 --rounds 5 --ways $FIRST
bench 45 $STEP --model qwen3-4b --tokens 4096 --rounds 6 --ways $FIRST
bench 50 $STEP --model qwen3-4b --tokens 16384 --rounds 4 --ways $FIRST --together 5
if [ "$ATTENTION" = own ]; then
    bench 20 attention --model qwen3-0.6b --tokens 1024 2048 4096 8192 16384 --draws 3
    bench 25 memory --model qwen3-0.6b --part layers --tokens 8192
    bench 25 capture --model qwen3-0.6b --part layers --tokens 8192 --ways chunk chunk+compile --banks 1 8
fi
bench 35 $STEP --model qwen3-0.6b --tokens 1024 --rounds 6 --ways $SECOND
bench 35 $STEP --model qwen3-0.6b --tokens 1024 --rounds 6 --ways $THIRD
for tokens in 4096 2048 8192; do
    bench 40 $STEP --model qwen3-0.6b --tokens $tokens --rounds 5 --ways $SECOND
done
if [ "$ATTENTION" = own ]; then
    bench 30 memory --model qwen3-0.6b --part layers --tokens 8192 --compile
    bench 30 capture --model qwen3-0.6b --part layers --tokens 8192 --ways layer layer+compile --banks 1 8
fi
exit 0
