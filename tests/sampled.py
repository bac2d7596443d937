"""Tests that the default run leaves to `make soak`: each has siblings that stay, which test the same on less.

`LEFT_TO_SOAK` has patterns of node ids, as `fnmatch` reads them but for brackets, which are literal. `SAMPLED` says of
how many of its cases a property is tested by default: always the same ones, spread by a hash. Picked by time
(`--durations=60`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

__all__ = ["LEFT_TO_SOAK", "SAMPLED", "left_to_soak"]

SAMPLED: Mapping[str, int] = {
    "tests/api/test_budgets.py::test_any_budget_and_any_cap_give_a_sound_plan": 6,
    "tests/api/test_bytes.py::test_simulated_bytes_are_the_measured_ones": 9,
    "tests/api/test_kept_plans.py::test_an_entry_that_is_no_plan_of_the_step_is_one_warning": 10,
    "tests/api/test_own_optimizers.py::test_numbers_are_eagers_and_bytes_are_exact": 5,
    "tests/capture/test_networks.py::test_simulated_bytes_are_the_measured_ones": 20,
    "tests/fission/test_proof.py::test_changed_loops_are_refused_or_the_same": 5,
    "tests/fuzz/test_random.py::test_a_loop": 5,
    "tests/fuzz/test_random.py::test_a_program": 12,
    "tests/models/test_networks.py::test_blocks_are_disjoint_and_hold_most_of_the_network": 12,
    "tests/models/test_networks.py::test_every_small_network_has_a_loss_and_reaches_every_parameter": 8,
    "tests/models/test_networks.py::test_other_data_types": 3,
    "tests/models/test_networks.py::test_paper_sizes_allocate_nothing_and_run_under_fake_tensors": 6,
    "tests/models/test_presets.py::test_small_sizes_keep_the_bars": 5,
    "tests/models/test_presets.py::test_the_other_networks_learn_as_well": 2,
    "tests/paper/test_ftree.py::test_enabled_trees_compute_the_same": 3,
    "tests/paper/test_ftree.py::test_every_node_of_a_network_is_legal": 4,
    "tests/planners/test_peers.py::test_plans_cost_what_they_say_and_meet_the_goal_they_are_given_for": 2,
    "tests/randomness/test_states.py::test_every_random_operator_draws_as_in_eager_mode": 12,
    "tests/rewrite/test_plans.py::test_a_random_plan": 20,
    "tests/rewrite/test_rules.py::test_numbers": 30,
    "tests/rewrite/test_rules_networks.py::test_one_match_of_every_rule": 3,
    "tests/runtime/test_loops.py::test_simulated_bytes_are_measured_bytes": 8,
    "tests/search/test_interrupted.py::test_a_front_of_loops_that_ends_early_has_sound_points": 3,
    "tests/search/test_search.py::test_small_steps_get_the_optimum_of_all_plans": 4,
    "tests/training/test_apart.py::test_numbers_and_bytes_are_those_of_a_plain_loop": 8,
    "tests/training/test_changes.py::test_an_optimizer_that_changes_updates_as_it_would": 5,
    "tests/training/test_drawn.py::test_every_step_draws_what_eager_draws": 3,
}
"""Function -> cases."""

LEFT_TO_SOAK = (
    "tests/api/test_budgets.py::test_any_budget_and_any_cap_give_a_sound_plan[0.6-1-None-mlp-sim:rtx3090]",
    "tests/api/test_budgets.py::test_any_budget_and_any_cap_give_a_sound_plan[0.6-1-None-tests.api.nets:few_blocks-cpu]",
    "tests/api/test_fitting.py::test_eager_is_exact[0-1]",
    "tests/api/test_fronts.py::test_a_front_is_monotone_and_between_the_bound_and_eager[seed-unet-sim:rtx3090]",
    "tests/api/test_fronts.py::test_a_front_is_monotone_and_between_the_bound_and_eager[tests.api.nets:few_blocks-cpu]",
    "tests/api/test_fronts.py::test_plans_of_merged_calls_run_in_their_bytes_with_eagers_numbers",
    "tests/api/test_precision.py::test_a_step_under_autocast_is_eagers_bit_by_bit_and_byte_by_byte[amp-float16-convolutions]",
    "tests/api/test_precision.py::test_a_step_under_autocast_is_eagers_bit_by_bit_and_byte_by_byte[amp-float16-transformer]",
    "tests/api/test_pricing.py::test_on_a_cpu_a_profile_predicts_and_plans_stay_as_they_are",
    "tests/api/test_profiling.py::test_plans_hold_no_operator_that_was_not_listed[seed-bert-0.4]",
    "tests/api/test_sharing.py::test_arrays_of_another_kind_are_made_again[floats]",
    "tests/api/test_other_strategies.py::test_compiled_code_is_estimated_where_it_cannot_run",
    "tests/api/test_other_strategies.py::test_scaled_gradients_leave_room_for_the_scaler",
    "tests/compile/test_saved.py::test_inductors_code_computes_eagers_gradients",
    "tests/fission/test_floor.py::test_no_plan_in_parts_is_below_it_though_below_the_bound_of_whole_operators[seed-resnet50]",
    "tests/paper/test_ftree.py::test_enabled_trees_of_networks_compute_the_same[seed-unetpp]",
    "tests/paper/test_ftree.py::test_enabled_trees_of_networks_compute_the_same[seed-vit]",
    "tests/fission/test_halo.py::test_one_convolution_and_its_backward[2-2]",
    "tests/fission/test_halo.py::test_one_convolution_and_its_backward[2-4]",
    "tests/fission/test_halo.py::test_one_convolution_and_its_backward[3-*]",
    "tests/fission/test_halo.py::test_random_regions_compute_the_same_in_the_bytes_said[pooled]",
    "tests/fission/test_halo.py::test_random_regions_compute_the_same_in_the_bytes_said[super-resolution]",
    "tests/fission/test_in_place.py::test_regions_in_place_compute_the_same_in_the_bytes_said",
    "tests/fission/test_regions.py::test_regions_compute_the_same_in_the_bytes_said[bert]",
    "tests/fission/test_regions.py::test_regions_compute_the_same_in_the_bytes_said[btlm]",
    "tests/fission/test_regions.py::test_regions_compute_the_same_in_the_bytes_said[gpt_neo]",
    "tests/fission/test_regions.py::test_regions_compute_the_same_in_the_bytes_said[resnet50]",
    "tests/fission/test_regions.py::test_regions_compute_the_same_in_the_bytes_said[seed-bert]",
    "tests/fission/test_regions.py::test_regions_compute_the_same_in_the_bytes_said[seed-btlm]",
    "tests/fission/test_regions.py::test_regions_compute_the_same_in_the_bytes_said[seed-gpt_neo]",
    "tests/fission/test_regions.py::test_regions_compute_the_same_in_the_bytes_said[seed-resnet50]",
    "tests/fission/test_regions.py::test_regions_compute_the_same_in_the_bytes_said[unetpp]",
    "tests/fission/test_regions.py::test_regions_compute_the_same_in_the_bytes_said[vit]",
    "tests/plugin/test_against.py::test_more_memory_than_the_revision_is_red[n2]",
    "tests/plugin/test_leaks.py::test_no_tensor_outlives_its_case_and_memory_is_bounded[4]",
    "tests/plugin/test_marked.py::test_a_mark_that_makes_no_cases_is_red[n2]",
    "tests/plugin/test_other_machines.py::test_committed_baselines_hold_on_older_processors",
    "tests/plugin/test_own_models.py::test_a_bad_model_is_one_line_and_nothing_is_written[own_nets:branches]",
    "tests/plugin/test_own_models.py::test_a_bad_model_is_one_line_and_nothing_is_written[own_nets:mixed_norm]",
    "tests/plugin/test_own_models.py::test_a_bad_model_is_one_line_and_nothing_is_written[own_nets:raises]",
    "tests/plugin/test_own_models.py::test_a_bad_model_is_one_line_and_nothing_is_written[own_nets:without_parameters]",
    "tests/plugin/test_own_models.py::test_a_model_that_is_not_chosen_does_no_harm[k-n2]",
    "tests/plugin/test_own_models.py::test_a_model_that_is_not_chosen_does_no_harm[node-id]",
    "tests/plugin/test_own_models.py::test_a_script_that_exits_when_it_is_imported[n2]",
    "tests/plugin/test_own_models.py::test_an_operator_that_nobody_declared_runs[n2]",
    "tests/plugin/test_own_models.py::test_the_same_under_xdist[own_nets:branches]",
    "tests/plugin/test_own_models.py::test_the_same_under_xdist[own_nets:mixed_norm]",
    "tests/plugin/test_planted.py::test_one_percent_more_memory_is_red_hardly_slower_and_explained[kept]",
    "tests/plugin/test_profile.py::test_a_profile_in_its_place_prices_and_the_report_says_how_much",
    "tests/plugin/test_real_core.py::test_workers_measure_the_same_memory",
    "tests/plugin/test_real_interrupt.py::test_ctrl_c_leaves_whole_files_and_nothing_else[while_searching-False-run2]",
    "tests/plugin/test_real_interrupt.py::test_ctrl_c_leaves_whole_files_and_nothing_else[while_timing-False-run1]",
    "tests/predict/test_warm_steps.py::test_one_more_step_changes_nothing[*-cuda]",
    "tests/predict/test_warm_steps.py::test_one_more_step_changes_nothing[amp+*]",
    "tests/predict/test_warm_steps.py::test_one_more_step_changes_nothing[fsdp-cpu]",
    "tests/predict/test_warm_steps.py::test_one_more_step_changes_nothing[half+*]",
    "tests/predict/test_warm_steps.py::test_one_more_step_changes_nothing[oss*]",
    "tests/predict/test_warm_steps.py::test_one_more_step_changes_nothing[tp*]",
    "tests/predict/test_warm_steps.py::test_one_more_step_changes_nothing[zero2-*]",
    "tests/predict/test_warm_steps.py::test_one_more_step_changes_nothing[zero3-*]",
    "tests/ranks/test_attached.py::test_a_run_without_ranks_of_its_own_is_no_part_of_any_job[asked1]",
    "tests/ranks/test_attached.py::test_a_run_without_ranks_of_its_own_is_no_part_of_any_job[asked2]",
    "tests/rewrite/test_networks.py::test_adversarial_schedules[bert-0-1]",
    "tests/rewrite/test_networks.py::test_adversarial_schedules[btlm-*]",
    "tests/rewrite/test_networks.py::test_adversarial_schedules[resnet50-*]",
    "tests/rewrite/test_networks.py::test_adversarial_schedules[unet-0-1]",
    "tests/rewrite/test_networks.py::test_random_plans[btlm-*]",
    "tests/rewrite/test_networks.py::test_random_plans[resnet50-*]",
    "tests/rewrite/test_networks.py::test_random_plans[unet-*]",
    "tests/rewrite/test_networks.py::test_random_plans[unetpp-0-0]",
    "tests/rewrite/test_rules_networks.py::test_rounding[bert]",
    "tests/rewrite/test_rules_networks.py::test_rounding[btlm]",
    "tests/rewrite/test_rules_walks.py::test_walks[0-2-tiny-bert]",
    "tests/search/test_front.py::test_every_point_of_a_divided_front_is_a_sound_step_of_that_size[blocks]",
    "tests/search/test_places.py::test_a_picture_in_parts_needs_less[convnext]",
    "tests/search/test_places.py::test_it_is_the_halo_that_does_it[convnext]",
    "tests/search/test_search.py::test_odd_steps_are_searched_too",
    "tests/seed/test_seed_api.py::test_a_latency_limit_instead",
    "tests/seed/test_seed_api.py::test_gradients_alone_are_kept_to_the_end",
    "tests/seed/test_seed_api.py::test_half_precision_runs[bfloat16]",
    "tests/seed/test_seed_api.py::test_half_precision_runs[float16]",
    "tests/seed/test_seed_api.py::test_inplace_lets_results_take_over_memory",
    "tests/seed/test_seed_api.py::test_inplace_lowers_a_peak_that_lies_at_a_point_wise_operator",
    "tests/steps_of_strategies/test_local.py::test_a_budget_keeps_less_of_compiled_code",
    "tests/training/test_groups.py::test_groups_with_numbers_of_their_own_are_part_of_the_step[adamw]",
    "tests/training/test_groups.py::test_groups_with_numbers_of_their_own_are_part_of_the_step[sgd]",
)

_PATTERN = re.compile("|".join(re.escape(each).replace(r"\*", ".*") for each in LEFT_TO_SOAK))


def left_to_soak(node_ids: Iterable[str]) -> frozenset[str]:
    """Those that the default run leaves out; node ids are relative to the repository."""
    found, cases = set(), dict[str, list[str]]()
    for node_id in node_ids:
        plain = node_id.partition("@")[0]
        if _PATTERN.fullmatch(plain) is not None:
            found.add(node_id)
        elif plain.partition("[")[0] in SAMPLED:
            cases.setdefault(plain.partition("[")[0], []).append(node_id)
    for function, each in cases.items():
        each.sort(key=lambda node_id: hashlib.sha1(node_id.partition("@")[0].encode()).digest())
        found.update(each[SAMPLED[function] :])
    return frozenset(found)
