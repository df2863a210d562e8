#!/usr/bin/env bash
# All tests of GPUs side by side, over the cards of this host. On an H100 with 16 cores, in other groups, those
# side by side took 410 s and those alone more than 240 s:
#   PYTHON=python3 OUT=/tmp/gpu bash tests/gpu/all.sh
# Each group has a process of its own, one card and a log in $OUT; tests of ranks see all cards; those that
# measure memory run last, one group a card.
set -u
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:?name a folder for the logs: OUT=/tmp/gpu bash tests/gpu/all.sh}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT"

CARDS=$(nvidia-smi -L | wc -l)
next=0
card() { export CUDA_VISIBLE_DEVICES=$((next++ % CARDS)); } # the next group's card

group() { # NAME WORDS...: pytest over WORDS
    local name=$1 begun=$SECONDS code
    shift
    "$PYTHON" -m pytest -m gpu -p no:cacheprovider "$@" >"$OUT/$name.log" 2>&1
    code=$?
    echo "$name: exit $code, $((SECONDS - begun)) s: $(tail -1 "$OUT/$name.log")"
    grep -E '^(FAILED|ERROR)' "$OUT/$name.log"
}

# Files that no group names.
others() {
    for file in tests/gpu/test_*.py; do
        name=${file##*/test_} && grep -qE "[( ]${name%.py}[) ]" tests/gpu/all.sh || echo "$file"
    done
}

at() { printf 'tests/gpu/test_%s.py ' "$@"; }

group ranks -n 3 $(at ranks_gpu bench_shard_gpu) &
card; group corpus -n 7 $(at corpus_gpu) &
card; group huggingface -n 3 $(at huggingface_gpu graph_words_gpu) &
card; group graphs $(at graph_cuda evaluation_gpu forward_only_gpu graph_effects_gpu) &
card; group training $(at graph_state_cuda train_gpu update_rules_gpu) &
card; group threads $(at graph_threads_cuda moe_gpu ssd_gpu) &
ALONE=tests/gpu/test_offload_gpu.py::test_graphs_tell_their_compute_whatever_was_copied # times kernels
card; group offloading $(at offload_gpu stash_gpu) --deselect $ALONE &
card; group models $(at recompute_gpu ops_gpu fp8_gpu packing_gpu) &
card; group others $(others) &
card; group hybrids $(at models_gpu hybrid_gpu pull_gpu) &
wait
next=0
card; group memory $(at memory_gpu) $ALONE &
((CARDS > 1)) || wait
card; group bench $(at bench_gpu bench_moe_gpu autotune_gpu) &
wait
