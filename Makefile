# Everything runs from a virtual environment in .venv, made on first use. PYTHON picks the interpreter it is made from.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST_FLAGS ?=
# Processes that share the suite: three more than cores, since some tests wait. Each may run a cluster of five more, so there
# are five at most. With five, two cores are busy for 99 % of a run, its start aside.
JOBS ?= $(shell cores=$$(nproc); echo $$((cores < 2 ? cores + 3 : 5)))
# The third of the deep tests that `make test` runs: 0, 1, 2, or that of the number of commits.
PART ?= auto
PARALLEL = $(BIN)/python -m pytest --numprocesses=$(JOBS) --dist=load --maxschedchunk=1
APART := not compose and not guide and not upgrade and not cluster
# What outlives a clone: compiled kernels (tests/support/kept_kernels.py), and what mypy has found, by content.
KEPT := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/hisparse-tests
# Processes that tests start would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE
CHECKED := $(addprefix tests/,house protocol basics metrics coordinator worker/link worker/pool worker/transfer)
SEEDS ?= 10000
START ?= 0
REQUESTS ?= 1000000
MESSAGES ?= 100000
BODIES ?= 10000
FUZZ_S ?= 3600

.PHONY: demo test test-all suite check cores transfer-test cluster-test compose-test upgrade-test oldest-test follow-docs lock sim mutants fuzz format lint style types report docs bench install prometheus clean
.DEFAULT_GOAL := test

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

# The main job: concurrent long-context decode on two worker processes, every token checked against the model library.
demo: $(STAMP)
	$(BIN)/hisparse demo

# The type checker uses one core: tests run beside it, here and in the two targets below.
test: style prometheus
	$(MAKE) --no-print-directory --jobs=2 types suite

# With all deep tests. PYTEST_FLAGS=--store-durations keeps their seconds, by which the parts of `make test` are balanced.
test-all: style prometheus
	$(MAKE) --no-print-directory --jobs=2 PART= types suite

suite: $(STAMP)
	$(PARALLEL) --durations=20 -m "$(APART)" --part=$(PART) $(PYTEST_FLAGS)

# What to run before each commit: no processes, no models, no planted bugs.
check: style
	$(MAKE) --no-print-directory --jobs=2 types cores

cores: $(STAMP)
	$(PARALLEL) -m "not process and not fuzz and not pd and not mutation" $(CHECKED) $(PYTEST_FLAGS)

# Page transfer through the engines that cross nodes. Their wheels (170 MB) are not part of `make test`, which skips these.
transfer-test: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[nixl,mooncake]'
	$(BIN)/python -m pytest tests/worker/transfer/test_engines.py tests/worker/transfer/test_transfer.py tests/worker/transfer/test_decode.py \
		tests/processes/test_prefill_decode.py tests/processes/test_prefill_decode_faults.py

# A real Ray cluster of four nodes in network namespaces, for CLUSTER_MIN minutes at most: docs/ray.md. Needs root and
# iproute2, installs the extras `ray` (79 MB) and `nixl` (120 MB), and skips where namespaces cannot be made.
CLUSTER_MIN ?= 30
cluster-test: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[ray,nixl]'
	timeout --kill-after=60 $(CLUSTER_MIN)m $(BIN)/python -m pytest tests/cluster -m cluster -s $(PYTEST_FLAGS)

# docker-compose.yml on this machine's engine, for COMPOSE_MIN minutes at most: docs/operations.md. Needs root, an engine,
# Compose and debootstrap, installs none of them, and skips where one is missing.
COMPOSE_MIN ?= 60
compose-test: $(STAMP) prometheus
	timeout --kill-after=120 $(COMPOSE_MIN)m $(BIN)/python -m pytest tests/compose -m compose --timeout=3000 $(PYTEST_FLAGS)

# A cluster of an earlier commit, upgraded under load: 2 minutes. Needs the repository's history, and skips without it.
upgrade-test: $(STAMP)
	$(BIN)/python -m pytest tests/processes/test_upgrade_skew.py $(PYTEST_FLAGS)

# What meets the model library, with the oldest release that pyproject.toml admits, from a directory that comes before .venv:
# docs/testing.md.
OLDEST := $(CURDIR)/build/oldest
oldest-test: $(STAMP)
	rm -rf $(OLDEST)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $(OLDEST) --requirement constraints-oldest.txt
	PYTHONPATH=$(OLDEST) $(PARALLEL) tests/worker/runners tests/worker/weights tests/worker/loop/test_model.py $(PYTEST_FLAGS)
	PYTHONPATH=$(OLDEST) $(BIN)/hisparse demo

# README and docs followed literally on a fresh clone, and a first hour compared with docs/first-hour.txt: 12 minutes on
# 2 cores; with LONG=1 also what takes minutes.
follow-docs: $(STAMP)
	$(BIN)/python -m tools.docs.follow $(if $(LONG),--long)
	$(BIN)/python -m pytest tests/processes/test_first_hour.py $(PYTEST_FLAGS)

# locks/*.txt, from which images are installed, anew from pyproject.toml and constraints*.txt.
lock: $(STAMP)
	.ci/lock

# promtool and a server for the tests of rules and dashboards, without root. Tests that need them skip where this fails.
prometheus:
	-.ci/prometheus

# More seeds of the simulated cluster than the suite runs: docs/testing.md.
sim: $(STAMP)
	$(BIN)/python -m tests.sim --seeds $(SEEDS) --start $(START)

# By which seeds each planted bug is caught: tests/sim/mutant_hints.json anew, 15 minutes; of some, MUTANTS="NAME NAME".
mutants: $(STAMP)
	$(BIN)/python -m tests.sim.mutant_hints $(MUTANTS)

format: $(STAMP)
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .

# Hostile peers before real HTTP fronts and a real coordinator, and a client that is not, within FUZZ_S seconds; with 8
# cores or more each side has some of its own. Then drawn schemas and bodies, BODIES of them: docs/testing.md.
fuzz: $(STAMP)
	$(BIN)/python -m tools.fuzz.all --requests $(REQUESTS) --messages $(MESSAGES) --seconds $(FUZZ_S)
	$(BIN)/python -m tools.fuzz.schemas --bodies $(BODIES)

lint: style types

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	MYPY_CACHE_DIR="$(KEPT)/mypy" $(BIN)/mypy

# Pages and dashboards that declarations in the code say: commands, settings, metrics.
docs: $(STAMP)
	$(BIN)/python -m tools.docs.reference docs
	$(BIN)/python -m metrics.names > docs/metrics.md
	$(BIN)/python -m tools.dashboards

# benchmarks/TABLES.md from benchmarks/results.
report: $(STAMP)
	$(BIN)/python -m benchmarks.report

bench: $(STAMP)
	$(BIN)/python -m benchmarks.coordinator

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -rf "$(KEPT)"
