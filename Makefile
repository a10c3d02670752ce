# `make demo` and `make test` need nothing but Python >= 3.11; both install into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
unexport PYTHONDONTWRITEBYTECODE  # each of many processes would compile the tests, with their asserts rewritten, again

.PHONY: install demo test test-deep gate gpu peers zoo accuracy check docs site clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: install
	$(BIN)/torchrun --nproc-per-node 4 examples/llama_pretrain.py --mesh "dp_shard=2 tp=2" --out runs/demo

# A worker for each core; then, with the machine to themselves, the tests that compare times, of the files that have such.
PYTEST := $(BIN)/python -m pytest
TURN := commit
WORKERS := -n auto --maxprocesses 4

# Of the dear ones a part, another one each day (tests/turns.py); test-deep runs all, on more cells.
test: install
	MESHKIT_TEST_TURN=$(TURN) $(PYTEST) $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not gate and not alone"
	MESHKIT_TEST_TURN=$(TURN) $(PYTEST) -m alone $$(grep -rl --include='test_*.py' 'pytest\.mark\.alone' tests)

test-deep: install
	MESHKIT_TEST_DEPTH=deep $(MAKE) test TURN=

# Of the cells in which rarer pairs meet an eighth, another one each day; `make gate TURN=` runs all.
gate: install
	MESHKIT_TEST_TURN=$(TURN) $(PYTEST) $(WORKERS) --dist worksteal -m gate

# On 1, 2, 4 or 8 GPUs, whichever there are: the gate's cells on NCCL, then the benchmarks; rows, and docs/gpu.md of them.
gpu: install
	$(BIN)/python -m tests.gpu

# The same work with other libraries, in turns: rows into benchmarks/results/peers.jsonl, and docs/peers.md of them. Theirs is
# an environment over .venv, so torch is the same. ARGS="--stale" measures what has no row, or a row of other code.
PEERS := .venv-peers
ARGS :=
peers: $(PEERS)/.installed
	PYTHONPATH=. $(PEERS)/bin/python -m benchmarks.peers --record $(ARGS)

$(PEERS)/.installed: $(VENV)/.installed benchmarks/peers/requirements.txt
	test -x $(PEERS)/bin/python || $(BIN)/python -m venv $(PEERS)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > $$($(PEERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beneath.pth
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check "setuptools>=77,<90"  # builds DeepSpeed's wheel
	grep -E '^(torch|transformers|tokenizers|safetensors|numpy|accelerate)==' constraints.txt > $(PEERS)/constraints.txt
	DS_ACCELERATOR=cpu DS_BUILD_OPS=0 $(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check \
	  -c $(PEERS)/constraints.txt --no-build-isolation -r benchmarks/peers/requirements.txt
	touch $@

# Every causal language model of transformers, and odd modules, on every mesh: each right or refused. Goes on where it was
# ended, and writes tests/zoo/results.jsonl and docs/zoo.md.
zoo: install
	$(BIN)/python -m tests.zoo --resume && $(BIN)/python -m tests.zoo --write-docs

# Forecasts of published runs, into docs/accuracy.md. Profiles of steps are kept in build/accuracy: the first time takes an hour.
accuracy: install
	$(BIN)/python -m benchmarks.accuracy

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The reference of all names, and what works with what, into build/docs; docs/names.md, which is committed.
docs: install
	$(BIN)/python -m tests.docs

# The documentation as a site in build/site, with every public class and its methods; a warning is an error.
site: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) runs build *.egg-info
