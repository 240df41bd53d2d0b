#!/usr/bin/env bash
# Builds the package on a machine with a CUDA GPU, which needs no network, runs its GPU tests and benchmarks, and writes
# one folder of results. A stage that fails does not keep the next ones from running.
#
#   tools/gpu_report.sh RESULTS [STORAGE]
#
# RESULTS   folder for the results: report.txt (what ran, for how long, and whether it failed), versions.txt,
#           nvidia-smi.txt, the output of each stage, the benchmarks' figures as JSON
# STORAGE   folder on the drive to measure (default: one below RESULTS, which is removed)
#
# PYTHON (default: python3) has to find torch with CUDA, the package's other requirements, pytest with pytest-xdist, and
# what the build needs: scikit-build-core, nanobind, cmake and ninja. LIMIT is how many seconds all stages may take
# (default: 520), and PYTEST_WORKERS how many processes the tests are dealt out to (default: 4).
set -uo pipefail

usage() { sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "$0"; }
[[ $# -ge 1 && $# -le 2 && $1 != -* ]] || { usage; exit 2; }

python=$(command -v "${PYTHON:-python3}") && python=$(realpath --no-symlinks "$python") || exit 2
mkdir -p "$1" || exit 2
results=$(cd "$1" && pwd)
storage=${2:-$results/storage}
mkdir -p "$storage" && storage=$(cd "$storage" && pwd) || exit 2
cd "$(dirname "$0")/.." || exit 2
deadline=$((SECONDS + ${LIMIT:-520}))
# Of several forms in which an environment may name this device's architecture, DeepSpeed's builds know one.
unset TORCH_CUDA_ARCH_LIST
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
failed=0
printf '%-12s %-8s %s\n' stage result seconds >"$results/report.txt"

# Runs a stage, with its output in a file, for at most so many seconds of those that are left.
stage() {
    local name=$1 limit=$2 begun=$SECONDS code=0 result
    shift 2
    (((deadline - SECONDS) < limit)) && limit=$((deadline - SECONDS))
    if ((limit < 1)); then
        code=124
    else
        timeout --kill-after=5 "$limit" "$@" >"$results/$name.txt" 2>&1 || code=$?
    fi
    case $code in
        0) result=passed ;;
        124 | 137) result='too long' ;;
        *) result="failed:$code" ;;
    esac
    ((code == 0)) || failed=1
    printf '%-12s %-8s %d\n' "$name" "$result" $((SECONDS - begun)) | tee -a "$results/report.txt"
    ((code == 0)) || tail -n 5 "$results/$name.txt" 2>/dev/null
}

build() {
    rm -rf "$results/site"
    # The tests inject faults into the native core.
    "$python" -m pip install --quiet --no-index --no-deps --no-build-isolation --no-compile \
        --config-settings cmake.define.SMART_INFINITY_TESTING=ON --target "$results/site" .
}

versions() {
    uname -srm
    nproc
    free -h | head -2
    df -h "$storage"
    git rev-parse HEAD 2>/dev/null
    "$python" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda, torch.cuda.is_available())'
    "$python" -m pip list 2>/dev/null
}

# Beside the sources, Python would import those instead of what was built.
outside() { (cd "$results/sources" && PYTHONPATH="$results/site:$results/sources" "$@"); }

export -f build versions outside
export results storage python
stage nvidia-smi 10 nvidia-smi
stage versions 60 bash -c versions
stage build 240 bash -c build
rm -rf "$results/sources" && mkdir "$results/sources"
cp -r tests benchmarks hls docs pyproject.toml "$results/sources"
stage tests 200 bash -c 'outside "$python" -m pytest tests/gpu -q -rs -n "${PYTEST_WORKERS:-4}" --import-mode=importlib -p no:cacheprovider'
stage step 150 bash -c 'outside "$python" benchmarks/gpu_step.py --size 355M --storage "$storage" --json "$results/step.json"'
stage budgets 90 bash -c 'outside "$python" benchmarks/gpu_step.py --size 355M --systems smart_infinity_budgets smart_infinity_storage zero_infinity_parameters --storage "$storage" --json "$results/budgets.json"'
stage activations 110 bash -c 'outside "$python" benchmarks/activations.py --size 3.6b --shape 4 1024 --loss chunked --systems plain ours checkpoint save_on_cpu --host-bytes 16GB --steps 8 --storage "$storage" --json "$results/activations.json"'
rm -rf "$results/site" "$results/sources"
[[ $storage == "$results/storage" ]] && rm -rf "$storage"
exit $failed
