# Every target sets itself up: a virtual environment in .venv with the package and its development tools.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test browser test-slow test-gpu torture lint types docs bench bench-methods clean

demo: .venv/ready
	rm -rf runs/demo
	$(BIN)/opencon demo --out runs/demo

test: .venv/ready
	OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest -n 2 -q  # passive: two test processes share the cores

# The page of `opencon review` in a real browser, wherever one is there.
BROWSER := $(shell command -v chromium || command -v google-chrome)
browser: .venv/ready
ifeq ($(BROWSER),)
	@echo "NO BROWSER HERE: the page of opencon review WAS NOT TESTED. Install chromium and say: make browser"
else
	CHROMIUM=$(BROWSER) $(BIN)/pytest -m browser -q tests/review
endif

test-slow: .venv/ready
	$(BIN)/pytest -m slow -q

# On a machine with a GPU and its own torch: make test-gpu PYTHON=/path/to/python
test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu -q -p no:cacheprovider

# Hostile settings, tables, arrays and files, damaged folders, kills and full disks: a table of what survived, in minutes.
# Whatever changes the tree has; a run for the record is benchmarks/torture.py itself, at a clean commit.
SEED ?= 0
torture: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/torture.py --dirty-ok --seed $(SEED)

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/ready
	$(BIN)/mypy

# The documentation as a site, build/site. Strict: a dead link or an unknown name is an error.
docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# What a CPU can measure, about half an hour, of a clean commit; QUICK=--quick tries every script in minutes and records nothing.
BENCH := digits loss_memory kmeans cpu_step growth features worker_path class_count openworld photos_scale
bench: .venv/ready
	set -e; for name in $(BENCH); do echo "== $$name"; $(BIN)/python benchmarks/$$name.py --replace $(QUICK); done
	$(BIN)/python benchmarks/page.py

# Every method on the digits with five seeds, about half an hour.
bench-methods: .venv/ready
	$(BIN)/python benchmarks/methods.py digits --seeds 5 --pretrain --parallel 2 --replace $(QUICK)

clean:
	rm -rf .venv build src/*.egg-info

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch .venv/ready
