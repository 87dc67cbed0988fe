# `make quickstart` and `make test` set up everything they need; a second call installs nothing again. On a machine without
# an index WHEELS names a folder with wheels, and what it lacks comes from PYTHON's own packages.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ORACLES := .oracles
MEGABLOCKS := $(VENV)/megablocks

.PHONY: quickstart test check figures lint speed oracles megablocks test-megablocks check-launchers \
	check-losses check-trainers side-by-side gpu clean

$(READY): pyproject.toml integrations/pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "steadymoe needs Python 3.11 or newer; this is " + sys.version.split()[0] + " (choose another with PYTHON=python3.12)")'
	@echo "installing torch, transformers and the suite into $(VENV): two to five minutes"
	$(PYTHON) -m venv $(if $(WHEELS),--system-site-packages) $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check \
		$(if $(WHEELS),--no-index --find-links $(WHEELS) --no-build-isolation,--constraint constraints.txt) --editable '.[dev]' --editable ./integrations
	touch $(READY)

quickstart: $(READY)
	@echo "training GRPO, GSPO and GRPO without a clip on three seeds: two to four minutes on two cores"
	$(BIN)/steadymoe run experiment=quickstart
	$(BIN)/steadymoe report --experiment quickstart

test: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal

# What takes longer: every algorithm learns, and its table is committed; both builds of integrations in a new environment.
# Last, a bound or a number that fits one processor or one draw alone: the whole suite once with the plainest kernels of
# torch and numpy together, and what rounding or the draw could turn once more with AVX2 and with other data.
# NPY_DISABLE_CPU_FEATURES may name only features that numpy dispatches and the processor has.
SENSITIVE := $(addprefix tests/,training/test_savings.py training/test_packing.py training/test_learner.py \
	training/test_sampling.py models/test_models.py models/test_families.py models/test_backends.py \
	models/test_routing.py models/test_predictor.py training/test_token_metrics.py)
DISPATCHED := $(BIN)/python -c 'from numpy._core._multiarray_umath import __cpu_dispatch__ as names, \
	__cpu_features__ as has; print(*filter(has.get, names))'
check: $(READY)
	$(MAKE) check-losses
	$(BIN)/steadymoe run experiment=every_algorithm
	$(BIN)/steadymoe report --experiment every_algorithm --keep results/reference
	$(BIN)/steadymoe report --experiment every_algorithm --results results/reference
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,notebook]'
	$(BIN)/python -m pytest -m check -rs
	NPY_DISABLE_CPU_FEATURES="$$($(DISPATCHED))" ATEN_CPU_CAPABILITY=default \
		$(BIN)/python -m pytest -n auto --dist worksteal
	ATEN_CPU_CAPABILITY=avx2 $(BIN)/python -m pytest -m 'check or not check' -n auto --dist worksteal \
		$(SENSITIVE) tests/score/test_recorded.py
	ATEN_CPU_CAPABILITY=default STEADYMOE_TEST_SEED=1 $(BIN)/python -m pytest -n auto --dist loadfile $(SENSITIVE)

# Every table and figure of results/reference again, from its data. Git keeps those that a page links. Last, README's figure.
figures: $(READY)
	$(BIN)/steadymoe report --results results/reference --format png --caption
	$(BIN)/steadymoe report --results results/reference --format png --caption --experiment gspo --figure overview \
		--arms 'grpo flat,grpo flat routing=pinned,gspo flat,grpo dense_flat,gspo dense_flat'
	rm results/reference/tables/gspo-overview.csv # of some arms: no test compares it

# mypy reads the packages under the names they are installed by: a git-ignored folder of links.
lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p .typecheck/steadymoe && for p in bench models algorithms conf integrations; do ln -sfn ../../$$p .typecheck/steadymoe/$$p; done
	$(BIN)/mypy

# In an environment that has TRL. `make speed SETTING="micro stale"` measures these alone; with `RECORD=--record` it replaces
# them in the committed numbers.
speed: $(ORACLES)/trl/.ready
	$(ORACLES)/trl/bin/python benchmarks/speed.py $(if $(SETTING),--setting $(SETTING)) $(RECORD)

# What TRL and verl compute, recorded anew for tests/algorithms/test_oracles.py. verl needs transformers below 5.11 and TRL is
# measured with this project's, so each has an environment; of verl's requirements only what its losses import.
oracles: $(ORACLES)/trl/.ready $(ORACLES)/verl/.ready
	$(ORACLES)/trl/bin/python tests/oracles/trl_surrogates.py
	$(ORACLES)/verl/bin/python tests/oracles/verl_surrogates.py

