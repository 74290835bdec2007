#!/bin/bash
# Runs inside a base image:  install.sh train|generate NCCL_VERSION [VARIABLES]
#
# VARIABLES, "NAME=value NAME=value", become the image's own: for enroot, which reads no Dockerfile.
# Puts containers/KIND/requirements.txt into /opt/hetstep, a virtual environment over the base's own packages, and checks the
# result. `cluster.<component>.python: /opt/hetstep/bin/python` is what the ranks are to use.
set -euo pipefail
kind=$1 nccl=$2 variables=${3:-}
folder=$(cd "$(dirname "$0")" && pwd)
python3 -m venv --system-site-packages --without-pip /opt/hetstep
# NVIDIA's images constrain pip to the versions that they hold; these go beside them, not in their place.
PIP_CONSTRAINT='' python3 -m pip --python /opt/hetstep/bin/python install --no-cache-dir --no-deps --only-binary=:all: \
    --ignore-installed --requirement "$folder/$kind/requirements.txt"
if [[ $kind == train ]]; then
    # FlashAttention-3 for Hopper, which PyPI does not have: PyTorch's own build, for any torch from 2.9 on (LibTorch's stable ABI).
    [[ $(uname -m) != x86_64 ]] || PIP_CONSTRAINT='' python3 -m pip --python /opt/hetstep/bin/python install --no-cache-dir --no-deps --only-binary=:all: \
        --index-url https://download.pytorch.org/whl/cu130 flash-attn-3==3.0.0
else # NVIDIA's image has all this, and is only checked
    apt-get update
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends rdma-core libibverbs1 ibverbs-providers librdmacm1
    rm -rf /var/lib/apt/lists/*
    # PyTorch's wheel loads NCCL from this package.
    PIP_CONSTRAINT='' python3 -m pip install --no-cache-dir --no-deps --break-system-packages "nvidia-nccl-cu13==$nccl"
fi
[[ -z $variables ]] || printf '%s\n' $variables >>/etc/environment
PYTHONDONTWRITEBYTECODE=1 /opt/hetstep/bin/python "$folder/check_image.py" "$kind" "$nccl" /opt/hetstep/build.json \
    "$folder/../other.json"
