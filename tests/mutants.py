"""Small ways to break the engine, each with the test that must notice it; `python tests/mutants.py` tries them all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutant:
    """One breakage: a text of one file, what replaces it, and the test that must fail."""

    name: str
    file: str
    text: str
    broken: str
    test: str


ACCUMULATOR, PASSES, PRECISION, STEP_RESULT = (
    f"src/gradaccum/engine/{name}.py" for name in ("accumulator", "passes", "precision", "step_result")
)
OBJECTIVE, BATCHING, FITTING, RANKS = (
    f"src/gradaccum/engine/{name}.py" for name in ("objective", "batching", "fitting", "ranks")
)
BUFFERS, GRADIENTS, HELD, STATE = (
    f"src/gradaccum/engine/{name}.py" for name in ("buffers", "gradients", "held", "state")
)
STEPS, PRECISIONS, FITS = (f"tests/engine/test_{name}.py" for name in ("accumulator", "precision", "fitting"))
OVER_RANKS = "tests/distributed"

TOLD_OF_EACH_PASS = "shares=shares)"

HARMLESS = Mutant(
    "nothing is broken",
    ACCUMULATOR,
    "self.steps += 1",
    "self.steps += 1  # harmless",
    f"{STEPS}::test_a_window_steps_as_the_full_batch_does",
)

MUTANTS = [
    Mutant(
        "the loss is not divided",
        ACCUMULATOR,
        "scale / totals[0] if totals[0] else 0.0",
        "scale",
        f"{STEPS}::test_a_window_steps_as_the_full_batch_does",
    ),
    Mutant(
        "the loss is divided by the number of micro-batches",
        RANKS,
        "totals = list(map(sum, counts))",
        "totals = [float(len(window)) for _ in objective.terms]",
        f"{STEPS}::test_a_window_steps_as_the_full_batch_does",
    ),
    Mutant(
        "a mean of means",
        PASSES,
        "gradients.backward(sums, seeds[number])",
        "gradients.backward(sums, [seed * work.totals[0] / len(work.batches) / work.counts[0][number] "
        "for seed in seeds[number]])",
        f"{STEPS}::test_a_window_steps_as_the_full_batch_does",
    ),
    Mutant(
        "the short last window is divided by the longest one's count",
        RANKS,
        "totals = list(map(sum, counts))",
        "totals = objective.__dict__['t'] = [max(objective.__dict__.get('t', [0])[0], sum(counts[0]))]",
        f"{STEPS}::test_a_last_short_window_is_divided_by_its_own_count_and_leaks_nothing",
    ),
    Mutant(
        "masked targets are counted",
        OBJECTIVE,
        "len(flat) - flat.count(ignore_index)",
        "len(flat)",
        "tests/engine/test_objective.py::test_ignored_labels_are_no_targets",
    ),
    Mutant(
        "class weights are summed as targets",
        OBJECTIVE,
        "if class_weights is not None:",
        "if False:",
        "tests/engine/test_objective.py::test_class_weights_divide_by_the_weights_of_the_whole_window",
    ),
    Mutant(
        "every term is divided by the first one's count",
        ACCUMULATOR,
        "zip(self.objective.weights.values(), totals, strict=True)",
        "zip(self.objective.weights.values(), [totals[0]] * len(totals), strict=True)",
        "tests/engine/test_objective.py::test_each_term_is_divided_by_its_own_count",
    ),
    Mutant(
        "a term's loss counts where it has no target",
        PASSES,
        "loss if count else loss.new_zeros(())",
        "loss",
        "tests/engine/test_objective.py::test_a_term_that_is_no_number_where_it_has_no_target_enters_neither_loss_nor_gradient",
    ),
    Mutant(
        "half-precision norms are rounded to half precision",
        GRADIENTS,
        "vector_norm(each, dtype=torch.float32) if each.dtype in HALF else vector_norm(each)",
        "vector_norm(each)",
        "tests/engine/test_gradients.py::test_the_global_norm_is_that_of_one_long_vector_at_least_in_float32",
    ),
    Mutant(
        "the reported loss is divided by N as well",
        STEP_RESULT,
        "sum(map(Tensor.item, losses)) / total, losses[0])",
        "sum(map(Tensor.item, losses)) / total / len(losses), losses[0])",
        f"{STEPS}::test_a_window_steps_as_the_full_batch_does",
    ),
    Mutant(
        "each micro-batch is clipped",
        ACCUMULATOR,
        TOLD_OF_EACH_PASS,
        "shares=shares, note=lambda *_: self.clip_norm and gradients.clip(g := self._gradients.whole(), "
        "gradients.global_norm(g), self.clip_norm))",
        f"{STEPS}::test_the_whole_windows_gradient_is_clipped_once",
    ),
    Mutant(
        "the clip comes before the unscale",
        ACCUMULATOR,
        "gradients.scale(found, 1 / self.loss_scale.value)",
        "gradients.clip(found, gradients.global_norm(found), self.clip_norm or 1e30);"
        " gradients.scale(found, 1 / self.loss_scale.value)",
        f"{PRECISIONS}::test_the_loss_scale_is_taken_out_once_before_the_clip",
    ),
    Mutant(
        "gradients are unscaled twice",
        ACCUMULATOR,
        "gradients.scale(found, 1 / self.loss_scale.value)",
        "gradients.scale(found, 1 / self.loss_scale.value**2)",
        f"{PRECISIONS}::test_the_loss_scale_is_taken_out_once_before_the_clip",
    ),
    Mutant(
        "the scheduler ticks every micro-batch",
        ACCUMULATOR,
        TOLD_OF_EACH_PASS,
        "shares=shares, note=lambda *_: self.scheduler and self.scheduler.step())",
        f"{STEPS}::test_a_warm_up_of_ten_steps_takes_ten_windows",
    ),
    Mutant(
        "weights are averaged every micro-batch",
        ACCUMULATOR,
        TOLD_OF_EACH_PASS,
        "shares=shares, note=lambda *_: [callback(self.model) for callback in self.after_step])",
        f"{STEPS}::test_callbacks_run_once_a_step_and_see_the_weights_after_it",
    ),
    Mutant(
        "weights are averaged before the step",
        ACCUMULATOR,
        "            work = self._ranks.share(",
        "            [callback(self.model) for callback in self.after_step]\n            work = self._ranks.share(",
        f"{STEPS}::test_callbacks_run_once_a_step_and_see_the_weights_after_it",
    ),
    Mutant(
        "gradients are not cleared before a window",
        ACCUMULATOR,
        "        try:\n            self._gradients.clear()\n",
        "        try:\n",
        f"{STEPS}::test_leftover_gradients_do_not_enter_the_window",
    ),
    Mutant(
        "only parameters trained at the start are cleared",
        PRECISION,
        "chain(model.parameters(), stepped)",
        "chain(trainable(model), [])",
        f"{STEPS}::test_parameters_unfrozen_later_start_each_window_clean",
    ),
    Mutant(
        "an exception leaves gradients behind",
        ACCUMULATOR,
        "            self._gradients.clear()\n            forget(self.model)\n",
        "            forget(self.model)\n",
        "tests/engine/test_interrupted.py::test_an_interrupted_window_changes_nothing_and_the_next_is_clean",
    ),
    Mutant(
        "only ordinary exceptions clean up",
        ACCUMULATOR,
        "except BaseException as error:",
        "except Exception as error:",
        "tests/engine/test_interrupted.py::test_an_interrupted_window_changes_nothing_and_the_next_is_clean",
    ),
    Mutant(
        "a window without targets steps",
        ACCUMULATOR,
        "        if not any(totals):\n",
        "        if False:\n",
        f"{STEPS}::test_a_window_without_any_target_moves_nothing_and_ticks_nothing",
    ),
    Mutant(
        "an overflow steps",
        ACCUMULATOR,
        "not torch.isfinite(grad_norm)",
        "False",
        f"{PRECISIONS}::test_an_overflow_skips_step_scheduler_and_callbacks_and_says_so",
    ),
    Mutant(
        "a skipped window updates the loss scale",
        ACCUMULATOR,
        "if self.loss_scale is not None and any(totals):",
        "if self.loss_scale is not None:",
        f"{PRECISIONS}::test_a_window_without_targets_says_nothing_about_the_loss_scale",
    ),
    Mutant(
        "wide sums are rounded at every micro-batch",
        PRECISION,
        "self._sums[parameter] = parameter.grad.to(self._dtype)",
        "self._sums[parameter] = parameter.grad",
        "tests/engine/test_half_precision.py::test_float32_buffers_keep_what_bf16_sums_lose_over_512_micro_batches",
    ),
    Mutant(
        "an interrupted window stays in the wide sums",
        PRECISION,
        "        super().clear()\n        self._sums.clear()\n",
        "        super().clear()\n",
        "tests/engine/test_interrupted.py::test_an_interrupted_window_leaves_nothing_in_the_wide_sums",
    ),
    Mutant(
        "every backward syncs",
        PASSES,
        "synced = every or number + 1 == last",
        "synced = True",
        f"{STEPS}::test_a_step_reports_its_window",
    ),
    Mutant(
        "backward runs under autocast",
        PASSES,
        "            with syncing(synced):",
        "            with syncing(synced), torch.autocast('cpu', torch.bfloat16):",
        f"{PRECISIONS}::test_forward_and_loss_run_under_autocast_and_backward_does_not",
    ),
    Mutant(
        "the random state is not restored",
        "src/gradaccum/engine/state.py",
        '    set_random_state(state["random"])\n',
        "",
        "tests/engine/test_state.py::test_a_run_resumed_in_a_new_process_continues_bit_for_bit",
    ),
    Mutant(
        "windows leave out the last short one",
        BATCHING,
        "if drop_last and len(window) < accum_steps:",
        "if len(window) < accum_steps:",
        "tests/engine/test_batching.py::test_windows_cover_every_micro_batch_once_and_in_order",
    ),
    Mutant(
        "windows hold two windows at a time",
        BATCHING,
        "        del window",
        "        pass",
        "tests/engine/test_batching.py::test_windows_hold_at_most_one_window",
    ),
    Mutant(
        "a retry goes on with other random numbers",
        FITTING,
        "    set_random_state(random)\n",
        "",
        f"{FITS}::test_a_halved_run_is_to_the_last_bit_the_run_with_that_micro_batch_from_the_start",
    ),
    Mutant(
        "a retry keeps the buffers of the failed try",
        FITTING,
        "    buffers.restore()\n    set",
        "    set",
        f"{FITS}::test_a_halved_run_is_to_the_last_bit_the_run_with_that_micro_batch_from_the_start",
    ),
    Mutant(
        "what fitted is forgotten",
        FITTING,
        "self.micro_batch = size = (size + 1) // 2",
        "size = (size + 1) // 2",
        f"{FITS}::test_what_fitted_is_remembered_and_a_smaller_batch_is_left_whole",
    ),
    Mutant(
        "a window is stepped on again after its step began",
        FITTING,
        "if stepping or size == 1",
        "if size == 1",
        f"{FITS}::test_memory_that_runs_out_in_the_optimizer_s_step_is_not_retried",
    ),
    Mutant(
        "a trial leaves its step behind",
        FITTING,
        "        undo.callback(_restore, parameters, held)\n",
        "",
        f"{FITS}::test_trials_leave_everything_to_the_last_bit_as_it_was",
    ),
    Mutant(
        "a trial leaves its gradients behind",
        FITTING,
        'undo.callback(setattr, parameter, "grad", parameter.grad)',
        "pass",
        f"{FITS}::test_trials_leave_everything_to_the_last_bit_as_it_was",
    ),
    Mutant(
        "the mean over ranks is taken for the sum",
        ACCUMULATOR,
        "scale = self._ranks.world_size * (1.0",
        "scale = (1.0",
        f"{OVER_RANKS}/test_gradients.py::test_ranks_step_as_one_process_on_the_full_batch",
    ),
    Mutant(
        "each rank divides by its own targets",
        RANKS,
        "told[:, 3:].sum(0).tolist()",
        "[total * self.world_size for total in own.totals]",
        f"{OVER_RANKS}/test_gradients.py::test_unequal_counts_divide_by_the_targets_of_all_ranks",
    ),
    Mutant(
        "the first micro-batch syncs instead of the last",
        PASSES,
        "synced = every or number + 1 == last",
        "synced = every or number == 0",
        f"{OVER_RANKS}/test_gradients.py::test_ranks_step_as_one_process_on_the_full_batch",
    ),
    Mutant(
        "the first micro-batch syncs as well",
        PASSES,
        "synced = every or number + 1 == last",
        "synced = every or number + 1 in (1, last)",
        f"{OVER_RANKS}/test_traffic.py::test_ddp_reduces_once_a_window_and_n_times_where_asked",
    ),
    Mutant(
        "forward runs outside no_sync",
        PASSES,
        "            with syncing(synced):\n                sums = loss_sums(model, batch)\n",
        "            sums = loss_sums(model, batch)\n            with syncing(synced):\n",
        f"{OVER_RANKS}/test_traffic.py::test_ddp_reduces_once_a_window_and_n_times_where_asked",
    ),
    Mutant(
        "a replayed batch weighs as much as the first time",
        PASSES,
        "[torch.zeros_like(loss) for loss in live]",
        "[torch.ones_like(loss) for loss in live]",
        f"{OVER_RANKS}/test_unequal_ranks.py::test_a_rank_whose_data_ends_earlier_adds_nothing_and_stays_in_step",
    ),
    Mutant(
        "the norm of a shard passes for the whole gradient's",
        RANKS,
        "squares = norm.double().square() * self.held",
        "squares = norm.double().square() / self.world_size",
        f"{OVER_RANKS}/test_gradients.py::test_the_global_norm_is_clipped_once",
    ),
    Mutant(
        "a failed window stays inside a sharded model",
        "src/gradaccum/engine/gradient_sync.py",
        "                parameter._unsharded_param.grad = None\n",
        "                pass\n",
        f"{OVER_RANKS}/test_failed_windows.py::test_after_a_window_that_failed_everywhere_the_next_starts_clean",
    ),
    Mutant(
        "ranks stop when their own data ends",
        BATCHING,
        "if not (_any_rank_has(window) if together else window):",
        "if not window:",
        f"{OVER_RANKS}/test_unequal_ranks.py::test_dropping_a_short_window_keeps_ranks_together",
    ),
    Mutant(
        "a replaced parameter goes unnoticed",
        HELD,
        "if parameter not in self._dtypes:",
        "if False:",
        "tests/engine/test_changed_models.py::test_a_replaced_parameter_is_refused_before_anything_is_stepped",
    ),
    Mutant(
        "only the first window looks for replaced parameters",
        HELD,
        "if trained == self._trained:",
        "if self._trained:",
        "tests/engine/test_changed_models.py::test_a_replaced_parameter_is_refused_before_anything_is_stepped",
    ),
    Mutant(
        "parameters that got gradients are counted, not told apart",
        HELD,
        "if trained == self._trained:",
        "if trained.count(None) == [*self._trained].count(None) and self._trained:",
        "tests/engine/test_changed_models.py::test_a_new_head_beside_as_many_parameters_unfrozen_is_refused",
    ),
    Mutant(
        "an autocast around the loop keeps the old weights",
        ACCUMULATOR,
        "torch.clear_autocast_cache()",
        "pass",
        "tests/engine/test_surroundings.py::test_an_autocast_around_the_loop_keeps_no_weights_of_before_the_step",
    ),
    Mutant(
        "a state goes on in the caller's tensors",
        STATE,
        'deepcopy(state["optimizer"])',
        'state["optimizer"]',
        "tests/engine/test_state.py::test_a_state_can_be_gone_back_to_again_and_again",
    ),
    Mutant(
        "another kind of scheduler goes on with the state",
        STATE,
        'if state["kinds"] != (kinds := _kinds(run)):',
        "if (kinds := _kinds(run)) is None:",
        "tests/engine/test_state.py::test_state_of_another_kind_of_part_is_refused_and_changes_nothing",
    ),
    Mutant(
        "a pass's graph lives through the next forward",
        PASSES,
        "            del sums  #",
        "            #",
        "tests/engine/test_surroundings.py::test_no_pass_holds_its_graph_through_the_next_forward",
    ),
    Mutant(
        "the engine's backward enters the graph of a compiled loop",
        GRADIENTS,
        "if is_dynamo_compiling():",
        "if False:",
        "tests/engine/test_surroundings.py::test_a_compiled_training_loop_steps_as_the_plain_one",
    ),
    Mutant(
        "a converted model goes unnoticed",
        HELD,
        "if (built := self._dtypes[parameter]) is not parameter.dtype:",
        "if (built := None):",
        "tests/engine/test_changed_models.py::test_a_model_converted_to_another_type_is_refused",
    ),
    Mutant(
        "a thawed parameter without a master weight goes unnoticed",
        HELD,
        "if self._mastered is not None and",
        "if False and",
        "tests/engine/test_changed_models.py::test_a_parameter_thawed_after_its_master_weights_were_made_is_refused",
    ),
    Mutant(
        "a replaced buffer stays replaced",
        BUFFERS,
        "            module._buffers[name] = buffer\n",
        "",
        f"{FITS}::test_trials_put_every_kind_of_buffer_back_and_give_the_observer_back_whatever_fails",
    ),
    Mutant(
        "buffers that have not changed are written to",
        BUFFERS,
        " and not torch.equal(buffer, value.to(buffer.device))",
        "",
        f"{FITS}::test_trials_put_every_kind_of_buffer_back_and_give_the_observer_back_whatever_fails",
    ),
    Mutant(
        "a trial keeps the observer",
        FITTING,
        '        undo.callback(setattr, accumulator, "observer", accumulator.observer)\n',
        "",
        f"{FITS}::test_trials_put_every_kind_of_buffer_back_and_give_the_observer_back_whatever_fails",
    ),
    Mutant(
        "a replay that fails leaves its buffers behind",
        RANKS,
        "    try:\n        yield\n    finally:\n        before.restore()\n",
        "    yield\n    before.restore()\n",
        "tests/engine/test_buffers.py::test_a_pass_that_fails_leaves_every_buffer_as_it_was",
    ),
    Mutant(
        "master weights of another shape are taken",
        STATE,
        "    if has != given:\n        raise StateError(\n            f\"the state's {len(given)} master",
        "    if len(has) != len(given):\n        raise StateError(\n            f\"the state's {len(given)} master",
        "tests/engine/test_state.py::test_a_state_that_does_not_fit_is_refused_and_changes_nothing",
    ),
    Mutant(
        "the state of another optimizer is taken",
        STATE,
        "if extra and lacking:",
        "if False:",
        "tests/engine/test_state.py::test_a_state_that_does_not_fit_is_refused_and_changes_nothing",
    ),
    Mutant(
        "gradients that a loss takes itself count as noise",
        "src/gradaccum/engine/noise_scale.py",
        "self._fresh[parameter] =",
        "self._fresh[len(self._fresh)] =",
        "tests/engine/test_noise_scale_edges.py::test_gradients_that_a_loss_takes_itself_are_no_part_of_the_noise",
    ),
    Mutant(
        "probabilities of classes are counted as labels",
        OBJECTIVE,
        "not in WHOLE:",
        "is None:",
        "tests/engine/test_unusual_batches.py::test_labels_that_cannot_be_classes_are_refused",
    ),
    Mutant(
        "counts may overflow",
        OBJECTIVE,
        "0 <= count <= LARGEST_COUNT",
        "0 <= count < float('inf')",
        "tests/engine/test_unusual_batches.py::test_a_count_that_nothing_can_be_divided_by_is_refused",
    ),
    Mutant(
        "a loss without a gradient is told in torch's words",
        ACCUMULATOR,
        "            preflight.explain(error, self.model)\n",
        "",
        "tests/engine/test_preflight.py::test_a_loss_that_nothing_can_learn_from_is_refused",
    ),
    Mutant(
        "an optimizer that steps in backward is taken",
        "src/gradaccum/engine/preflight.py",
        'if getattr(parameter, "_post_accumulate_grad_hooks", None):',
        "if False:",
        "tests/engine/test_preflight.py::test_an_optimizer_that_steps_in_backward_is_refused",
    ),
    Mutant(
        "float64 gradients are measured in float32 beside half-precision ones",
        GRADIENTS,
        "torch.float64 if torch.float64 in dtypes else torch.float32",
        "torch.float32",
        "tests/engine/test_gradients.py::test_the_global_norm_is_that_of_one_long_vector_at_least_in_float32",
    ),
]


if __name__ == "__main__":
    from mutation import try_all  # beside this file, where a script's imports are looked for first

    try_all(HARMLESS, MUTANTS)
