#!/usr/bin/env bash
# The part of tpu_vm.sh that runs on the workers of a slice: tpu_worker.sh COMMAND ARGS. Arguments may be empty.
# Failures exit with status 3, because gcloud uses 1 and 255 if it cannot connect.
set -euo pipefail
trap '(($? == 0)) || exit 3' EXIT

fail() {
  echo "error: $(hostname): $*" >&2
  exit 1
}

# Prints a path in which ~/ at the start is replaced by the home folder.
expand() {
  # shellcheck disable=SC2088
  if [[ $1 == "~/"* ]]; then echo "$HOME/${1#\~/}"; else echo "$1"; fi
}

# The supervisor counts as the run: it ends after the run and writes the exit status. The check of the command line is
# needed because the process id may have been reused.
is_running() {
  grep -qs tpu_worker.sh "/proc/$(cat ~/smallgpt_jax.pid 2>/dev/null || echo none)/cmdline"
}

idle() { ! is_running || fail "a run is in progress; stop it first"; }

install() { # BUCKET EXTRAS (separated by commas)
  local uv=~/.local/bin/uv
  local repository=https://packages.cloud.google.com/apt key=/usr/share/keyrings/gcsfuse.asc
  # The VMs may have Python 3.10, which is too old; uv installs 3.11.
  [[ -x $uv ]] || curl -LsSf https://astral.sh/uv/install.sh | sh
  $uv venv --quiet --allow-existing --python=3.11 .venv
  $uv pip install --quiet --python=.venv/bin/python -c constraints.txt -e ".[tpu${2:+,$2}]"
  if [[ $1 ]] && ! command -v gcsfuse >/dev/null; then
    curl -fsS $repository/doc/apt-key.gpg | sudo tee $key >/dev/null
    echo "deb [signed-by=$key] $repository gcsfuse-$(lsb_release -cs) main" |
      sudo tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null
    sudo apt-get -qq update
    sudo apt-get -qq -y -o DPkg::Lock::Timeout=300 install gcsfuse
  fi
  ready "$1" ''
  echo "installed on $(hostname)"
}

ready() { # BUCKET STAGE (FROM:TO)
  idle
  [[ -x .venv/bin/python ]] || fail "not installed; run install first"
  if [[ $1 ]]; then
    mkdir -p ~/bucket
    # No metadata cache, because other workers write the same files. Completing a checkpoint renames a folder, which
    # needs a large --rename-dir-limit.
    mountpoint -q ~/bucket || gcsfuse --implicit-dirs --rename-dir-limit=1000000 \
      --metadata-cache-ttl-secs=0 --metadata-cache-negative-ttl-secs=0 "$1" ~/bucket
  fi
  [[ ! $2 ]] || stage "$(expand "${2%%:*}")" "$(expand "${2#*:}")"
}

sizes() { (cd "$1" && find . -type f -printf '%P %s\n' | sort); } # FOLDER

# Copies a folder, unless the copy exists. An interrupted copy is started again.
stage() { # FROM TO
  local bytes free
  [[ -d $1 ]] || fail "--stage: $1: no such folder"
  if [[ -e $2 ]]; then
    [[ -d $2 && $(sizes "$1") == "$(sizes "$2")" ]] ||
      fail "--stage: $2 exists and is not a copy of $1; remove it, or choose another folder"
    return
  fi
  mkdir -p "$(dirname "$2")"
  rm -rf "$2.partial"
  bytes=$(du -sb "$1" | cut -f1) free=$(df --output=avail -B1 "$(dirname "$2")" | tail -n 1)
  ((bytes <= free)) || fail "--stage: $1 needs $bytes bytes, but $(dirname "$2") has $free; choose another folder"
  cp -r "$1" "$2.partial"
  [[ $(sizes "$1") == "$(sizes "$2.partial")" ]] || fail "--stage: $1 changed while it was copied; try again"
  mv "$2.partial" "$2"
  echo "staged $1 at $2 on $(hostname)"
}

start() { # LOGS (folder for copies of the log) ARGS
  local logs words=() word
  logs=$(expand "$1")
  for word in "${@:2}"; do # expand ~/ at the start of a value
    [[ $word != -*=* ]] || word=${word%%=*}=$(expand "${word#*=}")
    words+=("$word")
  done
  if [[ -f ~/smallgpt_jax.env ]]; then # it may contain secrets, so it is removed as soon as it is read
    # shellcheck disable=SC1090
    source ~/smallgpt_jax.env
    rm ~/smallgpt_jax.env
  fi
  rm -f ~/smallgpt_jax.exit ~/smallgpt_jax.stopped
  setsid bash launch/tpu_worker.sh supervise "$logs" "${words[@]}" >>~/smallgpt_jax.log 2>&1 </dev/null &
  echo $! >~/smallgpt_jax.pid
  echo "started on $(hostname)"
}

# Runs the training, copies its part of the log to the folder LOGS, and writes its exit status to a file.
supervise() { # LOGS ARGS
  local first copy='' pid copier='' status
  first=$(($(stat -c %s ~/smallgpt_jax.log) + 1))
  [[ ! $1 ]] || copy=$1/$(date -u +%Y%m%dT%H%M%SZ)-$(hostname).log
  trap : TERM # only the run reacts to SIGTERM
  .venv/bin/python -m smallgpt_jax.main "${@:2}" &
  pid=$!
  if [[ $copy ]]; then
    mkdir -p "$1" || true # if it fails, the run continues without the copy
    while sleep "${LOG_SECONDS:-60}"; do copy_log "$first" "$copy"; done &
    copier=$!
  fi
  while true; do # a signal interrupts `wait`
    status=0
    wait "$pid" || status=$?
    kill -0 "$pid" 2>/dev/null || break
  done
  [[ ! $copier ]] || kill "$copier" 2>/dev/null || true
  [[ ! $copy ]] || copy_log "$first" "$copy"
  echo "$status" >~/smallgpt_jax.exit.partial
  mv ~/smallgpt_jax.exit.partial ~/smallgpt_jax.exit
}

copy_log() { # FIRST_BYTE COPY
  tail -c "+$1" ~/smallgpt_jax.log >"$2" || true
}

# Prints "HOST: running", "HOST: exit status N after step M", "HOST: stopped" or "HOST: no run". Only the primary
# process logs steps.
state() {
  local state="no run" step
  if is_running; then
    state=running
  elif [[ -f ~/smallgpt_jax.stopped ]]; then
    state=stopped
  elif [[ -f ~/smallgpt_jax.exit ]]; then
    state="exit status $(<~/smallgpt_jax.exit)"
    step=$(tail -c 1000000 ~/smallgpt_jax.log | grep -aoE '^step +[0-9]+' | tail -n 1) && state+=" after step ${step##* }"
  fi
  echo "$(hostname): $state"
}

status() { echo "$(state); $(tail -n 1 ~/smallgpt_jax.log 2>/dev/null || echo "no log")"; }

# Stops the run. `watch` does not start it again.
stop() { # SECONDS between SIGTERM and SIGKILL
  if is_running; then
    touch ~/smallgpt_jax.stopped
    end "$1"
  fi
  state
}

end() { # SECONDS between SIGTERM and SIGKILL
  local pid i
  is_running || return 0
  pid=$(<~/smallgpt_jax.pid)
  kill -TERM -- "-$pid" || true
  for ((i = 0; i < $1; i++)); do
    is_running || return 0
    sleep 1
  done
  if is_running; then
    kill -KILL -- "-$pid"
    echo 137 >~/smallgpt_jax.exit
  fi
}

cd "$(dirname "$0")/.."
"$@"
