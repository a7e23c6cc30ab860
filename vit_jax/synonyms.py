"""What timm, Hugging Face, big_vision, scenic, Keras, DeiT and MAE call the fields of our configuration."""

# Our field -> their names. A name that is the last part of one of our fields needs no row.
FOREIGN_NAMES = {
    "resolution": "img_size image_size input_size img_resolution image_resolution crop_size",
    "batch": "batch_size train_batch_size global_batch_size batchsize bs",
    "batch_eval": "eval_batch_size validation_batch_size val_batch_size test_batch_size",
    "accum_steps": "gradient_accumulation_steps grad_accum_steps gradient_accumulation accumulate_grad_batches "
    "accum_iter",
    "total_steps": "steps max_steps num_steps train_steps num_train_steps num_training_steps iterations max_iters",
    "total_epochs": "epochs epoch num_epochs max_epochs n_epochs train_epochs num_train_epochs num_training_epochs",
    "init_from": "pretrained pretrained_path pretrained_dir initial_checkpoint init_checkpoint checkpoint "
    "checkpoint_path model_init model_load model_name_or_path model_or_filename finetune weights load_from",
    "base_lr": "lr learning_rate base_learning_rate lr_base init_lr initial_learning_rate peak_lr max_lr",
    "warmup_steps": "warmup num_warmup_steps warmup_iters",
    "decay_type": "schedule sched scheduler lr_schedule lr_scheduler lr_scheduler_type lr_decay",
    "grad_norm_clip": "clip_grad grad_clip grad_clip_norm clip_grad_norm gradient_clip gradient_clip_val max_grad_norm "
    "clip_norm clipnorm global_clipnorm",
    "log_every": "log_interval log_steps log_freq print_freq logging_steps log_training_steps log_every_n_steps "
    "progress_every",
    "eval_every": "eval_steps eval_interval eval_freq log_eval_steps val_check_interval steps_per_eval",
    "checkpoint_every": "save_steps save_every save_interval save_freq ckpt_steps ckpt_every checkpoint_steps",
    "profile_steps": "profile profiler xprof",
    "seed": "rng_seed random_seed",
    "model.name": "model arch architecture backbone model_name model_type network variant",
    "model.width": "hidden_size hidden_dim embed_dim emb_dim",
    "model.depth": "num_layers num_hidden_layers n_layers layers",
    "model.mlp_dim": "intermediate_size",
    "model.num_heads": "num_attention_heads n_heads heads",
    "model.pooling": "pool pool_type global_pool classifier",
    "model.representation_size": "rep_size",
    "model.head_bias": "init_head_bias head_init_bias",
    "model.position": "posemb pos_emb pos_embed position_embedding positional_embedding",
    "model.dropout_rate": "dropout drop drop_rate hidden_dropout_prob",
    "model.stochastic_depth": "drop_path drop_path_rate droppath stoch_depth stochastic_depth_rate",
    "model.registers": "reg_tokens num_register_tokens num_registers register_tokens",
    "model.final_norm": "fc_norm",
    "model.position_rows": "no_embed_class",
    "model.rotary": "rope use_rot_pos_emb rotary_embedding rope_type",
    "model.activation": "act_layer hidden_act act use_swiglu_ffn",
    "model.norm_epsilon": "layer_norm_eps layer_norm_epsilon norm_eps ln_eps",
    "model.layer_scale": "init_values layerscale_value layer_scale_init_value ls_init",
    "model.image_mean": "mean pixel_mean",
    "model.image_std": "std pixel_std",
    "model.dtype": "amp amp_dtype bf16 fp16 half_precision mixed_precision precision compute_dtype",
    "model.remat": "gradient_checkpointing grad_checkpointing activation_checkpointing remat_policy",
    "data.source": "data dataset dataset_name data_path data_root train_dir",
    "data.data_dir": "tfds_data_dir dataset_dir",
    "data.split": "train_split",
    "data.preprocess": "pp preprocessing transform transforms aug augment augmentation augmentations aa auto_augment "
    "autoaugment randaug randaugment rand_augment reprob random_erasing color_jitter hflip",
    "data.num_classes": "nb_classes n_classes num_labels",
    "data.workers": "num_workers n_workers dataloader_num_workers num_parallel_calls",
    "evals.test.split": "evals val_split validation_split eval_split test_split",
    "evals.test.preprocess": "crop_pct pp_eval test_transform",
    "task.loss": "task criterion loss_fn loss_type",
    "task.label_smoothing": "smoothing label_smoothing_factor",
    "task.mixup": "mixup_alpha mixup.p",
    "task.cutmix": "cutmix_alpha",
    "task.mixup_probability": "mixup_prob",
    "optim.name": "optim optimizer optimiser opt optax_name",
    "optim.beta1": "adam_beta1",
    "optim.beta2": "adam_beta2",
    "optim.eps": "adam_epsilon epsilon opt_eps",
    "optim.moment_dtype": "optim_dtype mu_dtype",
    "optim.grad_dtype": "reduce_dtype grad_reduce_dtype gradient_dtype allreduce_dtype",
    "optim.weight_decay": "wd l2 l2_decay_factor weight_decay_rate",
    "optim.lr_multipliers": "rates freeze lr_mults",
    "optim.ema_decay": "ema model_ema model_ema_decay ema_rate",
    "mesh.slice": "num_slices",
    "mesh.data": "data_parallel",
    "mesh.fsdp": "mesh sharding",
    "mesh.tensor": "tensor_parallel model_parallel",
    "checkpoint.keep_last": "save_total_limit checkpoint_hist max_to_keep",
    "checkpoint.best_metric": "eval_metric metric_for_best_model monitor",
}
# What to do instead -> their names for what is not a field here.
ADVICE = {
    "rates that fall with depth do not exist: the blocks are one stacked array, which --config.optim.lr_multipliers "
    "can only multiply as a whole.": "layer_decay layerwise_lr_decay lr_layer_decay llrd",
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
# Their name -> our field, or what to do instead.
SYNONYMS = {name: ours for ours, names in (FOREIGN_NAMES | ADVICE).items() for name in names.split()}
