"""Every field, its default and its meaning. The other configs are short differences from this one.

A field whose default is `placeholder(type)` is unset. Durations are counted in optimizer steps or in epochs (passes
over the training split): set one of the two.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    """Returns the defaults, locked: an unknown key is an error."""
    config = ConfigDict()

    config.seed = 0  # of the initial weights, the data order, augmentation, dropout and MixUp
    config.resolution = 224  # pixels on a side; {resolution} in the preprocessing, {resolution*256/224}: in proportion
    config.batch = 4096  # images per optimizer step, over all hosts and devices
    config.batch_eval = placeholder(int)  # images per evaluation step; unset: batch / accum_steps
    config.accum_steps = 1  # parts into which a batch is cut to save memory; the gradient stays that of the batch
    config.total_steps = placeholder(int)  # length of training in steps; 0: only evaluates and exports
    config.total_epochs = placeholder(float)  # or in epochs: int(total_epochs * num_examples / batch) steps
    config.init_from = placeholder(str)  # whose weights start this run: workdir, checkpoint, npz or published name
    config.keep_head = False  # init_from keeps head and pre_logits: for plain evaluation or to go on
    config.resample = "linear"  # of its positions: linear (the authors'), bicubic (timm's), flexi (and of its patches)

    config.base_lr = 1e-3  # the learning rate after warm-up
    config.warmup_steps = placeholder(int)  # linear warm-up from 0, in steps
    config.warmup_epochs = placeholder(float)  # or in epochs
    config.decay_type = "cosine"  # cosine (to 0), linear (to linear_end), rsqrt or constant
    config.linear_end = 1e-5  # the rate at the end of a linear decay
    config.rsqrt_timescale = 10_000  # steps after which rsqrt has fallen by sqrt(2)
    config.cooldown_steps = 0  # linear decay to 0 over the last steps of rsqrt or constant
    config.grad_norm_clip = placeholder(float)  # largest global norm of the gradient; unset: no clipping

    config.log_every = 50  # steps between two lines of metrics
    config.eval_every = placeholder(int)  # steps between two evaluations; both unset: at the end only
    config.eval_every_epochs = placeholder(float)  # or epochs, but at least log_every steps
    config.checkpoint_every = 1000  # steps between two checkpoints; the last step is always saved
    config.checkpoint_every_minutes = 15.0  # or minutes since the last one, whichever comes first; 0: by steps only
    config.stall_limit = 1800.0  # seconds without progress on a host, compiling included, after which the run is ended
    config.profile_steps = 0  # steps to trace into <workdir>/profile, from the third of the run on

    config.model = ConfigDict()
    config.model.name = "ViT-B/16"  # [{R,R26,R50}+]ViT-{mu,Ti,S,B,L,H,g,G}/<patch size>, or ViT/<patch size>
    config.model.width = placeholder(int)  # unset: as the name says, ViT/<patch size> nothing; likewise the next three
    config.model.depth = placeholder(int)
    config.model.mlp_dim = placeholder(int)
    config.model.num_heads = placeholder(int)
    config.model.pooling = "token"  # token (class token), gap (mean of the patches) or map (attention pooling)
    config.model.pre_logits = False  # a tanh layer before the head, as in pre-training
    config.model.representation_size = placeholder(int)  # width of that layer; unset: the model's
    config.model.head_bias = 0.0  # initial bias of the head; its kernel starts at 0
    config.model.position = "learned"  # learned, sincos2d, sincos2d_moco (fixed) or none
    config.model.dropout_rate = 0.0  # after every dense layer except qkv, and after adding positions
    config.model.stochastic_depth = 0.0  # rate of dropping a residual branch in the last block, rising linearly to it
    config.model.dtype = "auto"  # of the activations: float32, bfloat16 or auto (bfloat16 on TPU and GPU)
    config.model.attention = "auto"  # heads_first, tokens_first or auto (the fastest for the mesh's devices)
    config.model.mlp = "jit"  # who places what devices exchange for an MLP: jit (the compiler) or shard_map (we do)
    config.model.remat = "none"  # what the backward pass computes again: none, dots (all but matmuls) or full
    config.model.scan = False  # run the blocks as one loop: compiles sooner, runs slower

    config.data = ConfigDict()
    config.data.source = "synthetic"  # digits, tfds:NAME, folder:PATH, array_record:PATTERN or synthetic
    config.data.data_dir = placeholder(str)  # where TFDS data lies, local or remote; unset: TFDS's own default
    config.data.split = "train"  # of training, as TFDS writes it: train[:98%]
    config.data.preprocess = "inception_crop({resolution})|flip_lr|value_range(-1,1)"  # of training
    config.data.num_classes = placeholder(int)  # checked against the data; unset: taken from it
    config.data.num_examples = placeholder(int)  # of the training split; checked or taken likewise
    config.data.max_labels = placeholder(int)  # labels of one image in multi-label data; unset: taken from the data
    config.data.workers = 0  # worker processes that read and decode; 0: threads of this process
    config.data.fast = False  # training resizes in whole numbers: faster, a third of the values a grey level higher
    config.data.accept_change = False  # resume though the data differ from those that the run began with
    config.data.bad_images = "fail"  # an unreadable file of training: fail, or replace it by the next readable one
    config.data.max_bad = 0.001  # the largest share of the images to replace, as each host has met since it started

    config.task = ConfigDict()
    config.task.loss = "softmax"  # softmax or sigmoid (summed over classes) cross-entropy
    config.task.label_smoothing = 0.0  # softmax: mass spread over all classes; sigmoid: on = 1 - s, off = s
    config.task.mixup = 0.0  # alpha of MixUp's Beta(alpha, alpha); 0: off
    config.task.cutmix = 0.0  # alpha of CutMix's Beta(alpha, alpha); 0: off; with MixUp, each in half of the steps
    config.task.mixup_probability = 1.0  # share of the steps that mix

    config.optim = ConfigDict()
    config.optim.name = "adamw"  # adamw or sgd
    config.optim.beta1 = 0.9  # adamw: decay of the first moment
    config.optim.beta2 = 0.999  # adamw: decay of the second moment
    config.optim.eps = 1e-8  # adamw: added to the root of the second moment
    config.optim.momentum = 0.9  # sgd
    config.optim.moment_dtype = "float32"  # of adamw's first moment and of sgd's momentum: float32 or bfloat16
    config.optim.weight_decay = 0.0  # decoupled from the gradient
    config.optim.decays = "kernels"  # what decays: kernels or all
    config.optim.decay_factor = "rate"  # what multiplies it: rate (the learning rate) or schedule (rate / base_lr)
    config.optim.rates = ""  # REGEX=FACTOR,...: times the rate where it matches the whole name; 0 freezes
    config.optim.ema_decay = 0.0  # of a moving average of the weights, evaluated and exported when on; 0: off
    config.optim.max_nonfinite_skips = 0  # steps in a row with a non-finite loss or gradient to skip before stopping

    config.mesh = ConfigDict()
    config.mesh.slice = 1  # TPU slices, or groups of hosts: the batch is split over them, only gradients pass between
    config.mesh.data = -1  # devices over which the batch is split and the weights are copied; -1: all the others
    config.mesh.fsdp = 1  # devices over which both the batch and the weights are split
    config.mesh.tensor = 1  # devices over which attention heads and MLPs are split, with their weights

    config.evals = ConfigDict()
    config.evals.test = ConfigDict()  # the key names the metrics: test/accuracy, test/loss, test/n
    config.evals.test.split = "test"
    config.evals.test.preprocess = "resize_small({resolution*256/224})|central_crop({resolution})|value_range(-1,1)"

    config.checkpoint = ConfigDict()
    config.checkpoint.keep_last = 2  # newest checkpoints to keep
    config.checkpoint.keep_best = 1  # best checkpoints to keep besides
    config.checkpoint.best_metric = "test/accuracy"  # by which metric; the larger the better; NaN is never best

    return config.lock()
