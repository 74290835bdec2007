#!/bin/bash
# Install Apptainer or SingularityCE for the tests: from the distribution, or else that of Debian sid with the libraries that it
# needs, in a folder of its own, ~/.cache/hetstep/apptainer. Never fails: where neither can be had, the tests that start
# containers are skipped, and say so.
set -u
folder=${XDG_CACHE_HOME:-$HOME/.cache}/hetstep/apptainer
sid="deb http://deb.debian.org/debian sid main"
packages="apptainer libc6 libseccomp2 libsqlite3-0"
tools="squashfs-tools uidmap patchelf squashfuse fuse-overlayfs"
skip() { echo "Apptainer cannot be installed ($*): its tests will be skipped"; exit 0; }
failed() { mkdir -p "${folder%/*}" && echo "$*" >"$folder.failed"; skip "$*"; }  # which a day's later calls do not repeat

for program in apptainer singularity "$folder/usr/bin/apptainer"; do
    command -v "$program" >/dev/null && exit 0
done
command -v apt-get >/dev/null || skip "there is no apt-get"
[ -z "$(find "$folder.failed" -mmin -1440 2>/dev/null)" ] || skip "$(cat "$folder.failed"); remove $folder.failed to try again"
if [ "$(id -u)" = 0 ]; then as_root=; elif sudo -n true 2>/dev/null; then as_root="sudo -n"; else skip "this user may not"; fi
install() { DEBIAN_FRONTEND=noninteractive timeout 300 $as_root apt-get -o Acquire::Retries=0 install --yes --no-install-recommends "$@" >/dev/null 2>&1; }
echo "installing Apptainer for the tests"
timeout 120 $as_root apt-get -o Acquire::Retries=0 update >/dev/null 2>&1
install apptainer || install singularity-container && exit 0
[ "$(dpkg --print-architecture)" = amd64 ] || failed "Debian sid has it for amd64 only"
# shellcheck disable=SC2086
install $tools || failed "no $tools"

partial=$(mktemp -d)
trap 'rm -rf "$partial"' EXIT
mkdir -p "$partial"/{lists,cache,root} "$(dirname "$folder")" && cd "$partial" && echo "$sid" >sid.list || failed "no folder"
own=(-o "Dir::Etc::SourceList=$partial/sid.list" -o Dir::Etc::SourceParts=- -o "Dir::State::Lists=$partial/lists"
    -o "Dir::Cache=$partial/cache" -o APT::Sandbox::User=root)
# shellcheck disable=SC2086
{ apt-get "${own[@]}" update && apt-get "${own[@]}" download $packages; } >/dev/null 2>&1 || failed "no mirror answers"
for package in *.deb; do
    dpkg-deb --extract "$package" root || failed "$package is damaged"
done
# Apptainer finds its other files from the folder of its programs, below usr/ and usr/lib/. The programs take the libraries of sid.
libraries=$folder/usr/lib/x86_64-linux-gnu
for program in root/usr/bin/apptainer root/usr/lib/x86_64-linux-gnu/apptainer/bin/starter; do
    patchelf --set-interpreter "$libraries/ld-linux-x86-64.so.2" --force-rpath --set-rpath "$libraries" $program || failed "patchelf"
done
for name in etc var; do
    ln -s "../$name" "root/usr/$name" && ln -s "../../$name" "root/usr/lib/$name"
done
# A container of root would ask for capabilities that root of a container or of some virtual machines lacks.
sed -i 's/^root default capabilities = .*/root default capabilities = no/' root/etc/apptainer/apptainer.conf
rm -rf "$folder" && chmod 755 root && mv root "$folder" && "$folder/usr/bin/apptainer" --version || failed "it does not start"
