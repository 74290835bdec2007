#!/bin/bash
# Fetch the packages that `make gpu-check` needs beside PyTorch and transformers, for a machine without a network:
#
#     containers/gpu_check_wheels.sh FOLDER PYTHON_VERSION        such as: wheels 3.12, for Linux on x86-64
#
# The machine has torch, transformers, peft, pytest, tensorboard, pyarrow, pandas, xxhash, cloudpickle, psutil, rich and
# nvidia-ml-py; without vLLM the parts that need it are left out. Versions are those of the CPU lock. All wheels together are
# below 64 MB.
set -euo pipefail
fail() { echo "gpu_check_wheels.sh: $*" >&2; exit 1; }

folder=${1:-} version=${2:-}
[[ $folder && $version =~ ^3\.[0-9]+$ ]] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
lock=$(cd "$(dirname "$0")" && pwd)/requirements-cpu.lock
names=(annotated-types antlr4-python3-runtime datasets dill latex2sympy2_extended math-verify megatron-core msgspec
    multiprocess omegaconf pydantic pydantic_core submitit torchdata typing-inspection typing_extensions)
pins=()
for name in "${names[@]}"; do
    pins+=("$(grep -i "^${name//[-_]/[-_]}==" "$lock")") || fail "$lock has no $name"
done
platforms=()
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux_2_12 manylinux2010 manylinux1; do
    platforms+=(--platform "${tag}_x86_64")
done
mkdir -p "$folder"
! compgen -G "$folder/*.whl" >/dev/null || fail "$folder holds wheels; two versions of a package would stop the installation"
${PYTHON:-python3} -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp \
    --python-version "$version" "${platforms[@]}" --dest "$folder" "${pins[@]}" || fail "pip could not fetch them"
bytes=$(cat "$folder"/*.whl | wc -c)
((bytes < 64000000)) || fail "the wheels in $folder are $bytes bytes"
echo "$(ls "$folder"/*.whl | wc -l) wheels, $((bytes / 1000000)) MB. There: python3 -m pip install --no-index --no-deps $folder/*.whl"
