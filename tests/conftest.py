"""Five logical CPU devices for every test, four logical GPUs for `-m gpu`; TensorFlow starts here and nowhere else."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator, Mapping, Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

gc.disable()  # up to the first test: see `pytest_collection_finish`

import keras  # noqa: E402, F401 (before `keep_compiled`)
import pytest  # noqa: E402
import tensorflow as tf  # noqa: E402

from tests.helpers.processes import keep_compiled  # noqa: E402

keep_compiled()

import graphsplit as gs  # noqa: E402
from graphsplit.api.layouts import automatic  # noqa: E402
from tests.helpers.samples import sample  # noqa: E402

DEVICES = int(os.environ.get("GRAPHSPLIT_TEST_DEVICES", "5"))
MANY = 12  # devices: more than most tests need, see test_twelve_devices.py

ALL = 10_000

# What `-m quick` runs: files, or functions of files, with how many of their cases (`helpers/samples.py` says which). A
# promise of each layer is among them; what trains whole models, starts processes or tries all of a table is not.
QUICK = {
    "test_checkers.py": ALL,
    "test_control_flow.py": 4,
    "test_decompositions.py": 5,
    "test_effects_and_plans.py": ALL,
    "test_emitted_graphs.py": 34,
    "test_errors.py": 37,
    "test_gradients.py": 9,
    "test_keras_models.py::test_equals_the_template_in_float64": 1,
    "test_layout_properties.py": 23,
    "test_merging.py": 4,
    "test_micro_batches.py": 5,
    "test_micro_batches_in_order.py": 2,
    "test_on_device.py": 4,
    "test_ordering.py": ALL,
    "test_packing.py": 6,
    "test_parallelize.py": 21,
    "test_pipelines.py": 4,
    "test_placement.py": 12,
    "test_prefetching.py": 7,
    "test_project.py::test_every_folder_is_in_the_table_of_folders": ALL,
    "test_project.py::test_imports_point_downwards": ALL,
    "test_project.py::test_no_circles_among_modules": ALL,
    "test_project.py::test_private_tensorflow_in_one_file_only": ALL,
    "test_project.py::test_public_names_and_signatures": ALL,
    "test_random.py": 7,
    "test_random_programs.py::test_random_program": 3,
    "test_rules.py::test_any_argument_as_a_partial_sum": 3,
    "test_rules.py::test_any_argument_split_along_any_axis": 7,
    "test_rules.py::test_coverage_check_can_fail": ALL,
    "test_rules.py::test_every_rule_has_cases": ALL,
    "test_rules.py::test_made_in_pieces": 4,
    "test_rules.py::test_sharded_equals_unsharded": 66,
    "test_saved_models_errors.py": 3,
    "test_sizes.py": ALL,
    "test_stages.py": 6,
    "test_undefined_outputs.py": ALL,
    "test_unknown_batch.py::test_effects_happen_once_whatever_the_size": ALL,
    "test_unknown_batch.py::test_rules": 7,
    "test_unknown_lengths.py::test_unknown_lengths_as_well": ALL,
    "test_untiling.py": 17,
    "test_xla.py": 2,
}

# How many of these functions' cases run by default (`helpers/samples.py` says which); the others are long tests. None,
# where others try what a function promises on something smaller: Keras' own tests, processes of workers, documents.
LONG = {
    "test_arguments_where_they_lie.py::test_no_device_sends_arguments_to_another": 1,
    "test_augmentation.py::test_augmentation": 2,
    "test_automatic_layouts.py::test_a_prediction_names_what_was_chosen": 0,
    "test_automatic_layouts.py::test_layouts_that_somebody_set_stay": 0,
    "test_automatic_plans.py::test_along_an_axis_where_that_fits": 0,
    "test_automatic_plans.py::test_sharded_where_only_that_fits": 0,
    "test_automatic_plans.py::test_variables_that_are_laid_out_stay_and_others_are_laid_out": 1,
    "test_benchmarks.py::test_bytes_in_partitions_are_those_of_the_plan": 1,
    "test_benchmarks.py::test_traffic_of_the_plan_is_that_of_the_graph": 2,
    "test_benchmarks_gpu.py::test_every_way_computes_the_same": 0,
    "test_benchmarks_gpu.py::test_ratios": 0,
    "test_benchmarks_gpu.py::test_ways_are_other_ways": 0,
    "test_branches.py::test_a_branch_that_the_shapes_rule_out": 3,
    "test_branches.py::test_a_stateful_draw_in_a_branch": 4,
    "test_branches.py::test_branches_and_turns_of_other_shapes": 3,
    "test_branches_of_parts.py::test_loss_scaling_updates_parts_where_they_are": 0,
    "test_branches_of_parts.py::test_what_a_branch_writes_is_chosen_where_its_parts_are": 1,
    "test_sides_of_branches.py::test_numbers_are_those_of_one_device": 12,
    "test_sides_of_branches.py::test_what_fails_fails_only_if_it_is_taken": 4,
    "test_buckets.py::test_a_full_bucket_is_reduced_while_the_backward_pass_goes_on": 1,
    "test_calibration.py::test_operations_are_measured_as_large_as_those_of_micro_batches": 0,
    "test_calibration.py::test_operations_of_a_function_are_measured": 0,
    "test_calibration.py::test_operations_of_loops_are_measured_at_the_sizes_of_shards": 0,
    "test_cli_errors.py::test_what_is_wrong_with_a_target": 8,
    "test_clusters.py::test_a_tape_around_the_call": 0,
    "test_constant_folding.py::test_folds_are_what_kernels_compute": 6,
    "test_constant_folding.py::test_folds_hold_for_every_size": 5,
    "test_constant_folding.py::test_gradients_along_axes_of_size_one": 1,
    "test_control_flow.py::test_one_lstm_encodes_two_inputs": 0,
    "test_control_flow.py::test_recurrent_networks_train_on_the_shards": 1,
    "test_ctc.py::test_dense_labels": 1,
    "test_cuts.py::test_arguments_with_other_numbers_of_rows": 3,
    "test_cuts.py::test_rows_that_are_drawn_inside_are_split": 2,
    "test_cuts.py::test_two_players_of_a_game": 2,
    "test_damaged_models.py::test_damage": 1,
    "test_damaged_models.py::test_no_model_is_refused_that_is_whole": 2,
    "test_decompositions.py::test_fused_batch_normalisation_in_training": 4,
    "test_embeddings.py::test_sparse_gradients": 1,
    "test_embeddings.py::test_text_vectorization": 0,
    "test_emitted_graphs.py::test_every_change_of_any_node_is_another_digest": 2,
    "test_everyday_life.py::test_a_layout_that_comes_in_mid_life": 0,
    "test_everyday_life.py::test_a_model_that_is_deleted_is_gone": 0,
    "test_everyday_life.py::test_a_template_that_is_wrapped_again": 0,
    "test_everyday_life.py::test_callbacks_that_change_weights": 0,
    "test_everyday_life.py::test_checkpoints": 0,
    "test_everyday_life.py::test_compiled_again": 0,
    "test_everyday_life.py::test_copies": 0,
    "test_everyday_life.py::test_files": 0,
    "test_everyday_life.py::test_low_rank_adapters": 0,
    "test_everyday_life.py::test_models_that_share_layers": 0,
    "test_everyday_life.py::test_two_optimizers": 0,
    "test_everyday_life.py::test_what_is_exported": 0,
    "test_examples.py::test_polynomial_fit": 0,
    "test_examples.py::test_polynomial_fit_tf1": 0,
    "test_examples.py::test_training_loop": 0,
    "test_exchanges.py::test_no_device_sees_more_than_its_share": 1,
    "test_exchanges.py::test_shards_exchange_their_parts": 2,
    "test_exchanges.py::test_what_needs_all_rows_runs_on_columns": 1,
    "test_experts.py::test_gathered_all_the_same": 1,
    "test_experts.py::test_other_steps": 1,
    "test_experts.py::test_prediction": 0,
    "test_experts.py::test_tokens_go_to_experts": 2,
    "test_functions_of_graphs.py::test_each_level_of_nested_branches_is_planned_a_few_times": 1,
    "test_fuzzer.py::test_a_wrong_slice_of_a_part_is_found": 0,
    "test_fuzzer.py::test_command": 0,
    "test_fuzzer.py::test_every_template_makes_lines": 1,
    "test_gpu.py::test_a_mesh_with_a_vocabulary_in_parts": 0,
    "test_gpu.py::test_networks_of_the_benchmarks": 1,
    "test_gpu.py::test_recurrent_layers": 0,
    "test_gpu.py::test_rows_layers_and_stages": 0,
    "test_gpu.py::test_saved_models": 1,
    "test_gpu.py::test_the_default_layout": 0,
    "test_gpu.py::test_the_example_of_the_page_runs_on_cpu_devices": 0,
    "test_gpu_kernels.py::test_layouts_run_on_gpus_throughout": 1,
    "test_gradients.py::test_a_gradient_that_is_taken_elsewhere_than_the_call": 1,
    "test_gradients.py::test_a_jacobian_between_two_tapes": 0,
    "test_gradients.py::test_a_variable_that_functions_inside_read_by_its_handle": 1,
    "test_gradients.py::test_eager_calls_that_functions_differentiate": 0,
    "test_gradients.py::test_gradients_by_inputs_and_variables": 2,
    "test_gradients.py::test_gradients_through_a_vectorized_map_in_a_graph": 1,
    "test_gradients.py::test_jacobians": 1,
    "test_gradients.py::test_second_derivatives_across_a_change_of_layout": 1,
    "test_gradients.py::test_second_derivatives_of_a_loop_of_calls": 0,
    "test_gradients.py::test_three_derivatives_where_the_function_was_called": 1,
    "test_gradients.py::test_vectorized_jacobians_of_custom_gradients_between_two_tapes": 0,
    "test_gradients.py::test_what_a_vectorized_jacobian_plans_captures_the_variables_themselves": 0,
    "test_graph_defs.py::test_training": 1,
    "test_graph_defs.py::test_training_with_any_number_of_rows": 1,
    "test_host_reading.py::test_each_host_cuts_what_it_reads": 3,
    "test_host_relays.py::test_once_to_each_host": 1,
    "test_host_variables.py::test_no_slot_travels_but_the_gradients_and_the_update_do": 1,
    "test_host_variables.py::test_slots_in_the_hosts_memory_give_the_same_bits": 1,
    "test_hosts.py::test_an_optimizer_with_slots": 1,
    "test_hosts.py::test_each_weight_and_each_gradient_passes_once_to_each_host": 1,
    "test_hosts.py::test_reductions": 3,
    "test_hosts.py::test_shards_that_may_have_no_rows": 1,
    "test_hosts.py::test_shards_that_take_turns": 1,
    "test_keras_distribution.py::test_a_model_that_is_wrapped_keeps_its_devices": 0,
    "test_keras_distribution.py::test_callbacks": 0,
    "test_keras_distribution.py::test_compiled_by_xla": 0,
    "test_keras_distribution.py::test_data_of_unknown_length_is_counted_as_if_it_were_known": 0,
    "test_keras_distribution.py::test_equals_one_device": 0,
    "test_keras_distribution.py::test_files_and_copies": 0,
    "test_keras_distribution.py::test_functions_are_kept_while_nothing_changes": 0,
    "test_keras_distribution.py::test_kinds_of_data": 1,
    "test_keras_distribution.py::test_models_answer": 0,
    "test_keras_distribution.py::test_one_device_then_four_then_three_then_one": 0,
    "test_keras_distribution.py::test_steps_per_execution": 0,
    "test_keras_distribution.py::test_the_first_batch_builds_a_model": 1,
    "test_keras_distribution.py::test_two_dimensional_meshes_and_other_devices_than_the_first": 0,
    "test_keras_distribution_layouts.py::test_a_function_for_generating_goes_on": 0,
    "test_keras_distribution_layouts.py::test_a_mesh_of_three_axes": 0,
    "test_keras_distribution_layouts.py::test_axes_are_called_as_their_user_likes": 0,
    "test_keras_distribution_layouts.py::test_disabled_everything_is_at_home": 0,
    "test_keras_distribution_layouts.py::test_entries_for_outputs": 0,
    "test_keras_distribution_layouts.py::test_equals_one_device": 1,
    "test_keras_distribution_layouts.py::test_functions_of_a_users_own_see_every_value": 0,
    "test_keras_distribution_layouts.py::test_maps_of_both_axes": 0,
    "test_keras_distribution_layouts.py::test_on_gpus": 0,
    "test_keras_distribution_layouts.py::test_other_distributions_move_the_variables": 0,
    "test_keras_distribution_layouts.py::test_what_a_user_has_laid_out_stays": 0,
    "test_keras_distribution_switch.py::test_a_class_that_drives_batches_itself_is_told": 0,
    "test_keras_distribution_switch.py::test_no_warning_where_nothing_is_distributed": 0,
    "test_keras_distribution_switch.py::test_nothing_happens_on_import": 0,
    "test_keras_distribution_switch.py::test_the_next_fit_is_keras_own": 0,
    "test_keras_distribution_switch.py::test_workers_of_a_cluster": 0,
    "test_keras_distribution_upstream.py::test_of_all_backends": 0,
    "test_keras_distribution_upstream.py::test_of_jax": 0,
    "test_keras_guide.py::test_the_guide_runs": 0,
    "test_keras_models.py::test_equals_the_template_in_float32": 0,
    "test_keras_models.py::test_equals_the_template_in_float64": 1,
    "test_keras_models.py::test_losses_of_single_outputs_are_weighted_as_keras_does": 0,
    "test_keras_models_files.py::test_every_file_loads_in_a_process_without_graphsplit": 0,
    "test_keras_models_files.py::test_training_goes_on_after_a_reload_on_another_number_of_devices": 0,
    "test_keras_models_tensorboard.py::test_keras_3": 0,
    "test_keras_models_tensorboard.py::test_tf_keras": 0,
    "test_keras_models_tf_keras.py::test_dropout": 1,
    "test_keras_models_tf_keras.py::test_equals_the_template": 1,
    "test_keras_models_tf_keras.py::test_single_batches": 0,
    "test_keras_models_tf_keras.py::test_steps_per_execution_and_counters": 0,
    "test_keras_models_use.py::test_a_layer_with_fit_that_is_no_model": 0,
    "test_keras_models_use.py::test_a_model_that_has_a_train_step_and_no_call": 0,
    "test_keras_models_use.py::test_compiling_again_changes_what_runs": 0,
    "test_keras_models_use.py::test_kinds_of_data": 0,
    "test_keras_models_use.py::test_layouts_of_an_optimizer_that_compile_brings_after_a_prediction": 0,
    "test_keras_models_use.py::test_noise_in_a_step_with_a_smaller_last_batch": 1,
    "test_keras_models_use.py::test_predictions_are_merged_on_the_cpu_unless_told_otherwise": 0,
    "test_keras_models_use.py::test_progress_bar_and_history_are_as_usual": 0,
    "test_keras_models_use.py::test_quantized_after_a_prediction": 0,
    "test_keras_models_use.py::test_relocation_of_a_trained_model_by_a_copy": 0,
    "test_keras_models_use.py::test_single_batches": 0,
    "test_keras_models_use.py::test_steps_per_execution": 0,
    "test_keras_row_numbers.py::test_results_are_those_of_one_device": 1,
    "test_keras_scopes.py::test_a_layer_of_a_built_model_learns": 1,
    "test_keras_seen_shapes.py::test_a_batch_without_rows": 1,
    "test_keras_seen_shapes.py::test_code_sees_the_rows_that_it_sees_on_one_device": 1,
    "test_keras_seen_shapes.py::test_loops_of_a_trace_of_any_rows_are_sharded": 0,
    "test_keras_seen_shapes.py::test_what_is_made_of_sparse_and_ragged_rows_is_sharded": 0,
    "test_keras_slots.py::test_slots_begin_as_keras_has_them": 1,
    "test_keras_stages.py::test_stages_begin_at_layers": 1,
    "test_keras_tests.py::test_a_part": 0,
    "test_keras_tests.py::test_steps_of_fit_evaluate_and_predict_are_compared": 0,
    "test_late_operations.py::test_less_is_alive": 1,
    "test_late_operations.py::test_what_an_optimizer_makes_of_what_it_keeps_waits": 0,
    "test_layout_slots.py::test_a_pattern_names_one_of_two_optimizers_or_both": 0,
    "test_layout_slots.py::test_slots_fit_what_their_variables_fit": 2,
    "test_layout_slots.py::test_slots_lie_with_their_variables": 2,
    "test_layout_slots.py::test_slots_made_later_lie_with_their_variables": 1,
    "test_layout_slots.py::test_slots_of_ones_own_are_found_by_what_a_step_computes": 1,
    "test_layouts_asked.py::test_a_first_call_lays_them_out": 2,
    "test_layouts_of_any_variables.py::test_any_variables": 2,
    "test_loading.py::test_damaged_files_change_nothing": 8,
    "test_loading.py::test_loaded": 1,
    "test_loading.py::test_some_entries_of_an_array": 12,
    "test_lookups.py::test_lookups_read_rows_and_not_the_variable": 1,
    "test_lookups.py::test_rows_are_sent_and_not_their_table": 1,
    "test_lookups.py::test_tables_are_sent_where_that_is_less": 1,
    "test_memory.py::test_nothing_fits": 0,
    "test_memory_of_models.py::test_a_model_is_fitted_under_a_limit_of_memory": 0,
    "test_mesh.py::test_a_keras_model_fits": 0,
    "test_mesh.py::test_a_perceptron": 1,
    "test_mesh.py::test_a_transformer": 1,
    "test_mesh.py::test_loops_branches_and_lists": 1,
    "test_mesh_axes.py::test_a_keras_model": 0,
    "test_mesh_axes.py::test_a_transformer_with_experts": 1,
    "test_mesh_axes.py::test_every_spelling": 1,
    "test_mesh_axes.py::test_with_the_batchs_axis": 2,
    "test_mesh_channels.py::test_channels": 2,
    "test_mesh_found.py::test_programs": 2,
    "test_mesh_found.py::test_what_has_another_shape_is_not_cut_alike": 1,
    "test_mesh_fsdp.py::test_adam_with_clipping": 1,
    "test_mesh_fsdp.py::test_layouts": 2,
    "test_mesh_fsdp.py::test_transformer": 1,
    "test_mesh_heads.py::test_the_plan_says_whether_heads_are_cut_and_by_how_many": 2,
    "test_mesh_loops.py::test_keras_loss_scaling": 0,
    "test_mesh_loops.py::test_keras_recurrent_layers": 0,
    "test_mesh_plans.py::test_layouts_are_found_on_a_mesh": 0,
    "test_mesh_plans.py::test_the_mesh_is_found": 0,
    "test_mesh_plans.py::test_under_a_memory_on_a_mesh": 0,
    "test_mesh_predictions.py::test_more_devices_than_there_are": 0,
    "test_mesh_predictions.py::test_stages": 1,
    "test_mesh_search.py::test_about_as_good_as_an_exhaustive_search": 0,
    "test_mesh_stages.py::test_compiled_by_xla": 0,
    "test_mesh_units.py::test_blocks_of_different_sizes": 0,
    "test_mesh_units.py::test_gradients_from_outside": 1,
    "test_mesh_units.py::test_no_activation_is_gathered_forward": 1,
    "test_mesh_units.py::test_units_are_found_however_products_are_taken_apart": 0,
    "test_mesh_units.py::test_units_beside_another_axis": 1,
    "test_mesh_variables.py::test_every_spelling": 2,
    "test_mesh_variables.py::test_weights_are_gathered_again": 1,
    "test_mesh_vocabulary.py::test_a_keras_language_model": 0,
    "test_mesh_vocabulary.py::test_a_vocabulary_in_parts": 1,
    "test_methods_and_copies.py::test_instances_go_with_their_traces": 1,
    "test_micro_batches.py::test_keras_models": 0,
    "test_micro_batches.py::test_loops_and_branches": 0,
    "test_micro_batches.py::test_random_programs": 0,
    "test_microbenchmarks.py::test_what_devices_cost_is_a_difference": 0,
    "test_microbenchmarks.py::test_what_is_measured_besides_is_taken_off": 0,
    "test_mirrored_variables.py::test_elementwise_optimizers_give_the_same_bits": 2,
    "test_mirrored_variables.py::test_what_couples_a_variable_is_exact": 1,
    "test_mixed_precision.py::test_a_gradient_that_is_not_finite_in_one_shard_skips_the_step": 1,
    "test_mixed_precision.py::test_mixed_precision": 1,
    "test_models.py::test_models_are_compared_and_counted": 0,
    "test_networks.py::test_architecture": 1,
    "test_networks.py::test_attention": 1,
    "test_networks.py::test_rows_against_rows": 1,
    "test_new_variables.py::test_equal_in_all_bits": 2,
    "test_new_variables.py::test_whatever_tensorflow_takes": 3,
    "test_on_device.py::test_a_keras_model_with_a_stage_trains_as_without": 0,
    "test_on_device.py::test_a_stage_of_a_training_step_runs_on_its_devices": 2,
    "test_on_device.py::test_training_equals_the_unsplit_function": 4,
    "test_optimizers.py::test_no_optimizer_moves_more_than_at_home": 0,
    "test_order_of_threads.py::test_a_thread_runs_operations_in_the_predicted_order": 0,
    "test_outer_functions.py::test_a_layout_may_change_between_forward_and_backward": 2,
    "test_outer_functions.py::test_first_traced_under_an_outer_tape": 1,
    "test_outer_functions.py::test_higher_derivatives_through_an_outer_function": 0,
    "test_outer_functions.py::test_outer_graphs_go": 1,
    "test_outer_functions.py::test_results_without_gradients_under_a_tape": 4,
    "test_outer_functions.py::test_saved_and_loaded_without_graphsplit": 0,
    "test_own_rows.py::test_crops_from_the_image_of_each_row": 4,
    "test_own_rows.py::test_gradient_of_a_gather_from_each_row": 2,
    "test_own_rows.py::test_updates_of_a_whole_tensor_are_joined": 2,
    "test_owners.py::test_optimizers_stay_with_their_variables": 1,
    "test_packing.py::test_any_mixture_of_rows_and_vectors": 1,
    "test_packing.py::test_biases_and_their_gradients_travel_as_one": 1,
    "test_pairs.py::test_pair": 33,
    "test_parallelize.py::test_any_number_of_rows": 5,
    "test_pipelines.py::test_random_pipelines": 0,
    "test_placement.py::test_large_placement_has_answers": 0,
    "test_placement.py::test_layers_are_called_as_in_their_model": 1,
    "test_placement_actual.py::test_every_model_runs_where_it_was_asked_to": 2,
    "test_placement_transpiled.py::test_inspect_splits_nothing_twice": 0,
    "test_placement_transpiled.py::test_inspect_without_a_specification_counts_some_rows": 0,
    "test_prediction.py::test_sizes_are_those_that_tensorflow_infers": 0,
    "test_prediction_errors.py::test_variables_that_lie_on_fewer_devices_are_told_of": 1,
    "test_prefetching.py::test_layouts_may_change_between_batches_that_were_sent": 2,
    "test_prefetching.py::test_results_are_those_of_one_call_per_batch": 4,
    "test_programs.py::test_equal": 1,
    "test_project.py::test_the_code_of_the_readme_runs": 0,
    "test_random.py::test_stateless_numbers_are_those_of_one_device": 10,
    "test_random_along_axes.py::test_bits_of_one_device": 8,
    "test_random_programs.py::test_random_program": 5,
    "test_reading.py::test_assertions_change_nothing": 1,
    "test_reading.py::test_results_of_differentiated_branches": 1,
    "test_reading.py::test_second_derivatives_of_any_number_of_rows": 1,
    "test_recomputation.py::test_what_cannot_be_meant": 2,
    "test_recurrent_kernels.py::test_both_kernels_are_cut_or_neither": 0,
    "test_recurrent_kernels.py::test_only_the_batch_is_cut": 3,
    "test_recurrent_kernels.py::test_training": 1,
    "test_resharding.py::test_micro_batches_of_few_rows_meet_before_each_weight": 1,
    "test_resharding.py::test_two_weights_at_a_time": 0,
    "test_resharding.py::test_wherever_it_is_put_together_again": 1,
    "test_row_lookups.py::test_training": 1,
    "test_row_loops.py::test_a_loop_that_does_not_turn_once_for_each_row_says_so": 1,
    "test_row_loops.py::test_a_table_that_is_read_by_the_row_and_elsewhere": 0,
    "test_row_loops.py::test_an_array_that_grows_with_each_turn": 1,
    "test_row_loops.py::test_an_array_that_is_written_row_by_row": 1,
    "test_row_loops.py::test_gradients_by_rows_that_are_mapped": 1,
    "test_row_loops.py::test_gradients_of_mapped_rows_from_outside": 1,
    "test_row_loops.py::test_lists_of_one_turn_with_as_many_entries_as_there_are_rows": 0,
    "test_row_loops.py::test_loops_that_are_not_row_by_row": 1,
    "test_row_loops.py::test_map": 1,
    "test_row_loops.py::test_map_over_several_arguments_with_results_of_several_shapes": 1,
    "test_row_loops.py::test_the_gradient_of_a_loop_in_a_loop": 0,
    "test_row_loops.py::test_turns_of_an_unknown_number_of_rows": 1,
    "test_row_loops.py::test_vectorized_maps_of_an_unknown_number_of_rows": 0,
    "test_rules.py::test_any_argument_as_a_partial_sum": 30,
    "test_rules.py::test_any_argument_split_along_any_axis": 60,
    "test_rules.py::test_made_in_pieces": 35,
    "test_safetensors.py::test_loaded": 1,
    "test_saved_models.py::test_an_unknown_number_of_rows_is_sharded": 2,
    "test_saved_models.py::test_batches_that_differ": 0,
    "test_saved_models.py::test_large_constants_are_stored_once": 1,
    "test_saved_models_errors.py::test_a_disk_that_is_full": 1,
    "test_saved_models_errors.py::test_assets_from_outside_of_the_model_are_refused": 2,
    "test_saved_models_errors.py::test_strict_on_the_command_line_has_no_dataset": 0,
    "test_seeds.py::test_laid_out_variables": 1,
    "test_seeds.py::test_seed": 10,
    "test_several_meshes.py::test_a_layout_over_other_devices_than_before": 0,
    "test_several_meshes.py::test_a_loop_that_changes_the_layout_each_time_has_the_right_values": 0,
    "test_several_meshes.py::test_two_meshes": 1,
    "test_slices_of_variables.py::test_axes_of_length_one": 5,
    "test_slices_of_variables.py::test_gradients_of_slices": 1,
    "test_slices_of_variables.py::test_other_ways_to_take_a_part": 1,
    "test_slices_of_variables.py::test_slices_are_read": 1,
    "test_slices_of_variables.py::test_slices_are_written": 4,
    "test_stages.py::test_a_keras_network_with_normalization_and_skips": 0,
    "test_stages.py::test_fewer_stages_for_a_batch_of_which_less_runs_on_the_shards": 0,
    "test_stages.py::test_random_stages": 0,
    "test_stages.py::test_tapes_around_the_call": 1,
    "test_structures.py::test_changed_contents_are_seen_and_traced_once": 3,
    "test_structures.py::test_gradients_reach_the_contents": 3,
    "test_tasks.py::test_few_shards_tell_what_all_hold_and_send": 2,
    "test_tasks.py::test_what_a_loop_keeps_for_its_gradient_counts_in_every_turn": 1,
    "test_tasks.py::test_what_is_emitted_computes_and_sends_the_same": 2,
    "test_threads.py::test_calls_and_gradients_of_same_and_different_shapes": 1,
    "test_threads.py::test_first_gradients": 1,
    "test_threads.py::test_in_outer_functions": 0,
    "test_threads.py::test_instances_that_take_each_others_place": 0,
    "test_threads.py::test_layouts_change_while_others_call": 0,
    "test_training.py::test_keras_optimizer": 0,
    "test_training.py::test_older_optimizers": 1,
    "test_training.py::test_optimizer_options": 1,
    "test_transfers.py::test_every_change_of_any_value_is_found": 1,
    "test_transfers.py::test_every_other_reader_is_found": 3,
    "test_typing.py::test_a_user_script": 0,
    "test_typing.py::test_the_check_can_fail": 0,
    "test_unknown_batch.py::test_gradients_from_outside": 1,
    "test_unknown_batch.py::test_random_numbers_are_those_of_one_device": 6,
    "test_unknown_batch.py::test_rules": 48,
    "test_unknown_lengths.py::test_gradients_from_outside_of_sequences_of_any_length": 0,
    "test_unknown_lengths.py::test_nothing_is_taken_for_the_number_that_it_is_planned_with": 3,
    "test_unknown_lengths.py::test_training_on_sequences_of_any_length": 1,
    "test_untiling.py::test_same_bits": 10,
    "test_v1_graphs.py::test_gradients_are_those_of_one_device_and_stay_with_their_towers": 3,
    "test_variable_arguments.py::test_a_tape_outside_reaches_it": 4,
    "test_variable_arguments.py::test_functions_inside_are_given_variables_that_are_laid_out": 1,
    "test_variable_arguments.py::test_it_is_read_and_written": 4,
    "test_variable_layouts.py::test_any_number_of_rows": 1,
    "test_variable_layouts.py::test_elementwise_optimizers_give_the_same_bits": 2,
    "test_variable_layouts.py::test_traffic_is_spread_over_the_devices": 1,
    "test_variable_layouts.py::test_what_couples_the_parts_of_a_variable_is_exact": 1,
    "test_variable_layouts_files.py::test_a_small_fit": 0,
    "test_variable_layouts_files.py::test_keras_models_are_exported_and_train_on": 0,
    "test_variable_layouts_files.py::test_saved_models": 1,
    "test_variable_layouts_loading.py::test_an_interrupted_save_leaves_the_old_file_whole": 1,
    "test_variable_layouts_loading.py::test_what_is_loaded_goes_to_the_parts": 1,
    "test_variable_layouts_truth.py::test_a_model_that_was_fitted_before_a_layout_goes_on": 0,
    "test_variable_layouts_truth.py::test_an_interrupt_leaves_one_value_whole": 8,
    "test_variable_layouts_truth.py::test_an_interrupt_while_a_layout_changes": 1,
    "test_variable_layouts_truth.py::test_functions_that_were_traced_before_a_layout": 1,
    "test_with_layout.py::test_rows_and_sequences": 1,
    "test_without_values.py::test_loaded": 1,
    "test_without_values.py::test_planned_then_initialized_then_trained": 1,
    "test_without_values.py::test_the_plan_that_fits_is_chosen_without_values": 0,
    "test_workers.py::test_a_worker_ends_cleanly": 0,
    "test_workers.py::test_batches_are_kept_only_since_a_checkpoint": 0,
    "test_zero_1.py::test_how_it_is_written": 0,
    "test_zero_1.py::test_results_are_those_of_one_device": 2,
    "test_zero_1.py::test_traffic_is_that_of_an_all_reduce": 1,
}

FEW = "more devices than this process has: `test_twelve_devices.py` starts one with twelve"
NO_GPU = "no GPU that TensorFlow finds (`graphsplit doctor` says more), or a run without `-m gpu`, which hides them"
GPU_MB = int(os.environ.get("GRAPHSPLIT_TEST_GPU_MB", "2000"))  # of each of four logical GPUs, in each process


def pytest_configure(config: pytest.Config) -> None:
    """Start TensorFlow.

    `-m gpu` gives it four logical GPUs. All other tests run on CPU devices, on every machine: a number of devices
    means GPUs where there are any, and so GPUs are hidden from them and from the processes that they start.
    """
    if tf.config.list_physical_devices("GPU"):
        if re.search(r"(?<!not )\bgpu\b", config.option.markexpr):
            gs.use_logical_devices(4, kind="GPU", memory_mb=GPU_MB)
        else:
            tf.config.set_visible_devices([], "GPU")
            os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    if "GRAPHSPLIT_TEST_V1" in os.environ:  # see test_other_regimes.py
        tf.compat.v1.disable_v2_behavior()
    gs.use_logical_devices(DEVICES)
    if "GRAPHSPLIT_TEST_WORKERS" in os.environ:  # see test_on_workers.py
        workers = gs.workers.LocalWorkers(int(os.environ["GRAPHSPLIT_TEST_WORKERS"]), devices=2)
        config.add_cleanup(workers.close)
        gs.connect(workers, timeout_s=240)
        # (cases call steps inside of a tf.function, over workers here; `worker_reading.py` tests what is said of it)
        config.addinivalue_line("filterwarnings", "ignore:.* is called inside of a tf.function, and runs on worker")
    tf.config.list_logical_devices()  # starts TensorFlow


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Mark what is `long` or `quick`: in one place, since a sample of a table is no property of any one case."""
    for item in items:
        if item.get_closest_marker("gpu") and not tf.config.list_logical_devices("GPU"):
            item.add_marker(pytest.mark.skip(reason=NO_GPU))
        if item.get_closest_marker("many") and DEVICES < MANY:
            item.add_marker(pytest.mark.skip(reason=FEW))
    shorter = [item for item in items if not item.get_closest_marker("long")]
    for item in _left_out(shorter, LONG):
        item.add_marker("long")
    shorter = [item for item in shorter if not item.get_closest_marker("long") and _entry(item, QUICK)]
    left_out = set(_left_out(shorter, QUICK))
    for item in shorter:
        if item not in left_out:
            item.add_marker("quick")


