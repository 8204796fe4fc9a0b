# Shared by the scripts of this folder: find a Python, make a virtual environment, say what failed.
# shellcheck shell=bash

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

die() {
  echo "error: $*" >&2
  exit 1
}

# find_python 3.11 prints an interpreter of that version, or nothing.
find_python() {
  local want="$1" candidate
  local -a candidates=("python$want" python3 python)
  if command -v pyenv >/dev/null 2>&1; then
    for candidate in "$(pyenv root)"/versions/"$want".*/bin/python; do candidates+=("$candidate"); done
  fi
  for candidate in "${candidates[@]}"; do
    if [ "$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$want" ]; then
      command -v "$candidate"
      return 0
    fi
  done
  return 1
}

# main_python prints the interpreter to use: 3.11, else 3.12.
main_python() {
  find_python 3.11 || find_python 3.12 || die "Python 3.11 or 3.12 is needed and neither was found on PATH;" \
    "install one (python.org, your package manager, or pyenv install 3.11) and run this again"
}

# make_venv FOLDER PYTHON [test] installs the pinned requirements once; a stamp of them makes it idempotent.
make_venv() {
  local venv="$1" python="$2" extra="${3:-}" stamp want free
  local -a files=("$ROOT/requirements.txt")
  [ "$extra" = test ] && files+=("$ROOT/launch/requirements-test.txt")
  want="$(cat "${files[@]}" "$ROOT/launch/requirements-no-deps.txt" | cksum) $("$python" -V)"
  stamp="$venv/.envace-stamp"
  if [ -x "$venv/bin/python" ] && grep -qxF "$want" "$stamp" 2>/dev/null; then
    return 0
  fi
  free="$(df -Pk "$ROOT" | awk 'NR == 2 { print int($4 / 1024) }')"
  [ "$free" -ge 3000 ] || die "only $free MB are free where this folder lies; the environment takes about 2,500 MB"
  echo "setting up $venv with $("$python" -V) (some minutes the first time)"
  "$python" -m venv "$venv" || die "could not make a virtual environment with $python (Debian: apt install python3-venv)"
  local -a args=()
  for file in "${files[@]}"; do args+=(-r "$file"); done
  "$venv/bin/python" -m pip install -q --disable-pip-version-check "${args[@]}" ||
    die "pip could not install the requirements (its message is above): check the network or the proxy, then run this again"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps -r "$ROOT/launch/requirements-no-deps.txt" ||
    die "pip could not install launch/requirements-no-deps.txt (its message is above): check the network"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e "$ROOT" 2>/dev/null ||
    "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps -e "$ROOT" ||
    die "pip could not install the package itself (its message is above)"
  echo "$want" >>"$stamp"
}
