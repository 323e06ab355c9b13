"""Do published rules for other effective batches hold here?"""

from _run import run_stage
from gradaccum.measurements.scaling import Config, measure

if __name__ == "__main__":
    run_stage("scaling", Config, measure)
