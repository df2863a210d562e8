"""Runs that cannot fit are refused before anything is allocated, with figures; runs that may fit
are not."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from packgraph.cli import main
from packgraph.models.decoder import DecoderModel
from packgraph.train import launch
from packgraph.train import memory as memory_need
from packgraph.train.config.presets import PRESETS, preset
from packgraph.train.config.reading import ConfigError, ConfigLayer, read_config
from packgraph.train.memory import available_memory, check_memory, need_of

CPU = torch.device("cpu")
GIB = 2**30


def changed(name, **options):
    return read_config(preset(name), [ConfigLayer("options", options)])


@pytest.mark.parametrize("name", ["qwen3-tiny", "moonlight-tiny", "hybrid-tiny"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_gradients_and_state_are_those_of_the_model(name, dtype):
    config = changed(name, run={"dtype": dtype})
    model = DecoderModel(config.model, dtype=getattr(torch, dtype))
    need = need_of(config, "cpu")
    held = sum(parameter.nbytes for parameter in model.parameters())
    elements = sum(parameter.numel() for parameter in model.parameters())
    rates = 1e-3 if name == "hybrid-tiny" else 0  # of Mamba-2: they stay in float32
    assert need.weights == pytest.approx(held, rel=rates)
    assert need.gradients == pytest.approx(4 * elements, rel=rates)
    narrow = need_of(changed(name, run={"dtype": dtype}, optimizer={"gradients": dtype}), "cpu")
    assert narrow == replace(need, gradients=need.weights)
    assert need.optimizer == pytest.approx(elements * (8 if dtype == "float32" else 12), rel=rates)


PADDING = 1e-3  # what replicas share divides by their number, in elements


def test_parts_of_ranks_add_up_to_the_whole():
    config = changed("moonlight-tiny")
    whole = need_of(config, "cpu")
    replicas = [need_of(config, "cpu", world=4, rank=rank) for rank in range(4)]
    (padded,) = {need.weights for need in replicas}
    assert whole.weights < padded < whole.weights * (1 + PADDING)
    updated = sum(need.optimizer for need in replicas)
    assert updated == pytest.approx(whole.optimizer, rel=PADDING)
    stages = [
        need_of(changed("moonlight-tiny", parallel={"pp": 3}), "cpu", world=3, rank=rank)
        for rank in range(3)
    ]
    assert sum(need.weights for need in stages) == whole.weights
    shared = changed("moonlight-tiny", parallel={"ep": 2})
    experts = [need_of(shared, "cpu", world=2, rank=rank) for rank in range(2)]
    assert whole.weights / 2 < experts[0].weights < whole.weights
    updated = sum(need.optimizer for need in experts)
    assert updated == pytest.approx(whole.optimizer, rel=PADDING)


def test_split_matrices_and_rows_need_less():
    whole, split = (
        need_of(changed("qwen3-tiny"), "cpu"),
        need_of(changed("qwen3-tiny", parallel={"tp": 2}), "cpu", 2),
    )
    assert split.weights == whole.weights // 2
    assert split.microbatch < whole.microbatch
    assert (
        need_of(changed("qwen3-tiny", parallel={"cp": 2}), "cpu", 2).microbatch < whole.microbatch
    )


def test_what_may_take_less_is_not_counted():
    usual = need_of(changed("qwen3-tiny"), "cpu")
    assert usual.graphs == usual.microbatch > 0
    assert need_of(changed("qwen3-tiny"), "cuda").graphs == 0
    assert need_of(changed("qwen3-tiny", graph={"compile": True}), "cpu").least == usual.state
    assert need_of(changed("qwen3-tiny", offload={"modules": ["mlp_act"]}), "cuda").microbatch == 0
    for graph in ({"enabled": False}, {"memory_budget": "1GiB"}):
        need = need_of(changed("qwen3-tiny", graph=graph), "cpu")
        assert need.graphs == 0 and need.capacity.tokens == 256


def test_a_run_is_refused_exactly_where_its_least_need_does_not_fit():
    config = changed("qwen3-0.6b")
    least = need_of(config, "cpu").least
    check_memory(config, CPU, least)
    check_memory(config, CPU, None)
    with pytest.raises(ConfigError, match="needs at least"):
        check_memory(config, CPU, least - 1)


def test_the_message_has_figures_and_a_way_out():
    config = changed("qwen3-0.6b")
    with pytest.raises(ConfigError) as refused:
        check_memory(config, CPU, 21 * GIB)
    told = str(refused.value)
    for part in (
        "21.00 GiB",
        "weights 1.11 GiB",
        "gradients 2.22 GiB",
        "optimizer state 6.66 GiB",
        "4096x64",
        "--graph.capacities",
        "--graph.enabled false",
    ):
        assert part in told
    with pytest.raises(ConfigError, match="model alone does not fit"):
        check_memory(config, CPU, 8 * GIB)


def test_the_command_line_refuses_before_it_allocates(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(launch, "available_memory", lambda device, local_processes: 50 * 2**20)
    monkeypatch.setattr(launch, "Trainer", lambda *args: pytest.fail("the trainer was made"))
    assert (
        main(["train", "qwen3-tiny", "--run.device", "cpu", "--run.folder", str(tmp_path / "runs")])
        == 2
    )
    told = capsys.readouterr().err
    assert (
        told.startswith("packgraph: error: 1 problem in the configuration:")
        and "50.00 MiB are available" in told
    )
    assert not (tmp_path / "runs").exists()


def test_all_small_presets_fit_a_small_machine():
    for name in PRESETS:
        if name.endswith("-tiny"):
            check_memory(preset(name), CPU, GIB // 4)


def test_processes_of_a_host_share_its_memory():
    told = launch.Launch.read(
        {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    )
    assert told.local_world == 2
    assert launch.Launch.read({}).local_world == 1


def machine(folder, group, files, available=8 * GIB):
    """A tree of `proc` and `sys`. group: text of /proc/self/cgroup; files: under /sys/fs/cgroup."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/meminfo").write_text(
        f"MemTotal: 99 kB\nMemAvailable:   {available // 1024} kB\n"
    )
    (folder / "proc/self/cgroup").write_text(group)
    for name, text in files.items():
        file = folder / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(text))
    return folder


