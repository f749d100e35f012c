# Sourced by quickstart.sh and test.sh: .venv with the tested versions, and DeepSpeed's CPU kernels built once.
# usage: . launch/install.sh EXTRAS     (run from the repository root; needs Python 3.11, gcc and pip)

PYTHON=${PYTHON:-python3.11}
command -v "$PYTHON" >/dev/null || PYTHON=python3
"$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=..." >&2; exit 2; }
command -v g++ >/dev/null || { echo "g++ is needed to build DeepSpeed's CPU kernels" >&2; exit 2; }

[ -x .venv/bin/python ] || "$PYTHON" -m venv .venv
export PATH="$PWD/.venv/bin:$PATH"
# one stamp for each set of extras and versions, so that a second start installs nothing
stamp=.venv/installed-$(cat setup.py launch/constraints.txt ds_flux/__init__.py | cksum | cut -d' ' -f1)-$1
if [ ! -e "$stamp" ]; then
    echo "installing into .venv ..."
    # torch first and by its exact version, or a dependency's range may bring another build
    pip install -q --disable-pip-version-check "torch==$(sed -n 's/^torch==//p' launch/constraints.txt)"
    pip install -q --disable-pip-version-check -c launch/constraints.txt -e ".[$1]"
    # by itself: it asks for torchvision, of which there is none for torch's CPU build, and one of another build breaks imports
    [ "$1" != test ] || pip install -q --disable-pip-version-check --no-deps -c launch/constraints.txt torch-fidelity
    touch "$stamp"
fi

# On a machine without accelerator every rank is one thread of the CPU; the kernels are kept beside the packages.
export TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$PWD/.venv/torch_extensions}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# A build that was killed leaves a lock on which every later start would wait for ever.
if ! pgrep -f deepspeed >/dev/null; then rm -f "$TORCH_EXTENSIONS_DIR"/*/lock; fi
echo "DeepSpeed's CPU kernels (built once, about two minutes) ..."
env -u OMP_NUM_THREADS DS_ACCELERATOR=cpu python - "$1" <<'PY'
import logging
import sys

logging.disable(logging.WARNING)
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, ShareMemCommBuilder

CPUAdamBuilder().load(verbose=False)
ShareMemCommBuilder().load(verbose=False)
if sys.argv[1] == "test" and AsyncIOBuilder().is_compatible(verbose=False):  # for the test of NVMe
    AsyncIOBuilder().load(verbose=False)
PY