$(ORACLES)/trl/.ready: pyproject.toml integrations/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(ORACLES)/trl
	$(ORACLES)/trl/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable . --editable './integrations[trl]'
	touch $@

$(ORACLES)/verl/.ready: constraints.txt
	$(PYTHON) -m venv $(ORACLES)/verl
	$(ORACLES)/verl/bin/pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(ORACLES)/verl/bin/pip install --quiet --disable-pip-version-check 'tensordict>=0.8,!=0.9.0,<=0.10.0' \
		'transformers>=5.5.3,!=5.6.0,<5.11' codetiming hydra-core numpy omegaconf orjson packaging pandas ray
	$(ORACLES)/verl/bin/pip install --quiet --disable-pip-version-check --no-deps verl==0.9.1
	touch $@

# MegaBlocks 0.10.0 pins another torch, numpy and packaging, so it comes without its dependencies, and is built with the
# torch that is there. Its compiled part needs CUDA, and not every CUDA will do: where the build fails, it comes without,
# and models/megablocks.py supplies what is missing. (Its setup.py asks for a GPU unless an architecture is named.)
megablocks: $(MEGABLOCKS)/.ready

$(MEGABLOCKS)/.ready: $(READY)
	rm -rf $(MEGABLOCKS)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,megablocks]'
	TORCH_CUDA_ARCH_LIST=9.0 $(BIN)/pip download --quiet --disable-pip-version-check --no-deps --no-build-isolation \
		--no-binary megablocks --dest $(MEGABLOCKS) megablocks==0.10.0
	tar -xzf $(MEGABLOCKS)/megablocks-0.10.0.tar.gz -C $(MEGABLOCKS) --strip-components=1
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation ./$(MEGABLOCKS) || { \
		echo 'the compiled part of MegaBlocks cannot be built here; installing MegaBlocks without it'; \
		sed -i "s/^if 'cu' in/if False and 'cu' in/" $(MEGABLOCKS)/setup.py; \
		$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation ./$(MEGABLOCKS); }
	touch $@

# Beside eager: on the CPU in Triton's interpreter, then on a GPU where torch finds one.
test-megablocks: $(MEGABLOCKS)/.ready
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -m megablocks tests/models/test_megablocks.py
	if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		TRITON_INTERPRET=0 $(BIN)/python -m pytest -m megablocks tests/models/test_megablocks.py; fi

# The same sweep by submitit's local executor and by a local Ray, against the basic launcher; what both loggers hold.
# hydra-ray-launcher 1.2.2 asks for a cloudpickle that joblib does not take, and works with joblib's: hence --no-deps.
check-launchers: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[dev,slurm,tensorboard,wandb]' ray
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps hydra-ray-launcher==1.2.2
	$(BIN)/python -m pytest -m launchers tests/runs/test_launchers.py
	$(BIN)/python -m pytest tests/runs/test_loggers.py

# Both builds of integrations/, each in a new environment: the losses alone with torch and PyYAML, and the integrations.
check-losses: $(READY)
	$(BIN)/python -m pytest -m bare integrations/tests/test_builds.py

# The suite inside TRL's trainer, on one process and on two of gloo; the losses alone inside verl, which excludes the suite.
# The checkout itself stays off the path there: its egg-info would hide the plugin that the losses announce.
check-trainers: $(ORACLES)/trl/.ready $(ORACLES)/verl/.ready
	$(ORACLES)/trl/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt pytest
	$(ORACLES)/trl/bin/python -m pytest -m trl integrations/tests
	$(ORACLES)/verl/bin/pip install --quiet --disable-pip-version-check --force-reinstall --no-deps ./integrations/losses
	$(ORACLES)/verl/bin/pip install --quiet --disable-pip-version-check PyYAML pytest datasets pillow
	PYTHONSAFEPATH=1 $(ORACLES)/verl/bin/python -m pytest --import-mode=importlib -o pythonpath=integrations/tests \
		-m verl --noconftest integrations/tests/test_verl.py

# Recorded anew in results/trainers: the same frozen rollouts through three trainers.
side-by-side: $(ORACLES)/trl/.ready
	$(ORACLES)/trl/bin/python benchmarks/side_by_side.py results/trainers

# What needs a GPU, in three stages, each with its table in results/measured_gpu; results/gpu has a record.
gpu: $(READY)
	$(BIN)/python benchmarks/gpu.py results/measured_gpu

clean:
	rm -rf $(VENV) $(ORACLES) .typecheck build dist *.egg-info integrations/build integrations/*.egg-info \
		integrations/losses/build integrations/losses/*.egg-info
