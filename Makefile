# Every target prepares .venv first; that takes a moment only when requirements.txt has changed.
PYTHON ?= python3
ARGS ?=
VENV ?= .venv
V := $(VENV)/bin/python

.PHONY: help setup test search_r1 torl retool otc swirl eval report retriever setup_bfcl sandbox_check vectors tiny_model tiny_rates bench bench_sandbox bench_trl research r1_searcher toolrl tool_n1 deep_researcher web exercises
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z_0-9]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | awk -F'\t' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(VENV)/current  ## create .venv and install requirements.txt

$(VENV)/current: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or newer is needed; name it with PYTHON=python3.11" >&2; exit 2; }
	@test -x $(V) || $(PYTHON) -m venv $(VENV) || { echo "error: cannot create $(VENV); on Debian or Ubuntu: apt-get install python3-venv" >&2; exit 2; }
	@echo "installing requirements.txt into $(VENV) (about a minute)"
	@$(V) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

test: setup  ## run the tests (ARGS goes to pytest)
	$(V) -m pytest -q tests $(ARGS)

search_r1: setup  ## Search-R1 (ARGS="--help" shows every flag)
	$(V) -m methods.search_r1 $(ARGS)

research: setup  ## ReSearch (ARGS="--help" shows every flag)
	$(V) -m methods.research $(ARGS)

torl: setup  ## ToRL (ARGS="--help" shows every flag)
	$(V) -m methods.torl $(ARGS)

retool: setup  ## ReTool (ARGS="--help" shows every flag)
	$(V) -m methods.retool $(ARGS)

otc: setup  ## OTC, on search or on programs (ARGS="--help" shows every flag)
	$(V) -m methods.otc $(ARGS)

swirl: setup  ## SWiRL, on search or on a calculator (ARGS="--help" shows every flag)
	$(V) -m methods.swirl $(ARGS)

r1_searcher: setup  ## R1-Searcher; its stage files: ARGS="--select" (ARGS="--help" shows every flag)
	$(V) -m methods.r1_searcher $(ARGS)

toolrl: setup  ## ToolRL: graded reward for tool calls (ARGS="--help" shows every flag)
	$(V) -m methods.toolrl $(ARGS)

tool_n1: setup  ## Tool-N1: binary reward for tool calls (ARGS="--help" shows every flag)
	$(V) -m methods.tool_n1 $(ARGS)

deep_researcher: setup  ## DeepResearcher (ARGS="--help" shows every flag)
	$(V) -m methods.deep_researcher $(ARGS)

eval: setup  ## evaluate a saved run again: make eval RUN=runs/search_r1/tiny-seed0 [ARGS="--eval-data other.jsonl"]
	$(V) -m methods.$$($(V) -c 'import json, sys; print(json.load(open(sys.argv[1] + "/config.json"))["method"])' $(RUN)) --evaluate $(RUN) $(ARGS)

report: setup  ## rebuild the page of a run: make report RUN=runs/search_r1/tiny-seed0
	$(V) -m common.report $(RUN)

retriever: setup  ## serve a corpus over Search-R1's protocol: make retriever CORPUS=corpus.jsonl [ARGS="--port 8000"]
	$(V) -m common.search --corpus $(CORPUS) $(ARGS)

setup_bfcl: setup  ## BFCL's data and checker into .bfcl (2 MB to download, 14 MB on disk), then its gold answers through our path
	@rm -rf .bfcl.part
	$(V) -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target .bfcl.part bfcl-eval==2026.3.23
	@rm -rf .bfcl && mv .bfcl.part .bfcl
	$(V) -m common.bfcl --golden

web: setup  ## serve a corpus as a small web with Serper's search protocol: make web CORPUS=corpus.jsonl [ARGS="--port 8001"]
	$(V) -m common.web --corpus $(CORPUS) $(ARGS)

sandbox_check: setup  ## what the sandbox protects here, line by line: make sandbox_check [ARGS="unsafe" or ARGS="http://host:port"]
	$(V) -m common.sandbox --check $(ARGS)

exercises: setup  ## planted bugs: prove that the tests find each; to hunt one: ARGS="apply", then "hint", "solution", "undo"
	$(V) -m tests.exercise $(ARGS)

vectors: setup  ## reward and parser vectors: make vectors [DIR=tests/vectors]
	$(V) -m tests.check_vectors $(or $(DIR),tests/vectors)

tiny_model: setup  ## rebuild the tiny model from nothing (about 33 minutes on two quiet cores)
	$(V) -m common.tiny.build $(ARGS)

tiny_rates: setup  ## success rate of the tiny model on every protocol, before any RL
	$(V) -m common.tiny.measure $(ARGS)

bench: setup  ## speed of the engine against transformers' generate, and where a step's time goes
	$(V) -m tests.bench $(ARGS)

bench_sandbox: setup  ## speed of the sandbox beside subprocess.run, and what 10,000 calls leave behind
	$(V) -m tests.bench_sandbox $(ARGS)

bench_trl: setup  ## a whole training step against TRL's GRPOTrainer (in its own venv, .trl-venv)
	$(V) -m tests.bench_trl $(ARGS)
