"""What does a larger effective batch buy?"""

from _run import run_stage
from gradaccum.measurements.efficiency import Config, measure

if __name__ == "__main__":
    run_stage("efficiency", Config, measure)
