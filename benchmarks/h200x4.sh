#!/usr/bin/env bash
# What needs four or eight H200s of one host, the most important first, within LIMIT seconds in all. On four GPUs the
# job `deep` wants a call of its own.
#
#   OUT=benchmarks/results bash benchmarks/h200x4.sh          what this number of GPUs allows, as far as time lasts
#   OUT=... ONLY="deep" bash ...                              these jobs alone; what had no time is named at the end
#   OUT=... GPUS=4 bash ...                                   the part for four GPUs, on a machine with eight
#   OUT=... DRY=1 bash ...                                    the commands alone
#   OUT=... TINY=1 GPUS=4 LIMIT=1800 bash ...                 toys on the CPU: whether commands and script are right
#
# Jobs run one after another, each with all GPUs to itself and with a time limit of its own; none is begun when less
# than half of its limit is left. A failed job does not stop the next one; it is said at the end, and by the exit code.
#
# A line for each job (exit code, seconds, command) goes to $OUT/h200xN.txt, N GPUs; the whole output of all jobs to
# $OUT/h200xN_logs.tar.gz, which is written anew after every job; that of the job that is running, which is all there is
# of it when somebody ends this script, to $OUT/h200xN_running.log; rows of benchmarks are appended to
# $OUT/h200_context.jsonl. PYTHON: the interpreter (default python3). COMMIT: what rows say, where there is no checkout.
set -u
cd "$(dirname "$0")/.." || exit
OUT=${OUT:?name a folder: OUT=benchmarks/results bash benchmarks/h200x4.sh}
PYTHON=${PYTHON:-python3}
LIMIT=${LIMIT:-540}
ONLY=${ONLY:-}
DRY=${DRY:-0}
TINY=${TINY:-0}
GPUS=${GPUS:-$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')}
GRACE=35 # seconds until a job that was told to end is killed; torchrun gives its workers 30
export PYTHONPATH="$PWD/src:$PWD/tests/helpers:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 COLUMNS=${COLUMNS:-160}
if [ "$GPUS" != 4 ] && [ "$GPUS" != 8 ]; then
    echo "four or eight GPUs are needed, $GPUS are here; GPUS=4 makes use of four of more" >&2
    exit 2
fi
mkdir -p "$OUT" && OUT=$(cd "$OUT" && pwd) || exit
NAME="$OUT/h200x$GPUS"
LOGS=$(mktemp -d)
trap 'rm -rf "$LOGS"' EXIT
[ ! -f "${NAME}_logs.tar.gz" ] || tar -xzf "${NAME}_logs.tar.gz" -C "$LOGS" # of the calls before
FAILED=0
KNOWN=""
SKIPPED=""

job() { # NAME SECONDS COMMAND...: under torchrun with all GPUs; a job that fails is noted, and the next one runs
    local name=$1 seconds=$2 left=$((LIMIT - SECONDS)) began=$SECONDS code line
    shift 2
    KNOWN="$KNOWN $name"
    [ -z "$ONLY" ] || [[ " $ONLY " == *" $name "* ]] || return
    set -- "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$GPUS" "$@"
    [ "$TINY" = 0 ] || seconds=$((3 * seconds))
    if [ "$DRY" != 0 ]; then
        echo "$name, at most $seconds s: $*"
        return
    fi
    if ((left < seconds / 2 || left < 1)); then
        SKIPPED="$SKIPPED $name"
        return
    fi
    ((seconds < left)) || seconds=$left
    set -- "${@/#TIME/$((seconds > 30 ? seconds - 15 : seconds))}" # of a script that looks at the time itself
    echo "== $name, at most $seconds s"
    timeout -k $GRACE "$seconds" "$@" >"${NAME}_running.log" 2>&1
    code=$?
    line="$name: exit $code, $((SECONDS - began)) s: $*"
    echo "$line" >>"${NAME}_running.log"
    mv "${NAME}_running.log" "$LOGS/$name.log"
    tar -czf "${NAME}_logs.tar.gz" -C "$LOGS" .
    if ((code == 0)); then
        tail -n 13 "$LOGS/$name.log" | head -n 12 | cut -c 1-400
        grep -aE "^left out" "$LOGS/$name.log"
    else
        FAILED=1
        grep -aE "^(ok|left out)" "$LOGS/$name.log"
        # torchrun ends with a trace of its own; why a worker failed stands before it.
        grep -aE -A1 "Error|error:|WRONG|differ" "$LOGS/$name.log" | grep -avE "SignalException|ChildFailed|^--" |
            awk '!seen[$0]++' | head -n 12 | cut -c 1-400
    fi
    echo "$line" | tee -a "$NAME.txt"
}

verify() { # NAME SECONDS WORDS...: graphs against eager on every rank, bit by bit
    local name=$1 seconds=$2
    shift 2
    job "$name" "$seconds" -m packgraph.cli verify "$@" --skip-one-process
}

deep() { # NAME SECONDS WAYS WORDS...: all layers of Moonlight, an eager run and as many ways as there is time for
    local name=$1 seconds=$2 ways=$3
    shift 3
    # The eager run takes 135 to 157 s on four GPUs, a way 100 to 162. What is left of LIMIT is the job's limit if less.
    job "$name" "$seconds" tests/gpu/deep_ranks.py --ways $ways --steps $LONG --seconds TIME --each 165 -- \
        $MOONLIGHT --model.num-layers $ALL $DEEP_ROWS "$@"
}

bench() { # NAME SECONDS WORDS...: training steps with rows over one number of ranks, or over what they need
    local name=$1 seconds=$2
    shift 2
    [ "$TINY$GPUS" != 18 ] || return # the toy has four heads
    job "$name" $((seconds + 40)) benchmarks/bench.py context "$@" --seconds "$seconds" \
        --out "$OUT/h200_context.jsonl" ${COMMIT:+--commit "$COMMIT"}
}

# Widths and lengths. ROW: tokens of a rank. A training state of Moonlight takes some 20 bytes a parameter, and a layer
# with experts has 585 million, of which 553 are divided by EP: 84 GiB a rank for 27 layers and EP4 (108 with all else),
# 50 for EP8, so one run is made after the other.
if [ "$TINY" = 0 ]; then
    MOONLIGHT="moonlight --model.vocab-size 4096 --run.dtype bfloat16"
    WIDE="qwen3-0.6b --model.hidden-size 4096 --model.intermediate-size 12288 --model.num-heads 32
        --model.num-kv-heads 8 --model.tie-embeddings false --model.num-layers 2 --model.vocab-size 4096
        --run.dtype bfloat16" # Qwen3-8B's
    ROW=1024 ALL=27 LONG=100 LOOPS=""
    COMPILED="dynamic+graph+compile fixed+graph+compile"
else
    MOONLIGHT="moonlight-tiny --run.device cpu"
    WIDE="qwen3-tiny --run.device cpu"
    ROW=64 ALL=3 LONG=4 COMPILED="" LOOPS="--model tiny --rows 64"
fi
# Few documents wait to be combined, since otherwise all rows are of the larger size.
ROWS="--data.window 4 --graph.capacities ${ROW}x16,$((2 * ROW))x32 --run.tokens-per-step $((2 * ROW * GPUS))"
DEEP_ROWS="--data.window 2 --graph.capacities ${ROW}x16,$((2 * ROW))x32 --run.tokens-per-step $((2 * ROW))"
WAYS="chunk+stash layer chunk layer+stash" # of pipelines, too
CHUNKS="--graph.granularity chunk"
STASHED="$CHUNKS --parallel.expert-stash 2.0"

contexts() { # RANKS TIMES: rows over as many of RANKS ranks as their documents need, TIMES a rank's tokens in a step
    echo "--parallel.cp $1 --parallel.dynamic-cp true --graph.capacities $(($1 * ROW))x4,$(($1 * ROW))x32" \
        "--run.tokens-per-step $(($2 * ROW))"
}

# Two layers of Llama 3.1 8B, or a toy, by transformers' own code with random weights.
LIVE=$LOGS/live
mkdir -p "$LIVE"
"$PYTHON" - "$TINY" "$LIVE/config.json" <<'EOF' || exit
import json, sys
config = json.load(open("benchmarks/configs/llama-3-8b.json"))
config |= {"num_hidden_layers": 2, "vocab_size": 4096}
if sys.argv[1] == "1":
    config |= {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"head_dim": 16, "vocab_size": 512}
json.dump(config, open(sys.argv[2], "w"))
EOF
LLAMA="hf:$LIVE --hf.random true --data.source stdlib --data.tokenizer bytes"
[ "$TINY" = 0 ] || LLAMA="$LLAMA --run.device cpu"

# Words of the variables above are split on purpose.
# shellcheck disable=SC2046,SC2086
case $GPUS in
4)
    job context 120 tests/gpu/context_ranks.py --steps $LONG
    verify moonlight-cp 100 $MOONLIGHT --model.num-layers 3 $(contexts 4 8) --steps 7
    verify pp-ep 100 $MOONLIGHT --model.num-layers 6 --parallel.pp 2 --parallel.ep 2 $ROWS $STASHED --steps 20
    # Rows over changing numbers of ranks need two more of them beside TP2 x PP2, so eight.
    verify tp-pp 70 $WIDE --parallel.tp 2 --parallel.pp 2 $ROWS $CHUNKS --steps 8
    bench workload 100 --ways fixed dynamic dynamic+graph $COMPILED --places 64 --rounds 8
    verify live-tp-pp 150 $LLAMA --parallel.tp 2 --parallel.pp 2 $ROWS $CHUNKS --steps 8
    verify live-tp-cp 150 $LLAMA --parallel.tp 2 $(contexts 2 8) $CHUNKS --steps 8
    verify live-pp-shard 150 $LLAMA --parallel.pp 2 --parallel.shard parameters $ROWS --steps 8
    verify tp-cp 60 $WIDE --parallel.tp 2 $(contexts 2 8) $CHUNKS --steps 8
    verify soak 240 $MOONLIGHT --model.num-layers 3 $(contexts 4 8) --steps $LONG
    job loops 120 tests/gpu/loop_ranks.py $LOOPS
    deep deep 540 "$WAYS step step+stash" --parallel.ep 4
    ;;
8)
    verify moonlight-cp 110 $MOONLIGHT --model.num-layers 3 $(contexts 8 16) --steps 7
    bench workload 70 --ways fixed dynamic fixed+graph dynamic+graph --rounds 12
    verify tp-pp-cp 80 $WIDE --parallel.tp 2 --parallel.pp 2 $(contexts 2 8) $CHUNKS --steps 8
    deep deep 540 "$WAYS step step+stash" --parallel.ep 8
    deep deep-pp-ep 540 "$WAYS" --parallel.pp 2 --parallel.ep 4
    bench compiled 120 --ways fixed dynamic dynamic+graph $COMPILED --places 64 --rounds 8
    job context 120 tests/gpu/context_ranks.py --steps $LONG
    ;;
esac
for name in $ONLY; do
    [[ "$KNOWN " == *" $name "* ]] || echo "no job is called $name; with $GPUS GPUs there are$KNOWN" >&2
done
[ -z "$SKIPPED" ] || echo "not run, the limit of $LIMIT seconds is near: ONLY=\"${SKIPPED# }\"" | tee -a "$NAME.txt"
((FAILED == 0)) || echo "something is wrong: see ${NAME}_logs.tar.gz" >&2
exit $FAILED
