#!/usr/bin/env bash
# Lint, types and tests. Without options: what continuous integration runs (Python 3.11, then a short subset on
# 3.12 where it is found). --all: everything, long tests too, on both; its result and date go to docs/test-results.md.
# Other arguments are handed to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/common.sh
. launch/common.sh

all=no
pytest_args=()
for arg in "$@"; do
  if [ "$arg" = --all ]; then all=yes; else pytest_args+=("$arg"); fi
done

export JAX_PLATFORMS=cpu
python="$(main_python)"
make_venv .venv "$python" test
bin=.venv/bin
status=0

echo "== lint"
$bin/ruff check . || status=1
$bin/shellcheck -x launch/*.sh launch/*.sbatch .ci/run || status=1
echo "== types"
$bin/mypy envace_jax || status=1

select_main=(-m "not long")
select_second=(-m "quick and not long")
if [ "$all" = yes ]; then
  select_main=()
  select_second=()
fi

run_tests() { # FOLDER LABEL ARGS…
  local venv="$1" label="$2"
  shift 2
  echo "== tests on $("$venv/bin/python" -V) ($label)"
  "$venv/bin/python" -m pytest -q -n 2 --dist loadfile "$@" || status=1
}

run_tests .venv "$([ "$all" = yes ] && echo all || echo 'without the long ones')" \
  "${select_main[@]}" ${pytest_args[@]+"${pytest_args[@]}"}

if [ "$($bin/python -c 'import sys; print(sys.version_info[1])')" = 11 ] && second="$(find_python 3.12)"; then
  make_venv .venv312 "$second" test
  run_tests .venv312 "$([ "$all" = yes ] && echo all || echo 'short subset')" \
    "${select_second[@]}" ${pytest_args[@]+"${pytest_args[@]}"}
else
  echo "skipped: no second Python (3.11 and 3.12) was found, so the tests ran on one version only"
fi

[ "$status" = 0 ] && echo "all checks passed" || echo "some checks failed (see above)"
exit "$status"
