# The same targets on a laptop and in CI. They use .venv, which `make setup` makes.
BIN := $(CURDIR)/.venv/bin
OUTSIDE := $(CURDIR)/build/outside

.PHONY: setup format lint types test-fast test test-extended docs check-docs site engines flower nvflare checkers release

setup:
	python3 -m venv .venv
	.venv/bin/pip install -q --no-deps -r torch-cpu.txt
	.venv/bin/pip install -q -c constraints.txt -e ".[dev]"

format:
	$(BIN)/ruff check --fix --quiet .
	$(BIN)/ruff format .

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy and import-linter read the installed wheel, where attacks/ is vflsec.attacks. The wheel goes into a folder of its
# own, which both search first, so that .venv keeps its editable installation of the tree.
types:
	rm -rf build dist && mkdir -p $(OUTSIDE)
	$(BIN)/python -m build --wheel --outdir dist . > build/wheel.log 2>&1 || (cat build/wheel.log; exit 1)
	$(BIN)/pip install --quiet --no-deps --target $(OUTSIDE) dist/*.whl
	cd $(OUTSIDE) && MYPYPATH=. $(BIN)/mypy --strict --config-file $(CURDIR)/pyproject.toml -p vflsec
	cd $(OUTSIDE) && PYTHONPATH=. $(BIN)/lint-imports --config $(CURDIR)/pyproject.toml --no-cache

test-fast:
	$(BIN)/pytest -m "not (slow or chaos or cluster or long or statistical)"

test:
	$(BIN)/pytest

# All that `make test` leaves out: tests that take long, so that workers take them from each other, some of which wait for
# processes, so that there is a worker more than cores.
test-extended:
	$(BIN)/pytest -n 3 --dist worksteal -m "chaos or cluster or long or statistical"

# Flower and NVFlare, each in an environment of its own, for the tests that record them; without, those are skipped. Such
# an environment reads from .venv what it does not need in another version, such as torch.
SITE := -c "import site; print(*site.getsitepackages())"
engines: flower nvflare checkers
flower nvflare:
	python3 -m venv .engines/$@
	$(BIN)/python $(SITE) > "$$(.engines/$@/bin/python $(SITE))/shared.pth"
	.engines/$@/bin/pip install -q -c constraints.txt -e ".[$@]"

# What judges files that others read: a schema of SARIF (MIT) and one of JUnit (MIT), a validator of XML, and axe (MPL),
# which looks for what some people cannot read on a page. Without npm or a network its tests are skipped.
AXE := axe-core@4.14.1
SARIF := @microsoft/jest-sarif@1.0.0-beta.0
checkers:
	-rm -rf .engines/$@ && mkdir -p .engines/$@ && $(BIN)/pip install -q --target .engines/$@ "xmlschema>=4,<5" && \
	$(BIN)/pip download -q --no-deps --no-binary pytest -c constraints.txt -d .engines/$@ pytest && \
	cd .engines/$@ && npm pack --silent $(AXE) $(SARIF) > packed && for each in *.tgz *.tar.gz; do tar -xzf $$each; done && \
	mv pytest-*/testing/example_scripts/junit-10.xsd package/axe.min.js package/lib/schemas/sarif-2.1.0-rtm.5.json .

# Rewrites what is generated: the table and the picture of the first command, the map in CONTRIBUTING.md,
# the picture of the packages, and the notebooks. It trains, and takes a few minutes.
docs:
	$(BIN)/python scripts/build_docs.py

check-docs:
	$(BIN)/python scripts/build_docs.py --check

# The documentation as a site in site/, which needs no network to be read; a link that leads nowhere is an error. The
# reference, with a page for each technique, is written from the code.
.site/bin/mkdocs:
	python3 -m venv .site && .site/bin/pip install -q "mkdocs-material>=9.5,<10"

site: .site/bin/mkdocs
	$(BIN)/python scripts/build_reference.py
	NO_MKDOCS_2_WARNING=1 .site/bin/mkdocs build --strict --quiet

# Builds sdist and wheel, checks both, and tries each in an environment of its own: the first evaluation, and for the
# sdist the tests of its core. Uploads nothing.
RELEASE := $(CURDIR)/build/release
release:
	rm -rf dist $(RELEASE) && python3 -m venv $(RELEASE)/tools && $(RELEASE)/tools/bin/pip install -q build twine
	$(RELEASE)/tools/bin/python -m build --outdir dist . > $(RELEASE)/build.log 2>&1 || (cat $(RELEASE)/build.log; exit 1)
	$(RELEASE)/tools/bin/twine check --strict dist/*
	for kind in whl tar.gz; do \
	  python3 -m venv $(RELEASE)/$$kind && $(RELEASE)/$$kind/bin/pip install -q --no-deps -r torch-cpu.txt || exit 1; \
	  $(RELEASE)/$$kind/bin/pip install -q -c constraints.txt dist/*.$$kind || exit 1; \
	  (cd $(RELEASE) && $$kind/bin/vflsec eval --dataset toy --seeds 1 --attack mc:epochs=5 --out run-$$kind) || exit 1; \
	done
	tar -xzf dist/*.tar.gz -C $(RELEASE) && $(RELEASE)/tar.gz/bin/pip install -q pytest pytest-xdist hypothesis
	$(RELEASE)/tar.gz/bin/pip install -q --no-deps -e $(RELEASE)/vflsec-*/
	cd $(RELEASE)/vflsec-*/ && $(RELEASE)/tar.gz/bin/pytest -q -o addopts="--import-mode=importlib" tests/core tests/results/analysis
	ls -l dist
