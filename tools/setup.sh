#!/bin/sh
# Makes a virtual environment with this package, built from source, and all that its tests and tools need.
# usage: setup.sh PYTHON FOLDER
set -eu
python=$1 venv=$2
torch="torch==2.13.0"

fail() {
    printf '\n%s\n' "$1" >&2
    exit 1
}
packages="sudo apt install g++ make python3-dev python3-venv"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$python is not there or older than 3.10. Name another: make PYTHON=python3.12 ..."
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python cannot make virtual environments. On Debian and Ubuntu: $packages"
"$python" -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
    fail "Python.h, which the engine is built with, is not there. On Debian and Ubuntu: $packages"
command -v "${CXX:-c++}" >/dev/null || fail "There is no C++ compiler. On Debian and Ubuntu: $packages"

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# PyTorch comes first. Its usual Linux build brings gigabytes of CUDA, of no use without a GPU: then take the CPU build,
# if pip knows one, or else through uv, which knows where PyTorch keeps it.
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    echo "Installing PyTorch ..."
    if [ "$(uname -s)" != Linux ] || nvidia-smi >/dev/null 2>&1; then
        pip install --quiet "$torch"
    elif ! pip install --quiet "$torch+cpu" 2>/dev/null; then
        pip install --quiet uv
        "$venv/bin/uv" pip install --python "$venv/bin/python" --torch-backend cpu "$torch" ||
            fail "The CPU build of PyTorch could not be installed; the lines above say why."
    fi
fi

echo "Building onlinenorm ..."
pip install --quiet "scikit-build-core>=0.10" "nanobind>=2.4" ninja cmake
pip install --quiet --no-build-isolation --config-settings build-dir="$venv/build" --editable ".[dev]"
