# Needs Python 3.11, make and git; each target installs what it needs, once.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN    := .venv/bin
READY  := .venv/ready
CLAIM  ?=
SEEDS  ?= 0:100000
WORKERS := $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 4 ? cores + 1 : 5)))
PARALLEL := -n $(WORKERS) --dist worksteal  # one pytest process more than cores, since some tests wait
ALONE := -n 2 --dist loadfile  # what measures time
SERIAL = $$(grep -rl --include='test_*.py' 'mark\.serial' tests)  # collecting only these files saves half a minute
DEADLINE := -o faulthandler_timeout=660 -o faulthandler_exit_on_timeout=true  # with all stacks, where pytest-timeout cannot act
export PYTHONDONTWRITEBYTECODE :=  # the processes that tests start read what the first of them has compiled

.PHONY: setup spark check types house test test-long test-all soak hashes audit sbom golden docs bench gpu-pack demo clean
setup: $(READY)  ## a virtual environment with the pinned tools and this package, editable

$(READY): pyproject.toml constraints.txt requirements-ci.txt setup.py $(wildcard native/*)
	@echo "installing the pinned tools into .venv: once, about a minute plus the download of torch"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -qq --require-hashes --no-deps -r requirements-ci.txt
	$(BIN)/python -m pip install -qq -c constraints.txt --no-build-isolation -e '.[dev,docs]'
	touch $@

spark: $(READY)  ## install what the Spark tests need: PySpark (456 MB), and Java where there is none
	$(BIN)/python -m pip install -qq -c constraints.txt pyspark pandas pyarrow
	command -v java >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends openjdk-17-jre-headless; }

check: $(READY)  ## format, lint, types, import contracts, rules of names and code
	$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/lint-imports --no-logo
	$(MAKE) --no-print-directory --jobs=2 --output-sync types house
types: $(READY)
	$(BIN)/mypy --num-workers=2
house: $(READY)
	$(BIN)/pytest tests/house
test: $(READY)  ## every test except the long and the slow ones, those that need a GPU, and the rules that `make check` checks
	$(BIN)/pytest $(PARALLEL) $(DEADLINE) --ignore tests/house -m "not long and not slow and not gpu and not serial"
	$(BIN)/pytest $(ALONE) $(DEADLINE) -m "serial and not long and not slow and not gpu" $(SERIAL)
test-long: $(READY)  ## jobs of several processes, and the tests of `make test` on more models, plans and seeds
	$(BIN)/pytest $(PARALLEL) $(DEADLINE) -m "long and not slow and not gpu and not serial"
	$(BIN)/pytest $(ALONE) $(DEADLINE) -m "serial and long and not slow and not gpu" $(SERIAL)
test-all: $(READY)  ## every test, with new random plans
	$(BIN)/pytest --hypothesis-profile=explore
soak: $(READY)  ## 100,000 simulated parameter-server jobs on all cores (SEEDS=40000:100000 continues from there); 10 minutes of fuzzing
	$(BIN)/python -m tests.ps.simulator_soak $(SEEDS)
	$(BIN)/python -m pip install -qq -c constraints.txt atheris || echo "no atheris here: fuzzing without coverage"
	$(BIN)/python -m tests.fuzz.fuzz --seconds 600
hashes: $(READY)  ## write requirements-ci.txt again after a change of constraints.txt; torch is left out, its file depends on the machine
	$(BIN)/python -m pip install -qq uv
	(head -n 1 requirements-ci.txt; $(BIN)/uv pip compile -q --generate-hashes --no-header --no-annotate --no-emit-index-url \
	  --no-emit-find-links $(addprefix --find-links ,$(PIP_FIND_LINKS)) --no-emit-package torch -c constraints.txt \
	  --extra dev --extra docs pyproject.toml) > requirements-ci.new && mv requirements-ci.new requirements-ci.txt
audit: $(READY) .venv-audit/bin/pip  ## known vulnerabilities of what is installed; asks the registry, so it needs a network and is no part of CI
	.venv-audit/bin/pip-audit --progress-spinner off --skip-editable --path $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
sbom: $(READY) .venv-audit/bin/pip  ## build/sbom.json, a CycloneDX list of what is installed
	mkdir -p build && .venv-audit/bin/cyclonedx-py environment --of JSON -o build/sbom.json $(BIN)/python
.venv-audit/bin/pip:
	$(PYTHON) -m venv .venv-audit && .venv-audit/bin/python -m pip install -qq pip-audit==2.10.1 cyclonedx-bom==7.5.0
golden: $(READY)  ## rewrite tests/golden; read the diff before you commit it
	$(BIN)/pytest --golden
docs: $(READY)  ## build the pages and run their examples; a warning is an error
	$(BIN)/sphinx-build -q -W --keep-going --nitpicky -b html docs docs/_build/html
	$(BIN)/sphinx-build -q -W --keep-going --nitpicky -b doctest docs docs/_build/doctest
bench: $(READY)  ## one claim (make bench CLAIM=parity) or all of them
	$(BIN)/counterpoint bench $(CLAIM)
gpu-pack: $(READY)  ## fill .gpu/ with what benchmarks/gpu needs on a machine without a network
	bash benchmarks/gpu/pack.sh
demo: $(READY)  ## train a small GPT on two ranks and write its report
	$(BIN)/counterpoint train text -n 2
clean:
	rm -rf .venv .venv-audit build docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
