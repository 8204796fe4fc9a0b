"""`python -m envace_jax COMMAND`."""

import sys

from envace_jax.cli import main

sys.exit(main())
