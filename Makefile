# make demo   set up everything and run the whole job on a tiny model
# make test   set up everything and run the tests that need no GPU, but for those of layouts
# make test-layouts   the tests of parallel layouts: several CPU processes each
# make lint   style, format and types
# make check  lint and all tests
# make env    the environment .venv alone

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTHON ?=
IS_312 := -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))'

.DEFAULT_GOAL := help
.PHONY: help env demo test test-layouts lint check

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

env: $(STAMP)

demo: $(STAMP)
	$(BIN)/glm5 demo demo

# Two workers of one thread each: tiny models are too small for threads to share.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --ignore tests/parallel

test-layouts: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/parallel

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

check: lint test-layouts test

# Runs again only when what is to be installed has changed.
$(STAMP): pyproject.toml constraints.txt
	@$(BIN)/python $(IS_312) 2>/dev/null || { $(make_venv); }
	$(BIN)/python -m pip install --quiet --constraint constraints.txt uv
	$(BIN)/uv pip install --python $(BIN)/python --constraint constraints.txt \
		--build-constraint constraints.txt --editable '.[dev]'
	@touch $@

# The first Python 3.12 on PATH, else the newest one that pyenv has.
define make_venv
for python in "$(PYTHON)" python3.12 python3 python \
	$$(ls -d "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.12*/bin/python 2>/dev/null | sort -rV); do \
	if [ -n "$$python" ] && "$$python" $(IS_312) 2>/dev/null; then \
		echo "making $(VENV) with $$python"; \
		"$$python" -m venv --clear $(VENV) && exit 0 || exit 1; \
	fi; \
done; \
echo "glm5 needs Python 3.12, and none was found on PATH or in pyenv." >&2; \
echo "Install it ('pyenv install 3.12', or your system's python3.12 and python3.12-venv)," >&2; \
echo "or name one: make env PYTHON=/path/to/python3.12" >&2; \
exit 1
endef
