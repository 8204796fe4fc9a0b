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
failed=()
skipped=""

echo "== lint"
$bin/ruff check . || status=1
$bin/shellcheck -x launch/*.sh launch/*.sbatch .ci/run || status=1
echo "== types"
$bin/mypy envace_jax || status=1
lint="$([ "$status" = 0 ] && echo passed || echo failed)"

select_main=(-m "not long")
select_second=(-m "quick and not long")
if [ "$all" = yes ]; then
  select_main=()
  select_second=()
fi

results=()
run_tests() { # FOLDER LABEL ARGS…
  local venv="$1" label="$2" log
  shift 2
  echo "== tests on $("$venv/bin/python" -V) ($label)"
  log="$(mktemp)"
  "$venv/bin/python" -m pytest -q -n 2 --dist loadfile "$@" 2>&1 | tee "$log" || status=1
  results+=("| $("$venv/bin/python" -V) | $("$venv/bin/python" -c 'import jax; print(jax.__version__)') | $(tail -n 1 "$log" | tr -d '=' | xargs) |")
  failed+=("$(grep -E '^(FAILED|ERROR) ' "$log" | cut -c1-160 || true)")
  skipped="$(grep -E '^SKIPPED ' "$log" || true)"
  rm -f "$log"
}

# write_results writes docs/test-results.md: what --all found, where and when.
write_results() {
  {
    echo "# What \`launch/test.sh --all\` found"
    echo
    echo "$(date -u +%F), $(uname -m), $(nproc) cores, commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)$(git diff --quiet HEAD 2>/dev/null || echo ' with changes'); lint and types: $lint."
    echo
    echo "| Python | jax | pytest's closing line |"
    echo "|---|---|---|"
    printf '%s\n' "${results[@]}"
    if [ -n "$(printf '%s' "${failed[@]}")" ]; then
      printf '\nFailed:\n\n'
      printf '%s\n' "${failed[@]}" | sed -e '/^$/d' -e "s|$PWD/||g" -e 's/^/    /'
    fi
    if [ -n "$skipped" ]; then
      printf '\nSkipped, with the reason (as the last of these Pythons said it):\n\n'
      printf '%s\n' "$skipped" | sed -e "s|$PWD/||g" -e 's/^/    /'
    fi
  } >docs/test-results.md
  echo "docs/test-results.md is written"
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

[ "$all" = no ] || write_results
[ "$status" = 0 ] && echo "all checks passed" || echo "some checks failed (see above)"
exit "$status"
