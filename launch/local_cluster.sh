#!/usr/bin/env bash
# Rehearses a pod on this machine: several processes train one model together.
set -euo pipefail

usage() {
  cat <<'END'
launch/local_cluster.sh [--processes=N] [--devices=D] [--dry-run] -- ARGS

Starts N (default 2) processes of `python -m smallgpt_jax.main ARGS`, each with D (default 1) simulated CPU
devices. Shows the output of process 0, and of any process that fails. When one fails, the others are stopped
after 10 seconds; the exit status is that of the first failure. Ctrl-C is forwarded to all processes.

The processes run in the repository root, so a relative --workdir is relative to it. PYTHON=... selects the
interpreter (default: python on the PATH); --dry-run prints the commands without running them.

  launch/local_cluster.sh --processes=4 -- --config=configs/gpt.py:tiny --workdir=runs/rehearsal
END
}

wrong() {
  echo "error: $*; see --help" >&2
  exit 2
}

processes=2 devices=1 dry_run=
while [[ ${1:-} != -- ]]; do
  case ${1:-} in
    --processes=*) processes=${1#*=} ;;
    --devices=*) devices=${1#*=} ;;
    --dry-run) dry_run=yes ;;
    --help | -h) usage && exit ;;
    "") wrong "missing --, before the arguments of the run" ;;
    *) wrong "$1: unknown flag; arguments of the run follow --" ;;
  esac
  shift
done
shift
[[ $processes =~ ^[1-9][0-9]*$ ]] || wrong "--processes=$processes: expected a positive integer"
[[ $devices =~ ^[1-9][0-9]*$ ]] || wrong "--devices=$devices: expected a positive integer"

cd "$(dirname "$0")/.."
python=${PYTHON:-python}
grace=${GRACE_SECONDS:-10}

# A port below 30000, because the system assigns ports from 32768 on to other programs.
port=$((10000 + RANDOM % 20000))
while (: >"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do # the port is in use
  port=$((10000 + RANDOM % 20000))
done

environment=(JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES="$devices")
count_flag='--xla_force_host_platform_device_count=[0-9]*'
if [[ ${XLA_FLAGS:-} =~ $count_flag ]]; then # this flag conflicts with JAX_NUM_CPU_DEVICES
  environment+=(XLA_FLAGS="${XLA_FLAGS/"${BASH_REMATCH[0]}"/}")
fi
command=(env "${environment[@]}" "$python" -m smallgpt_jax.main
  --coordinator="127.0.0.1:$port" --num_processes="$processes")

if [[ $dry_run ]]; then
  for ((i = 0; i < processes; i++)); do
    printf '%q ' "${command[@]}" --process_id="$i" "$@"
    echo
  done
  exit
fi
command -v "$python" >/dev/null ||
  { echo "error: $python: not found; activate the environment, or set PYTHON" >&2 && exit 1; }

pids=() # of running processes
logs=$(mktemp -d)
failed=0    # status of the first failure
deadline='' # value of $SECONDS at which the remaining processes are stopped; '' before a failure
signal=TERM # signal to send at the deadline
sent=       # last signal sent

signal_all() {
  local i
  sent=$1
  for ((i = 0; i < processes; i++)); do
    [[ -z ${pids[i]:-} ]] || kill "-$1" -- "-${pids[i]}" 2>/dev/null || true
  done
}

set_deadline() {
  deadline=${deadline:-$((SECONDS + grace))}
}

trap 'signal_all INT; set_deadline' INT
trap 'signal_all TERM; set_deadline' TERM
trap 'signal_all HUP; set_deadline' HUP
trap 'signal_all KILL; rm -rf "$logs"' EXIT

set -m # one process group per process, so that Ctrl-C reaches each only once, through signal_all
for ((i = 0; i < processes; i++)); do
  if ((i == 0)); then
    "${command[@]}" --process_id="$i" "$@" </dev/null &
  else
    "${command[@]}" --process_id="$i" "$@" </dev/null >"$logs/$i" 2>&1 &
  fi
  pids[i]=$!
done
set +m
[[ ! $sent ]] || signal_all "$sent" # a signal may have arrived before the last process id was known

left=$processes
exec 3>&2 2>/dev/null # hides bash's messages about killed processes
while ((left)); do
  for ((i = 0; i < processes; i++)); do
    if [[ -z ${pids[i]:-} ]] || kill -0 "${pids[i]}"; then
      continue
    fi
    status=0
    wait "${pids[i]}" || status=$?
    pids[i]=
    left=$((left - 1))
    ((status)) || continue
    ((failed)) || failed=$status
    set_deadline
    [[ ! $sent ]] || continue # the process was stopped by a signal
    ((i == 0)) || sed "s/^/process $i: /" "$logs/$i" >&3
    echo "process $i: exit status $status" >&3
  done
  if [[ $deadline ]] && ((SECONDS >= deadline)); then
    signal_all "$signal"
    signal=KILL # for processes that ignore SIGTERM
    deadline=$((SECONDS + grace))
  fi
  sleep 0.1 || true # Ctrl-C ends the sleep early
done
exit "$failed"
