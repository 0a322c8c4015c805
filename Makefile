# make demo    set up .venv, run the demo campaign on this machine's CPU and show its results
# make test    the test suite, then the checks
# make check   ruff, mypy, snakefmt and snakemake --lint
# make lock    remake the three lock files (LOCKFLAGS=--upgrade takes newer versions)
# make clean   remove results, caches and .venv

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCKFLAGS ?=
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps
START := $(shell date +%s)

.DELETE_ON_ERROR:
.PHONY: demo test check lock clean

demo: $(VENV)/.stamp-package $(VENV)/.stamp-model
	$(BIN)/snakemake --profile profiles/local
	$(BIN)/gristmill show config/config.yaml
	@echo "make demo took $$(( $$(date +%s) - $(START) )) seconds in all."

test: $(VENV)/.stamp-dev $(VENV)/.stamp-model
	$(BIN)/python tools/run_tests.py
	@$(MAKE) --no-print-directory check

check: $(VENV)/.stamp-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/snakefmt --check Snakefile workflow
	$(BIN)/python tools/lint_workflow.py

lock:
	PYTHON="$(PYTHON)" tools/lock.sh $(LOCKFLAGS)

clean:
	rm -rf $(VENV) results .snakemake .cache build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf workflow/lib/*.egg-info
	find workflow tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.stamp-venv:
	@command -v "$(PYTHON)" >/dev/null || { \
		echo "make: no '$(PYTHON)' found; Gristmill needs Python 3.11 or newer (make PYTHON=python3.11 ...)" >&2; \
		exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: '$(PYTHON)' is $$("$(PYTHON)" -V 2>&1), but Gristmill needs Python 3.11 or newer" \
			"(make PYTHON=python3.11 ...)" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "make: '$(PYTHON)' cannot make virtual environments; on Debian or Ubuntu:" \
			"apt-get install python3-venv" >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	@touch $@

$(VENV)/.stamp-runtime: requirements.lock $(VENV)/.stamp-venv
	$(PIP_INSTALL) --require-hashes -r $<
	@touch $@

$(VENV)/.stamp-dev: requirements-dev.lock $(VENV)/.stamp-package
	$(PIP_INSTALL) --require-hashes -r $<
	@touch $@

$(VENV)/.stamp-model: requirements-model.lock $(VENV)/.stamp-venv
	$(PIP_INSTALL) --require-hashes -r $<
	@touch $@

$(VENV)/.stamp-package: pyproject.toml $(VENV)/.stamp-runtime
	$(PIP_INSTALL) --no-build-isolation -e .
	@touch $@
