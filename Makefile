PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin

.PHONY: help run test lint docs tensorboard clean
.DEFAULT_GOAL := help

help:
	@echo "make run          the main job: five learners on a small CMDP, a table, figures and TensorBoard files in runs/ (ARGS='--episodes 1000' to change it)"
	@echo "make test         all tests, over all cores (ARGS='-n 0' in one process)"
	@echo "make lint         formatting, lint and types"
	@echo "make docs         the documentation as web pages, in build/docs"
	@echo "make tensorboard  look at runs/ in a browser, a learner in its own colour (ARGS='--port 6007')"
	@echo "make clean        remove the virtual environment and caches; runs/ stays"
	@echo
	@echo "The first of these creates $(VENV) and installs into it; PYTHON=python3.12 chooses the interpreter."

run: $(VENV)/.installed
	$(BIN)/python -m train $(ARGS)

# A process for each core, up to four, and one thread in each: the tests' tensors are small, and more threads only contend.
test: export OMP_NUM_THREADS ?= 1
test: $(VENV)/.installed
	$(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist worksteal $(ARGS)

lint: $(VENV)/.installed-lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy torchcmdp

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.installed
	$(BIN)/python -m mkdocs build --strict --quiet -f docs/site/mkdocs.yml $(ARGS)
	@echo "Open build/docs/index.html; with its search: $(BIN)/python -m http.server -d build/docs"

tensorboard: $(VENV)/.installed
	$(BIN)/python -m train tensorboard $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find torchcmdp train tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "torchcmdp needs Python 3.11 or newer, and $(PYTHON) is older or missing: try make PYTHON=python3.12." >&2; exit 1; }
	@echo "Installing into $(VENV); this happens once."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[moreau,test]' || \
		{ echo "That failed; installing without Moreau, which some platforms lack: projection=\"cvxpy\" uses DIFFCP instead." >&2; \
		  $(BIN)/python -m pip install -q -c constraints.txt -e '.[test]'; }
	@touch $@

$(VENV)/.installed-lint: $(VENV)/.installed
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@
