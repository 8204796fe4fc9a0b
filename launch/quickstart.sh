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
.venv/bin/python -m envace_jax train --config configs/quickstart.py "$@"
cat <<'END'

next: . .venv/bin/activate
  python -m envace_jax show 0 --config configs/quickstart.py                      one task as the policy sees it
  python -m envace_jax export runs/quickstart models/quickstart                   the trained policy as a folder
  python -m envace_jax evaluate quickstart --config configs/quickstart.py \
    --config.model.path=models/quickstart --config.run_dir=runs/measured          measured again
  python -m envace_jax chat --config configs/quickstart.py --config.model.path=models/quickstart
END
