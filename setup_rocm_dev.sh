#!/usr/bin/env bash
# Sets this checkout up for development: says what it finds, makes .venv with the torch that fits the GPU, and says what
# to type next. Needs no root, and changes nothing outside this folder.
#
#   ./setup_rocm_dev.sh                          what the tests and checks need (make setup-dev)
#   ./setup_rocm_dev.sh --dry-run                says what it finds and would do, and does nothing
#   PYTHON=python3.12 ./setup_rocm_dev.sh        with another Python
#   ROCM_SD_TORCH=gfx1100 ./setup_rocm_dev.sh    with another torch than the one that would be chosen
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

usage() { sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]##*/}"; }

found() { printf '  %-8s %s\n' "$1" "$2"; }

flags=
case "${1:-}" in
    '') ;;
    --dry-run) flags=--dry-run ;;
    --help | -h)
        usage
        exit 0
        ;;
    *)
        printf 'What is "%s"?\n\n' "$1" >&2
        usage >&2
        exit 2
        ;;
esac

python=${PYTHON:-python3}
for program in "$python" make; do
    if ! command -v "$program" > /dev/null; then
        printf 'There is no %s here. On Debian and Ubuntu type: sudo apt install python3 python3-venv make\n' "$program" >&2
        exit 1
    fi
done

gpu() {
    if [[ -e /dev/kfd ]]; then
        if [[ -r /dev/kfd && -w /dev/kfd ]]; then
            echo "an AMD GPU that you may use (/dev/kfd)"
        else
            echo "an AMD GPU that you may not open; type: sudo usermod -aG render,video \"\$USER\", and log in again"
        fi
    elif command -v nvidia-smi > /dev/null; then
        echo "NVIDIA's driver"
    else
        echo "none: everything but the tests that need one runs on the CPU"
    fi
}

rocm() {
    local root=${ROCM_PATH:-/opt/rocm}
    if [[ -r $root/.info/version ]]; then
        echo "$(< "$root/.info/version") in $root"
    elif [[ -d $root ]]; then
        echo "in $root"
    else
        echo "none: torch brings its own libraries; only the C++ library of the kernels needs it"
    fi
}

clang() {
    local name
    for name in clang-19 clang-20 clang-21 "${ROCM_PATH:-/opt/rocm}/llvm/bin/clang"; do
        if command -v "$name" > /dev/null; then
            command -v "$name"
            return
        fi
    done
    echo "none: tests of the HIP kernels are skipped; type: sudo apt install clang-19 lld-19"
}

echo "Found:"
found Python "$("$python" --version 2>&1)"
found GPU "$(gpu)"
found ROCm "$(rocm)"
found clang "$(clang)"
found CMake "$(command -v cmake || echo 'none: tests of the C++ library are skipped; type: sudo apt install cmake g++')"
echo

make --no-print-directory setup-dev PYTHON="$python" SETUP_FLAGS="$flags"

if [[ -z $flags ]]; then
    echo
    echo "Next, type:"
    echo "  source .venv/bin/activate"
    echo "  rocm-sd doctor    what of this machine is in the way, and the cure"
    echo "  rocm-sd demo      pictures, stock and optimised"
    echo "  make test         the tests that need no GPU; make test-gpu runs the others"
    echo "  make check        format, lint, types, import contracts"
fi