STAT = f"anon 1\nactive_file {GIB // 4}\ninactive_file {GIB // 4}\n"
OLD_STAT = f"cache 1\ntotal_active_file {GIB // 4}\ntotal_inactive_file {GIB // 4}\n"


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("", {}, 8 * GIB),
        ("0::/\n", {"memory.max": "max\n", "memory.current": GIB}, 8 * GIB),
        ("0::/\n", {"memory.max": 4 * GIB, "memory.current": GIB}, 3 * GIB),
        (
            "0::/\n",
            {"memory.max": 4 * GIB, "memory.current": GIB, "memory.stat": STAT},
            3 * GIB + GIB // 2,
        ),
        (
            "0::/a/b\n",
            {
                "a/b/memory.max": "max",
                "a/b/memory.current": 1,
                "a/memory.max": 2 * GIB,
                "a/memory.current": GIB,
            },
            GIB,
        ),
        ("0::/of/the/host\n", {"memory.max": 2 * GIB, "memory.current": GIB}, GIB),
        ("0::/\n", {"memory.max": 99 * GIB, "memory.current": GIB}, 8 * GIB),
        ("0::/\n", {"memory.max": GIB, "memory.current": 2 * GIB}, 0),
        (
            "9:memory:/job\n8:cpu:/x\n",
            {
                "memory/job/memory.limit_in_bytes": 4 * GIB,
                "memory/job/memory.usage_in_bytes": GIB,
                "memory/job/memory.stat": OLD_STAT,
            },
            3 * GIB + GIB // 2,
        ),
        (
            "9:cpu,memory:/\n",
            {"memory/memory.limit_in_bytes": 2**63 - 4096, "memory/memory.usage_in_bytes": GIB},
            8 * GIB,
        ),
    ],
)
def test_limits_of_control_groups_count(tmp_path, group, files, expected):
    assert available_memory(CPU, root=machine(tmp_path, group, files)) == expected
    assert available_memory(CPU, 4, tmp_path) == expected // 4


def test_a_system_that_does_not_say_refuses_nothing(tmp_path):
    assert available_memory(CPU, root=tmp_path) is None


def test_the_memory_of_this_machine_is_read():
    found = available_memory(CPU)
    assert found is None or 2**26 < found < memory_need.UNLIMITED


PEAK = """
import sys, threading, time
import torch
from packgraph.train.config.reading import ConfigLayer, read_config
from packgraph.train.launch import train
from packgraph.train.memory import need_of
from packgraph.train.config.presets import preset

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

torch.set_num_threads(1)
config = read_config(preset("qwen3-tiny"), [ConfigLayer("options", eval(sys.argv[1]))])
before, peak, done = resident(), [0], threading.Event()
def watch():
    while not done.wait(0.01):
        peak[0] = max(peak[0], resident())
thread = threading.Thread(target=watch)
thread.start()
try:
    train(config)
finally:
    done.set()
    thread.join()
need = need_of(config, "cpu")
print((peak[0] - before) / need.total, (peak[0] - before) / need.least)
"""
SHAPE = {"num_kv_heads": 2, "head_dim": 64}


@pytest.mark.slow
@pytest.mark.skipif(
    not os.path.exists("/proc/self/statm"), reason="resident memory is read from /proc"
)
@pytest.mark.parametrize(
    ("enabled", "dtype", "tokens", "model"),
    [
        (
            False,
            "float32",
            1024,
            {
                "hidden_size": 512,
                "intermediate_size": 1536,
                "num_layers": 6,
                "vocab_size": 4096,
                "num_heads": 8,
            },
        ),
        (
            True,
            "bfloat16",
            1536,
            {
                "hidden_size": 256,
                "intermediate_size": 1024,
                "num_layers": 8,
                "vocab_size": 16_384,
                "num_heads": 4,
            },
        ),
    ],
)
def test_the_estimate_is_what_a_run_takes(tmp_path, enabled, dtype, tokens, model):
    options = {
        "model": {**SHAPE, **model},
        "graph": {"enabled": enabled, "warmup": 1, "capacities": f"{tokens}x32"},
        "run": {
            "device": "cpu",
            "steps": 2,
            "dtype": dtype,
            "tokens_per_step": tokens,
            "folder": str(tmp_path),
        },
    }
    told = subprocess.run(
        [sys.executable, "-c", PEAK, repr(options)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    of_total, of_least = map(float, told.stdout.split()[-2:])
    assert 0.75 < of_total < 1.25
    assert of_least > 1


def test_capacities_that_are_not_chosen_yet_are_an_error():
    config = changed("qwen3-tiny", graph={"capacities": "auto"})
    with pytest.raises(RuntimeError, match="not chosen yet"):
        need_of(config, "cpu")
