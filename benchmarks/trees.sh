#!/usr/bin/env bash
# Rows of two trees by turns on one GPU, so that a change of speed is told from a machine's noise.
#
#   git worktree add /tmp/before COMMIT
#   BEFORE=/tmp/before OUT=/tmp/rows bash benchmarks/trees.sh                    dense rows of 1k to 16k
#   BEFORE=... OUT=... bash benchmarks/trees.sh --model moonlight --layers 4 --tokens 4096 --ways eager chunk
#
# Every tree runs its own benchmarks/bench.py step over its own src, twice, in processes of their own.
# Rows are appended to $OUT/trees.jsonl; `commit` says before or now. PYTHON: the interpreter.
# ATTENTION: of every way (default varlen). LIMIT: seconds until nothing further begins (default 560).
set -u
cd "$(dirname "$0")/.." || exit
BEFORE=${BEFORE:?a checkout of the other commit: BEFORE=/tmp/before OUT=/tmp/rows bash benchmarks/trees.sh}
OUT=${OUT:?a folder for the rows}
PYTHON=${PYTHON:-python3}
ATTENTION=${ATTENTION:-varlen}
LIMIT=${LIMIT:-560}
mkdir -p "$OUT"

row() { # NAME TREE WORDS...: one benchmark of a tree
    local name=$1 tree=$2
    shift 2
    ((SECONDS < LIMIT)) || { echo "not run, the limit is reached: $name $*"; return; }
    PYTHONPATH="$tree/src${PYTHONPATH:+:$PYTHONPATH}" timeout 120 "$PYTHON" "$tree/benchmarks/bench.py" step \
        --part layers --attention $ATTENTION --calls 4 --rounds 6 --seconds 45 "$@" \
        --out "$OUT/trees.jsonl" --commit "$name" >>"$OUT/trees.log" 2>&1 || echo "failed: $name $*"
}

twice() { # WORDS...: both trees, by turns
    for _ in 1 2; do
        row before "$BEFORE" "$@"
        row now . "$@"
    done
}

if (($#)); then
    twice "$@"
else
    for tokens in 1024 4096 16384 2048 8192; do
        twice --model qwen3-0.6b --tokens $tokens --ways eager chunk chunk+compile
    done
fi
"$PYTHON" - "$OUT/trees.jsonl" <<'P'
import json, sys
found = {}
for line in open(sys.argv[1], encoding="utf-8"):
    row = json.loads(line)
    median = row["figures"].get("device_ms", {}).get("median", row["reason"])
    place = found.setdefault((row["model"], row["tokens"], row["way"]), {})
    place.setdefault(row["commit"], []).append(median)
print("model, tokens, way: device ms before | now")
for place, by_tree in found.items():
    print(*place, ":", *by_tree.get("before", []), "|", *by_tree.get("now", []))
P
