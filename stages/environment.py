"""First: refuse what is wrong anywhere in params.yaml; then write what the machine decides."""

from dataclasses import fields
from functools import partial
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from _start import user_errors  # first: it decides whose code is run  # isort: split
from gradaccum.config import read_params, refuse_unknown, section, shared, together
from gradaccum.machine import describe, require_cuda
from gradaccum.measurements.setup import Setup
from gradaccum.results.files import OUTPUTS, write_json


def main() -> None:
    """Validate every section by the measurement that reads it, whichever stage is to run; tell all that is wrong."""
    with user_errors():
        params = read_params()
        scripts = sorted(script.stem for script in Path(__file__).parent.glob("[a-z]*.py"))
        measurements = [f"gradaccum.measurements.{name}" for name in scripts]
        configs = {name.rpartition(".")[2]: import_module(name).Config for name in measurements if find_spec(name)}
        together(
            lambda: refuse_unknown(params, {*(field.name for field in fields(Setup)), *configs}),
            lambda: shared(params, Setup),
            *(partial(section, params, stage, config) for stage, config in configs.items()),
        )
        setup = shared(params, Setup)
        if setup.device == "cuda":
            require_cuda()
        source = setup.workload.source()
        facts = describe() | {"workload_source": sha256(source.read_bytes()).hexdigest() if source else None}
        print(f"wrote {write_json(OUTPUTS / 'environment.json', facts)}")


if __name__ == "__main__":
    main()
