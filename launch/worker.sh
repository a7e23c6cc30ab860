#!/usr/bin/env bash
# What launch/launcher.py runs on every worker, in the folder of the run; it is copied there with the code.
# A run holds the lock as long as it lives, and then leaves its exit code. It belongs to no session, so that it outlives
# the connection that started it. Every answer is a line that the launcher counts, since gcloud skips nodes that it
# cannot reach without failing.
set -euo pipefail
script=$(realpath "$0")
cd "$(dirname "$script")/../.."

begun="launch: start " # begins a line of the log; the number of the start and the time follow

answer() { echo "worker $(hostname): $*"; }

case $1 in
  install) # with a Python of its own: that of the images is older than vit_jax needs
    uv=$(command -v uv || echo "$HOME/.local/bin/uv")
    # Newer images have no pip, or refuse to install with it. The second way is uv's own.
    [ -x "$uv" ] || python3 -m pip install --quiet --user uv 2> /dev/null ||
      curl --silent --show-error --fail --location https://astral.sh/uv/install.sh | sh
    [ -x venv/bin/python ] || "$uv" venv --quiet --python=3.12 venv
    "$uv" pip install --quiet --python=venv/bin/python -e './code[tpu,gcs]'
    answer installed
    ;;
  number) # of this machine in its slice, from the metadata that JAX reads (jax/_src/clusters/cloud_tpu_cluster.py), or by
    # the name that TPU instances have been seen to use; nothing where neither is told
    for key in agent-worker-number worker-id; do
      number=$(curl --silent --fail --max-time 10 --header "Metadata-Flavor: Google" \
        "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$key") && break
    done || true
    answer "number ${number:-}"
    ;;
  start) # ID COMMAND ...: does nothing if a run lives
    exec 9> lock
    if flock --wait 3 9; then # status holds it for a moment
      rm -f exit
      echo "$2" > mark
      # The output of earlier runs stays; it may end with the stacks of a hang.
      [ ! -s log ] || echo >> log
      echo "$begun$(($(grep -c "^$begun" log 2> /dev/null || true) + 1)), $(date -u +%FT%TZ)" >> log
      setsid bash "$script" run "${@:3}" < /dev/null >> log 2>&1 &
      answer started
    else
      answer "running $(cat mark)"
    fi
    ;;
  run) # COMMAND ...: only called by start, whose lock it inherits
    export PATH="$PWD/venv/bin:$PATH"
    code=0
    # A process that outlives the command, such as a loader, does not hold the lock.
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
  follow) # until the run releases the lock: its last lines and all further ones, none of earlier runs
    first=$(awk -v begun="$begun" 'index($0, begun) == 1 {n = NR} END {print NR < n + 20 ? "+" n + 0 : 20}' log)
    tail --lines="$first" --follow=name log &
    flock --shared lock true
    sleep 0.2 # lets tail print the last lines
    kill "$!"
    ;;
esac
