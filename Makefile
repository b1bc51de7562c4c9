# `make` lists what there is. Everything happens inside .venv; nothing needs root.
# Another Python: make PYTHON=python3.12 demo. Another torch than the one chosen: ROCM_SD_TORCH=cpu make demo.
PYTHON ?= python3
BIN := .venv/bin
TEST_EXTRAS := dev,onnx,quality,ray,report,training,verify
# pytest-xdist starts one worker a core; a GPU is shared by none. A worker keeps the tests of a file together, whose models
# and compiled kernels are then made once, and takes over from the other what is left at the end.
WORKERS := -n auto --dist worksteal
PYTEST_FLAGS ?=
SETUP_FLAGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev demo test coverage test-gpu check format docs wheel clean clean-venv

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

setup: ## make .venv with the torch that fits this machine
	@$(PYTHON) tools/setup_env.py

setup-dev: ## the same, with what the tests and checks need
	@$(PYTHON) tools/setup_env.py --extras $(TEST_EXTRAS) $(SETUP_FLAGS)

demo: setup ## generate pictures, stock and optimised, into out/
	@$(BIN)/rocm-sd demo

test: setup-dev ## run the whole test suite that needs no GPU
	@$(BIN)/python -m pytest $(WORKERS) -m "not gpu" $(PYTEST_FLAGS)

coverage: setup-dev ## the same with coverage, which takes half as long again
	@$(BIN)/python -m pytest $(WORKERS) -m "not gpu" --cov --cov-report=term-missing:skip-covered $(PYTEST_FLAGS)

test-gpu: setup-dev ## run the tests that need a GPU
	@$(BIN)/python -m pytest -m gpu $(PYTEST_FLAGS)

check: setup-dev ## format, lint, types, import contracts, and that all tests can be read; all run, even when one fails
	@failed=; \
	step() { name=$$1; shift; echo "== $$name"; "$$@" || failed="$$failed $$name,"; }; \
	collected() { found=$$($(BIN)/python -m pytest --collect-only -qq 2>&1) || { echo "$$found" | tail -40; false; }; }; \
	step format $(BIN)/ruff format --check .; \
	step lint $(BIN)/ruff check .; \
	step types $(BIN)/mypy; \
	step contracts $(BIN)/lint-imports; \
	step tests collected; \
	if [ -n "$$failed" ]; then echo "make check failed at:$${failed%,}"; exit 1; fi; \
	echo "make check passed"

format: setup-dev ## rewrite the code in the project's format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

docs: setup-dev ## build the documentation site into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: setup-dev ## build the sdist, and from it the wheel, into dist/
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation --outdir dist

clean: ## remove what was built and cached, not .venv
	@rm -rf out runs site dist dist-comfyui build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage*
	@find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

clean-venv: ## remove .venv, to be made anew
	@rm -rf .venv
