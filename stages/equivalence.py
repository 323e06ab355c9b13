"""Is it right? Every cut of a batch against the whole."""

from _run import run_stage
from gradaccum.measurements.equivalence import Config, measure

if __name__ == "__main__":
    run_stage("equivalence", Config, measure)
