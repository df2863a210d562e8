"""What is in this folder starts several processes, or belongs to tests that do."""

from pathlib import Path

import pytest

# What `make test` runs of them: of every kind of parallelism something quick, the comparison with
# eager above all.
CORE = (
    "test_context.py::test_graphs_equal_eager_bitwise[zigzag-cp 2-('chunk',)-False]",
    "test_float8_ranks.py::test_products_and_all_gradients_are_those_of_cut_matrices[False-True-fp8]",
    "test_live_parallel.py::test_an_attention_with_windows",
    "test_live_parallel.py::test_stages_one_after_the_other",
    "test_live_parallel.py::test_what_cannot_be_spread",
    "test_live_tensor.py",
    "test_mesh.py::test_groups_of_ranks_that_share_rows",
    "test_moe_dispatch.py::test_a_factor",
    "test_moe_dispatch.py::test_an_overflow",
    "test_moe_dispatch.py::test_dispatchers_equal_one_process[2]",
    "test_moe_dispatch.py::test_host_splits",
    "test_moe_dispatch.py::test_replays_equal_eager",
    "test_moe_dispatch.py::test_segments",
    "test_moe_dispatch.py::test_symmetric_buffers",
    "test_moe_training.py::test_graphs_equal_eager_bitwise[dp 2 x ep 2-('chunk',)]",
    "test_offload_ranks.py::test_all_ranks_capture_anew_where_one_has_planned_by_its_graphs",
    "test_pipeline.py::test_a_pipeline_computes_what_the_whole_model_computes",
    "test_pipeline.py::test_a_rank_that_raises_ends_all_ranks_with_its_error",
    "test_pipeline_training.py::test_spans_leave_when_their_chunk_is_done",
    "test_replicate.py::test_graphs_equal_eager_and_one_process[True-chunk]",
    "test_sharded.py::test_graphs_equal_eager_bitwise[parameters-chunk]",
    "test_tensor.py::test_graphs_equal_eager_on_every_rank[True-options3]",
    "test_tensor.py::test_every_matrix_is_split",
    "test_votes.py::test_a_failure_of_one_is_one_of_all_and_nobody_waits_for_ever",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.dist)
            if f"{item.path.name}::{item.nodeid.partition('::')[2]}".startswith(CORE):
                item.add_marker(pytest.mark.core)
