#!/bin/bash
#SBATCH --job-name=b16
#SBATCH --output=b16-%j.log
#SBATCH --open-mode=append
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --dependency=singleton
#SBATCH --partition=gpu

# Processes that lose another one end by themselves and say why.
srun --kill-on-bad-exit=0 --wait=0 --gpu-bind=none --cpus-per-task=8 python -m vit_jax.main --config=configs/vit_b16_imagenet21k.py --config.data.source=array_record:/shared/imagenet21k --workdir=/shared/b16
code=$?

# A fault of the machines: again, at most 10 times. Faults are counted in a file, which outlives a requeue.
faults=b16-$SLURM_JOB_ID.faults
if [ "$code" -ge 128 ]; then
  echo "$code" >> "$faults" || exit "$code"
  again=$(($(wc -l < "$faults") <= 10))
else # Preempted and saved: again, however often. After all other codes somebody should look.
  again=$((code == 42))
fi
if [ "$again" -eq 1 ]; then
  echo "ended with $code; again" >&2
  scontrol requeue "$SLURM_JOB_ID" || exit "$code"
else
  rm -f "$faults"
  exit "$code"
fi
