#!/bin/bash
# Make the images that `cluster.<component>.container_image` names:
#
#     containers/build.sh train|generate [FOLDER]        -> FOLDER/hetstep-train-VERSION.sqsh (default: the current folder)
#
# Beside it comes hetstep-train-VERSION.json: its PyTorch, CUDA and NCCL. The second image is held against that of the first in
# the same folder, since ranks of both form one world.
#
# With docker or podman: the Dockerfile is built, and enroot makes a squashfs file of it. With enroot alone: it fetches the base
# image from its registry, runs the same installation in it, and exports that. Without enroot, Apptainer does the same, and makes a
# .sif file for cluster.container_runtime=apptainer. TOOL=docker, podman, enroot or apptainer chooses; else the first that works
# here. BASE_DIGEST=@sha256:... pins the base image. NVIDIA's registry may ask for a login: `docker login nvcr.io`,
# or for enroot a line in ~/.config/enroot/.credentials.
set -euo pipefail
fail() { echo "build.sh: $*" >&2; exit 1; }
has() { command -v "$1" >/dev/null; }

root=$(cd "$(dirname "$0")/.." && pwd)
kind=${1:-}
[[ $kind == train || $kind == generate ]] || { sed -n '2,15s/^# \{0,1\}//p' "$0" >&2; exit 2; }
folder=$(cd "${2:-.}" 2>/dev/null && pwd) || fail "there is no folder ${2:-.}"
dockerfile=$root/containers/$kind/Dockerfile
argument() { sed -n "s/^ARG $1=//p" "$dockerfile"; }
base=${BASE:-$(argument BASE)}${BASE_DIGEST:-}
nccl=${NCCL_VERSION:-$(argument NCCL_VERSION)}
variables=$(echo $(sed -nE 's/^ENV ((NCCL|MELLANOX)_.*)/\1/p' "$dockerfile")) # in one line
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/pyproject.toml")
name=hetstep-$kind-$version
other=$folder/hetstep-$([[ $kind == train ]] && echo generate || echo train)-$version.json
tool=${TOOL:-}
has enroot || ! has apptainer || tool=${TOOL:-apptainer}
for each in docker podman; do
    [[ -z $tool ]] && has $each && $each info >/dev/null 2>&1 && tool=$each
done
tool=${tool:-enroot}
if [[ $tool != apptainer ]]; then
    has enroot || fail "there is no enroot here, which makes .sqsh files: https://github.com/NVIDIA/enroot"
    for needed in mksquashfs unsquashfs; do
        has $needed || fail "enroot needs $needed: install squashfs-tools"
    done
fi
has "$tool" || fail "TOOL=$tool: there is no such program here"
image=$folder/$name.$([[ $tool == apptainer ]] && echo sif || echo sqsh)
[[ ! -e $image ]] || fail "$image is there already; remove it, or give another folder"
echo "build.sh: $image from $base, by $tool"

context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT
cp -r "$root/pipeline" "$root/launch" "$root/containers" "$root/pyproject.toml" "$context"
[[ ! -e $other ]] || cp "$other" "$context/other.json"
case $tool in
docker | podman)
    DOCKER_BUILDKIT=1 "$tool" build --file "$context/containers/$kind/Dockerfile" --tag "$name" \
        --build-arg "BASE=$base" --build-arg "NCCL_VERSION=$nccl" "$context" || fail "$tool could not build $name"
    "$tool" run --rm "$name" cat /opt/hetstep/build.json >"$folder/$name.json" || fail "$tool could not run $name"
    scheme=$([[ $tool == docker ]] && echo dockerd || echo podman)
    enroot import --output "$image" "$scheme://$name" || fail "enroot could not import $name from $tool"
    ;;
enroot)
    registry=${base%%/*} path=${base#*/}
    [[ $path == *@* ]] && path=${path%%:*}@${path#*@} # enroot takes a tag or a digest
    [[ $registry == docker.io ]] && from=docker://$path || from=docker://$registry#$path # without one it is Docker's
    enroot import --output "$context/base.sqsh" "$from" || fail "enroot could not fetch $base"
    enroot create --force --name "$name" "$context/base.sqsh"
    enroot start --root --rw --mount "$context:/hetstep" "$name" /hetstep/containers/install.sh "$kind" "$nccl" "$variables" ||
        fail "the installation in $base failed; what there is of it: enroot start --root --rw $name"
    enroot start "$name" cat /opt/hetstep/build.json >"$folder/$name.json" || fail "enroot could not start $name"
    enroot export --output "$image" "$name" || fail "enroot could not export $name"
    enroot remove --force "$name"
    ;;
apptainer)
    [[ $base == *@* ]] && from=${base%%:*}@${base#*@} || from=$base # a tag or a digest
    cat >"$context/image.def" <<END
Bootstrap: docker
From: $from

%files
    $context /hetstep

%post
    /hetstep/containers/install.sh $kind $nccl
    rm -rf /hetstep

%environment
    export PATH=/opt/hetstep/bin:\$PATH $variables
END
    apptainer build "$image" "$context/image.def" || fail "apptainer could not build $image"
    apptainer exec "$image" cat /opt/hetstep/build.json >"$folder/$name.json" || fail "apptainer could not start $image"
    ;;
*) fail "TOOL=$tool is none of docker, podman, enroot, apptainer" ;;
esac
echo "build.sh: cluster.$kind.container_image=$image cluster.$kind.python=/opt/hetstep/bin/python"
