"""What does each usual mistake do?"""

from _run import run_stage
from gradaccum.measurements.ablation import Config, measure

if __name__ == "__main__":
    run_stage("ablation", Config, measure)
