# `make run` sets everything up and runs the main job; `make test` sets everything up and passes the tests.

# Which lock to install: gpu where an NVIDIA driver answers, else cpu. `make DEVICE=cpu ...` decides otherwise.
DEVICE ?= $(shell nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(DEVICE)
RECIPE ?= polaris_tiny

.PHONY: help setup run repro dvc test test-unit test-parity test-engine test-flows lint type format docs bench bench-algorithms bench-batch bench-controller bench-cost bench-formulas bench-mechanisms bench-memory bench-nightly bench-overhead bench-packing bench-regressions bench-reshard lock clean

help:  ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(READY)  ## make .venv with the locked packages

$(READY): requirements/$(DEVICE).lock requirements/setup.sh pyproject.toml
	bash requirements/setup.sh $(DEVICE) $(VENV)
	touch $@

run: $(READY)  ## run the main job (RECIPE=name for another recipe)
	$(BIN)/almanac run recipe=$(RECIPE)

repro: $(READY)  ## the recipe in params.yaml as DVC runs it: what is out of date
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/dvc repro

test: test-unit test-parity test-engine test-flows  ## all tests

test-unit: $(READY)  ## pure functions, some minutes
	$(BIN)/pytest tests/unit

test-parity: $(READY)  ## the formulas beside verl's and TRL's, in .work/reference
	bash requirements/reference.sh $(VENV)
	.work/reference/bin/python -m pytest tests/parity

test-engine: $(READY)  ## Ray, FSDP2 and vLLM on tiny models
	$(BIN)/pytest tests/engine

test-flows: $(READY)  ## Prefect, MLflow and the whole recipe, small; and what kills it
	$(BIN)/pytest tests/flows tests/faults

lint: $(READY)  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(READY)  ## mypy, strict
	$(BIN)/mypy

format: $(READY)  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

dvc: $(READY)  ## write params.yaml and dvc.yaml anew (RECIPE=name for another recipe)
	$(BIN)/almanac dvc recipe=$(RECIPE)

docs: $(READY)  ## write docs/configuration.md, the numbers of docs/recipes/ and prefect.yaml anew
	$(BIN)/python -m tasks.reference_page
	$(BIN)/python -m tasks.recipe_page
	$(BIN)/python -m flows.deployments

bench: $(READY)  ## three seeds and two control arms of the main job, about forty minutes
	$(BIN)/python bench/learning.py

bench-algorithms: $(READY)  ## the shipped algorithms from one SFT model, about half an hour
	$(BIN)/python bench/algorithms.py

bench-batch: $(READY)  ## Batch beside TensorDict and DataProto, up to a million rows, some minutes
	$(BIN)/python bench/batch.py

bench-controller: $(READY)  ## bytes through the controller and what runs side by side, four short runs
	$(BIN)/python bench/controller.py

bench-cost: $(READY)  ## predicted seconds and memory of a step beside measured ones, four short runs
	$(BIN)/python bench/cost.py

bench-formulas: $(READY)  ## every estimator and loss beside verl's, on 4,096 samples of 1,024 tokens, some minutes
	$(BIN)/python bench/formulas.py

bench-mechanisms: $(READY)  ## the recipes' mechanisms beside their controls, three seeds, an hour or more
	$(BIN)/python bench/mechanisms.py

bench-memory: $(READY)  ## memory of log-probs, all logits at once beside in parts, some minutes
	$(BIN)/python bench/memory.py

bench-nightly: $(READY)  ## false alarms and power of the nightly test, simulated, some minutes
	$(BIN)/python bench/nightly.py

bench-overhead: $(READY)  ## what Prefect, MLflow, DVC and validation add to the main job, ten minutes
	$(BIN)/python bench/overhead.py

bench-packing: $(READY)  ## training without padding beside padded, and the balance of ranks, some minutes
	$(BIN)/python bench/packing.py

bench-regressions: $(READY)  ## planted regressions, night after night until they are found, hours
	$(BIN)/python bench/regressions.py

bench-reshard: $(READY)  ## ways to synchronise weights beside each other, bytes and seconds, an hour
	$(BIN)/python bench/reshard.py

lock:  ## resolve the dependencies anew
	bash requirements/lock.sh

clean:  ## remove what runs have left; data sets, models and MLflow records included
	rm -rf .work mlflow.db* mlruns/[0-9]* data/*/
