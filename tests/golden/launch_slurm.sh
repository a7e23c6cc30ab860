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

# Processes that lose another one end by themselves, and say why.
srun --kill-on-bad-exit=0 --wait=0 --gpu-bind=none --cpus-per-task=8 python -m vit_jax.main --config=configs/vit_b16_imagenet21k.py --config.data.data_dir=/shared/tensorflow_datasets --workdir=/shared/b16
code=$?

# Preempted and saved, or infrastructure: again. After all else somebody should look.
if [ "$code" -eq 42 ] || { [ "$code" -ge 128 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 10 ]; }; then
  echo "ended with $code; again" >&2
  scontrol requeue "$SLURM_JOB_ID" || exit "$code"
else
  exit "$code"
fi
