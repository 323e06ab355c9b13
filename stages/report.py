"""Joins the curves, draws the figures, writes the recipe."""

from pathlib import Path

from _start import user_errors  # first: it decides whose code is run  # isort: split
from gradaccum.results import figures
from gradaccum.results.files import (
    OUTPUTS,
    read_csv,
    read_curve,
    read_json,
    write_bytes,
    write_csv,
    write_json,
    write_text,
)
from gradaccum.results.recipe import recipe
from gradaccum.results.report import ablation_table, equivalence_table, joined_curve, throughput_table

STAGES = ("throughput", "equivalence", "ablation")


def main() -> None:
    """Read what the stages wrote; write outputs/accum-curve.json, outputs/report/ and the recipe."""
    with user_errors():
        curves = {stage: read_curve(OUTPUTS / stage / "accum-curve.json") for stage in STAGES}
        metrics = {stage: read_json(OUTPUTS / stage / "metrics.json") for stage in STAGES}
        losses = read_csv(OUTPUTS / "ablation" / "losses.csv")
        page = recipe(metrics, curves["ablation"], read_json(OUTPUTS / "environment.json"))
        report = OUTPUTS / "report"
        written: list[Path] = [
            write_json(OUTPUTS / "accum-curve.json", joined_curve(curves).to_json()),
            write_text(OUTPUTS / "skill-gradient-accumulation.md", page),
            write_csv(report / "throughput.csv", throughput_table(curves["throughput"])),
            write_csv(report / "equivalence.csv", equivalence_table(curves["equivalence"])),
            write_csv(report / "ablation.csv", ablation_table(losses)),
        ]
        for curve in curves.values():
            for name, image in figures.of_stage(curve, {"losses": losses}).items():
                written.append(write_bytes(report / name, image))
        print("wrote " + ", ".join(map(str, written)))


if __name__ == "__main__":
    main()
