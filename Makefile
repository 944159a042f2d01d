# Requirements: Python 3.11 or later, make and access to a package registry.
#   make demo    run the demo         make test    run the tests
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DEMO_READY := $(VENV)/.ready-demo
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check

.PHONY: help demo demo-pipeline test java browser system screenshots reference check platforms bench sim faults lock clean

help:
	@echo "make demo    run an embedded bus for about ten seconds; installs only the packages that it needs"
	@echo "make demo-pipeline    run the Spark jobs on a log of 200,000 events; writes a report to zbus-pipeline-demo/"
	@echo "make test    run the whole test suite, in about eight minutes"
	@echo "make check   check formatting, lint rules, types and import directions"
	@echo "make platforms    show for which platforms every dependency of the core has a wheel; downloads about 240 MB"
	@echo "make bench   run the benchmarks against their peers; writes benchmarks/results/"
	@echo "make sim     run the scenarios of the simulator with 2,000 seeds, in about four minutes; SEEDS=A:B runs others"
	@echo "make faults  run the long fault tests: 20,000 seeds of the simulator, 200 x kill -9 and more"
	@echo "make reference    write docs/reference/ from the code"
	@echo "make lock    update requirements.lock and requirements-demo.lock from pyproject.toml"

define CHECK_PYTHON
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "zbus needs Python 3.11 or later; choose one with: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
endef

# Every package is pinned by version and hash, including the build backend.
$(READY): requirements.lock pyproject.toml
	$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --require-hashes -r requirements.lock
	$(PIP) install --no-build-isolation --no-deps -e .
	@touch $(READY)

# A part of the same environment with the same versions, which `make test` completes. The lock has all dependencies, so
# pip does not resolve any, and modules are compiled on import: both shorten the time until the first output.
FROM_DEMO_LOCK := --no-deps --require-hashes -r requirements-demo.lock
$(DEMO_READY): requirements-demo.lock pyproject.toml
	$(CHECK_PYTHON)
	@echo "Installing the packages of the demo into $(VENV) …"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) download --dest $(VENV)/packages $(FROM_DEMO_LOCK)
	@du -sk $(VENV)/packages | awk '{ printf "%.0f MB of packages downloaded\n", $$1 / 1024 }'
	@$(PIP) install --no-index --find-links $(VENV)/packages --no-compile $(FROM_DEMO_LOCK)
	@$(PIP) install --no-build-isolation --no-deps -e .
	@rm -rf $(VENV)/packages
	@touch $(DEMO_READY)

demo: $(if $(wildcard $(READY)),$(READY),$(DEMO_READY))
	@$(BIN)/zbus demo

demo-pipeline: java
	rm -rf zbus-pipeline-demo
	$(BIN)/zbus pipeline demo zbus-pipeline-demo

# Programs that are not on PyPI: Debian packages, installed if this user is allowed to. Otherwise one message lists them.
java browser system: $(READY)
	@packages= purposes=; \
	lack() { packages="$$packages $$1"; purposes="$${purposes:+$$purposes; }$$2"; }; \
	case $@ in java | system) \
		$(BIN)/python -c 'from zbus.cli.java import *; raise SystemExit((java_version() or 0) < JAVA_VERSION_MIN)' || \
			lack openjdk-17-jre-headless "Spark needs Java 17 or later";; \
	esac; \
	case $@ in browser | system) \
		command -v chromium >/dev/null || lack "chromium fonts-liberation" "the tests run the console in Chromium"; \
		command -v promtool >/dev/null || lack prometheus "promtool checks the metrics";; \
	esac; \
	[ -z "$$packages" ] || { \
		sudo=$$([ "$$(id -u)" = 0 ] || echo "sudo -n"); \
		command -v apt-get >/dev/null && { [ -z "$$sudo" ] || $$sudo true 2>/dev/null; } && \
		$$sudo apt-get update -qq && $$sudo apt-get install -y -qq --no-install-recommends $$packages; } || \
		{ echo "$$purposes. Install the missing packages: sudo apt-get install -y$$packages" >&2; exit 1; }

screenshots: browser
	$(BIN)/python tests/browser/screenshots.py docs/images

reference: $(READY)
	$(BIN)/python tests/support/reference.py docs/reference

# Python must keep compiled modules: otherwise each of several hundred processes compiles them again.
test: system
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m "not nightly" -n 5 --dist loadfile --no-loadscope-reorder \
		--durations 20 --durations-min 1

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

platforms: $(READY)
	$(BIN)/python tests/support/platforms.py

bench: system
	$(BIN)/python benchmarks/run.py

SEEDS ?= 2000
sim: $(READY)
	$(BIN)/zbus sim run tests/sim/scenarios.py --seeds $(SEEDS) --jobs 2

# An interrupted run of the simulator continues where it stopped, unless the code has changed.
faults: java
	$(BIN)/zbus sim run tests/sim/scenarios.py --seeds 20000 --jobs 2 --resume .sim-faults.json
	rm -f .sim-faults.json
	$(BIN)/python -m pytest -m nightly --timeout 3600

LOCK := $(BIN)/uv pip compile pyproject.toml --universal --generate-hashes --python-version 3.11 --no-header --no-annotate \
	--quiet
lock: $(READY)
	$(PIP) install uv
	$(LOCK) --group dev --upgrade -o requirements.lock
	rm -f requirements-demo.lock
	$(LOCK) --group build --constraint requirements.lock -o requirements-demo.lock

clean:
	rm -rf $(VENV) zbus-pipeline-demo dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
