from __future__ import annotations

from typing import Any

import pytest

from gradaccum.measurements.verdict import FLOAT32_ROUNDING, Difference, float32_bound, judge


def differs(**changes: Any) -> Difference:
    none = dict.fromkeys(Difference.__dataclass_fields__, 0.0)
    return Difference(**{**none, "worst_parameter": "w", "norm_ratio": 1.0, "steps_differ": False, **changes})


@pytest.mark.parametrize("kind", ["grad_rel_diff", "loss_rel_diff", "state_rel_diff"])
def test_float64_is_judged_sharply(kind: str) -> None:
    right = judge(differs(**{kind: 9e-13}), differs(), micro_batches=4, tolerance=1e-4)
    wrong = judge(differs(**{kind: 1.1e-12}), differs(), micro_batches=4, tolerance=1e-4)
    assert right.equivalent
    assert not wrong.equivalent


def test_what_is_not_a_number_is_never_equivalent() -> None:
    assert not judge(differs(grad_rel_diff=float("nan")), differs(), micro_batches=2, tolerance=1e-4).equivalent


@pytest.mark.parametrize("kind", ["max_grad_diff", "max_param_diff"])
def test_a_float32_excess_is_a_kink_only_where_float64_agrees(kind: str) -> None:
    excess = differs(**{kind: 2e-4})
    kink = judge(differs(), excess, micro_batches=4, tolerance=1e-4)
    assert kink.equivalent
    assert kink.kink
    wrong = judge(differs(grad_rel_diff=1e-5), excess, micro_batches=4, tolerance=1e-4)
    assert not wrong.equivalent
    assert not wrong.kink


def test_a_large_float32_difference_is_no_kink() -> None:
    verdict = judge(differs(), differs(grad_rel_diff=0.3), micro_batches=4, tolerance=1e-4)
    assert not verdict.equivalent
    assert not verdict.kink


def test_the_float32_bound_has_a_floor_and_grows_slowly() -> None:
    assert float32_bound(1) == FLOAT32_ROUNDING * 34
    assert float32_bound(64) == FLOAT32_ROUNDING * 48
