# make demo   set up everything and run the whole job on a tiny model
# make test   set up everything and run the tests that need no GPU, but for those of layouts
# make test-layouts   the tests of parallel layouts: several CPU processes each
# make test-cores   the tests of what must hold under every supported Megatron-Core, under each
# make test-bridge   the tests with Megatron-Bridge, in an environment of their own
# make lint   style, format and types
# make check  lint and all tests
# make env    the environment .venv alone

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTHON ?=
# Of each supported minor release the newest; the one of constraints.txt is what all other tests run
# under.
CORES := 0.16.1 0.17.1 0.18.2
CORE_FOLDERS := $(CORES:%=$(VENV)/cores/%)
CORE_TESTS := tests/cores tests/parity/test_verify.py tests/train/test_resume.py \
	tests/train/test_loop.py tests/model/test_replay.py tests/model/test_dispatcher.py
IS_312 := -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))'

# What Megatron-Bridge needs lies on top of .venv. Of Transformer Engine, which it imports, PyPI has
# the PyTorch part as source alone: a wheel of it is looked for in this folder.
TE_WHEELS ?= ../shared/wheels
TE_WHEEL := $(firstword $(wildcard $(TE_WHEELS)/transformer_engine_torch-2.20.2-cp312-*.whl))
BRIDGE := .venv-bridge
BRIDGE_STAMP := $(BRIDGE)/.installed
SITE := lib/python3.12/site-packages
NVIDIA := $(abspath $(VENV))/$(SITE)/nvidia

.DEFAULT_GOAL := help
.PHONY: help env demo test test-layouts test-cores test-bridge lint check

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

env: $(STAMP)

demo: $(STAMP)
	$(BIN)/glm5 demo demo

# Two workers of one thread each: tiny models are too small for threads to share.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile \
		--ignore tests/parallel --ignore tests/bridge

test-layouts: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/parallel

# A release comes before the environment's own on the path; two releases at a time.
test-cores: $(STAMP) $(CORE_FOLDERS)
	@printf '%s\n' $(CORES) | xargs -n 1 -P 2 $(SHELL) -c '\
		log=$(VENV)/cores/$$0.log; \
		export PYTHONPATH=$(CURDIR)/$(VENV)/cores/$$0; \
		found=$$($(BIN)/python -c "from importlib.metadata import version as v; print(v(\"megatron-core\"))"); \
		[ "$$found" = "$$0" ] || { echo "megatron-core $$found, not $$0" >&2; exit 1; }; \
		OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m cores \
			-p no:cacheprovider $(CORE_TESTS) >$$log 2>&1; status=$$?; \
		echo "megatron-core $$0: $$(tail -n 1 $$log)"; \
		[ $$status = 0 ] || { cat $$log; exit 1; }'

$(VENV)/cores/%: | $(STAMP)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --target $@.new megatron-core==$*
	@rm -rf $@ && mv $@.new $@

ifeq ($(TE_WHEEL),)
test-bridge:
	@echo "test-bridge: SKIPPED, since $(TE_WHEELS) has no wheel of transformer_engine_torch 2.20.2"
	@echo "for Python 3.12. Build one, and name its folder: make test-bridge TE_WHEELS=folder"
else
test-bridge: $(BRIDGE_STAMP)
	OMP_NUM_THREADS=1 LD_LIBRARY_PATH=$(NVIDIA)/nccl/lib:$(NVIDIA)/cudnn/lib:$(NVIDIA)/cu13/lib \
		$(BRIDGE)/bin/python -m pytest tests/bridge
endif

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

check: lint test-layouts test test-cores test-bridge

# Runs again only when what is to be installed has changed.
$(STAMP): pyproject.toml constraints.txt
	@$(BIN)/python $(IS_312) 2>/dev/null || { $(make_venv); }
	$(BIN)/python -m pip install --quiet --constraint constraints.txt uv
	$(BIN)/uv pip install --python $(BIN)/python --constraint constraints.txt \
		--build-constraint constraints.txt --editable '.[dev]'
	@touch $@

# Sees the packages of .venv after its own; Transformer Engine looks for CUDA's libraries beside it.
$(BRIDGE_STAMP): $(STAMP) constraints-bridge.txt $(TE_WHEEL)
	$(BIN)/python -m venv --clear --without-pip $(BRIDGE)
	printf '%s\n' "$(abspath $(VENV))/$(SITE)" "$(CURDIR)/src" >$(BRIDGE)/$(SITE)/glm5-base.pth
	ln -sfn $(NVIDIA) $(BRIDGE)/$(SITE)/nvidia
	$(BIN)/uv pip install --python $(BRIDGE)/bin/python --no-deps \
		--requirement constraints-bridge.txt $(TE_WHEEL)
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
