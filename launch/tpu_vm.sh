#!/usr/bin/env bash
# Trains on a slice of Cloud TPU VMs. Needs git and gcloud on this machine.
set -euo pipefail

usage() {
  cat <<'END'
launch/tpu_vm.sh COMMAND --name=NAME --zone=ZONE [flags] [-- ARGS]

  watch     keeps a run going until it ends: creates the slice if it does not exist, recreates it after each preemption;
            then does install and start. Takes the flags and ARGS of create, install and start
  create    requests the slice, as a queued resource, and waits until it is active
  install   copies this repository's last commit to all workers and creates the environment there
  start     starts `python -m smallgpt_jax.main ARGS` on all workers, detached
  resume    continues a run once after a preemption, with the same flags and ARGS as watch: recreates the slice unless
            it is active, then does install and start. The run resumes from its newest checkpoint
  logs      follows the log of a worker
  status    shows the state of the slice, and of the run on each worker
  stop      stops the run on all workers
  delete    deletes the slice

  --name=NAME, --zone=ZONE     the slice (all commands)
  --project=PROJECT            Google Cloud project; default: gcloud's (all commands)
  --dry-run                    print the commands without running them (all commands)
  --accelerator_type=TYPE      type and size, such as v5litepod-8 (create)
  --runtime_version=VERSION    image of the VMs: v2-alpha-tpuv5-lite for v5e (create)
  --spot                       cheaper VMs that can be preempted (create)
  --create_flag=FLAG           further flag of `gcloud compute tpus queued-resources create`, may be repeated (create)
  --no_wait                    do not wait until the slice is active (create)
  --max_wait=MINUTES           how long to wait for the slice; default: 1440, one day (create)
  --repo=URL                   clone this repository instead of copying the local one (install)
  --extras=NAMES               extras of setup.py to install, separated by commas (install)
  --bucket=NAME                Cloud Storage bucket to mount at ~/bucket; `start` copies the logs to its folder logs/NAME
                               (install, start)
  --stage=FROM:TO              first copy the folder FROM to the local folder TO on each worker (start)
  --env=KEY=VALUE, --env=KEY   environment variable of the run; default: its value in this shell. The value is never
                               printed. May be repeated (start)
  --worker=N                   worker whose log is shown; default: 0 (logs)
  --yes                        do not ask for confirmation (delete)

~/ at the start of a value in ARGS is the home folder on the workers; /dev/shm is their memory:
  launch/tpu_vm.sh watch --name=gpt --zone=us-west4-a --accelerator_type=v5litepod-16 --spot \
      --runtime_version=v2-alpha-tpuv5-lite --bucket=mine --stage=~/bucket/fineweb-edu:/dev/shm/fineweb-edu -- \
      --config=configs/gpt.py --workdir=~/bucket/runs/gpt --config.data.store=/dev/shm/fineweb-edu
END
}

wrong() {
  echo "error: $*; see --help" >&2
  exit 2
}

fail() {
  echo "error: $*" >&2
  exit 1
}

# Prints its arguments as one line, quoted for a shell.
quoted() {
  local line='' word quote="'" escaped="'\\''"
  for word; do
    [[ $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]] || word="'${word//$quote/$escaped}'"
    line+="$word "
  done
  echo "${line% }"
}

run() {
  if [[ $dry_run ]]; then
    quoted "$@"
  else
    echo "+ $(quoted "$@")" >&2
    "$@"
  fi
}

### The state of the slice

# Prints the output of a gcloud command. If the command fails, prints NOT_FOUND, or UNKNOWN and its errors (to standard
# error).
ask() {
  local answer errors
  errors=$(mktemp)
  if answer=$("$@" 2>"$errors"); then
    echo "$answer"
  elif grep -q NOT_FOUND "$errors"; then
    echo NOT_FOUND
  else
    cat "$errors" >&2
    echo UNKNOWN
  fi
  rm -f "$errors"
}

# Sets $state to the state of the request. A request can stay ACTIVE after its node is gone. If the node of an ACTIVE
# request is not READY, $state is therefore the state of the node, such as NODE_PREEMPTED.
query() {
  local before=$state node
  state=$(ask "${describe[@]}")
  if [[ $state == ACTIVE ]]; then
    node=$(ask "${describe_node[@]}")
    [[ $node == READY ]] || state=NODE_$node
  fi
  [[ $state == "$before" ]] || echo "$(date +%H:%M:%S) $name is $state"
}

