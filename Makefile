# Every target works in a fresh clone; paths stay relative, so the checkout's own path may hold spaces.

.DEFAULT_GOAL := help
.PHONY: help venv demo test suite supervisor-oldest ready computing programs faults bench lint format clean

# These compute, in as many processes as there are processors. All others start real programs and wait for them
# half of the time: one process more than there are processors keeps two busy.
COMPUTING := tests/unit tests/payload
NEEDED := openssh-server faketime lxc gcc iproute2

# What is compiled once is there for every process that follows.
unexport PYTHONDONTWRITEBYTECODE

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' Makefile

venv:  ## make .venv, or bring it up to date
	@tools/setup.sh

demo: venv  ## run the out-of-memory probe on this machine's CPU, to a printed verdict
	.venv/bin/orch run experiments/oom_probe.yaml --host local --profile cpu

test:  ## run the whole suite, the supervisor's tests on Python 3.8 too
	@$(MAKE) --no-print-directory --jobs 2 suite

suite: supervisor-oldest programs

# It needs no .venv, and is done before all others are.
supervisor-oldest:
	@tools/supervisor-tests.sh

ready: venv
	@tools/setup.sh $(NEEDED)

computing: ready
	.venv/bin/python -m pytest $(COMPUTING) --numprocesses auto --dist worksteal

programs: computing
	.venv/bin/python -m pytest $(addprefix --ignore ,$(COMPUTING)) --numprocesses 3 --dist worksteal

faults:  ## put in every fault there is, not a few of each kind (a quarter of an hour)
	@tools/setup.sh openssh-server faketime
	ORCH_FAULTS=all .venv/bin/python -m pytest tests/faults

bench:  ## measure orch beside plain tools, in at most 10 minutes, and compare with what it must reach
	@tools/setup.sh openssh-server
	.venv/bin/python -m benchmarks

lint: venv  ## check style, format, types and import layering
	.venv/bin/python -m ruff check
	.venv/bin/python -m ruff format --check
	.venv/bin/python -m mypy
	PYTHONPATH=payloads .venv/bin/lint-imports

format: venv  ## rewrite the sources in the project's format
	.venv/bin/python -m ruff check --fix
	.venv/bin/python -m ruff format

clean:  ## remove .venv and the tools' caches; runs and their logs in .orch stay
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
