# The command `watch` of tpu_vm.sh, which provides the functions and variables that are not defined here.
# shellcheck shell=bash disable=SC2154

worker_state="if test -f smallgpt_jax/launch/tpu_worker.sh; then $there state; else echo \"\$(hostname): no run\"; fi"
ask_workers=(gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker=all --command="$worker_state")

# Acts on the state of the slice, once per poll. A failed command is repeated at the next poll.
watch() { # ARGS
  local request='' # the request, as far as we know: '' (unknown), exists, or deleted (by us)
  local last_run=$SECONDS run_seen='' failed_starts=0 failed_polls=0 mixed_polls=0 idle_ends=0 last_step=0
  if [[ $dry_run ]]; then
    resume "$@"
    echo "$(quoted "${ask_workers[@]}") # repeated until the run has ended"
    return
  fi
  query
  [[ $state != UNKNOWN ]] || exit 1 # a later network error does not end the watch
  while true; do
    case $state in
      ACTIVE) watch_run "$@" ;;
      FAILED) fail_with_reason ;;
      NOT_FOUND)
        [[ $request != exists ]] || fail "$name was deleted by another command; rerun watch to create it again"
        ! request_slice || request=exists
        ;;
      *)
        if [[ $request != deleted ]] && is_gone && yes=yes delete; then
          request=deleted
        fi
        ;;
    esac
    [[ $state == NOT_FOUND || $state == UNKNOWN || $request == deleted ]] || request=exists
    check_wait "$last_run"
    pause
    query
  done
}

# Starts the run on an active slice unless it is in progress or has ended. Exits if it has ended for good.
watch_run() { # ARGS
  local answer ended failed hung=''
  answer=$(ask "${ask_workers[@]}")
  if [[ $answer == UNKNOWN || $answer == NOT_FOUND ]]; then # a network error, or a slice that is being preempted
    return
  fi
  if [[ $answer == *": running"* ]]; then
    last_run=$SECONDS run_seen=yes failed_polls=0
    ended=$(grep -v ": running" <<<"$answer") || mixed_polls=0
    # Workers do not end at the same moment.
    [[ $ended ]] && ((++mixed_polls >= 10)) || return 0
    echo "some workers have ended, so the others are stopped: ${ended//$'\n'/, }"
    on_workers all "$there end ${GRACE_SECONDS:-30}" || return 0
    answer=$ended hung=yes mixed_polls=0
  fi
  if [[ ! $run_seen || $answer == *": no run"* ]]; then # the slice is new, or its VMs were restarted
    if try_to install_and_start "$@"; then run_seen=yes; fi
  elif [[ $answer == *": stopped"* ]]; then
    fail "the run was stopped by tpu_vm.sh stop; rerun watch to continue it"
  elif [[ $answer =~ ": exit status "(124|143) ]]; then # train.stall_seconds, or a SIGTERM by the VM
    restart "$@"
  elif failed=$(grep ": exit status [1-9]" <<<"$answer"); then
    # A preemption can end the run minutes before it changes the state of the slice.
    [[ $hung ]] || ((++failed_polls >= 10)) || return 0
    fail "the run has failed: ${failed//$'\n'/, }; see the log. The slice still exists"
  elif [[ $hung ]]; then
    restart "$@"
  else
    echo "the run has finished; to stop the charges, run launch/tpu_vm.sh delete $(quoted --name="$name" "${where[@]}")"
    exit
  fi
}

# Starts the run again, unless its last six ends came without a new step.
restart() { # ARGS
  local step ends=$((idle_ends + 1))
  step=$(grep -oE 'after step [0-9]+' <<<"$answer" | grep -oE '[0-9]+' | sort -n | tail -n 1) || step=0
  ((step <= last_step)) || ends=0
  ((ends < 6)) || fail "the run has ended $ends times without a new step: ${answer//$'\n'/, }; see the log"
  echo "the run has ended early and is started again: ${answer//$'\n'/, }"
  if try_to start "$@"; then
    idle_ends=$ends
    ((ends)) || last_step=$step
  fi
}

install_and_start() { install && start "$@"; }

# Runs a command on the workers. If they cannot be reached, the next poll tries again; other failures are counted.
try_to() { # COMMAND
  local status=0
  "$@" || status=$?
  case $status in
    0) failed_starts=0 ;;
    1 | 255) echo "the workers cannot be reached, or gcloud has failed; trying again" >&2 ;;
    *) ((++failed_starts < 5)) || fail "the run could not be started, five times in a row" ;;
  esac
  return "$status"
}
