#!/usr/bin/env bash
# Makes sure that the system has what pip cannot install: a C++20 compiler, Python's venv module and headers and, if
# available, liburing, without which I/O runs in threads.
# Installs what is missing if it may (as root on a system with apt-get); otherwise says what to install.
# Usage: tools/system_packages.sh PYTHON
set -euo pipefail

python=$1

if ! command -v "$python" >/dev/null; then
    echo "error: there is no '$python'; install Python 3.10 or newer, or name one: make setup PYTHON=/path/to/python3" >&2
    exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "error: '$python' is $("$python" --version 2>&1); name Python 3.10 or newer: make setup PYTHON=/path/to/python3" >&2
    exit 1
fi

missing_packages() {
    if ! command -v "${CXX:-c++}" >/dev/null && ! command -v g++ >/dev/null && ! command -v clang++ >/dev/null; then
        echo g++
    fi
    "$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
    "$python" - <<'EOF' || echo python3-dev
import pathlib, sys, sysconfig
sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())
EOF
}

# Lists packages that the build can do without.
useful_packages() {
    local compiler
    for compiler in "${CXX:-c++}" g++ clang++; do
        command -v "$compiler" >/dev/null || continue
        "$compiler" -E -x c++ - <<<'#include <liburing.h>' >/dev/null 2>&1 || echo liburing-dev
        return
    done
    echo liburing-dev
}

missing=$(missing_packages | xargs)
useful=$(useful_packages)
[ -n "$missing$useful" ] || exit 0

if [ -z "$missing" ] && { [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; }; then
    echo "note: this system lacks $useful (name of a Debian package): I/O will run in threads instead of io_uring" >&2
    exit 0
fi

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "error: this system lacks: $missing (names of Debian packages)" >&2
    echo "       Install them, for instance by 'sudo apt-get install $missing', and run make again." >&2
    exit 1
fi

echo "Installing system packages: $(echo "$missing" $useful)"
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
# shellcheck disable=SC2086 # a list of names
[ -z "$missing" ] || apt-get install -q -y --no-install-recommends $missing
# shellcheck disable=SC2086
[ -z "$useful" ] || apt-get install -q -y --no-install-recommends $useful ||
    echo "note: $useful could not be installed: I/O will run in threads instead of io_uring" >&2

missing=$(missing_packages | xargs)
if [ -n "$missing" ]; then
    echo "error: still missing after apt-get: $missing; is '$python' the system's own Python?" >&2
    exit 1
fi
