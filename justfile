# Shortcuts for what .ci/run and the README call: just --list

# install everything that development needs
setup:
    uv sync --group dev

# the fast tests; pass further arguments to pytest
test *ARGUMENTS:
    uv run --group dev pytest {{ARGUMENTS}}

# ruff, import contracts, structure, types
lint:
    bash .ci/run static

# format the code in place
format:
    uv run --group dev ruff check --fix .
    uv run --group dev ruff format .

# build the documentation into build/site
docs:
    NO_MKDOCS_2_WARNING=1 uv run --only-group docs mkdocs build --strict

# everything that must hold, or the named lanes: just ci static fast
ci *LANES:
    bash .ci/run {{LANES}}
