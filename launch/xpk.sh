#!/usr/bin/env bash
# A run on GKE through xpk. Running it again with the same RUN_NAME resumes from the last checkpoint.
#   PROJECT=my-project ZONE=us-east5-b CLUSTER=my-cluster TYPE=v5p-32 BUCKET=gs://my-bucket IMAGE=region-docker/…:tag \
#     launch/xpk.sh [--dry_run] -- train --config configs/qwen3_8b_v5p.py
# SLICES (default 1; more need mesh.replica over them), RUN_NAME (default envace) and GRACE (default 120, the seconds that
# a pod has to save in) are optional. IMAGE holds this repository installed with the [tpu] extra. Secrets
# (OPENAI_API_KEY, HF_TOKEN, WANDB_API_KEY) are taken by xpk from the environment at creation; they stand in the workload's
# definition, for whoever may read it in the cluster.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=launch/common.sh
. "$here/common.sh"
# shellcheck source=launch/lib_launch.sh
. "$here/lib_launch.sh"

while [ $# -gt 0 ]; do
  case "$1" in
    --dry_run) DRY_RUN=yes; shift ;;
    --) shift; break ;;
    *) die "$1: unknown option; usage: launch/xpk.sh [--dry_run] -- COMMAND …" ;;
  esac
done
[ $# -gt 0 ] || die "no command after --"
require_env PROJECT ZONE CLUSTER TYPE BUCKET IMAGE
RUN_NAME="${RUN_NAME:-envace}"
need xpk

quoted="$(printf ' %q' "$@" "--config.run_dir=runs/$RUN_NAME" "--config.checkpoint.folder=$BUCKET/$RUN_NAME")"
args=(--project="$PROJECT" --zone="$ZONE" --cluster="$CLUSTER" --workload="$RUN_NAME")
if [ "$DRY_RUN" = no ] && xpk workload list --project="$PROJECT" --zone="$ZONE" --cluster="$CLUSTER" 2>/dev/null |
  grep -qw "$RUN_NAME"; then
  echo "removing the earlier workload $RUN_NAME (its checkpoints stay in $BUCKET)"
  run xpk workload delete "${args[@]}" --force
fi
# A variable named without a value is read by xpk from the environment: no secret is in this file or on the command line.
variables="$(mktemp)"
trap 'rm -f "$variables"' EXIT
echo "ENVACE_DISTRIBUTED=auto" >"$variables"
for name in "${SECRET_NAMES[@]}"; do
  [ -z "${!name:-}" ] || echo "$name" >>"$variables"
done
[ "$DRY_RUN" = no ] || sed "s|^|# $variables: |" "$variables"
# exec: the signal that xpk sends to the shell of its command reaches the run.
run xpk workload create "${args[@]}" --tpu-type="$TYPE" --num-slices="${SLICES:-1}" --docker-image="$IMAGE" \
  --restart-on-user-code-failure --max-restarts=20 --termination-grace-period-seconds="${GRACE:-120}" \
  --env-file="$variables" --command="exec python -m envace_jax$quoted"
