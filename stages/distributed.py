"""Many ranks: is it right, what is reduced, and what does it cost? Started by torchrun."""

from _run import run_stage
from gradaccum.measurements.distributed import Config, measure

if __name__ == "__main__":
    run_stage("distributed", Config, measure)
