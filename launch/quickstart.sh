#!/usr/bin/env bash
# The main job on a laptop: sets up .venv and trains the embedded quickstart policy on CPU.
# Options are handed to the command, e.g. ./launch/quickstart.sh --config.seed=1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/common.sh
. launch/common.sh

python="$(main_python)"
make_venv .venv "$python"
export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
exec .venv/bin/python -m envace_jax train --config configs/quickstart.py "$@"
