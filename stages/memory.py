"""What does a window need in memory?"""

from _run import run_stage
from gradaccum.measurements.memory import Config, measure

if __name__ == "__main__":
    run_stage("memory", Config, measure)
