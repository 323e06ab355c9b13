"""First: refuse what is wrong anywhere in params.yaml; then write what the machine decides."""

from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from _start import user_errors  # first: it decides whose code is run  # isort: split
from gradaccum.config import read_params, refuse_unknown, section, shared
from gradaccum.machine import describe
from gradaccum.measurements.setup import Setup
from gradaccum.results.files import OUTPUTS, write_json


def main() -> None:
    """Validate every section by the measurement that reads it, whichever stage is to run."""
    with user_errors():
        params = read_params()
        setup = shared(params, Setup)
        stages = [script.stem for script in sorted(Path(__file__).parent.glob("[a-z]*.py"))]
        measuring = [stage for stage in stages if find_spec(f"gradaccum.measurements.{stage}")]
        refuse_unknown(params, {*vars(setup), *measuring})
        for stage in measuring:
            section(params, stage, import_module(f"gradaccum.measurements.{stage}").Config)
        source = setup.workload.source()
        facts = describe() | {"workload_source": sha256(source.read_bytes()).hexdigest() if source else None}
        print(f"wrote {write_json(OUTPUTS / 'environment.json', facts)}")


if __name__ == "__main__":
    main()
