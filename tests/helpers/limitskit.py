"""Every sentence of docs/guides/limits.md and the tests that hold it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides" / "limits.md"

Held = dict[str, list[str]]  # file → names of tests
HERE = "tests/cpu/test_limits.py"
AUTOGRAD = "tests/cpu/graphs/test_autograd.py"
BITWISE = "tests/cpu/graphs/test_bitwise.py"
CONFIG = "tests/cpu/train/test_malformed_config.py"
CONSTANTS = "tests/cpu/graphs/test_constants.py"
OUTSIDE = "tests/cpu/graphs/test_sets_outside.py"
EFFECTS = "tests/cpu/graphs/test_effects.py"
FALLBACKS = "tests/cpu/graphs/test_fallbacks.py"
OUTPUTS = "tests/cpu/graphs/test_outputs.py"
STATE = "tests/cpu/graphs/test_module_state.py"
THREADS = "tests/cpu/graphs/test_threads.py"
WORDS = "tests/cpu/train/test_malformed_words.py"
# Says only what was run on GPUs, and where that stands: nothing that a test on a CPU could show.
MEASURED: Held = {}

HELD: dict[str, Held] = {
    "The trainer knows data, tensor, pipeline, expert": {
        HERE: ["test_the_options_that_are_named_exist"],
        "tests/dist/test_reshard.py": ["test_torchrun_trains_and_a_failing_rank_ends_it"],
        "tests/dist/test_data.py": ["test_two_replicas_equal_one_process_within_rounding"],
        "tests/dist/test_tensor.py": ["test_two_ranks_equal_one_process_within_rounding"],
        "tests/dist/test_pipeline_training.py": ["test_stages_learn_what_the_whole_model_learns"],
        "tests/dist/test_moe_training.py": ["test_sharing_experts_learns_what_one_process_learns"],
        "tests/dist/test_context.py": [
            "test_ranks_that_share_rows_learn_what_one_process_learns",
        ],
    },
    "A graph of a step holds the update of the weights": {
        "tests/cpu/train/test_step.py": [
            "test_steps_with_the_update_inside_equal_eager_steps_bitwise",
            "test_what_cannot_hold_the_update_is_said_at_once",
        ],
        "tests/dist/test_step_update.py": [
            "test_tensor_parallel_steps_with_the_update_inside_equal_eager_ones_bitwise",
            "test_steps_of_replicas_equal_eager_ones_bitwise",
            "test_contexts_and_shared_experts_equal_eager_ones_bitwise",
            "test_what_replicas_cannot_have_in_a_graph_is_said_at_once",
        ],
        "tests/dist/test_step_exchanges.py": ["test_steps_equal_eager_ones_bitwise"],
        "tests/dist/test_pipeline_update.py": [
            "test_steps_equal_those_with_the_update_behind_graphs_bitwise",
            "test_steps_of_replicas_equal_eager_ones_bitwise",
            "test_what_ranks_share_beside_stages_equals_eager_steps_bitwise",
            "test_what_a_pipeline_cannot_have_in_a_graph_is_said_at_once",
        ],
    },
    "Where ranks exchange data within the model": {
        "tests/dist/test_step_update.py": [
            "test_a_rank_whose_module_changes_runs_eagerly_beside_replays",
            "test_a_rank_that_cannot_exchange_what_others_capture_makes_all_run_eagerly",
        ],
        "tests/dist/test_lone_changes.py": [
            "test_a_rank_whose_module_changes_alone_runs_eagerly",
            "test_without_a_rule_ranks_exchange_what_does_not_fit",
        ],
    },
    "Ranks that exchange data by collectives of your own code": {
        "tests/dist/test_lone_changes.py": [
            "test_own_collectives_are_captured_again_where_all_ranks_change"
        ],
        "tests/dist/test_pipeline_update.py": [
            "test_a_rank_whose_module_changes_makes_all_run_by_their_chunks",
        ],
    },
    "The reduction hides in the last backward": {
        "tests/dist/test_step_exchanges.py": ["test_what_is_left_out_of_exchanges_is_found"],
        "tests/dist/test_step_update.py": [
            "test_the_reduction_in_the_graph_has_the_bits_of_one_behind_graphs",
            "test_a_rank_that_cannot_capture_makes_all_run_eagerly",
        ],
        "tests/dist/test_pipeline_update.py": ["test_what_is_left_out_of_graphs_is_found"],
        "tests/dist/test_pipeline_training.py": [
            "test_reductions_start_before_the_end_of_a_step_and_change_nothing"
        ],
    },
    "`DistributedDataParallel` and FSDP": {
        FALLBACKS: [
            "test_distributed_data_parallel_is_refused",
            "test_fully_sharded_modules_are_refused",
        ],
    },
    "With `--parallel.shard parameters` no rank holds the whole": {
        "tests/dist/test_sharded_weights.py": [
            "test_no_rank_ever_holds_the_whole_model",
            "test_live_models_read_their_parts_alone",
            "test_live_values_that_cannot_be_had_by_parts_are_made_on_the_host",
        ],
        "tests/cpu/integrations/test_deferred.py": [
            "test_values_and_buffers_are_those_of_from_pretrained"
        ],
    },
    "Tied embeddings, and those of multi-token": {
        "tests/dist/test_sharded_ends.py": ["test_what_one_stage_alone_reads_is_shared"],
    },
    "How much of the optimizer's state is resident": {
        "tests/cpu/train/test_host_state.py": [
            "test_what_fits_beside_the_predicted_peak_stays",
            "test_updates_have_the_bits_of_those_on_the_device",
        ],
    },
    "Spans are cut between parameters": {
        "tests/cpu/train/test_host_state.py": [
            "test_what_stays_is_whole_parameters_within_the_size",
        ],
    },
    "Experts were measured in bfloat16": MEASURED,
    "Newer GPUs take torch's grouped product": {
        HERE: [
            "test_which_gpus_take_the_grouped_product_of_torch",
            "test_the_other_kernel_of_experts_needs_triton",
        ],
        "tests/cpu/ops/test_grouped_gemm.py": [
            "test_wide_numbers_and_other_devices_take_what_fits_everywhere",
            "test_descriptors_are_for_the_device_they_were_tried_on",
        ],
    },
    "Not run on GPUs yet": {
        HERE: ["test_rows_are_of_at_most_four_gpus_and_of_hybrids_on_at_most_two"],
        "tests/cpu/ops/float8/test_mxfp8.py": ["test_gpus_before_blackwell_are_refused"],
    },
    "What was verified bit by bit on one to four H200s": MEASURED,
    "A second backward through one call, and": {
        "tests/cpu/graphs/test_lifecycle.py": [
            "test_a_second_backward_through_a_region_is_an_error_not_a_wrong_number",
            "test_a_graph_that_is_kept_is_run_again_for_each_further_backward",
        ],
        HERE: ["test_a_backward_for_each_output_needs_the_graph_kept"],
    },
    "`create_graph=True` is an error": {
        AUTOGRAD: [
            "test_second_derivatives_are_an_error_and_run_eagerly_from_then_on",
            "test_second_derivatives_in_warm_up_keep_a_module_eager",
        ],
    },
    "`autograd.grad`, `backward(inputs=...)`, hooks": {
        AUTOGRAD: [
            "test_gradients_of_some_tensors_only_are_those_of_eager",
            "test_hooks_on_accumulators_fire",
            "test_gradients_that_were_kept_stay_what_they_were",
            "test_gradients_in_a_users_own_tensor_stay_there",
            "test_another_use_of_outputs_is_learned",
            "test_an_output_that_the_loss_leaves_out_gets_no_gradient_and_no_nan",
        ],
        BITWISE: ["test_hooks_on_outputs_and_parameters_fire_as_in_eager"],
        "tests/cpu/graphs/test_parameter_hooks.py": ["test_a_hook_is_called_when_eager_calls_it"],
    },
    "A set of outputs that warm-up has not shown": {
        AUTOGRAD: ["test_another_use_of_outputs_is_learned"],
        HERE: ["test_eight_sets_of_outputs_are_captured_and_others_run_eagerly"],
    },
    "Such a backward is an error where": {
        AUTOGRAD: ["test_a_forward_that_reads_what_it_writes_is_not_run_again"],
    },
    "An output that other outputs were computed from": {
        HERE: ["test_an_inner_output_gets_the_gradients_of_the_callers_code_only"],
        OUTPUTS: ["test_an_output_that_another_was_computed_from_is_no_surprise"],
    },
    "With a hook or `retain_grad` on it": {
        OUTPUTS: [
            "test_gradients_within_a_module_are_not_shown_in_part",
            "test_the_gradient_of_an_inner_output_alone_is_an_error",
        ],
    },
    "Outputs that share memory": {
        OUTPUTS: ["test_outputs_that_share_memory_are_refused"],
        HERE: ["test_a_clone_of_what_shares_memory_is_captured"],
    },
    "One tensor twice, an argument itself": {OUTPUTS: ["test_other_outputs_are_fine"]},
    "`nn.Module` hooks inside a captured module": {
        FALLBACKS: ["test_module_hooks_are_refused_with_the_way_out"],
        "tests/cpu/graphs/test_wrapper.py": ["test_a_removed_hook_lets_graphs_be_used_again"],
        CONSTANTS: ["test_a_hook_that_only_marks_is_captured", "test_another_hook_is_named"],
        "tests/dist/test_tensor.py": ["test_graphs_equal_eager_on_every_rank"],
    },
    "So are forwards that change attributes": {
        STATE: [
            "test_a_forward_that_assigns_is_refused_and_undone",
            "test_drawing_random_numbers_on_the_host_is_refused_and_undone",
        ],
        EFFECTS: [
            "test_what_a_replay_would_not_do_falls_back_with_one_warning_and_equals_eager",
            "test_strict_raises_at_the_users_line",
        ],
    },
    "A value that is there already": {
        OUTSIDE: ["test_what_forward_sets_is_set_by_every_call"],
        EFFECTS: ["test_what_a_replay_does_as_well_is_captured"],
        HERE: ["test_an_attribute_that_keeps_its_value_may_be_assigned"],
    },
    "What library calls do and return": {
        HERE: ["test_what_library_calls_do_and_return_is_not_captured"],
    },
    "Threads must call what `packgraph.graph` returned": {
        HERE: ["test_who_calls_the_module_itself_may_meet_its_capture"],
        THREADS: [
            "test_the_module_itself_is_not_seen_with_stand_ins_for_its_parameters",
            "test_threads_that_share_a_module_sum_all_gradients",
        ],
    },
    "A module that several threads train": {
        HERE: ["test_several_threads_cost_a_copy_of_gradients"]
    },
    "Captures exclude each other": {HERE: ["test_one_module_is_captured_at_a_time"]},
    "Sizes of models are bounded": {
        HERE: ["test_sizes_of_models_are_bounded"],
        WORDS: ["test_an_option_that_makes_no_sense_is_refused"],
    },
    "Seeds and counts are below 2^63": {
        HERE: ["test_whole_numbers_are_below_two_to_the_63"],
        WORDS: ["test_a_value_of_no_use_names_its_option"],
    },
    "Names and paths in options": {
        WORDS: [
            "test_a_value_of_no_use_names_its_option",
            "test_an_option_that_makes_no_sense_is_refused",
            "test_bytes_that_are_no_text_are_refused_as_a_shell_gives_them",
        ],
        CONFIG: ["test_a_config_file_that_makes_no_sense_is_named"],
    },
    "Objects are watched": {
        HERE: ["test_objects_and_classes_are_watched_whatever_their_depth"],
    },
    "Not watched:": {
        HERE: [
            "test_what_an_operation_reads_is_as_it_was_at_capture",
            "test_what_autograd_cannot_see_between_forward_and_backward_is_not_seen",
        ],
    },
    "Where nothing needs a gradient": {
        "tests/cpu/graphs/test_forward_only.py": [
            "test_a_fast_path_that_a_capture_does_not_take_runs_eagerly",
            "test_another_kernel_for_calls_without_gradients_runs_eagerly",
        ],
    },
    "Such calls run eagerly, with one warning": {
        "tests/cpu/graphs/test_forward_only.py": [
            "test_a_fast_path_that_a_capture_does_not_take_runs_eagerly"
        ],
    },
    "Modules of `torch.jit` run eagerly": {
        "tests/cpu/graphs/test_state_refused.py": ["test_modules_of_torch_jit_equal_eager"],
        "tests/cpu/graphs/test_modes.py": ["test_scripted_modules_run_eagerly"],
    },
    "A backward inside a `torch.autocast` block": {
        HERE: ["test_a_backward_under_autocast_runs_its_forward_again"],
        "tests/cpu/graphs/test_modes.py": ["test_a_backward_under_autocast_is_that_of_eager"],
    },
    "[docs/assumptions.md](../assumptions.md) lists": {
        "tests/cpu/graphs/test_hostile.py": ["test_gaps_stand_in_the_page"],
        "tests/cpu/test_docs.py": ["test_every_link_of_the_site_answers"],
    },
}


def sentences() -> list[str]:
    """The sentences of the page, each on one line."""
    text = PAGE.read_text(encoding="utf-8").partition("\n")[2]
    points = [" ".join(point.split()) for point in re.split(r"^\* ", text, flags=re.MULTILINE)]
    return [
        sentence
        for point in points
        if point
        for sentence in re.split(r"(?<=\.) (?=[A-Z`\[])", point)
    ]
