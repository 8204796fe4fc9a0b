#!/usr/bin/env bash
# The official clients of the long tests, each in a virtual environment of its own under .clients/:
#   launch/clients.sh [--test] [bfcl] [litellm]      (default: both; about 1.2 GB, CPU packages only)
# With --test they are then run against a server with the quickstart model (tests/serving/test_real_clients.py).
# BFCL's own requirements pull in CUDA builds through sentence-transformers alone, which only memory_vector needs: it is
# left out, and soundfile (which its command needs without saying so) and transformers (for the Qwen handlers) go in.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/common.sh
. launch/common.sh

home="$(realpath -m "${ENVACE_CLIENTS:-.clients}")"
python="$(main_python)"
wanted=()
test=no
for word in "$@"; do
  if [ "$word" = --test ]; then test=yes; else wanted+=("$word"); fi
done
[ "${#wanted[@]}" -gt 0 ] || wanted=(bfcl litellm)

for name in "${wanted[@]}"; do
  venv="$home/$name"
  if [ ! -x "$venv/bin/python" ]; then
    "$python" -m venv "$venv" || die "could not make a virtual environment with $python"
  fi
  pip=("$venv/bin/python" -m pip install -q --disable-pip-version-check)
  case "$name" in
    bfcl)
      "${pip[@]}" -r launch/requirements-bfcl-cli.txt || die "pip could not install what bfcl-eval needs"
      "${pip[@]}" --no-deps bfcl-eval==2026.3.23 || die "pip could not install bfcl-eval"
      ;;
    litellm)
      "${pip[@]}" litellm==1.110.2 || die "pip could not install litellm"
      ;;
    *) die "client '$name' is unknown: expected bfcl or litellm" ;;
  esac
  echo "$name: $venv"
done

if [ "$test" = yes ]; then
  make_venv .venv "$python" test
  ENVACE_CLIENTS="$home" .venv/bin/python -m pytest -m long -v -rs tests/serving/test_real_clients.py
fi