is_gone() { [[ $state =~ ^(SUSPENDED|NODE_(PREEMPTED|TERMINATED|STOPPED|NOT_FOUND))$ ]]; }

fail_with_reason() {
  fail "$name is $state; for the reason, run" \
    "$(quoted gcloud compute tpus queued-resources describe "$name" "${where[@]}")"
}

# Fails if --max_wait minutes have passed since the time $1, which is a value of $SECONDS.
check_wait() {
  ((SECONDS - $1 < 60 * max_wait)) ||
    fail "$name is still $state after $max_wait minutes (--max_wait); delete it, or wait again with resume or watch"
}

# Polls the slice until its state is final.
wait_for_slice() {
  local began=$SECONDS
  if [[ $dry_run ]]; then
    echo "$(quoted "${describe[@]}") # repeated until ACTIVE, FAILED or SUSPENDED"
    echo "$(quoted "${describe_node[@]}") # repeated until READY"
    return
  fi
  query
  # A single network error must not end hours of waiting, but gcloud must work at first.
  [[ $state != UNKNOWN ]] || exit 1
  until [[ $state == ACTIVE || $state == FAILED || $state == NOT_FOUND ]] || is_gone; do
    check_wait "$began"
    pause
    query
  done
}

pause() { sleep "${POLL_SECONDS:-30}"; }

### The commands

create() {
  request_slice
  [[ ! $no_wait ]] || return 0
  wait_for_slice
  [[ $dry_run || $state == ACTIVE ]] || fail_with_reason
}

request_slice() {
  run gcloud compute tpus queued-resources create "$name" --node-id="$name" "${where[@]}" \
    --accelerator-type="$accelerator_type" --runtime-version="$runtime_version" ${spot:+--spot} \
    ${create_flags[@]+"${create_flags[@]}"} # bash 3.2 cannot expand empty arrays
}

on_workers() { # WORKER (a number or all) COMMAND
  run gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker="$1" --command="$2"
}

copy_to_workers() { # FILE
  run gcloud compute tpus tpu-vm scp "$1" "$name:" "${where[@]}" --worker=all
}

there="bash smallgpt_jax/launch/tpu_worker.sh"

install() {
  local archive=build/$name/smallgpt_jax.tar.gz
  # without modules of an earlier commit, but with .venv
  local get="mkdir -p smallgpt_jax; rm -rf smallgpt_jax/smallgpt_jax"
  get+="; tar -xzf smallgpt_jax.tar.gz -C smallgpt_jax"
  if [[ $repo ]]; then
    get="if test -d smallgpt_jax/.git; then git -C smallgpt_jax pull --quiet --ff-only"
    # an earlier installation without --repo
    get+="; else test ! -e smallgpt_jax || mv smallgpt_jax smallgpt_jax-\$(date +%s)"
    get+="; git clone --quiet $(quoted "$repo") smallgpt_jax; fi"
  else
    [[ ! $(git status --porcelain) ]] || echo "warning: uncommitted changes are not copied" >&2
    run mkdir -p "build/$name" &&
      run git archive --format=tar.gz --output="$archive" HEAD &&
      copy_to_workers "$archive" || return
  fi
  get="if test -f smallgpt_jax/launch/tpu_worker.sh; then $there idle; fi; $get"
  on_workers all "set -e; $get; $there install $(quoted "$bucket" "$extras")"
}

start() { # in two steps, so that no worker starts unless all are ready
  on_workers all "$there ready $(quoted "$bucket" "$stage")" &&
    copy_environment &&
    on_workers all "$there start $(quoted "${bucket:+~/bucket/logs/$name}" "$@")"
}

