"""The names of our fields in other projects, and advice for settings of other projects that are not fields here."""

from vit_jax.config.fields import FIELDS

# What to do instead -> names in other projects of settings that are not fields here, separated by spaces.
ADVICE = {
    "batches are counted over all devices: --config.batch and --config.batch_eval.": "per_device_train_batch_size "
    "per_device_eval_batch_size batch_size_per_gpu",
    "--config.base_lr is the rate itself, not that for 256 images.": "blr",
    "warm-ups are counted in steps or epochs: --config.warmup_steps or --config.warmup_epochs.": "warmup_ratio",
    "only --config.decay_type=linear ends above 0, at --config.linear_end.": "min_lr lr_min end_lr final_lr",
    "the hidden channels are given by number: --config.model.mlp_dim.": "mlp_ratio",
    "each has a field of its own: --config.optim.beta1 and --config.optim.beta2.": "betas opt_betas",
    "the name of the model ends with it: --config.model.name=ViT-B/16.": "patch_size",
    "the folder of the run is a flag of its own, --workdir=FOLDER.": "workdir output output_dir out_dir log_dir logdir "
    "save_dir ckpt_dir checkpoint_dir run_name experiment",
    "the same command with the same --workdir continues its run where it stopped.": "resume auto_resume resume_from "
    "resume_from_checkpoint",
    "all devices that JAX finds are used; the mesh fields say how.": "device devices gpu gpus num_gpus n_gpu "
    "accelerator",
}
# Our field -> its names in other projects. A name that is also the last part of one of our names needs no entry.
FOREIGN_NAMES = {name.replace("*", "test"): field.synonyms for name, field in FIELDS.items() if field.synonyms}
# Name in another project -> our field, or a sentence on what to do instead.
SYNONYMS = {name: ours for ours, names in (FOREIGN_NAMES | ADVICE).items() for name in names.split()}
