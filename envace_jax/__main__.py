"""`python -m envace_jax COMMAND`."""

import sys

try:
    from envace_jax.cli import main
except ModuleNotFoundError as error:
    sys.exit(
        f"envace_jax: {error.name} is not installed for this Python ({sys.executable}): activate the environment first "
        "(. .venv/bin/activate; ./launch/quickstart.sh makes it), or pip install -e ."
    )

sys.exit(main())
