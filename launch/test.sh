#!/usr/bin/env bash
# The tests: bash launch/test.sh [pytest arguments].  Installs what they need into .venv; no GPU, no network but packages.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/install.sh test
export DS_ACCELERATOR=cpu HF_HUB_OFFLINE=1
ruff check .
ruff format --check .
exec python -m pytest -q --durations=10 "$@"
