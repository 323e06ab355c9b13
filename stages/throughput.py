"""What does it cost, and where does the curve flatten?"""

from _run import run_stage
from gradaccum.measurements.throughput import Config, measure

if __name__ == "__main__":
    run_stage("throughput", Config, measure)