def pytest_collection_finish() -> None:
    """Let the garbage collector leave out what is there before the first test, which stays to the end.

    That is a million objects of TensorFlow and Keras, which each full collection would visit.
    """
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)  # after fixtures of the module have ended
def pytest_runtest_teardown(item: pytest.Function, nextitem: pytest.Function | None) -> None:
    """Let it leave out what the tests of a file have left, too.

    TensorFlow keeps the gradient of each `tf.custom_gradient` that it ever traced, with its graph: two million objects
    by the end. (`living_objects` visits all that is not left out, whenever a layout is set.)
    """
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def _entry(item: pytest.Function, table: Mapping[str, int]) -> str | None:
    """Return what names a case in a table: its function, or else its file."""
    names = f"{item.path.name}::{item.originalname}", item.path.name
    return next((name for name in names if name in table), None)


def _left_out(items: Sequence[pytest.Function], table: Mapping[str, int]) -> list[pytest.Function]:
    """Return the cases that a table names, but that are not among its sample."""
    named: dict[str, dict[str, pytest.Function]] = {}
    for item in items:
        if (entry := _entry(item, table)) is not None:
            named.setdefault(entry, {})[item.nodeid] = item
    found = []
    for entry, cases in named.items():
        whole_file = "::" not in entry  # its functions have not all the same parameters
        values = {
            name: {"function": item.originalname} if whole_file else _parameters(item) for name, item in cases.items()
        }
        chosen = sample(values, table[entry])
        found += [item for name, item in cases.items() if name not in chosen]
    return found


def _parameters(item: pytest.Function) -> dict[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Start every test from the same random state."""
    tf.keras.utils.set_random_seed(0)


@pytest.fixture(autouse=True)
def regime(request: pytest.FixtureRequest) -> None:
    """Compute as a process of tests was asked to: see test_keras_automatic.py."""
    if "GRAPHSPLIT_TEST_COPIES_TAKE_TIME" in os.environ:
        request.getfixturevalue("copies_take_time")
        request.getfixturevalue("plain_oracle")


@pytest.fixture
def copies_take_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `variables="auto"` choose for logical CPU devices, and small models, as it does for GPUs and large ones."""
    monkeypatch.setattr(automatic, "copies_take_time", lambda _: True)
    monkeypatch.setattr(automatic, "LEAST_BYTES", 0)


@pytest.fixture
def plain_oracle() -> Iterator[None]:
    """Let a `tf.function` compute what was written.

    TensorFlow's graph optimizer, which graphsplit leaves out on CPUs, turns divisions by constants into products with
    their reciprocals. In Adam's float32 scalars that is 1e-9 in a float64 model, a thousand times what is tested.
    """
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": before["disable_meta_optimizer"]})