# Copies the values of --env in a file, because the arguments of processes are public. `start` removes it.
copy_environment() {
  local file=build/$name/smallgpt_jax.env status=0 variable
  ((${#env[@]})) || return 0
  if [[ ! $dry_run ]]; then
    mkdir -p "build/$name"
    trap 'rm -f "build/$name/smallgpt_jax.env"' EXIT
    rm -f "$file"
    (umask 077 && for variable in "${env[@]}"; do
      printf 'export %s=%q\n' "${variable%%=*}" "${variable#*=}"
    done >"$file")
  fi
  copy_to_workers "$file" || status=$?
  [[ $dry_run ]] || rm "$file"
  return "$status"
}

resume() {
  if [[ $dry_run ]]; then
    wait_for_slice
    yes=yes delete
    no_wait='' create
  else
    query
    [[ $state == NOT_FOUND ]] || wait_for_slice # NOT_FOUND: an earlier resume was interrupted
    [[ $state == ACTIVE || $state == NOT_FOUND ]] || yes=yes delete
    [[ $state == ACTIVE ]] || no_wait='' create
  fi
  install && start "$@"
}

logs() { on_workers "$worker" "tail -n 100 -F smallgpt_jax.log"; }

status() {
  if [[ $dry_run ]]; then
    quoted "${describe[@]}"
    quoted "${describe_node[@]}"
  else
    query
  fi
  [[ ! $dry_run && $state != ACTIVE ]] || on_workers all "$there status"
}

stop() { on_workers all "$there stop ${GRACE_SECONDS:-30}"; }

delete() {
  if [[ ! $yes && ! $dry_run ]]; then
    read -r -p "Delete $name in $zone, with its disks? [y/N] " answer || true
    [[ ${answer:-} == [yY]* ]] || fail "nothing was deleted"
  fi
  run gcloud compute tpus queued-resources delete "$name" "${where[@]}" --force --quiet
}

### Arguments

cd "$(dirname "$0")/.."
command=${1:-}
case $command in
  watch | create | install | start | resume | logs | status | stop | delete) shift ;;
  --help | -h) usage && exit ;;
  "") wrong "missing command" ;;
  *) wrong "$command: unknown command" ;;
esac

name='' zone='' project='' accelerator_type='' runtime_version='' spot='' no_wait='' max_wait=1440 repo='' extras=''
bucket='' stage='' worker=0 yes='' dry_run='' state='' env=() create_flags=()
with_value='^--(name|zone|project|accelerator_type|runtime_version|create_flag|max_wait|repo|extras|bucket|stage|env'
with_value+='|worker)$'
without='^--(spot|no_wait|yes|dry-run)$'
while (($#)) && [[ $1 != -- ]]; do
  flag=${1%%=*}
  if [[ $flag =~ $with_value ]]; then
    if [[ $1 != *=* ]]; then # --name VALUE
      (($# > 1)) || wrong "$flag: missing value"
      set -- "$1=$2" "${@:3}"
    fi
    case $flag in
      --env) env+=("${1#*=}") ;;
      --create_flag) create_flags+=("${1#*=}") ;;
      *) printf -v "${flag#--}" %s "${1#*=}" ;;
    esac
  elif [[ $1 =~ $without ]]; then
    printf -v "${BASH_REMATCH[1]//-/_}" yes
  elif [[ $1 =~ ^(--help|-h)$ ]]; then
    usage && exit
  else # without the value, which may be secret
    wrong "$flag: unknown flag; arguments of the run follow --"
  fi
  shift
done
((!$#)) || shift # the --

needed="name zone"
[[ ! $command =~ ^(watch|create|resume)$ ]] || needed+=" accelerator_type runtime_version"
for flag in $needed; do
  [[ ${!flag} ]] || wrong "$command needs --$flag="
done
if [[ $command =~ ^(watch|start|resume)$ ]]; then
  (($#)) || wrong "$command needs the arguments of the run, after --"
  # shellcheck disable=SC2088
  [[ $bucket || "$* =$stage" != *"=~/bucket"* ]] || wrong "paths in ~/bucket need --bucket=NAME"
elif (($#)); then
  wrong "$command: unexpected arguments after --"
fi
[[ $max_wait =~ ^(0|[1-9][0-9]*)$ ]] || wrong "--max_wait: expected a number of minutes"
[[ $extras =~ ^[A-Za-z0-9_,-]*$ ]] || wrong "--extras: expected names separated by commas"
[[ ! $stage || $stage =~ ^[^:]+:[^:]+$ ]] || wrong "--stage: expected FROM:TO"
for ((i = 0; i < ${#env[@]}; i++)); do
  key=${env[i]%%=*}
  [[ $key =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || wrong "--env: expected KEY=VALUE or KEY"
  [[ ${env[i]} == *=* ]] || env[i]=$key=$(printenv "$key") || wrong "--env: without a value, the variable must be set in this shell"
done

bucket=${bucket#gs://}
where=(--zone="$zone")
[[ ! $project ]] || where+=(--project="$project")
describe=(gcloud compute tpus queued-resources describe "$name" "${where[@]}" '--format=value(state.state)')
describe_node=(gcloud compute tpus tpu-vm describe "$name" "${where[@]}" '--format=value(state)')
source launch/tpu_watch.sh

"$command" "$@"
