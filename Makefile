# Perdure's verbs. `make run` and `make test` need only Python >= 3.11 and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SEED   ?=
TASKS  ?= 500
ARGS   ?=

.PHONY: help setup run demo test check check-alerts check-ui bench chaos lock clean fmt

help:            ## list the verbs
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 16

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Perdure needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Set PYTHON=/path/to/python3.11") if sys.version_info < (3, 11) else None'
	@echo "making .venv and fetching about 200 MB of packages; this happens once"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $(STAMP)

setup: $(STAMP)  ## make .venv from the lock

run: $(STAMP)    ## the whole stack on this machine, with one demo task on the first start
	$(BIN)/perdure dev $(ARGS)

demo: $(STAMP)   ## one real task, watched to its end
	$(BIN)/perdure demo $(ARGS)

test: $(STAMP)   ## lint, types and every test
	$(MAKE) check
	@# Whole stacks run beside each other here: what fails is looked at once more, alone, and counts if it fails then.
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS) || { test $$? = 1 && echo "== the failures above, once more and one by one ==" && $(BIN)/python -m pytest --last-failed --last-failed-no-failures none $(ARGS); }

check: $(STAMP)  ## ruff, mypy --strict, the import rule
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -p no:cacheprovider tests/unit/test_import_rule.py tests/unit/test_packaging.py

check-alerts: $(STAMP)  ## promtool on the alert rules; says what it lacks
	$(BIN)/python deploy/check_alerts.py

check-ui: $(STAMP)  ## a browser on the Temporal UI of a real stack; says what it lacks
	$(BIN)/python -m tests.ui $(ARGS)

fmt: $(STAMP)    ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)  ## the figures of the design, beside a bare Temporal workflow
	$(BIN)/python -m bench $(ARGS)

chaos: $(STAMP)  ## kill everything at random and count what was lost
	$(BIN)/python -m tests.chaos --tasks $(TASKS) $(if $(SEED),--seed $(SEED)) $(ARGS)

lock:            ## refresh requirements.lock (needs uv)
	uv lock --upgrade
	uv export --all-extras --group dev --no-emit-project --no-header -q -o requirements.lock

clean:           ## forget the environment and caches; keeps .perdure (your data)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist *.egg-info
