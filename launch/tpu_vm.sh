#!/usr/bin/env bash
# Trains on a slice of Cloud TPU VMs. Needs git and gcloud on this machine.
set -euo pipefail

usage() {
  cat <<'END'
launch/tpu_vm.sh COMMAND --name=NAME --zone=ZONE [flags] [-- ARGS]

  create    requests the slice, as a queued resource, and waits until it is active
  install   copies this repository's last commit to all workers and creates the environment there
  start     starts `python -m smallgpt_jax.main ARGS` on all workers, detached
  resume    continues a run after a preemption, with the flags and ARGS of the other commands: recreates the slice
            unless it is active, then does install and start. The run resumes from its newest checkpoint
  logs      follows the log of a worker
  status    shows the state of the slice, and of the run on each worker
  stop      stops the run on all workers
  delete    deletes the slice

  --name=NAME, --zone=ZONE     the slice (all commands)
  --project=PROJECT            default: gcloud's (all commands)
  --accelerator_type=TYPE      type and size, such as v5litepod-8 (create, resume)
  --runtime_version=VERSION    image of the VMs: v2-alpha-tpuv5-lite for v5e (create, resume)
  --spot                       cheaper VMs that can be preempted (create, resume)
  --no_wait                    do not wait (create)
  --repo=URL                   clone this repository instead of copying the local one (install, resume)
  --bucket=NAME                Cloud Storage bucket to mount at ~/bucket (install, start, resume)
  --worker=N                   default: 0 (logs)
  --yes                        do not ask for confirmation (delete)
  --dry-run                    print the commands without running them (all commands)

~/ at the start of a value in ARGS is the home folder on the workers:
  launch/tpu_vm.sh start --name=gpt --zone=us-west4-a --bucket=mine -- \
      --config=configs/gpt.py --workdir=~/bucket/runs/gpt --config.data.store=~/bucket/fineweb-edu
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

### The commands

create() {
  run gcloud compute tpus queued-resources create "$name" --node-id="$name" "${where[@]}" \
    --accelerator-type="$accelerator_type" --runtime-version="$runtime_version" ${spot:+--spot}
  [[ ! $no_wait ]] || return 0
  wait_for_slice
  [[ $dry_run || $state == ACTIVE ]] || fail "$name is $state; for the reason, run" \
    "$(quoted gcloud compute tpus queued-resources describe "$name" "${where[@]}")"
}

# Polls the state of the slice into $state until the state is final.
wait_for_slice() {
  local before=''
  if [[ $dry_run ]]; then
    echo "$(quoted "${describe[@]}") # repeated until ACTIVE, FAILED or SUSPENDED"
    return
  fi
  echo "+ $(quoted "${describe[@]}")" >&2
  while true; do
    if ! state=$("${describe[@]}"); then
      [[ $before ]] || exit 1
      state="unknown" # a single network error must not end hours of waiting
    fi
    [[ $state == "$before" ]] || echo "$(date +%H:%M:%S) $name is $state"
    [[ ! $state =~ ^(ACTIVE|FAILED|SUSPENDED)$ ]] || break
    before=$state
    sleep "${POLL_SECONDS:-30}"
  done
}

on_workers() { # WORKER (a number or all) COMMAND
  run gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker="$1" --command="$2"
}

# Workers call the functions below through their own copy of this script.
there="bash smallgpt_jax/launch/tpu_vm.sh worker"

install() {
  local get="mkdir -p smallgpt_jax; tar -xzf smallgpt_jax.tar.gz -C smallgpt_jax"
  if [[ $repo ]]; then
    get="if test -d smallgpt_jax; then git -C smallgpt_jax pull --quiet --ff-only"
    get+="; else git clone --quiet $(quoted "$repo") smallgpt_jax; fi"
  else
    [[ ! $(git status --porcelain) ]] || echo "warning: uncommitted changes are not copied" >&2
    run mkdir -p build
    run git archive --format=tar.gz --output=build/smallgpt_jax.tar.gz HEAD
    run gcloud compute tpus tpu-vm scp build/smallgpt_jax.tar.gz "$name:" "${where[@]}" --worker=all
  fi
  get="if test -f smallgpt_jax/launch/tpu_vm.sh; then $there idle; fi; $get"
  on_workers all "set -e; $get; $there install $(quoted "$bucket")"
}

start() { # in two steps, so that no worker starts unless all are ready
  on_workers all "$there ready $(quoted "$bucket")"
  on_workers all "$there start $(quoted "$@")"
}

resume() {
  state=''
  if [[ $dry_run ]] || "${describe[@]}" &>/dev/null; then # else the slice is missing: an earlier resume was interrupted
    wait_for_slice
    [[ $state == ACTIVE ]] || yes=yes delete
  fi
  [[ $state == ACTIVE ]] || no_wait='' create
  install
  start "$@"
}

logs() { on_workers "$worker" "tail -n 100 -F smallgpt_jax.log"; }

status() {
  run "${describe[@]}"
  [[ ! $dry_run && $("${describe[@]}") != ACTIVE ]] || on_workers all "$there status"
}

stop() { on_workers all "$there stop ${GRACE_SECONDS:-30}"; }

delete() {
  if [[ ! $yes && ! $dry_run ]]; then
    read -r -p "Delete $name in $zone, with its disks? [y/N] " answer || true
    [[ ${answer:-} == [yY]* ]] || fail "nothing was deleted"
  fi
  run gcloud compute tpus queued-resources delete "$name" "${where[@]}" --force --quiet
}

### On a worker

worker_running() { # checks the command line, because the process id may have been reused
  grep -qs smallgpt_jax.main "/proc/$(cat ~/smallgpt_jax.pid 2>/dev/null || echo none)/cmdline"
}

worker_idle() { ! worker_running || fail "$(hostname): a run is in progress; stop it first"; }

worker_install() { # [BUCKET]
  local uv=~/.local/bin/uv
  local repository=https://packages.cloud.google.com/apt key=/usr/share/keyrings/gcsfuse.asc
  # The VMs may have Python 3.10, which is too old; uv installs 3.11.
  [[ -x $uv ]] || curl -LsSf https://astral.sh/uv/install.sh | sh
  $uv venv --quiet --allow-existing --python=3.11 .venv
  $uv pip install --quiet --python=.venv/bin/python -c constraints.txt -e '.[tpu]'
  if [[ ${1:-} ]] && ! command -v gcsfuse >/dev/null; then
    curl -fsS $repository/doc/apt-key.gpg | sudo tee $key >/dev/null
    echo "deb [signed-by=$key] $repository gcsfuse-$(lsb_release -cs) main" |
      sudo tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null
    sudo apt-get -qq update
    sudo apt-get -qq -y -o DPkg::Lock::Timeout=300 install gcsfuse
  fi
  worker_ready "$@"
  echo "installed on $(hostname)"
}

worker_ready() { # [BUCKET]
  worker_idle
  [[ -x .venv/bin/python ]] || fail "$(hostname): not installed; run install first"
  [[ ${1:-} ]] || return 0
  mkdir -p ~/bucket
  # No metadata cache, because other workers write the same files. Completing a checkpoint renames a folder, which needs
  # a large --rename-dir-limit.
  mountpoint -q ~/bucket || gcsfuse --implicit-dirs --rename-dir-limit=1000000 \
    --metadata-cache-ttl-secs=0 --metadata-cache-negative-ttl-secs=0 "$1" ~/bucket
}

worker_start() { # ARGS
  local words=() word
  for word; do # expand ~/ at the start of a value
    # shellcheck disable=SC2088
    [[ $word != -*=* || ${word#*=} != "~/"* ]] || word=${word%%=*}=$HOME/${word#*=\~/}
    words+=("$word")
  done
  setsid .venv/bin/python -m smallgpt_jax.main "${words[@]}" >>~/smallgpt_jax.log 2>&1 </dev/null &
  echo $! >~/smallgpt_jax.pid
  echo "started on $(hostname)"
}

worker_status() {
  local state="no run"
  ! worker_running || state=running
  echo "$(hostname): $state; $(tail -n 1 ~/smallgpt_jax.log 2>/dev/null || echo "no log")"
}

worker_stop() { # SECONDS between SIGTERM and SIGKILL
  local pid i
  if worker_running; then
    pid=$(cat ~/smallgpt_jax.pid)
    kill -TERM -- "-$pid" || true
    for ((i = 0; i < $1; i++)); do
      worker_running || break
      sleep 1
    done
    ! worker_running || kill -KILL -- "-$pid"
  fi
  echo "no run on $(hostname)"
}

### Arguments

cd "$(dirname "$0")/.."
command=${1:-}
case $command in
  create | install | start | resume | logs | status | stop | delete) shift ;;
  worker)
    "worker_$2" "${@:3}"
    exit
    ;;
  --help | -h) usage && exit ;;
  "") wrong "missing command" ;;
  *) wrong "$command: unknown command" ;;
