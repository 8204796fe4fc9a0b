# Shared by the cluster launchers: a dry run that prints every command, retries, and no secrets on a command line.
# shellcheck shell=bash

DRY_RUN=no

# run COMMAND… runs it, or prints it under --dry_run.
run() {
  if [ "$DRY_RUN" = yes ]; then
    printf '+'
    printf ' %q' "$@"
    printf '\n'
  else
    "$@"
  fi
}

# retry N SECONDS COMMAND… for control planes that answer "busy".
retry() {
  local tries="$1" pause="$2" n
  shift 2
  if [ "$DRY_RUN" = yes ]; then
    run "$@"
    return 0
  fi
  for ((n = 1; n <= tries; n++)); do
    "$@" && return 0
    echo "attempt $n of $tries failed: $1" >&2
    [ "$n" -lt "$tries" ] && sleep "$pause"
  done
  return 1
}

need() {
  local name
  for name in "$@"; do
    [ "$DRY_RUN" = yes ] || command -v "$name" >/dev/null 2>&1 ||
      die "'$name' is not installed; it is what this launcher drives (--dry_run prints the commands without it)"
  done
}

require_env() {
  local name
  for name in "$@"; do
    [ -n "${!name:-}" ] || die "$name is not set; see the head of this script"
  done
}

# Secrets that a run may need; they travel through a file that only the user reads, never as an argument.
SECRET_NAMES=(OPENAI_API_KEY HF_TOKEN WANDB_API_KEY)

# secret_exports prints export lines for those that are set.
secret_exports() {
  local name
  for name in "${SECRET_NAMES[@]}"; do
    [ -n "${!name:-}" ] && printf 'export %s=%q\n' "$name" "${!name}"
  done
  return 0
}

# git_state prints the commit and how many files differ from it, for a copy without .git (envace_jax reads .commit).
git_state() {
  command -v git >/dev/null 2>&1 || return 0
  git -C "$ROOT" rev-parse HEAD 2>/dev/null || return 0
  git -C "$ROOT" status --porcelain | wc -l
}
