# `make quickstart` and `make test` set up everything they need; a second call installs nothing again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: quickstart test lint speed clean

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

# mypy reads the packages under the names they are installed by: a git-ignored folder of links.
lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p .typecheck/steadymoe && for p in bench models algorithms; do ln -sfn ../../$$p .typecheck/steadymoe/$$p; done
	$(BIN)/mypy

speed: $(READY)
	$(BIN)/python -m steadymoe.bench.speed

clean:
	rm -rf $(VENV) .typecheck build dist *.egg-info
