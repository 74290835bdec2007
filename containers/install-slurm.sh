#!/bin/sh
# Install Slurm and munge from the distribution, for the tests' private cluster. Never fails: where they cannot be had, the
# Slurm tests are skipped, and say so.
for program in slurmctld slurmd munged srun; do
    PATH="$PATH:/usr/sbin" command -v "$program" >/dev/null || missing=1
done
[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ]; then as_root=; elif sudo -n true 2>/dev/null; then as_root="sudo -n"; else
    echo "Slurm is not installed, and this user may not install it: its tests will be skipped"
    exit 0
fi
command -v apt-get >/dev/null || { echo "Slurm is not installed, and there is no apt-get: its tests will be skipped"; exit 0; }
echo "installing Slurm and munge for the tests"
{ $as_root apt-get update && DEBIAN_FRONTEND=noninteractive $as_root apt-get install --yes --no-install-recommends \
    slurmctld slurmd slurm-client munge; } >/dev/null 2>&1 || echo "Slurm could not be installed: its tests will be skipped"
exit 0
