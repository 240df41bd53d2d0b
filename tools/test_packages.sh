#!/usr/bin/env bash
# Installs, if it may (as root on a system with apt-get), what only tests use: XRT 2.13, through which the emulated
# SmartSSDs of tests/xrt work. Without it those tests are skipped.
# Usage: tools/test_packages.sh [ROOT]   ROOT: folder of the system's files, / by default
set -euo pipefail

root=${1:-}
version=2.13
packages="libxrt1 libxrt-dev uuid-dev" # headers of libxrt-dev include uuid-dev's

has_xrt() {
    compgen -G "$root/usr/lib/x86_64-linux-gnu/libxrt_noop.so.$version*" >/dev/null &&
        [ -e "$root/usr/include/xrt/version.h" ] && [ -e "$root/usr/include/uuid/uuid.h" ]
}

note() {
    echo "note: $1: tests on emulated SmartSSDs will be skipped" >&2
    exit 0
}

has_xrt && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    note "this system lacks XRT $version ($packages of Debian 12)"
fi

echo "Installing for tests: $packages"
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086 # a list of names
{ apt-get update -q && apt-get install -q -y --no-install-recommends $packages; } ||
    note "$packages could not be installed"
has_xrt || note "this system's $packages are not of version $version"