esac

name='' zone='' project='' accelerator_type='' runtime_version='' spot='' no_wait='' repo='' bucket=''
worker=0 yes='' dry_run=''
with_value='^--(name|zone|project|accelerator_type|runtime_version|repo|bucket|worker)=(.*)$'
without='^--(spot|no_wait|yes|dry-run)$'
while (($#)) && [[ $1 != -- ]]; do
  if [[ $1 =~ $with_value ]]; then
    printf -v "${BASH_REMATCH[1]}" %s "${BASH_REMATCH[2]}"
  elif [[ $1 =~ $without ]]; then
    printf -v "${BASH_REMATCH[1]//-/_}" yes
  elif [[ $1 =~ ^(--help|-h)$ ]]; then
    usage && exit
  else
    wrong "$1: unknown flag; arguments of the run follow --"
  fi
  shift
done
((!$#)) || shift # the --

needed="name zone"
[[ ! $command =~ ^(create|resume)$ ]] || needed+=" accelerator_type runtime_version"
for flag in $needed; do
  [[ ${!flag} ]] || wrong "$command needs --$flag="
done
if [[ $command =~ ^(start|resume)$ ]]; then
  (($#)) || wrong "$command needs the arguments of the run, after --"
  [[ $bucket || "$*" != *"=~/bucket"* ]] || wrong "paths in ~/bucket need --bucket=NAME"
elif (($#)); then
  wrong "$command: unexpected arguments after --"
fi

bucket=${bucket#gs://}
where=(--zone="$zone")
[[ ! $project ]] || where+=(--project="$project")
describe=(gcloud compute tpus queued-resources describe "$name" "${where[@]}" '--format=value(state.state)')

"$command" "$@"
