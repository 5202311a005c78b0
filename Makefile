# Two commands on a fresh machine with git, make, a C compiler and Python 3.11: `make serve`, `make test`.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
NPU_VENV ?= .venv-npu
NPU_TORCH_2_10_VENV ?= .venv-npu-torch-2.10
TRITON_ASCEND_VENV ?= .venv-triton-ascend
MODEL ?= smollm2-mtp
PORT ?= 30000
ARGS ?=

BIN := $(VENV)/bin
CODE := sglang_ascend tests benchmarks examples recipes
# Two workers: one has every test that shares servers, the other the rest; both take documented commands. ARGS="-n 0 -s" runs without.
PYTEST := $(BIN)/python -m pytest -n 2 --no-loadscope-reorder

.PHONY: help
help: ## Show this help
	@echo "make TARGET [VARIABLE=value ...]"
	@awk -F ':.*## ' '/^[a-z0-9.-]+:.*## / {printf "  %-30s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "VENV=$(VENV)  NPU_VENV=$(NPU_VENV)  MODEL=$(MODEL) (a name from the catalogue, or a checkpoint folder)  PORT=$(PORT)"
	@echo "ARGS= adds flags to the command that a target runs; PYTHON= names a Python 3.11."

.PHONY: serve
serve: venv ## Serve MODEL on PORT of this machine, drafted by its MTP layer
	@if [ -d "$(MODEL)" ]; then folder="$(MODEL)"; else folder=$$($(BIN)/sglang-ascend model-path "$(MODEL)"); fi; \
	set -x; exec $(BIN)/python -m sglang.launch_server \
	    --model-path "$$folder" --speculative-algorithm MTP --port $(PORT) $(ARGS)

.PHONY: test
test: venv-dev ## Run the tests, but for those that take minutes each
	@$(PYTEST) -m "not slow" $(ARGS)

.PHONY: test-all
test-all: venv-dev ## Run every test
	@$(PYTEST) $(ARGS)

.PHONY: test-npu-emulated
test-npu-emulated: ## Run the tests of the real torch_npu on an emulated NPU, in NPU_VENV
	@scripts/npu_emulation.sh $(NPU_VENV) python -m pytest tests/npu_emulation -m "not slow" $(ARGS)

.PHONY: test-npu-emulated-torch-2.10
test-npu-emulated-torch-2.10: ## The same under torch 2.10 and its torch_npu, in NPU_TORCH_2_10_VENV
	@scripts/npu_emulation.sh $(NPU_TORCH_2_10_VENV) --torch 2.10 python -m pytest tests/npu_emulation -m "not slow" $(ARGS)

.PHONY: test-triton-ascend
test-triton-ascend: ## Lower the Triton kernels as Ascend's compiler does, without CANN, and run them on the CPU
	@scripts/triton-ascend-env.sh $(TRITON_ASCEND_VENV)
	@TRITON_ASCEND_TESTS=1 PYTHONPATH=. $(TRITON_ASCEND_VENV)/bin/python -m pytest tests/triton_ascend -m "not slow" $(ARGS)

.PHONY: bench
bench: venv ## Measure output tokens/s with and without MTP
	@$(BIN)/python -m benchmarks.serving $(ARGS)

.PHONY: bench-gpu
bench-gpu: venv ## Check and time the kernels on a CUDA GPU; without one, say so
	@$(BIN)/python -m benchmarks.on_gpu --json $(ARGS)

.PHONY: bench-npu-step
bench-npu-step: ## Count what a decode step asks of an NPU, on the emulated one, in NPU_VENV
	@TORCH_DEVICE_BACKEND_AUTOLOAD=0 scripts/npu_emulation.sh $(NPU_VENV) python -m benchmarks.npu_step --json $(ARGS)

.PHONY: quality
quality: venv-dev ## Check lint, format, types and docker/
	@$(BIN)/ruff check $(wildcard $(CODE))
	@$(BIN)/ruff format --check $(wildcard $(CODE))
	@$(BIN)/pyright
	@$(BIN)/hadolint docker/Dockerfile docker/Dockerfile.cpu
	@$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker/compose.yaml

.PHONY: style
style: venv-dev ## Fix what lint and format can fix
	@$(BIN)/ruff check --fix $(wildcard $(CODE))
	@$(BIN)/ruff format $(wildcard $(CODE))

.PHONY: doctor
doctor: venv ## Print versions, platform, hooks and ops, and say what is off
	@$(BIN)/sglang-ascend doctor $(ARGS)

.PHONY: check-upstream
check-upstream: venv ## Say what of SGLang, release VERSION, has changed under this plugin (FROM=another one)
	@$(BIN)/python -m sglang_ascend.plugin.hooks.upstream $(VERSION) $(if $(FROM),--from $(FROM)) $(ARGS)

.PHONY: clean
clean: ## Remove the virtual environment and every build output
	rm -rf $(VENV) $(NPU_VENV) $(NPU_TORCH_2_10_VENV) $(TRITON_ASCEND_VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: environments
environments: ## Make the environments of test-npu-emulated and test-triton-ascend
	@scripts/npu_emulation.sh $(NPU_VENV) true
	@scripts/triton-ascend-env.sh $(TRITON_ASCEND_VENV)

# The script decides by content what is out of date; asking it costs a twentieth of a second.
.PHONY: venv venv-dev
venv:
	@scripts/bootstrap.sh $(VENV)
venv-dev:
	@scripts/bootstrap.sh $(VENV) dev
