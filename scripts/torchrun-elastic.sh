#!/usr/bin/env bash
# Train on one or more machines that may come and go: start this on every machine with the same arguments.
#
#   HEAD=host1:29500 NODES=1:4 scripts/torchrun-elastic.sh lm-1.3b topology=siamese parallel.mode=fsdp --run /shared/run
#
# HEAD is a machine that stays, with a free port; the run's folder must be one that all machines see. When a worker
# dies, or a machine joins or leaves, all workers start again from the newest complete checkpoint.
set -euo pipefail

HEAD=${HEAD:-localhost:29500}          # where machines find each other
NODES=${NODES:-1}                      # how many machines, or least:most
WORKERS=${WORKERS:-gpu}                # processes on each: a number, gpu or cpu
RESTARTS=${RESTARTS:-100}              # how often workers may be started again
ID=${ID:-siamesenorm}                  # the same on all machines, another for every run

# A store of its own for every meeting: workers that meet again never read the address of one that has died.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

exec torchrun \
  --nnodes "$NODES" --nproc-per-node "$WORKERS" --max-restarts "$RESTARTS" \
  --rdzv-backend c10d --rdzv-endpoint "$HEAD" --rdzv-id "$ID" \
  -m -- siamesenorm train "$@"  # without -- torchrun takes --run for an option of its own
