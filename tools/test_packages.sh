#!/usr/bin/env bash
# Installs, if it may (as root on a system with apt-get), what only tests use: XRT 2.13, through which the emulated
# SmartSSDs of tests/xrt work, and bindfs, by which two machines in tests/nodes see one file system. Without them those
# tests are skipped.
# With LONG=1 also a compiler and an emulator for 64-bit ARM.
# Usage: tools/test_packages.sh [ROOT]   ROOT: folder of the system's files, / by default
set -euo pipefail

root=${1:-}
version=2.13

has_xrt() {
    compgen -G "$root/usr/lib/x86_64-linux-gnu/libxrt_noop.so.$version*" >/dev/null &&
        [ -e "$root/usr/include/xrt/version.h" ] && [ -e "$root/usr/include/uuid/uuid.h" ]
}

has_two_machines() {
    [ -e "$root/usr/bin/bindfs" ] && compgen -G "$root/usr/*bin/ip" >/dev/null
}

has_arm() {
    [ -e "$root/usr/bin/aarch64-linux-gnu-g++" ] && [ -e "$root/usr/bin/qemu-aarch64" ]
}

# need CHECK WHAT TESTS PACKAGES
need() {
    local check=$1 what=$2 tests=$3 packages=$4
    "$check" && return
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        note "this system lacks $what ($packages of Debian 12)" "$tests"
        return
    fi
    echo "Installing for tests: $packages"
    # shellcheck disable=SC2086 # a list of names
    if ! { apt-get update -q && apt-get install -q -y --no-install-recommends $packages; }; then
        note "$packages could not be installed" "$tests"
    elif ! "$check"; then
        note "this system's $packages are not those of $what" "$tests"
    fi
}

note() {
    echo "note: $1: tests $2 will be skipped" >&2
}

export DEBIAN_FRONTEND=noninteractive
# Headers of libxrt-dev include uuid-dev's.
need has_xrt "XRT $version" "on emulated SmartSSDs" "libxrt1 libxrt-dev uuid-dev"
need has_two_machines "bindfs" "on two machines" "bindfs iproute2"
[ -z "${LONG:-}" ] || need has_arm "a compiler and an emulator for ARM" "on ARM" "g++-aarch64-linux-gnu qemu-user"
