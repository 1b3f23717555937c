# make demo | test | test-portable | test-lowest | test-vllm | test-torchtitan | lint | docs | site | clean | help. Everything runs in .venv, which is made on first use.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test pytest test-portable test-lowest test-vllm test-torchtitan lint docs site clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 21

$(READY): pyproject.toml constraints.txt setup.py $(wildcard src/siamesenorm/*/kernels/*.[ch])
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo 'installing into .venv (a few minutes the first time)'
	$(BIN)/python -m pip install -qq -c constraints.txt -e '.[dev]'
	$(BIN)/python scripts/mend_torchvision.py
	touch $@

demo: $(READY) ## compare pre, post and siamese on an embedded corpus: about five minutes, a report in runs/compare
	$(BIN)/siamesenorm topologies
	$(BIN)/siamesenorm compare

test: $(READY) ## lint, types and all tests, side by side
	@$(MAKE) --no-print-directory -j 2 pytest lint

pytest: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-portable: $(READY) ## the tests of numbers again, as CPUs with other instructions compute them
	$(BIN)/python scripts/portable.py

test-lowest: $(READY) ## tests in an environment of the lowest versions that pyproject.toml allows
	$(BIN)/python scripts/lowest_versions.py

test-vllm: $(READY) ## every topology in vLLM, in an environment of its own; writes benchmarks/results/vllm.json
	$(BIN)/python scripts/vllm/check.py

test-torchtitan: $(READY) ## our model in torchtitan, in an environment of its own; writes benchmarks/results/torchtitan.json
	$(BIN)/python scripts/torchtitan/check.py

lint: $(READY) ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY) ## rewrite the parts of docs/ that come from the code
	$(BIN)/python docs/refresh.py

site: $(READY) ## the documentation as a site in site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo 'site/index.html; to search it: $(BIN)/python -m http.server --directory site --bind 127.0.0.1'

clean: ## remove the environment and caches; runs/ stays
	rm -rf .venv .venv-lowest .venv-vllm .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist site src/*.egg-info
	find src -name '*.so' -delete
	find src tests benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +
