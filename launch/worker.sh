#!/usr/bin/env bash
# What launch/tpu_vm.py asks of every worker, in the folder of the run: it came there with the code.
# A run holds the lock, which is what tells whether it lives, and leaves its exit code behind. It belongs to no session,
# so that it outlives the connection that started it. Every answer is a line that the launcher counts: gcloud passes over
# nodes that it does not reach without failing.
set -euo pipefail
script=$(realpath "$0")
cd "$(dirname "$script")/../.."

begun="launch: start " # the number of the start and the time follow: a line of the log

answer() { echo "worker $(hostname): $*"; }

case $1 in
  install) # Python of its own: the images bring an older one than vit_jax needs
    uv=$(command -v uv || echo "$HOME/.local/bin/uv")
    [ -x "$uv" ] || python3 -m pip install --quiet --user uv
    [ -x venv/bin/python ] || "$uv" venv --quiet --python=3.12 venv
    "$uv" pip install --quiet --python=venv/bin/python -e './code[tpu,gcs]'
    answer installed
    ;;
  start) # MARK COMMAND ...: nothing, if a run lives
    exec 9> lock
    if flock --wait 3 9; then # who only looks holds it for a moment
      rm -f exit
      echo "$2" > mark
      # What the runs before have said stays: last of all, perhaps, the stacks of a hang.
      [ ! -s log ] || echo >> log
      echo "$begun$(($(grep -c "^$begun" log 2> /dev/null || true) + 1)), $(date -u +%FT%TZ)" >> log
      setsid bash "$script" run "${@:3}" < /dev/null >> log 2>&1 &
      answer started
    else
      answer "running $(cat mark)"
    fi
    ;;
  run) # COMMAND ...: for start alone, whose lock it inherits
    export PATH="$PWD/venv/bin:$PATH"
    code=0
    # What outlives the command, a loader that has not noticed, holds no lock.
    (cd code && "${@:2}" 9>&-) || code=$?
    echo "$code" > "exit"
    ;;
  status)
    if ! flock --nonblock lock true; then
      answer "running $(cat mark)"
    elif [ -s exit ]; then
      answer "ended $(cat exit)"
    else
      answer lost
    fi
    ;;
  follow) # until the run lets go of the lock: its last lines and what comes, nothing of the runs before it
    first=$(awk -v begun="$begun" 'index($0, begun) == 1 {n = NR} END {print NR < n + 20 ? "+" n + 0 : 20}' log)
    tail --lines="$first" --follow=name log &
    flock --shared lock true
    sleep 0.2 # for the last lines
    kill "$!"
    ;;
esac
