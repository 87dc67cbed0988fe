# `make quickstart` and `make test` set up everything they need; a second call installs nothing again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ORACLES := .oracles

.PHONY: quickstart test check lint speed oracles clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "steadymoe needs Python 3.11 or newer; this is " + sys.version.split()[0] + " (choose another with PYTHON=python3.12)")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

quickstart: $(READY)
	$(BIN)/steadymoe run experiment=quickstart
	$(BIN)/steadymoe report --experiment quickstart

test: $(READY)
	$(BIN)/python -m pytest

# What takes longer: every algorithm learns. Its table is committed. And what needs a C compiler: task=reasoning_gym.
check: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,reasoning]'
	$(BIN)/python -m pytest -k reasoning_gym
	$(BIN)/steadymoe run experiment=every_algorithm
	$(BIN)/steadymoe report --experiment every_algorithm
	cp results/tables/every_algorithm-summary.md results/tables/every_algorithm-summary.csv \
	  results/tables/every_algorithm-runs.csv results/reference/tables/
	$(BIN)/python -m pytest -m check

# mypy reads the packages under the names they are installed by: a git-ignored folder of links.
lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p .typecheck/steadymoe && for p in bench models algorithms; do ln -sfn ../../$$p .typecheck/steadymoe/$$p; done
	$(BIN)/mypy

speed: $(READY)
	$(BIN)/python -m steadymoe.bench.speed

# What TRL and verl compute, recorded anew for tests/test_oracles.py. verl needs transformers below 5.11 and TRL is
# measured with this project's, so each has an environment; of verl's requirements only what its losses import.
oracles: $(ORACLES)/trl/.ready $(ORACLES)/verl/.ready
	$(ORACLES)/trl/bin/python tests/oracles/trl_surrogates.py
	$(ORACLES)/verl/bin/python tests/oracles/verl_surrogates.py

$(ORACLES)/trl/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(ORACLES)/trl
	$(ORACLES)/trl/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[oracles]'
	touch $@

$(ORACLES)/verl/.ready: constraints.txt
	$(PYTHON) -m venv $(ORACLES)/verl
	$(ORACLES)/verl/bin/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(ORACLES)/verl/bin/pip install --quiet --disable-pip-version-check 'tensordict>=0.8,!=0.9.0,<=0.10.0' \
		'transformers>=5.5.3,!=5.6.0,<5.11' codetiming hydra-core numpy omegaconf orjson packaging pandas ray
	$(ORACLES)/verl/bin/pip install --quiet --disable-pip-version-check --no-deps verl==0.9.1
	touch $@

clean:
	rm -rf $(VENV) $(ORACLES) .typecheck build dist *.egg-info
