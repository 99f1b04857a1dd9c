# make demo: the main job on a CPU, in minutes.  make test: all tests.  Both set up .venv at their first run.
VENV := .venv
PYTHON_HERE := $(VENV)/bin/python
STAMP := $(VENV)/.somaspeed-installed

.PHONY: demo test lint clean

demo: $(STAMP)
	$(VENV)/bin/somaspeed ab recipes/pi05_libero_tiny.yaml

test: $(STAMP)
	OMP_NUM_THREADS=1 $(PYTHON_HERE) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

$(STAMP): pyproject.toml setup.py
	@[ -x $(PYTHON_HERE) ] || { python=$$(sh .ci/find-python) && echo "setting up $(VENV) with $$python (a few minutes)" && "$$python" -m venv $(VENV); }
	$(PYTHON_HERE) -m pip install -q -e '.[lerobot,ab,dev]'
	@touch $@

clean:
	rm -rf $(VENV) outputs build
