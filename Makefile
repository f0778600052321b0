# make setup | serve | test | slow | lint | bench | docs.   make serve ARGS="allocator=paged frontend.port=8080"

VENV ?= .venv
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do $$p -c '' 2>/dev/null && echo $$p && break; done)
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.quire-stamp
ARGS ?=

.PHONY: setup serve test slow lint format bench docs clean

setup: $(STAMP)

# runs pip only when the dependencies changed: without that, no target needs the network
$(STAMP): pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -c "import sys; assert (3, 11) <= sys.version_info < (3, 14), f'Quire needs Python 3.11 to 3.13, not {sys.version}'"
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt "setuptools>=77"
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[dev]"
	touch $@

serve: setup
	$(RUN) -m core.serve $(ARGS)

test: setup
	$(RUN) -m pytest -n 2 --dist loadfile $(ARGS)

slow: setup
	$(RUN) -m pytest -m slow $(ARGS)

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: setup
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: setup
	$(RUN) -m core.serve frontend=replay $(ARGS)

docs: setup
	$(RUN) -m core.serve --help
	@if [ -f docs/build.py ]; then $(RUN) docs/build.py; fi

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
