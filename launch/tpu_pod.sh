#!/usr/bin/env bash
# A run on a Cloud TPU pod slice: queued resource, install on all workers, start, follow, collect. Safe to run again:
# what exists is reused, and the run resumes from its last checkpoint.
#   PROJECT=my-project ZONE=us-east5-b TPU=my-tpu TYPE=v6e-64 BUCKET=gs://my-bucket \
#     launch/tpu_pod.sh {up|install|start|follow|collect|down|all} [--dry_run] [-- train --config configs/qwen3_8b_v6e.py]
# RUNTIME (default v2-alpha-tpuv6e), SPOT=yes and RUN_NAME (default envace) are optional. Secrets (OPENAI_API_KEY, HF_TOKEN,
# WANDB_API_KEY) are taken from the environment and written to a file on the workers that only the user reads.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=launch/common.sh
. "$here/common.sh"
# shellcheck source=launch/lib_launch.sh
. "$here/lib_launch.sh"

usage="usage: launch/tpu_pod.sh {up|install|start|follow|collect|down|all} [--dry_run] [-- COMMAND …]"
[ $# -ge 1 ] || die "$usage"
action="$1"
shift
while [ $# -gt 0 ]; do
  case "$1" in
    --dry_run) DRY_RUN=yes; shift ;;
    --) shift; break ;;
    *) die "$1: unknown option; $usage" ;;
  esac
done
command=("$@")
require_env PROJECT ZONE TPU TYPE
RUNTIME="${RUNTIME:-v2-alpha-tpuv6e}"
RUN_NAME="${RUN_NAME:-envace}"
need gcloud tar

tpu() { run gcloud compute tpus tpu-vm "$@" --project="$PROJECT" --zone="$ZONE"; }
on_workers() { retry 5 20 gcloud compute tpus tpu-vm ssh "$TPU" --project="$PROJECT" --zone="$ZONE" --worker=all --command="$1"; }

up() {
  local spot=()
  [ "${SPOT:-no}" = yes ] && spot=(--spot)
  if [ "$DRY_RUN" = no ] && gcloud compute tpus queued-resources describe "$TPU" --project="$PROJECT" --zone="$ZONE" \
    >/dev/null 2>&1; then
    echo "queued resource $TPU is there already"
  else
    run gcloud compute tpus queued-resources create "$TPU" --node-id="$TPU" --project="$PROJECT" --zone="$ZONE" \
      --accelerator-type="$TYPE" --runtime-version="$RUNTIME" ${spot[@]+"${spot[@]}"}
  fi
  [ "$DRY_RUN" = yes ] && return 0
  local state n
  for ((n = 0; n < ${WAIT_MINUTES:-120}; n++)); do
    state="$(gcloud compute tpus queued-resources describe "$TPU" --project="$PROJECT" --zone="$ZONE" \
      --format='value(state.state)')"
    case "$state" in
      ACTIVE) return 0 ;;
      FAILED | SUSPENDED) die "queued resource $TPU is $state: '$0 down' removes it, then run this again" ;;
    esac
    echo "queued resource $TPU: $state"
    sleep 60
  done
  die "queued resource $TPU is still $state after ${WAIT_MINUTES:-120} minutes; run this again to go on waiting"
}

install() {
  local archive secrets
  archive="$(mktemp)"
  secrets="$(mktemp)"
  chmod 600 "$secrets"
  run tar -C "$ROOT" --exclude=.git --exclude=.venv --exclude=.venv312 --exclude=.cache --exclude=runs -czf "$archive" .
  secret_exports >"$secrets"
  tpu scp "$archive" "$TPU:envace.tar.gz" --worker=all
  tpu scp "$secrets" "$TPU:.envace-secrets" --worker=all
  rm -f "$archive" "$secrets"
  on_workers "chmod 600 .envace-secrets && mkdir -p envace && tar -xzf envace.tar.gz -C envace && cd envace &&
    { [ -x .venv/bin/python ] || python3 -m venv .venv; } &&
    .venv/bin/pip install -q -e '.[tpu]' && .venv/bin/pip install -q --no-deps -r launch/requirements-no-deps.txt"
}

start() {
  [ ${#command[@]} -gt 0 ] || die "start needs a command after --, e.g. -- train --config configs/qwen3_8b_v6e.py"
  require_env BUCKET
  local quoted
  quoted="$(printf ' %q' "${command[@]}" "--config.run_dir=runs/$RUN_NAME" \
    "--config.checkpoint.folder=$BUCKET/$RUN_NAME")"
  on_workers "cd envace && { tmux has-session -t $RUN_NAME 2>/dev/null && echo 'already running' ||
    tmux new-session -d -s $RUN_NAME \"bash -c '. ../.envace-secrets; ENVACE_DISTRIBUTED=auto \
.venv/bin/python -m envace_jax$quoted >>../$RUN_NAME.log 2>&1'\"; }"
}

follow() { run gcloud compute tpus tpu-vm ssh "$TPU" --project="$PROJECT" --zone="$ZONE" --worker=0 --command="tail -n 100 -F $RUN_NAME.log"; }

collect() {
  require_env BUCKET
  run mkdir -p "runs/$RUN_NAME"
  run gcloud storage rsync --recursive "$BUCKET/$RUN_NAME/run" "runs/$RUN_NAME"
}

down() { run gcloud compute tpus queued-resources delete "$TPU" --project="$PROJECT" --zone="$ZONE" --force --quiet; }

case "$action" in
  up | install | start | follow | collect | down) "$action" ;;
  all) up; install; start; follow ;;
  *) die "$action: unknown action; $usage" ;;
esac
