"""Published claims beside what was measured here, as a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Metrics = Mapping[str, Any]

ORDER_OF_MAGNITUDE = 10


@dataclass(frozen=True)
class Claim:
    """What a paper says, what was seen here, and whether they agree: `holds`, `in part`, `not shown`, `cannot tell`."""

    paper: str
    says: str
    here: str
    verdict: str
    figure: str


def claims(efficiency: Metrics, scaling: Metrics) -> list[Claim]:
    return [_linear_scaling(scaling), _noise_scale(efficiency), _half_life(scaling)]


def page(all_claims: list[Claim]) -> str:
    """Markdown."""
    return "\n".join(["# Published claims, at this size", "", *_lines(all_claims)]) + "\n"


def _lines(all_claims: list[Claim]) -> Iterator[str]:
    yield "| paper | its claim | measured here | verdict | figure |"
    yield "|---|---|---|---|---|"
    for each in all_claims:
        yield f"| {each.paper} | {each.says} | {each.here} | **{each.verdict}** | {each.figure} |"


def _linear_scaling(scaling: Metrics) -> Claim:
    reach = {name: scaling[f"linear/{name}/holds_up_to_times"] for name in ("unscaled", "no_warm_up", "warm_up")}
    verdict, remark = "holds", ""
    if not scaling["linear/holds"]:
        verdict = "in part" if reach["warm_up"] > reach["unscaled"] else "not shown"
        remark = " A warm-up carried it no further than none, so this size does not show what warm-up is for."
    return Claim(
        paper="Goyal et al. 2017, arXiv 1706.02677",
        says="At k times the batch, k times the learning rate keeps the small batch's result, with gradual warm-up; "
        "without warm-up it does not.",
        here=f"From effective batch {scaling['linear/base_effective_batch']} the result stays up to "
        f"{reach['warm_up']} times that with warm-up, {reach['no_warm_up']} times without, {reach['unscaled']} times "
        f"with the learning rate unscaled.{remark}",
        verdict=verdict,
        figure="linear_scaling.png",
    )


def _noise_scale(efficiency: Metrics) -> Claim:
    bend, noise = efficiency["worse_from_effective_batch"], efficiency["noise_scale"]
    if bend is None or noise is None:
        here, verdict = "No arm was large enough to lose quality, or no noise scale could be told.", "cannot tell"
    else:
        good = efficiency["worth_it_up_to_effective_batch"]
        here = (
            f"The noise scale is {noise:.3g} targets; the loss on equal samples is as good as the best up to effective "
            f"batch {good}, and worse at {bend}, which is {bend / noise:.2g} times the noise scale."
        )
        verdict = "holds" if 1 / ORDER_OF_MAGNITUDE <= bend / noise <= ORDER_OF_MAGNITUDE else "not shown"
        if efficiency["worse_from_failed_runs"]:
            here += " Runs failed there, so it is the learning rate that was too large, whatever the noise."
            verdict = "cannot tell"
    return Claim(
        paper="McCandlish et al. 2018, arXiv 1812.06162",
        says="The loss reached on equal samples bends at a batch of the order of the gradient noise scale.",
        here=here,
        verdict=verdict,
        figure="noise_scale.png",
    )


def _half_life(scaling: Metrics) -> Claim:
    base, fixed = scaling["half_life/loss_above_base"], scaling["half_life/loss_of_fixed_above_it"]
    if base is None or fixed is None:
        here = "A seed diverged."
    else:
        here = (
            f"At effective batch {scaling['half_life/effective_batch']} the loss ends {base:+.3g} from that at "
            f"{scaling['half_life/base_effective_batch']} ({_span(scaling, 'half_life/loss_above_base')}); with beta2 "
            f"fixed it ends {fixed:+.3g} from there ({_span(scaling, 'half_life/loss_of_fixed_above_it')})."
        )
    return Claim(
        paper="Marek et al. 2025, arXiv 2507.07101",
        says="With AdamW's second moment kept at its half-life in samples, beta2' = beta2^(B'/B), small batches train "
        "as well as large ones.",
        here=here,
        verdict="holds" if scaling["half_life/holds"] else "not shown",
        figure="half_life.png",
    )


def _span(metrics: Metrics, name: str) -> str:
    return f"{metrics[f'{name}_low']:+.2g} to {metrics[f'{name}_high']:+.2g}"
