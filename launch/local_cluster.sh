#!/usr/bin/env bash
# A rehearsal of a pod on this machine: several processes that train one model together.
set -euo pipefail

usage() {
  cat <<'END'
launch/local_cluster.sh [--processes=N] [--devices=D] [--dry-run] -- ARGS

Starts N (2) processes of `python -m smallgpt_jax.main ARGS`, each with D (1) simulated CPU devices. Process
0 writes to this terminal; what another wrote is shown if it fails. When one fails, the others are stopped
10 seconds later, and the exit status is that of the first that failed. Ctrl-C reaches all of them.

They run in the repository's root, wherever you are: there, too, does a relative --workdir lie. PYTHON=...
names another python than the one on the PATH; --dry-run prints the commands and runs none.

  launch/local_cluster.sh --processes=4 -- --config=configs/gpt.py:tiny --workdir=runs/rehearsal
END
}

wrong() {
  echo "error: $*; --help explains" >&2
  exit 2
}

processes=2 devices=1 dry_run=
while [[ ${1:-} != -- ]]; do
  case ${1:-} in
    --processes=*) processes=${1#*=} ;;
    --devices=*) devices=${1#*=} ;;
    --dry-run) dry_run=yes ;;
    --help | -h) usage && exit ;;
    "") wrong "the arguments of the run come after --" ;;
    *) wrong "unknown flag $1 (the arguments of the run come after --)" ;;
  esac
  shift
done
shift
[[ $processes =~ ^[1-9][0-9]*$ ]] || wrong "--processes=$processes: not a number of processes"
[[ $devices =~ ^[1-9][0-9]*$ ]] || wrong "--devices=$devices: not a number of devices"

cd "$(dirname "$0")/.."
python=${PYTHON:-python}
grace=${GRACE_SECONDS:-10}

# Below 30000: the system gives ports from 32768 on to whoever asks for any.
port=$((10000 + RANDOM % 20000))
while (: >"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do # somebody answers there
  port=$((10000 + RANDOM % 20000))
done

environment=(JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES="$devices")
count_flag='--xla_force_host_platform_device_count=[0-9]*'
if [[ ${XLA_FLAGS:-} =~ $count_flag ]]; then # the other way to say how many devices there are
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
  { echo "error: there is no $python: activate the environment, or set PYTHON" >&2 && exit 1; }

pids=() # of the processes that have not ended
logs=$(mktemp -d)
failed=0    # the status of the first that failed
deadline='' # when those that are left will be told to end; '' while all is well
signal=TERM # what they will be told then
told=       # what they have been told last

tell_all() {
  local i
  told=$1
  for ((i = 0; i < processes; i++)); do
    [[ -z ${pids[i]:-} ]] || kill "-$1" -- "-${pids[i]}" 2>/dev/null || true
  done
}

end_soon() {
  deadline=${deadline:-$((SECONDS + grace))}
}

trap 'tell_all INT; end_soon' INT
trap 'tell_all TERM; end_soon' TERM
trap 'tell_all HUP; end_soon' HUP
trap 'tell_all KILL; rm -rf "$logs"' EXIT

set -m # a process group for each: a Ctrl-C reaches them through tell_all alone, and only once
for ((i = 0; i < processes; i++)); do
  if ((i == 0)); then
    "${command[@]}" --process_id="$i" "$@" </dev/null &
  else
    "${command[@]}" --process_id="$i" "$@" </dev/null >"$logs/$i" 2>&1 &
  fi
  pids[i]=$!
done
set +m
[[ ! $told ]] || tell_all "$told" # a signal may have come while one was started, before its number was known

left=$processes
exec 3>&2 2>/dev/null # from here on, bash has words of its own about those that are killed
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
    end_soon
    [[ ! $told ]] || continue # it was stopped
    ((i == 0)) || sed "s/^/process $i: /" "$logs/$i" >&3
    echo "process $i ended with status $status" >&3
  done
  if [[ $deadline ]] && ((SECONDS >= deadline)); then
    tell_all "$signal"
    signal=KILL # for those whom that does not end
    deadline=$((SECONDS + grace))
  fi
  sleep 0.1 || true # Ctrl-C ends it early
done
exit "$failed"
