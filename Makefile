# make quickstart   environment, install, train a small model, sample from it
# make test         environment, install, all tests
# make docs         the documentation site
#
# Another recipe: make quickstart CONFIG=configs/lgpt.py:quickstart
# Another Python: make quickstart PYTHON=python3.13

PYTHON ?= python3
CONFIG ?= configs/pgpt.py:quickstart
WORKDIR ?= runs/$(subst :,-,$(subst .py,,$(notdir $(CONFIG))))

VENV := .venv
PIP := $(VENV)/bin/pip --disable-pip-version-check
ACTIVATE := echo "to type commands, activate the environment in each terminal: source $(VENV)/bin/activate"

# Where this variable is set, each of the processes that tests start would compile all its modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test test-fast docs install corpus clean

quickstart: $(VENV)/installed
	$(VENV)/bin/python -m smallgpt_jax.main --config=$(CONFIG) --workdir=$(WORKDIR)
	@$(ACTIVATE)

test: $(VENV)/installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check --quiet .
	$(VENV)/bin/ty check --python $(VENV) --error-on-warning
	$(VENV)/bin/python -m pytest

# Without the tests that take longer than about a second.
test-fast: $(VENV)/installed-test
	$(VENV)/bin/python -m pytest -m "not slow"

# The documentation site, in site/. Broken links fail.
docs: $(VENV)/installed-test
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

install: $(VENV)/installed-test
	@$(ACTIVATE)

# The list of the files of data.source=python_packages, after a change of constraints.txt.
corpus: $(VENV)/installed-test
	$(VENV)/bin/python -c "from pathlib import Path; from smallgpt_jax.data.python_packages import write_manifest; \
		write_manifest(Path('constraints.txt'))"

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: Python 3.11 or newer is needed: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@$(PIP) install --quiet pip==26.3  # halves the time of the installation, compared with Python 3.11's pip

# Reinstalls only after a change of setup.py or constraints.txt. --no-compile saves over a minute: Python
# compiles the modules that it imports, and stores them (see `unexport`).
$(VENV)/installed: setup.py constraints.txt docs/constraints.txt | $(VENV)/bin/pip
	@echo "installing JAX and what training needs into $(VENV): 0.8 GB on disk, usually within a minute ..."
	$(PIP) install --quiet --no-compile --constraint constraints.txt --editable .
	@touch $@

$(VENV)/installed-test: setup.py constraints.txt docs/constraints.txt | $(VENV)/bin/pip
	@echo "installing JAX and what the tests need, PyTorch included: 2.4 GB on disk (more with CUDA), minutes ..."
	$(PIP) install --quiet --no-compile --constraint constraints.txt --constraint docs/constraints.txt \
		--editable '.[test,docs]'
	@touch $(VENV)/installed $@

clean:
	rm -rf $(VENV)
