# The command `watch` of tpu_vm.sh, which provides the functions and variables that are not defined here.
# shellcheck shell=bash disable=SC2154

worker_state="if test -f smallgpt_jax/launch/tpu_worker.sh; then $there state; else echo \"\$(hostname): no run\"; fi"
ask_workers=(gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker=all --command="$worker_state")

# Acts on the state of the slice, once per poll. A failed command is repeated at the next poll.
watch() { # ARGS
  local request='' # the request, as far as we know: '' (unknown), exists, or deleted (by us)
  local last_run=$SECONDS run_seen='' failed_starts=0 stalls=0 failed_polls=0
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

# Starts the run on an active slice unless it is in progress or has ended. Exits if it has ended.
watch_run() { # ARGS
  local answer failed
  answer=$(ask "${ask_workers[@]}")
  if [[ $answer == UNKNOWN || $answer == NOT_FOUND ]]; then # a network error, or a slice that is being preempted
    return
  elif [[ $answer == *": running"* ]]; then
    last_run=$SECONDS run_seen=yes failed_polls=0
  elif [[ ! $run_seen || $answer == *": no run"* ]]; then # the slice is new, or its VMs were restarted
    if install && start "$@"; then
      run_seen=yes failed_starts=0
    else
      ((++failed_starts < 5)) || fail "the run could not be started, five times in a row"
    fi
  elif [[ $answer == *": exit status 124"* ]]; then # train.stall_seconds
    ((++stalls <= 5)) || fail "the run has stalled $stalls times; see the log"
    echo "the run has stalled and is started again"
    start "$@" || true
  elif failed=$(grep ": exit status [1-9]" <<<"$answer"); then
    # A preemption can end the run minutes before it changes the state of the slice.
    ((++failed_polls < 10)) || fail "the run has failed: ${failed//$'\n'/, }; see the log. The slice still exists"
  elif [[ $answer == *": exit status 0"* ]]; then
    echo "the run has finished; to stop the charges, run launch/tpu_vm.sh delete $(quoted --name="$name" "${where[@]}")"
    exit
  fi
}
