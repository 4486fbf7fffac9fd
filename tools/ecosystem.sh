#!/bin/sh
# Runs tests/ecosystem with every library that it is about, in a virtual environment of its own. None may be missing.
# usage: ecosystem.sh [PYTHON [FOLDER [PYTEST ARGUMENTS]]]
set -eu
cd "$(dirname "$0")/.."
python=${1:-python3} venv=${2:-.venv/ecosystem}
[ $# -lt 2 ] || shift
[ $# -lt 1 ] || shift

sh tools/setup.sh "$python" "$venv"

# The libraries take the PyTorch that is there, without its suffix for the kind of build. The two that ask for a certain
# torchvision, or torchvision itself for a certain torch, come without what they depend on, which is named here.
constraints="$venv/constraints.txt"
"$venv/bin/python" -c 'import torch; print("torch==" + torch.__version__.split("+")[0])' >"$constraints"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --constraint "$constraints" "$@"; }
pip lightning transformers accelerate monai tensorboard huggingface_hub safetensors pyyaml pillow
pip --no-deps timm torchvision triton
"$venv/bin/python" -m pip list 2>/dev/null | grep -E '^(torch|torchvision|timm|monai|lightning|transformers|accelerate) '

ONLINENORM_ECOSYSTEM=all exec "$venv/bin/python" -m pytest tests/ecosystem "$@"
