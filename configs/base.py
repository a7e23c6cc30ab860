"""Every field, its default and its meaning. The other configs are short differences from this one.

A field whose default is `placeholder(type)` is unset. Durations are in optimizer steps or in epochs (passes over the
training split); set one of the two. What each field accepts, and whether a resumed run may change it, is in
vit_jax/config_fields.py.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    """Returns the defaults, locked: an unknown key is an error."""
    config = ConfigDict()

    config.seed = 0  # seed of the initial weights, the data order, augmentation, dropout and MixUp
    config.resolution = 224  # pixels on a side; preprocessing refers to it: {resolution}, {resolution*256/224}
    config.batch = 4096  # images per optimizer step, over all hosts and devices
    config.batch_eval = placeholder(int)  # images per evaluation step; unset: batch / accum_steps
    config.accum_steps = 1  # parts into which a batch is split to save memory; the gradient is that of the whole batch
    config.total_steps = placeholder(int)  # length of training in steps; 0: only evaluates and exports
    config.total_epochs = placeholder(float)  # the same in epochs: int(total_epochs * num_examples / batch) steps
    config.init_from = placeholder(str)  # weights to start from: a workdir, checkpoint, .npz file or published name
    config.keep_head = False  # also takes head and pre_logits from init_from: to evaluate, or to continue training
    config.resample = "linear"  # of init_from's positions: linear (the authors'), bicubic (timm's), flexi (patches too)

    config.base_lr = 1e-3  # the learning rate after the warm-up
    config.warmup_steps = placeholder(int)  # length of the linear warm-up from 0, in steps
    config.warmup_epochs = placeholder(float)  # the same in epochs
    config.decay_type = "cosine"  # after the warm-up: cosine (to 0), linear (to linear_end), rsqrt, step or constant
    config.decay_at = (0.3, 0.6, 0.9)  # step: fractions of the training after each of which the rate is divided by 10
    config.linear_end = 1e-5  # the learning rate at the end of a linear decay
    config.rsqrt_timescale = 10_000  # steps after which rsqrt has fallen by sqrt(2)
    config.cooldown_steps = 0  # last steps of rsqrt or constant, in which the learning rate falls linearly to 0
    config.grad_norm_clip = placeholder(float)  # largest global norm of the gradient; unset or 0: no clipping

    config.log_every = 50  # steps between two lines of metrics
    config.eval_every = placeholder(int)  # steps between two evaluations; unset, in epochs too: at the end only
    config.eval_every_epochs = placeholder(float)  # the same in epochs, but at least log_every steps
    config.checkpoint_every = 1000  # steps between two checkpoints; the last step is always saved
    config.checkpoint_every_minutes = 15.0  # minutes after which one is saved even before that; 0: by steps only
    config.stall_limit = 1800.0  # seconds without progress on a host, compilation included, after which the run ends
    config.profile_steps = 0  # steps to trace into <workdir>/profile, starting with the third step of the run
    config.wandb = placeholder(str)  # project of Weights & Biases to log to, too; needs the extra [wandb]
    config.report = False  # writes the page of vit_jax.report into the workdir at the end; needs the extra [plot]
    config.compiler_options = ""  # NAME=VALUE,...: of jax.jit, over those chosen for the devices; NAME= omits one

    config.model = ConfigDict()
    config.model.name = "ViT-B/16"  # [{R,R26,R50}+]ViT-{mu,Ti,S,B,L,H,So400m,g,G}/<patch>, ViT/<patch>, BiT-R50x1, ...
    config.model.width = placeholder(int)  # channels of a token; unset: by the name (ViT/<patch size> needs all four)
    config.model.depth = placeholder(int)  # number of blocks; unset: by the name
    config.model.mlp_dim = placeholder(int)  # hidden channels of an MLP; unset: by the name
    config.model.num_heads = placeholder(int)  # attention heads of a block; unset: by the name
    config.model.pooling = "token"  # input of the head: token (class token), gap (mean), map (attention), token_gap
    config.model.final_norm = "tokens"  # what the last LayerNorm normalises: tokens, or pooled (their pooled result)
    config.model.class_token = "auto"  # auto: a class token if the pooling reads it; always: also if it does not
    config.model.registers = 0  # learned tokens beside class token and patches, which the pooling does not read
    config.model.pre_logits = False  # whether a tanh layer precedes the head, as in pre-training
    config.model.representation_size = placeholder(int)  # width of the pre_logits layer; unset: the model's width
    config.model.head_bias = 0.0  # initial bias of the head; its kernel starts at 0
    config.model.position = "learned"  # learned (1-D), learned2d, relative, none (Table 8), sincos2d or sincos2d_moco
    config.model.position_rows = "all"  # which tokens have a learned position: all, class (and patches) or patches
    config.model.position_place = "stem"  # where learned positions are added: stem; every block, own (blocks) or shared
    config.model.position_std = 0.02  # standard deviation of the initial values of learned positions
    config.model.relative_tables = "block"  # tables of relative positions: one for each block, head, or for the model
    config.model.relative_clip = 0  # largest relative offset with a row of its own, in patches of raster order; 0: all
    config.model.rotary = "none"  # rotation of queries and keys: none, or axial (by row and column, as in EVA-02)
    config.model.rotary_grid = 0  # patches on a side to which rows and columns are scaled for the rotation; 0: not
    config.model.qk_norm = False  # whether queries and keys are normalised, each by a LayerNorm over a head's channels
    config.model.activation = "gelu_tanh"  # of the MLPs: gelu_tanh (as published), gelu (exact) or swiglu (gated)
    config.model.norm_epsilon = 1e-6  # epsilon of every LayerNorm
    config.model.layer_scale = 0.0  # LayerScale: initial factor of each channel of a residual branch; 0: no factors
    config.model.embed_bias = True  # whether the projection of patches has a bias
    config.model.stem_epsilons = "released"  # of a hybrid's ResNet: released (the authors') or timm
    config.model.image_mean = (0.5, 0.5, 0.5)  # subtracted from red, green, blue in [0, 1] before the patches,
    config.model.image_std = (0.5, 0.5, 0.5)  # then divided by; 0.5 leaves the images in [-1, 1]
    config.model.stages = placeholder(tuple)  # units in each stage of a BiT or of a hybrid's ResNet; unset: by the name
    config.model.unit = placeholder(str)  # of a BiT: pre_activation (if unset), post_activation or axial
    config.model.border = placeholder(str)  # of a BiT's root pooling: zeros, as released (unset), or lowest
    config.model.dropout_rate = 0.0  # dropout after every dense layer except qkv and after the positions are added
    config.model.stochastic_depth = 0.0  # rate at which the last block drops a residual branch; linear from 0 before it
    config.model.dtype = "auto"  # type of the activations: float32, bfloat16 or auto (bfloat16 on TPU and GPU)
    config.model.attention = "auto"  # heads_first, tokens_first, fused (TPU), cudnn (GPU) or auto (the fastest here)
    config.model.mlp = "jit"  # who places an MLP's communication between devices: jit (the compiler) or shard_map (us)
    config.model.remat = "none"  # recomputed backwards: none, dots (all but matmuls), mlp, attention (all but it), full
    config.model.scan = False  # run the blocks as one loop: compiles sooner, runs slower

    config.data = ConfigDict()
    config.data.source = "synthetic"  # digits, tfds:NAME, vtab:TASK, folder:PATH, array_record:PATTERN or synthetic
    config.data.data_dir = placeholder(str)  # folder of the TFDS data, local or remote; unset: TFDS's default
    config.data.split = "train"  # split to train on, as TFDS writes it: train[:98%]
    config.data.preprocess = "inception_crop({resolution})|flip_lr|value_range(-1,1)"  # of training images
    config.data.num_classes = placeholder(int)  # checked against the data; unset: taken from the data
    config.data.num_examples = placeholder(int)  # images in the training split; checked or taken likewise
    config.data.max_labels = placeholder(int)  # labels of one image in multi-label data; unset: taken from the data
    config.data.workers = 0  # worker processes that read and decode; 0: threads of this process
    config.data.fast = False  # training resizes in whole numbers: faster, a third of the values one grey level higher
    config.data.accept_change = False  # resume although the data differ from those that the run began with
    config.data.bad_images = "fail"  # what an unreadable training image does: fail, or replace (by the next readable)
    config.data.max_bad = 0.001  # largest fraction of images to replace, counted by each host since it started

    config.task = ConfigDict()
    config.task.kind = "classify"  # what is learnt: classify (labels), or masked_patches (without labels, section 4.6)
    config.task.loss = "softmax"  # cross-entropy: softmax, or sigmoid (summed over classes)
    config.task.label_smoothing = 0.0  # softmax: mass spread over all classes; sigmoid: on = 1 - s, off = s
    config.task.mixup = 0.0  # alpha of MixUp's Beta(alpha, alpha); 0: off
    config.task.cutmix = 0.0  # alpha of CutMix's Beta(alpha, alpha); 0: off; with MixUp, each in half of the steps
    config.task.mixup_probability = 1.0  # fraction of the steps that mix
    config.task.target = "mean_color"  # of masked_patches: mean_color, patch4 (4x4 colours) or full (pixels) of a patch
    config.task.corrupted = 0.5  # fraction of the patches that are corrupted, and predicted
    config.task.masked = 0.8  # fraction of these that the [mask] embedding replaces
    config.task.swapped = 0.1  # fraction of these that another patch's embedding replaces; the others stay as they are
    config.task.swap_from = "image"  # where the other patch is: in the same image, or batch (in the image before it)

    config.optim = ConfigDict()
    config.optim.name = "adamw"  # optimizer: adamw or sgd
    config.optim.beta1 = 0.9  # adamw: decay of the first moment
    config.optim.beta2 = 0.999  # adamw: decay of the second moment
    config.optim.eps = 1e-8  # adamw: added to the root of the second moment
    config.optim.momentum = 0.9  # sgd: decay of the momentum
    config.optim.moment_dtype = "float32"  # type of adamw's first moment and of sgd's momentum: float32 or bfloat16
    config.optim.grad_dtype = "auto"  # of kernels' gradients: auto (as activations) or float32 (doubles their exchange)
    config.optim.weight_decay = 0.0  # weight decay, decoupled from the gradient
    config.optim.decays = "kernels"  # what decays: kernels or all
    config.optim.decay_factor = "rate"  # factor of the decay: rate (the learning rate) or schedule (rate / base_lr)
    config.optim.lr_multipliers = ""  # REGEX=FACTOR,...: the first to match a parameter's whole name counts; 0 freezes
    config.optim.rates = config.optim.get_ref("lr_multipliers")  # its earlier name
    config.optim.ema_decay = 0.0  # of a moving average of the weights, which is then evaluated and exported; 0: off
    config.optim.max_nonfinite_skips = 0  # consecutive steps with a non-finite loss or gradient to skip before stopping

    config.mesh = ConfigDict()
    config.mesh.slice = 1  # TPU slices, or groups of hosts: the batch is split over them, only gradients pass between
    config.mesh.data = -1  # devices over which the batch is split and the weights are copied; -1: all the others
    config.mesh.fsdp = 1  # devices over which both the batch and the weights are split
    config.mesh.tensor = 1  # devices over which attention heads and MLPs are split, with their weights

    config.evals = ConfigDict()
    config.evals.test = evaluation("classify")  # the key names the metrics: test/accuracy, test/loss, test/n

    config.checkpoint = ConfigDict()
    config.checkpoint.keep_last = 2  # number of newest checkpoints to keep
    config.checkpoint.keep_best = 1  # number of best checkpoints to keep besides
    config.checkpoint.best_metric = "test/accuracy"  # metric of the best; larger is better, NaN is never best

    return config.lock()


def evaluation(kind: str, **fields: object) -> ConfigDict:
    """Returns an evaluation of a kind, with defaults for the fields that are not given.

    A recipe adds one in two lines: `with config.unlocked():` and `config.evals.NAME = base.evaluation("fewshot")`.
    """
    config = ConfigDict()
    config.kind = kind  # classify, predictions, masked_patches (of the head); of features: fewshot, knn, probe(_sgd)
    config.source = placeholder(str)  # its data, as data.source; unset: data.source
    config.split = "test"  # split to evaluate on, as TFDS writes it
    config.preprocess = "resize_small({resolution*256/224})|central_crop({resolution})|value_range(-1,1)"
    # preprocessing of evaluated images
    config.every = placeholder(int)  # steps between two of this evaluation; unset: eval_every
    if kind == "predictions":
        config.labels = placeholder(str)  # ReaL's labels, real.json; unset: those of the data
        config.class_map = placeholder(str)  # how classes of the data are the model's: names, order, imagenet_a, a file
    if kind not in ("classify", "predictions", "masked_patches"):
        config.train_split = "train"  # split that the classifier on frozen features learns from
    if kind == "fewshot":
        config.shots = (1, 5, 10, 25)  # images of each class to learn from; gives NAME/<N>shot
        config.seeds = 3  # random draws of these images, whose accuracies are averaged
        config.l2 = (1024.0,)  # strengths of the regularisation; several give NAME/<N>shot_l2_<strength>
    if kind == "probe":
        config.l2 = (1e-3, 1e-1, 1e1, 1e3)  # (of probe: to choose from)
    if kind == "probe_sgd":
        config.rates = (0.01, 0.1, 1.0)  # learning rates to choose from
        config.epochs = 100  # passes over the features
    if kind in ("probe", "probe_sgd"):
        config.validation = 0.1  # fraction of each class in train_split that chooses, before the fit to all of it
    if kind == "knn":
        config.k = (1, 5, 20)  # numbers of nearest neighbours that vote; gives NAME/<k>nn
        config.temperature = 0.07  # each votes with exp(cosine / temperature)
    config.update(fields)
    return config


def choose_stage(arg: str, stages: dict[str, tuple]) -> tuple:
    """Returns what a recipe states of the stage that its argument names, `stage=STAGE`.

    Raises:
        ValueError: there is no such stage.
    """
    key, _, stage = arg.partition("=")
    if key != "stage" or stage not in stages:
        raise ValueError(f"the argument {arg!r} is not stage=STAGE with one of the stages {', '.join(stages)}")
    return stages[stage]
