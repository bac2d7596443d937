"""Tests that the default run leaves to `make soak`: each has siblings that stay, which test the same on less.

Patterns of node ids, as `fnmatch` reads them but for brackets, which are literal. Picked by time (`--durations=60`).
"""

from __future__ import annotations

import re

__all__ = ["LEFT_TO_SOAK", "is_left_to_soak"]

LEFT_TO_SOAK = (
    "tests/api/test_budgets.py::test_any_budget_and_any_cap_give_a_sound_plan[0.6-1-None-mlp-sim:rtx3090]",
    "tests/api/test_fronts.py::test_a_front_is_monotone_and_between_the_bound_and_eager[seed-unet-sim:rtx3090]",
    "tests/api/test_fronts.py::test_a_front_is_monotone_and_between_the_bound_and_eager[tests.api.nets:blocks-cpu]",
    "tests/api/test_fronts.py::test_plans_of_merged_calls_run_in_their_bytes_with_eagers_numbers",
    "tests/api/test_pricing.py::test_on_a_cpu_a_profile_predicts_and_plans_stay_as_they_are",
    "tests/api/test_profiling.py::test_plans_hold_no_operator_that_was_not_listed[seed-bert-0.4]",
    "tests/api/test_sharing.py::test_arrays_of_another_kind_are_made_again[floats]",
    "tests/api/test_techniques.py::test_compiled_code_is_estimated_where_it_cannot_run",
    "tests/api/test_techniques.py::test_scaled_gradients_leave_room_for_the_scaler",
    "tests/aten/test_networks.py::test_parts_give_the_whole_sampled",
    "tests/compile/test_saved.py::test_inductors_code_computes_eagers_gradients",
    "tests/fission/test_floor.py::test_no_plan_in_parts_is_below_it_though_below_the_bound_of_whole_operators[seed-resnet50]",
    "tests/fission/test_ftree.py::test_enabled_trees_of_networks_compute_the_same[seed-vit]",
    "tests/fission/test_halo.py::test_one_convolution_and_its_backward[3-*]",
    "tests/fission/test_halo.py::test_random_regions_compute_the_same_in_the_bytes_said[pooled]",
    "tests/fission/test_halo.py::test_random_regions_compute_the_same_in_the_bytes_said[super-resolution]",
    "tests/fission/test_in_place.py::test_regions_in_place_compute_the_same_in_the_bytes_said",
    "tests/fission/test_regions.py::test_regions_compute_the_same_in_the_bytes_said[btlm]",
    "tests/fission/test_regions.py::test_regions_compute_the_same_in_the_bytes_said[gpt_neo]",
    "tests/fission/test_regions.py::test_regions_compute_the_same_in_the_bytes_said[seed-bert]",
    "tests/fission/test_regions.py::test_regions_compute_the_same_in_the_bytes_said[seed-resnet50]",
    "tests/fission/test_regions.py::test_regions_compute_the_same_in_the_bytes_said[unetpp]",
    "tests/plugin/test_leaks.py::test_no_tensor_outlives_its_case_and_memory_is_bounded[4]",
    "tests/plugin/test_marked.py::test_a_mark_that_makes_no_cases_is_red[n2]",
    "tests/plugin/test_other_machines.py::test_committed_baselines_hold_on_older_processors",
    "tests/plugin/test_own_models.py::test_a_bad_model_is_one_line_and_nothing_is_written[own_nets:branches]",
    "tests/plugin/test_own_models.py::test_a_bad_model_is_one_line_and_nothing_is_written[own_nets:mixed_norm]",
    "tests/plugin/test_own_models.py::test_a_bad_model_is_one_line_and_nothing_is_written[own_nets:raises]",
    "tests/plugin/test_own_models.py::test_a_bad_model_is_one_line_and_nothing_is_written[own_nets:without_parameters]",
    "tests/plugin/test_own_models.py::test_a_model_that_is_not_chosen_does_no_harm[k-n2]",
    "tests/plugin/test_own_models.py::test_a_script_that_exits_when_it_is_imported[n2]",
    "tests/plugin/test_own_models.py::test_an_operator_that_nobody_declared_runs[n2]",
    "tests/plugin/test_own_models.py::test_the_same_under_xdist[own_nets:branches]",
    "tests/plugin/test_own_models.py::test_the_same_under_xdist[own_nets:mixed_norm]",
    "tests/plugin/test_profile.py::test_a_profile_in_its_place_prices_and_the_report_says_how_much",
    "tests/plugin/test_real_core.py::test_workers_measure_the_same_memory",
    "tests/predict/test_warm_steps.py::test_one_more_step_changes_nothing[*-cuda]",
    "tests/predict/test_warm_steps.py::test_one_more_step_changes_nothing[amp+*]",
    "tests/predict/test_warm_steps.py::test_one_more_step_changes_nothing[half+*]",
    "tests/predict/test_warm_steps.py::test_one_more_step_changes_nothing[oss*]",
    "tests/predict/test_warm_steps.py::test_one_more_step_changes_nothing[tp*]",
    "tests/predict/test_warm_steps.py::test_one_more_step_changes_nothing[zero2-*]",
    "tests/predict/test_warm_steps.py::test_one_more_step_changes_nothing[zero3-*]",
    "tests/ranks/test_attached.py::test_a_run_without_ranks_of_its_own_is_no_part_of_any_job[asked1]",
    "tests/ranks/test_attached.py::test_a_run_without_ranks_of_its_own_is_no_part_of_any_job[asked2]",
    "tests/rewrite/test_networks.py::test_adversarial_schedules[btlm-*]",
    "tests/rewrite/test_networks.py::test_adversarial_schedules[resnet50-*]",
    "tests/rewrite/test_networks.py::test_random_plans[btlm-*]",
    "tests/rewrite/test_networks.py::test_random_plans[resnet50-*]",
    "tests/rewrite/test_networks.py::test_random_plans[unet-*]",
    "tests/rewrite/test_rules_networks.py::test_rounding[bert]",
    "tests/rewrite/test_rules_networks.py::test_rounding[btlm]",
    "tests/search/test_places.py::test_a_picture_in_parts_needs_less[convnext]",
    "tests/search/test_search.py::test_odd_steps_are_searched_too",
    "tests/seed/test_seed_api.py::test_a_latency_limit_instead",
    "tests/seed/test_seed_api.py::test_gradients_alone_are_kept_to_the_end",
    "tests/seed/test_seed_api.py::test_half_precision_runs[bfloat16]",
    "tests/seed/test_seed_api.py::test_half_precision_runs[float16]",
    "tests/seed/test_seed_api.py::test_inplace_lets_results_take_over_memory",
    "tests/seed/test_seed_api.py::test_inplace_lowers_a_peak_that_lies_at_a_point_wise_operator",
    "tests/techniques/test_local.py::test_a_budget_keeps_less_of_compiled_code",
)

_PATTERN = re.compile("|".join(re.escape(each).replace(r"\*", ".*") for each in LEFT_TO_SOAK))


def is_left_to_soak(node_id: str) -> bool:
    """Whether the default run leaves a test out; `node_id` is relative to the repository."""
    return _PATTERN.fullmatch(node_id.partition("@")[0]) is not None
