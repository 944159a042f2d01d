# Two commands do everything on a machine with Python 3.11 or later, make and a package registry:
#   make demo    see it work          make test    prove that it works
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: help demo demo-pipeline test java browser screenshots check bench faults lock clean

help:
	@echo "make demo    an embedded bus at work, 20 s at most"
	@echo "make demo-pipeline    Spark's jobs over a log of 200,000 events; leaves a report in zbus-pipeline-demo/"
	@echo "make test    the whole test suite, under 10 minutes"
	@echo "make check   lint, types and import direction"
	@echo "make bench   the benchmarks, each beside its peer; writes benchmarks/results/"
	@echo "make faults  the long fault runs: 200 x kill -9 and more"
	@echo "make lock    refresh requirements.lock from pyproject.toml"

# Every package is pinned by version and hash; the build backend comes from the same lock.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "zbus needs Python 3.11 or later; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $(READY)

demo: $(READY)
	$(BIN)/zbus demo

demo-pipeline: $(READY) java
	rm -rf zbus-pipeline-demo
	$(BIN)/zbus pipeline demo zbus-pipeline-demo

# What Spark runs on: Debian's, if there is none and this user may install it.
JAVA_PACKAGE := openjdk-17-jre-headless
java: $(READY)
	@$(BIN)/python -c 'from zbus.cli.java import *; raise SystemExit((java_version() or 0) < JAVA_VERSION_MIN)' || { \
		sudo=$$([ "$$(id -u)" = 0 ] || echo "sudo -n"); \
		command -v apt-get >/dev/null && { [ -z "$$sudo" ] || $$sudo true 2>/dev/null; } && \
		$$sudo apt-get update -qq && $$sudo apt-get install -y -qq $(JAVA_PACKAGE); } || \
		{ echo "Spark needs Java 17 or later: sudo apt-get install -y $(JAVA_PACKAGE)" >&2; exit 1; }

# What the console is tested in, and what checks its metrics: Debian's, if there are none and this user may install them.
BROWSER_PACKAGES := chromium fonts-liberation prometheus
browser:
	@{ command -v chromium && command -v promtool; } >/dev/null || { \
		sudo=$$([ "$$(id -u)" = 0 ] || echo "sudo -n"); \
		command -v apt-get >/dev/null && { [ -z "$$sudo" ] || $$sudo true 2>/dev/null; } && \
		$$sudo apt-get update -qq && $$sudo apt-get install -y -qq --no-install-recommends $(BROWSER_PACKAGES); } || \
		{ echo "The console is tested in Chromium, its metrics by promtool: sudo apt-get install -y $(BROWSER_PACKAGES)" >&2; exit 1; }

screenshots: $(READY) browser
	$(BIN)/python tests/browser/screenshots.py docs/images

test: $(READY) java browser
	$(BIN)/python -m pytest -m "not nightly" -n 3 --dist loadfile

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY) java browser
	$(BIN)/python benchmarks/run.py

faults: $(READY) java
	$(BIN)/python -m pytest -m nightly --timeout 3600

lock: $(READY)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile pyproject.toml --group dev --universal --generate-hashes --python-version 3.11 \
		--no-header --no-annotate --upgrade --quiet -o requirements.lock

clean:
	rm -rf $(VENV) zbus-pipeline-demo dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
