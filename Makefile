# `make demo` and `make test` do all the set-up there is: a virtual environment in .venv with the pinned packages.
PYTHON ?= python3
VENV ?= .venv
PY = $(VENV)/bin/python

.PHONY: demo test gpu-test gpu mutants exercises fuzz kill lint picture notebooks browser clean

demo: $(VENV)/run
	@echo "== in float32: is the text the very same?"
	$(PY) generate.py "Once upon a time" --compare --dtype float32
	@echo
	@echo "== in the stored dtype, bfloat16: how fast? (its coarse rounding may decide a near-tie otherwise)"
	$(PY) generate.py "Once upon a time" --compare
	@echo
	@echo "== the same, where a controller chooses what drafts"
	$(PY) generate.py "Once upon a time" --compare --draft auto

test: $(VENV)/dev
	$(PY) -m pytest -n auto

gpu-test: $(VENV)/dev
	@$(PY) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "torch finds no CUDA device here")'
	$(PY) -m pytest

gpu: $(VENV)/run
	$(PY) -m benchmarks.gpu --out gpu.json --resume

mutants: $(VENV)/dev
	$(PY) tests/mutants.py

exercises: $(VENV)/dev
	$(PY) exercises/check.py

fuzz: $(VENV)/dev
	$(PY) tests/fuzz.py

kill: $(VENV)/dev
	$(PY) tests/kill.py

picture: $(VENV)/run
	$(PY) generate.py "Once upon a time" --max-new 90 --picture run.png
	$(PY) generate.py "Once upon a time" --max-new 90 --gamma 3 --temperature 0.8 --top-p 0.95 --page run.html

notebooks: $(VENV)/dev
	$(PY) notebooks/execute.py

browser: $(VENV)/dev
	$(PY) tests/browser.py

lint: $(VENV)/dev
	$(PY) -m ruff check

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache

$(VENV)/run: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, e.g. make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

$(VENV)/dev: requirements-dev.txt $(VENV)/run
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@
