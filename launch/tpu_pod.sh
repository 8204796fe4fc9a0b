#!/usr/bin/env bash
# A run on a Cloud TPU pod slice: queued resource, install on all workers, start, follow, collect. Safe to run again:
# what exists is reused, and the run resumes from its last checkpoint.
#   PROJECT=my-project ZONE=us-east5-b TPU=my-tpu TYPE=v6e-32 BUCKET=gs://my-bucket \
#     launch/tpu_pod.sh {up|install|start|follow|collect|down|all} [--dry_run] [-- train --config configs/qwen3_8b_v6e.py]
# RUNTIME (default: the one of TYPE), SPOT=yes and RUN_NAME (default envace) are optional. Secrets (OPENAI_API_KEY, HF_TOKEN,
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
if [ -z "${RUNTIME:-}" ]; then
  case "$TYPE" in
    v5litepod-*) RUNTIME=v2-alpha-tpuv5-lite ;;
    v5p-*) RUNTIME=v2-alpha-tpuv5 ;;
    v6e-*) RUNTIME=v2-alpha-tpuv6e ;;
    *) die "TYPE=$TYPE: expected v5litepod-N (chips), v5p-N (cores, two a chip) or v6e-N (chips), or set RUNTIME too" ;;
  esac
fi
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
  folder="$(mktemp -d)"
  trap 'rm -rf "$folder"' EXIT
  run tar -C "$ROOT" --exclude=.git --exclude=.venv --exclude=.venv312 --exclude=.cache --exclude='.*_cache' \
    --exclude=__pycache__ --exclude=.clients --exclude=runs -czf "$folder/envace.tar.gz" .
  (umask 077 && secret_exports >"$folder/secrets")
  git_state >"$folder/commit"
  tpu scp "$folder/envace.tar.gz" "$TPU:envace.tar.gz" --worker=all
  tpu scp "$folder/secrets" "$TPU:.envace-secrets" --worker=all
  tpu scp "$folder/commit" "$TPU:.envace-commit" --worker=all
  # The workers' own Python is too old on Ubuntu 22.04; uv brings one that needs no root.
  on_workers "set -e; chmod 600 .envace-secrets; mkdir -p envace; tar -xzf envace.tar.gz -C envace; cd envace
    mv ../.envace-commit .commit
    if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      python=\$(command -v python3.11 || command -v python3.12 || true)
      if [ -z \"\$python\" ]; then
        python3 -m pip install -q --user uv
        python3 -m uv python install -q 3.11
        python=\$(python3 -m uv python find 3.11)
      fi
      rm -rf .venv
      \"\$python\" -m venv .venv
    fi
    .venv/bin/pip install -q -e '.[tpu]'
    .venv/bin/pip install -q --no-deps -r launch/requirements-no-deps.txt"
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
