#!/bin/bash
# Runs inside a base image:  install.sh train|generate NCCL_VERSION
#
# Puts containers/KIND/requirements.txt into /opt/hetstep, a virtual environment over the base's own packages, and checks the
# result. `cluster.<component>.python: /opt/hetstep/bin/python` is what the ranks are to use.
set -euo pipefail
kind=$1 nccl=$2
folder=$(cd "$(dirname "$0")" && pwd)
python3 -m venv --system-site-packages --without-pip /opt/hetstep
# NVIDIA's images constrain pip to the versions that they hold; these go beside them, not in their place.
PIP_CONSTRAINT='' python3 -m pip --python /opt/hetstep/bin/python install --no-cache-dir --no-deps --only-binary=:all: \
    --ignore-installed --requirement "$folder/$kind/requirements.txt"
if [[ $kind == generate ]]; then # PyTorch's wheel loads NCCL from this package; NVIDIA's build has its own, and is only checked
    PIP_CONSTRAINT='' python3 -m pip install --no-cache-dir --no-deps --break-system-packages "nvidia-nccl-cu13==$nccl"
fi
PYTHONDONTWRITEBYTECODE=1 /opt/hetstep/bin/python "$folder/check_image.py" "$kind" "$nccl"
