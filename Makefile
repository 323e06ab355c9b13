# One virtual environment, made from pinned requirements, serves every command.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := PATH="$(CURDIR)/$(BIN):$$PATH"

.PHONY: repro test check ui server docs lock install mutants

repro: install  ## the pipeline
	$(RUN) dvc repro

test: install  ## the whole test suite
	$(RUN) pytest -n 2 --dist loadfile

mutants: install  ## break the engine in small ways, each of which a named test must notice
	$(RUN) python tests/mutants.py

check: install  ## format, lint, types, import arrows
	$(RUN) ruff format --check .
	$(RUN) ruff check .
	$(RUN) mypy
	$(RUN) lint-imports

ui: install  ## MLflow UI over what was logged
	$(RUN) python -m gradaccum.tracking.ui $(if $(PORT),--port $(PORT))

server: install  ## a team's tracking server, for trying it: PostgreSQL where it is installed, proxied artifacts
	$(RUN) python -m gradaccum.tracking.server $(if $(PORT),--port $(PORT))

docs: install  ## copy the pipeline's figures and pages to docs, where README shows them
	mkdir -p docs/img
	cp outputs/report/*.png docs/img/
	cp outputs/report/*.md docs/

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint requirements.lock --editable ".[dev]"
	touch $@

lock:  ## pin everything anew, from pyproject.toml, in an environment of its own
	rm -rf build/lock
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip install --quiet --editable ".[dev]" "torch==2.13.0"
	build/lock/bin/pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//' > requirements.lock
	rm -rf build/lock
