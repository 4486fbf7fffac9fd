# Sets up its own virtual environment in .venv, once, and again when its inputs have changed.
#   make demo    see Online Normalization train beside BatchNorm and GroupNorm
#   make test    the tests
#   make test-ecosystem   the tests with torchvision, timm, MONAI, Lightning and transformers, in an environment of their own
#   make check   formatting, lint and types
#   make bench   the layer's speed beside PyTorch's normalisers
PYTHON ?= python3
ARGS ?=
bin := .venv/bin
sources := CMakeLists.txt pyproject.toml $(wildcard native/*.cpp native/*.h native/include/*.h native/*.txt)

.PHONY: demo test test-ecosystem check bench clean

demo: .venv/ready
	$(bin)/onlinenorm demo $(ARGS)

test: .venv/ready
	$(bin)/python -m pytest $(ARGS)

test-ecosystem: .venv/ready
	sh tools/ecosystem.sh $(PYTHON)

check: .venv/ready
	$(bin)/ruff format --check .
	$(bin)/ruff check .
	$(bin)/mypy

bench: .venv/ready
	$(bin)/onlinenorm bench $(ARGS)

clean:
	rm -rf .venv build

.venv/ready: $(sources) tools/setup.sh
	sh tools/setup.sh $(PYTHON) .venv
	@touch $@
