#!/bin/sh
# Install Slurm and munge from the distribution, for the tests' private cluster, and what a plugin for its srun is built with.
# Never fails: where they cannot be had, the Slurm tests are skipped, and say so. With the argument `matrix` also what makes and
# enters roots with other versions of Slurm; then it fails if that cannot be had.
packages="slurmctld slurmd slurm-client munge gcc libc6-dev libslurm-dev"
programs="slurmctld slurmd munged srun gcc"
what="its tests will be skipped"
failure=0
if [ "$1" = matrix ]; then
    packages="$packages debootstrap bubblewrap" programs="$programs debootstrap bwrap"
    what="there can be no matrix"
    failure=1
fi
for program in $programs; do
    PATH="$PATH:/usr/sbin" command -v "$program" >/dev/null || missing="$missing $program"
done
[ -e /usr/include/slurm/spank.h ] || missing="$missing slurm/spank.h"
[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ]; then as_root=; elif sudo -n true 2>/dev/null; then as_root="sudo -n"; else
    echo "Slurm is not installed (no$missing), and this user may not install it: $what"
    exit $failure
fi
command -v apt-get >/dev/null || { echo "Slurm is not installed (no$missing), and there is no apt-get: $what"; exit $failure; }
echo "installing Slurm for the tests: no$missing"
# shellcheck disable=SC2086
{ $as_root apt-get update && DEBIAN_FRONTEND=noninteractive $as_root apt-get install --yes --no-install-recommends \
    $packages; } >/dev/null 2>&1 || { echo "Slurm could not be installed: $what"; exit $failure; }
exit 0
