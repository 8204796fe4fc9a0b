#!/usr/bin/env bash
# N processes on this machine as one run (gloo collectives between them on CPU).
#   launch/local.sh N [--devices M] [--dry_run] -- train --config configs/quickstart.py --config.mesh.fsdp=8
# Each process gets M virtual CPU devices (default 4; 0 leaves real devices alone). A process that fails ends the
# others, and the exit status is its own. Logs: one file a process under the run's folder, or LOG_DIR.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=launch/common.sh
. "$here/common.sh"
# shellcheck source=launch/lib_launch.sh
. "$here/lib_launch.sh"

usage="usage: launch/local.sh N [--devices M] [--dry_run] -- COMMAND [options]"
[ $# -ge 1 ] || die "$usage"
n="$1"
shift
[[ "$n" =~ ^[1-9][0-9]*$ ]] || die "N=$n: expected a number of processes; $usage"
devices=4
while [ $# -gt 0 ]; do
  case "$1" in
    --devices) devices="${2:?--devices needs a number}"; shift 2 ;;
    --dry_run) DRY_RUN=yes; shift ;;
    --) shift; break ;;
    *) die "$1: unknown option; $usage" ;;
  esac
done
[ $# -gt 0 ] || die "no command after --; $usage"
[[ "$devices" =~ ^[0-9]+$ ]] || die "--devices $devices: expected a number"

python="${PYTHON:-$ROOT/.venv/bin/python}"
[ "$DRY_RUN" = yes ] || [ -x "$python" ] || die "$python is not there; run launch/quickstart.sh once, or set PYTHON"
port="${PORT:-$(( 20000 + RANDOM % 20000 ))}"
logs="${LOG_DIR:-$(mktemp -d "${TMPDIR:-/tmp}/envace-local.XXXXXX")}"
[ "$DRY_RUN" = yes ] || mkdir -p "$logs"

export ENVACE_COORDINATOR="127.0.0.1:$port" ENVACE_PROCESSES="$n"
if [ "$devices" -gt 0 ]; then
  export JAX_PLATFORMS=cpu XLA_FLAGS="--xla_force_host_platform_device_count=$devices ${XLA_FLAGS:-}"
fi

if [ "$DRY_RUN" = yes ]; then
  for ((i = 0; i < n; i++)); do
    run env ENVACE_COORDINATOR="$ENVACE_COORDINATOR" ENVACE_PROCESSES="$n" ENVACE_PROCESS="$i" \
      ${XLA_FLAGS:+XLA_FLAGS="$XLA_FLAGS"} "$python" -m envace_jax "$@"
  done
  exit 0
fi

pids=()
stop() {
  local one
  for one in ${pids[@]+"${pids[@]}"}; do kill "$one" 2>/dev/null || true; done
}
trap stop INT TERM
for ((i = 1; i < n; i++)); do
  ENVACE_PROCESS="$i" "$python" -m envace_jax "$@" >"$logs/process-$i.log" 2>&1 &
  pids+=($!)
done
ENVACE_PROCESS=0 "$python" -m envace_jax "$@" &
pids+=($!)

# By polling: a signal ends `wait`, and not the process that is waited for.
status=0
while [ ${#pids[@]} -gt 0 ]; do
  alive=() failed=no
  for pid in "${pids[@]}"; do
    if kill -0 "$pid" 2>/dev/null; then
      alive+=("$pid")
      continue
    fi
    code=0
    wait "$pid" || code=$?
    [ "$status" != 0 ] || status="$code"
    case "$code" in 0 | 75) ;; *) failed=yes ;; esac # 75: told to stop, as the others are
  done
  pids=(${alive[@]+"${alive[@]}"})
  [ "$failed" = no ] || stop
  [ ${#pids[@]} = 0 ] || sleep 0.2
done
[ "$status" = 0 ] || echo "a process ended with status $status; logs: $logs" >&2
exit "$status"
