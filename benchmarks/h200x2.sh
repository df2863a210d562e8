#!/usr/bin/env bash
# Sharded training beside FSDP2 on two H200s of one host, the most important cases first, in about twelve minutes.
#
#   OUT=benchmarks/results bash benchmarks/h200x2.sh           cases 1 to 6
#   OUT=... bash benchmarks/h200x2.sh 3 7                      these cases
#   OUT=... DRY=1 bash benchmarks/h200x2.sh                    the commands alone
#
# Rows are appended to $OUT/h200_shard.jsonl, tables and messages to $OUT/h200_shard.log. Every case has processes of
# its own and a limit of time. PYTHON: the interpreter (default python3). COMMIT: what rows say, where there is no
# checkout.
set -u
cd "$(dirname "$0")/.." || exit
OUT=${OUT:?name a folder: OUT=benchmarks/results bash benchmarks/h200x2.sh}
PYTHON=${PYTHON:-python3}
DRY=${DRY:-0}
GRACE=30 # seconds for the rounds of ways that are ready when a case's time is up
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$OUT" && OUT=$(cd "$OUT" && pwd) || exit
NAME="$OUT/h200_shard"
FAILED=0

bench() { # PROCESSES SECONDS OPTIONS...: a case that prepares no way after four fifths of SECONDS
    local processes=$1 seconds=$2 code began=$SECONDS
    shift 2
    set -- -m torch.distributed.run --standalone --nproc-per-node "$processes" benchmarks/bench.py shard \
        --seconds "$seconds" --device cuda --out "$NAME.jsonl" ${COMMIT:+--commit "$COMMIT"} "$@"
    if [ "$DRY" != 0 ]; then
        echo "$PYTHON $*"
        return
    fi
    timeout -k 10 $((seconds + GRACE)) "$PYTHON" "$@" >/dev/null 2>>"$NAME.log"
    code=$?
    [ "$code" = 0 ] || FAILED=1
    echo "exit $code after $((SECONDS - began)) s: $*" | tee -a "$NAME.log"
}

[ $# != 0 ] || set -- 1 2 3 4 5 6
for case in "$@"; do
    case $case in
    1) bench 2 140 --model qwen3-0.6b --tokens 1024 --step-tokens 16384 --rounds 2 --steps 1 \
        --ways fsdp+compile fsdp-keep+compile parameters+compile none+compile none+step+compile alone+compile ;;
    2) bench 2 130 --model qwen3-0.6b --tokens 4096 --step-tokens 32768 --rounds 3 --steps 1 --exchanges \
        --ways none+compile alone+compile parameters+compile parameters+compile+quiet gradients+compile fsdp-keep+compile fsdp+compile \
        none+layer+compile none+compile+quiet ;;
    3) bench 2 85 --model qwen3-8b --tokens 4096 --step-tokens 8192 --rounds 2 --steps 2 --together 1 --exchanges \
        --ways parameters+compile fsdp+compile ;;
    4) bench 2 110 --model qwen3-4b --tokens 16384 --step-tokens 16384 --rounds 3 --steps 2 --together 1 --exchanges \
        --ways fsdp+compile parameters+compile+quiet parameters+compile alone+compile none+compile fsdp-keep+compile ;;
    5) bench 2 70 --model qwen3-4b --tokens 16384 --step-tokens 32768 --rounds 3 --steps 2 --together 2 \
        --ways none+compile alone+compile none+layer+compile ;;
    6) bench 1 130 --model qwen3-8b --layers 14 --tokens 8192 --step-tokens 65536 --rounds 1 --steps 2 --together 1 \
        --ways none+compile none+offload=0+compile ;;
    7) bench 1 120 --model qwen3-8b --tokens 8192 --step-tokens 65536 --rounds 1 --steps 1 \
        --ways none+offload+compile ;;
    8) bench 2 70 --model qwen3-0.6b --tokens 1024 --step-tokens 16384 --rounds 3 --steps 1 \
        --ways parameters+compile parameters+layer+compile parameters none none+step+compile ;;
    *) echo "no case $case: 1 to 8" >&2 && exit 2 ;;
    esac
done
exit $FAILED
