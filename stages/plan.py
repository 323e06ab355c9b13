"""What should I set?"""

from _run import run_stage
from gradaccum.measurements.plan import Config, measure
from gradaccum.measurements.setup import Progress, Setup
from gradaccum.results.files import OUTPUTS, read_csv, read_json
from gradaccum.results.outcome import Outcome
from gradaccum.results.step_costs import StepCosts


def measure_with_costs(config: Config, setup: Setup, progress: Progress) -> Outcome:
    folder = OUTPUTS / "throughput"
    costs = StepCosts.of(read_csv(folder / "frontier.csv"), read_json(folder / "metrics.json"))
    return measure(config, setup, progress, costs=costs)


if __name__ == "__main__":
    run_stage("plan", Config, measure_with_costs)
