"""All fields of a configuration, one row each, with default, meaning and rules. All else is derived from these rows.

A default of None means unset. Durations are in optimizer steps or in epochs (passes over the training split); set one
of the two. `Field` documents what a row may state. `OPTIMIZERS` and `EVAL_KINDS` say which fields an optimizer and a
kind of evaluation have, and `EVAL_KINDS` also which metrics.
"""

import dataclasses
import enum
import itertools
import math
import re
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict


class OnResume(enum.Enum):
    """The rules for a run that is resumed with another value of a field."""

    ACCEPTED = "the run continues; the change is logged"
    DATA = "the run continues if data.accept_change is set"
    REFUSED = "it would be another run"


class Affects(enum.Enum):
    """The effects that a field of the model's group may have."""

    WEIGHTS = "which arrays there are and what they compute: weights to start from must agree"
    HEAD = "the same of the head: weights to start from must agree if their head is kept"
    TRAINING = "initial values and dropout: weights to start from may differ"
    EXECUTION = "how devices execute the model: a resumed run may differ"


class Place(enum.Enum):
    """The kinds of files that a field may name, which another machine may lack."""

    SOURCE = "a data source"
    WEIGHTS = "weights, by path or by published name"
    FOLDER = "a folder"
    FILE = "a file, or a word that stands for one of the package"


@dataclasses.dataclass(frozen=True)
class Field:
    """The declaration of a field: its default, its meaning and its rules.

    Attributes:
        name: the dotted name; `evals.*.NAME` is a field of every evaluation.
        default: the default value; None: unset.
        meaning: one line of documentation.
        optional: the type of a field that may be unset, and is unset by default; None: the field must have a value.
        minimum: the smallest number allowed, inclusive. In a tuple it holds for each number.
        maximum: the largest number allowed, inclusive. In a tuple it holds for each number.
        choices: the words allowed; empty: any value of the type, or those of the model's specs.
        is_integer: whether its numbers must be whole.
        auto: whether the value may be the word auto instead of a whole number.
        on_resume: the rule for a resumed run; None: the rule of the field's group, see `rule_of`.
        affects: what a field of the model's group affects; not used for other groups.
        place: what the field names in files; None: nothing.
        renamed_from: the name in earlier versions, which recipes, command lines and `config.json` may still use.
        since: the version that introduced the field. In a `config.json` of an earlier version it gets the value
            `before`.
        before: the value that earlier versions behaved like; None: `default`.
        synonyms: the names in timm, Hugging Face, big_vision, scenic, Keras, DeiT and MAE, separated by spaces.
    """

    name: str
    default: Any
    meaning: str
    optional: type | None = None
    minimum: float = -math.inf
    maximum: float = math.inf
    choices: tuple[str, ...] = ()
    is_integer: bool = False
    auto: bool = False
    on_resume: OnResume | None = None
    affects: Affects = Affects.WEIGHTS
    place: Place | None = None
    renamed_from: str | None = None
    since: str = "0.1"
    before: Any = None
    synonyms: str = ""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of evaluations that have the field; empty: all kinds, or it is not a field of an evaluation."""
        own = self.name.removeprefix("evals.*.")
        return tuple(kind for kind, rules in EVAL_KINDS.items() if own != self.name and own in rules.fields)

    @property
    def later(self) -> bool:
        """Whether reading a `config.json` adds this field where it is absent, because an earlier version wrote it.

        Fields of only some kinds of evaluations are not added.
        """
        return self.since != "0.1" and not self.kinds

    @property
    def rule(self) -> OnResume:
        """The rule for a run that is resumed with another value of this field."""
        return self.on_resume or rule_of(self.name, self.affects)


def rule_of(name: str, affects: Affects = Affects.WEIGHTS) -> OnResume:
    """Returns the rule for a resumed run that holds for a field's group.

    It applies to fields that state no rule, and to fields of a stored configuration that this version does not have.
    """
    group = name.partition(".")[0]
    if group == "model":
        return OnResume.ACCEPTED if affects is Affects.EXECUTION else OnResume.REFUSED
    return {"task": OnResume.REFUSED, "adapt": OnResume.REFUSED, "data": OnResume.DATA}.get(group, OnResume.ACCEPTED)


@dataclasses.dataclass(frozen=True)
class EvalKind:
    """A kind of evaluation, as far as it is known before data or models are opened.

    `METHODS` in evals/evaluators.py has its function.

    Attributes:
        meaning: what it does, for docs/evaluation.md.
        best: the metrics that may choose the best checkpoint, see `is_error`. {FIELD} in a name stands for each value
            of a field.
        others: the other metrics, but for `n` and `n_train`, the numbers of images.
        task: the kind of task whose head is evaluated; empty: the features of any model are evaluated.
        fields: the fields that not every kind has, without `evals.*.`.
        defaults: field -> default, for fields whose default is not that of their row.
        grid: the name of a field. If it has several values, the name and a value are appended to the metrics of `best`,
            as in 5shot_l2_1024. Empty: there is no such field.
    """

    meaning: str
    best: tuple[str, ...]
    others: tuple[str, ...] = ()
    task: str = ""
    fields: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    grid: str = ""


# fmt: off
EVAL_KINDS: Mapping[str, EvalKind] = {
    "classify": EvalKind(
        "the head's predictions, exactly", best=("accuracy", "top5", "loss"), task="classify"),
    "predictions": EvalKind(
        "the head's predictions, scored on the host; also with other labels or other classes",
        best=("accuracy", "top5", "class_accuracy", "calibration_error"), others=("accuracy_all", "top5_all"),
        task="classify", fields=("labels", "class_map")),
    "multi_label": EvalKind(
        "the head's predictions where an image has any number of classes; each above 0.5 is a prediction",
        best=("map", "f1_micro", "f1_macro", "loss"), task="classify"),
    "regression": EvalKind(
        "predicted numbers, in the units of the data",
        best=("mae", "r2"), others=("mae_<column>", "r2_<column>"), task="regress"),
    "masked_patches": EvalKind(
        "what a model of masked patches predicts of corrupted patches; the masks depend on the image alone",
        best=("accuracy", "loss"), task="masked_patches"),
    "fewshot": EvalKind(
        "the paper's few-shot evaluation: regularised least squares from N images a class to targets of -1 and 1",
        best=("{shots:g}shot",), others=("{shots:g}shot_std",), fields=("train_split", "shots", "seeds", "l2"),
        grid="l2"),
    "knn": EvalKind(
        "votes of the nearest neighbours by cosine",
        best=("{k:g}nn",), fields=("train_split", "k", "temperature")),
    "probe": EvalKind(
        "logistic regression by L-BFGS, with the `l2` that is best on a part of `train_split`",
        best=("accuracy",), others=("l2",), fields=("train_split", "l2", "validation"),
        defaults={"l2": (1e-3, 1e-1, 1e1, 1e3)}),
    "probe_sgd": EvalKind(
        "a linear classifier trained by SGD, with the rate that is best on a part of `train_split`",
        best=("accuracy",), others=("rate",), fields=("train_split", "rates", "epochs", "validation")),
    "zeroshot": EvalKind(
        "features are compared with vectors of texts, one for each class, by cosine",
        best=("accuracy", "top5", "class_accuracy", "calibration_error"), fields=("texts",)),
}
# fmt: on


@dataclasses.dataclass(frozen=True)
class OptimizerKind:
    """An optimizer, as far as a configuration is checked by it; `optim.UPDATE_RULES` has its functions.

    Attributes:
        defaults: field of the group `optim` that it uses -> the value of its authors (docs/optimizers.md).
        stored: the fields whose values its state contains. The state goes on with them when a run is resumed.
        scales_decay: whether the size of its updates, weight decay included, follows that of the parameters.
        averages: whether what is evaluated is an average of all parameters, which its state contains.
    """

    defaults: Mapping[str, Any]
    stored: tuple[str, ...] = ()
    scales_decay: bool = False
    averages: bool = False


OPTIMIZERS: Mapping[str, OptimizerKind] = {
    "adamw": OptimizerKind({"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "moment_dtype": "float32"}),
    "sgd": OptimizerKind({"momentum": 0.9, "moment_dtype": "float32"}),
    "lion": OptimizerKind({"beta1": 0.9, "beta2": 0.99, "moment_dtype": "float32"}),
    "lamb": OptimizerKind({"beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "moment_dtype": "float32"}, scales_decay=True),
    "adafactor": OptimizerKind({"beta2": 0.999, "momentum": 0.9, "moment_dtype": "bfloat16"}),
    "muon": OptimizerKind({"momentum": 0.95, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "moment_dtype": "float32"}),
    "schedule_free_adamw": OptimizerKind({"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}, stored=("beta1",), averages=True),
}
OF_OPTIMIZERS = tuple(dict.fromkeys(field for kind in OPTIMIZERS.values() for field in kind.defaults))


def _if_unset(field: str) -> str:
    """Returns the end of the meaning of an optimizer's field: "unset: VALUE (OPTIMIZER, ...), VALUE (...)"."""
    values = {name: kind.defaults[field] for name, kind in OPTIMIZERS.items() if field in kind.defaults}
    owners = {value: [name for name, own in values.items() if own == value] for value in dict.fromkeys(values.values())}
    return "unset: " + ", ".join(f"{value} ({', '.join(names)})" for value, names in owners.items())


REGRESSION_LOSSES = ("l1", "l2", "huber")  # the values of `task.loss` for numbers
ACCEPTED, REFUSED = OnResume.ACCEPTED, OnResume.REFUSED
EXECUTION, HEAD, TRAINING = Affects.EXECUTION, Affects.HEAD, Affects.TRAINING
FROM_WEIGHTS = "init_from"  # the value of `model.name` that stands for the model of the weights in `init_from`
MOST_DECAY = 1 - 1e-7  # of a moment or an average: at 1 it would stay what it was at first, and nothing be learnt

# fmt: off
_ROWS = (
    Field("seed", 0, "seed of the initial weights, the data order, augmentation, dropout and MixUp",
          minimum=0, maximum=2**32 - 1, on_resume=REFUSED, synonyms="rng_seed random_seed"),
    Field("resolution", 224, "pixels on a side; preprocessing refers to it: {resolution}, {resolution*256/224}",
          minimum=1, on_resume=REFUSED,
          synonyms="img_size image_size input_size img_resolution image_resolution crop_size"),
    Field("batch", 4096, "images per optimizer step, over all hosts and devices",
          minimum=1, on_resume=REFUSED, synonyms="batch_size train_batch_size global_batch_size batchsize bs"),
    Field("batch_eval", None, "images per evaluation step; unset: batch / accum_steps",
          optional=int, minimum=1, synonyms="eval_batch_size validation_batch_size val_batch_size test_batch_size"),
    Field("accum_steps", 1,
          "parts into which a batch is split to save memory; the gradient is that of the whole batch",
          minimum=1,
          synonyms="gradient_accumulation_steps grad_accum_steps gradient_accumulation accumulate_grad_batches "
          "accum_iter"),
    Field("total_steps", None, "length of training in steps; 0: only evaluates and exports",
          optional=int, minimum=0,
          synonyms="steps max_steps num_steps train_steps num_train_steps num_training_steps iterations max_iters"),
    Field("total_epochs", None, "the same in epochs: int(total_epochs * num_examples / batch) steps",
          optional=float, minimum=0,
          synonyms="epochs epoch num_epochs max_epochs n_epochs train_epochs num_train_epochs num_training_epochs"),
    Field("init_from", None, "weights to start from: a workdir, checkpoint, .npz file or published name",
          optional=str, place=Place.WEIGHTS,
          synonyms="pretrained pretrained_path pretrained_dir initial_checkpoint init_checkpoint checkpoint "
          "checkpoint_path model_init model_load model_name_or_path model_or_filename finetune weights "
          "load_from"),
    Field("keep_head", False, "also takes head and pre_logits from init_from: to evaluate, or to continue training"),
    Field("resample", "auto",
          "of init_from's positions: linear (Google's), bicubic (timm's), bicubic_no_antialias (transformers'), "
          "flexi (patches too), or auto: as in the library of its layout",
          choices=("auto", "linear", "bicubic", "bicubic_no_antialias", "flexi")),
    Field("base_lr", 1e-3, "the learning rate after the warm-up",
          minimum=0,
          synonyms="lr learning_rate base_learning_rate lr_base init_lr initial_learning_rate peak_lr max_lr"),
    Field("warmup_steps", None, "length of the linear warm-up from 0, in steps",
          optional=int, minimum=0, synonyms="warmup num_warmup_steps warmup_iters"),
    Field("warmup_epochs", None, "the same in epochs", optional=float, minimum=0),
    Field("decay_type", "cosine", "after the warm-up: cosine (to 0), linear (to linear_end), rsqrt, step or constant",
          choices=("cosine", "linear", "rsqrt", "step", "constant"),
          synonyms="schedule sched scheduler lr_schedule lr_scheduler lr_scheduler_type lr_decay"),
    Field("decay_at", (0.3, 0.6, 0.9),
          "step: fractions of the training after each of which the rate is divided by 10",
          minimum=0, maximum=1, since="0.2"),
    Field("linear_end", 1e-5, "the learning rate at the end of a linear decay"),
    Field("rsqrt_timescale", 10_000, "steps after which rsqrt has fallen by sqrt(2)", minimum=1),
    Field("cooldown_steps", 0, "last steps of rsqrt or constant, in which the learning rate falls linearly to 0",
          minimum=0),
    Field("grad_norm_clip", None, "largest global norm of the gradient; unset or 0: no clipping",
          optional=float, minimum=0,
          synonyms="clip_grad grad_clip grad_clip_norm clip_grad_norm gradient_clip gradient_clip_val max_grad_norm "
          "clip_norm clipnorm global_clipnorm"),
    Field("log_every", 50, "steps between two lines of metrics",
          minimum=1,
          synonyms="log_interval log_steps log_freq print_freq logging_steps log_training_steps log_every_n_steps "
          "progress_every"),
    Field("eval_every", None, "steps between two evaluations; if this and eval_every_epochs are unset: at the end only",
          optional=int, minimum=1,
          synonyms="eval_steps eval_interval eval_freq log_eval_steps val_check_interval steps_per_eval"),
    Field("eval_every_epochs", None, "the same in epochs, but at least log_every steps", optional=float, minimum=0),
    Field("stop_after", None,
          "evaluations in a row without a better checkpoint.best_metric that end the run, whose best is then exported",
          optional=int, minimum=1, since="0.2", synonyms="patience early_stopping early_stopping_patience"),
    Field("stop_difference", 0.0, "difference from the best value that a better one must exceed",
          minimum=0, since="0.2", synonyms="min_delta early_stopping_threshold"),
    Field("stop_cooldown", 0, "last steps that then follow, in which the learning rate falls linearly to 0",
          minimum=0, since="0.2"),
    Field("checkpoint_every", 1000, "steps between two checkpoints; the last step is always saved",
          minimum=1, synonyms="save_steps save_every save_interval save_freq ckpt_steps ckpt_every checkpoint_steps"),
    Field("checkpoint_every_minutes", 15.0,
          "minutes after which a checkpoint is saved before checkpoint_every steps; 0: by steps only",
          minimum=0),
    Field("stall_limit", 1800.0, "seconds without progress on a host, compilation included, after which the run ends",
          minimum=1),
    Field("profile_steps", 0, "steps to trace into <workdir>/profile, starting with the third step of the run",
          minimum=0, synonyms="profile profiler xprof"),
    Field("wandb", None, "project of Weights & Biases to log to, too; needs the extra [wandb]",
          optional=str, since="0.2"),
    Field("report", False, "writes the page of vit_jax.report into the workdir at the end; needs the extra [plot]",
          since="0.2"),
    Field("compiler_options", "",
          "NAME=VALUE,...: options of jax.jit, added to the devices' own or replacing them; NAME= omits one",
          since="0.2"),
    Field("step_numbers", "auto",
          "rates, decays, smoothing and seed in a compiled step: constants, arguments (that runs share), or auto: "
          "arguments in a sweep",
          choices=("auto", "constants", "arguments"), on_resume=REFUSED, since="0.2", before="constants"),
    Field("use_measured_times", False,
          "at the first start, replaces model.attention=auto by the plain form where vit_jax.measure found that faster",
          since="0.2"),
    # The model. Its specs in models/ take their defaults from here, list the accepted words and check the numbers.
    Field("model.name", "ViT-B/16",
          "[{R,R26,R50}+]ViT-{mu,Ti,S,B,L,H,So400m,g,G}/<patch>, ViT/<patch>, BiT-R50x1, ...; init_from: its own",
          synonyms="model arch architecture backbone model_name model_type network variant"),
    Field("model.width", None, "channels of a token; unset: by the name (ViT/<patch size> needs all four)",
          optional=int, synonyms="hidden_size hidden_dim embed_dim emb_dim"),
    Field("model.depth", None, "number of blocks; unset: by the name",
          optional=int, synonyms="num_layers num_hidden_layers n_layers layers"),
    Field("model.mlp_dim", None, "hidden channels of an MLP; unset: by the name",
          optional=int, synonyms="intermediate_size"),
    Field("model.num_heads", None, "attention heads of a block; unset: by the name",
          optional=int, synonyms="num_attention_heads n_heads heads"),
    Field("model.pooling", "token", "input of the head: token (class token), gap (mean), map (attention), token_gap",
          synonyms="pool pool_type global_pool classifier"),
    Field("model.map_heads", 0, "heads of the attention of pooling=map; 0: num_heads",
          since="0.2", synonyms="attn_pool_num_heads"),
    Field("model.map_mlp_dim", 0, "hidden channels of the MLP of pooling=map; 0: mlp_dim", since="0.2"),
    Field("model.map_prefix", False,
          "whether pooling=map reads class token and registers too (Perception Encoder)", since="0.2",
          synonyms="pool_include_prefix"),
    Field("model.final_norm", "tokens", "what the last LayerNorm normalises: tokens, or pooled (their pooled result)",
          since="0.2", synonyms="fc_norm"),
    Field("model.pre_norm", False, "whether a LayerNorm of all tokens, positions added, precedes the blocks (CLIP)",
          since="0.2", synonyms="norm_pre pre_layrnorm"),
    Field("model.class_token", "auto", "auto: a class token if the pooling reads it; always: also if it does not",
          since="0.2"),
    Field("model.registers", 0, "learned tokens beside class token and patches, which the pooling does not read",
          since="0.2", synonyms="reg_tokens num_register_tokens num_registers register_tokens"),
    Field("model.pre_logits", False, "whether a tanh layer precedes the head, as in pre-training", affects=HEAD),
    Field("model.representation_size", None, "width of the pre_logits layer; unset: the model's width",
          optional=int, affects=HEAD, since="0.2", synonyms="rep_size"),
    Field("model.projection", 0, "width of a linear layer without a bias after the pooling (CLIP); 0: there is none",
          since="0.2", synonyms="projection_dim embed_dim_out proj_dim"),
    Field("model.distilled_head", False,
          "whether the first register is a distillation token with a head of its own (DeiT); logits are their mean",
          affects=HEAD, since="0.2", synonyms="distilled distillation_token"),
    Field("model.head_bias", 0.0, "initial bias of the head",
          affects=TRAINING, synonyms="init_head_bias head_init_bias"),
    Field("model.head_std", 0.0, "standard deviation of the initial kernel of the head; 0: the kernel starts at 0",
          affects=TRAINING, minimum=0, since="0.2", synonyms="head_init_scale head_init_std"),
    Field("model.position", "learned",
          "learned (1-D), learned2d, relative, none (Table 8), relative_bias (BEiT), sincos2d or sincos2d_moco",
          synonyms="posemb pos_emb pos_embed position_embedding positional_embedding"),
    # patches: as if the positions were added before the other tokens join.
    Field("model.position_rows", "all", "which tokens have a learned position: all, class (and patches) or patches",
          since="0.2", synonyms="no_embed_class"),
    Field("model.position_place", "stem",
          "where learned positions are added (Table 8): stem; every block, with its own (blocks) or one table (shared)",
          since="0.2"),
    # The default is the authors' for learned positions at the stem; the paper states none for others.
    Field("model.position_std", 0.02, "standard deviation of the initial values of learned positions",
          affects=TRAINING, since="0.2"),
    # The paper says neither which relative tables there are, nor that offsets are clipped.
    Field("model.relative_tables", "block",
          "tables of relative positions: one for each block, for each head of each, or one for the model", since="0.2"),
    Field("model.relative_clip", 0,
          "largest relative offset with a row of its own, which farther ones share, in patches of raster order; 0: all",
          since="0.2"),
    Field("model.rotary", "none",
          "of queries and keys: none, axial (row and column, EVA-02), axial_xy (PE), centred (in [-1, 1], DINOv3)",
          since="0.2", synonyms="rope use_rot_pos_emb rotary_embedding rope_type"),
    Field("model.rotary_grid", 0, "patches on a side to which rows and columns are scaled for the rotation; 0: not",
          since="0.2"),
    Field("model.rotary_theta", 10_000.0, "base of the angles of the rotation (DINOv3: 100)", since="0.2",
          synonyms="rope_theta rope_temperature rope_base"),
    # Not in the paper, whose section 2 discusses them.
    Field("model.attention_pattern", "full",
          "which patches attend to which: full (all), local, local2d, strided, fixed", since="0.2",
          synonyms="sparse_attention local_attention"),
    Field("model.attention_window", 0,
          "patches of a block of the pattern, in raster order (local2d: on a side); 0: those of a row", since="0.2",
          synonyms="window_size block_length"),
    Field("model.qk_norm", False,
          "whether queries and keys are normalised, each by a norm over a head's channels, which the heads share",
          since="0.2"),
    Field("model.qkv_bias", "all", "which projections of the attention have a bias: all, query_value or none",
          since="0.2", synonyms="key_bias use_qkv_bias attention_bias"),
    Field("model.dense_bias", True, "whether the output of the attention and both layers of an MLP have biases",
          since="0.2", synonyms="proj_bias mlp_bias use_bias"),
    Field("model.activation", "gelu_tanh",
          "of the MLPs: gelu_tanh (as published), gelu (exact), quick_gelu (OpenAI's CLIP) or swiglu (gated)",
          since="0.2", synonyms="act_layer hidden_act act use_swiglu_ffn"),
    Field("model.mlp_norm", False, "whether a norm of an MLP's hidden channels precedes its last layer (EVA-02)",
          since="0.2", synonyms="scale_mlp scale_mlp_norm ffn_ln"),
    Field("model.norm", "layer", "every norm: layer (LayerNorm) or rms (RMSNorm: a scale alone, no mean)",
          since="0.2", synonyms="norm_layer rmsnorm use_rms_norm"),
    Field("model.norm_epsilon", 1e-6, "epsilon of every norm",
          since="0.2", synonyms="layer_norm_eps layer_norm_epsilon norm_eps ln_eps"),
    Field("model.layer_scale", 0.0, "LayerScale: initial factor of each channel of a residual branch; 0: no factors",
          since="0.2", synonyms="init_values layerscale_value layer_scale_init_value ls_init"),
    Field("model.embed_bias", True, "whether the projection of patches has a bias", since="0.2"),
    Field("model.stem_epsilons", "released",
          "of norms and standardised weights of a hybrid's ResNet: released (the authors') or timm", since="0.2"),
    Field("model.image_mean", (0.5, 0.5, 0.5), "mean of red, green and blue in [0, 1], subtracted before the patches",
          since="0.2", synonyms="mean pixel_mean"),
    Field("model.image_std", (0.5, 0.5, 0.5),
          "standard deviation of the three colours, by which they are then divided; 0.5 and 0.5: [-1, 1]",
          since="0.2", synonyms="std pixel_std"),
    Field("model.stages", None, "units in each stage of a BiT or of a hybrid's ResNet; unset: by the name",
          optional=tuple, since="0.2"),
    # Of the authors' two forms, pre_activation is the released one; post_activation is that of the hybrids and of
    # big_vision's recipes. The others are post_activation with attention. In place of each 3x3 convolution, axial has
    # attention along columns and rows (D.6), and stand_alone in neighbourhoods (1906.05909). augmented has attention
    # beside the 3x3 convolutions of all stages but the first (1904.09925). Squeeze-and-excitation: 1709.01507.
    Field("model.unit", None, "of a BiT: pre_activation (if unset), post_activation, axial, stand_alone, augmented",
          optional=str, since="0.2"),
    Field("model.se_reduction", None, "of a BiT: channels to a hidden unit of squeeze-and-excitation; unset: none",
          optional=int, since="0.2"),
    Field("model.root", None, "of a BiT: convolution (if unset), or attention, the stem of stand-alone attention",
          optional=str, since="0.2"),
    # Around the images in the max pooling of a pre-activation root: zeros, as the released weights were trained, or the
    # lowest number, as in big_vision. After the other root's ReLU it makes no difference.
    Field("model.border", None, "of a BiT's root pooling: zeros, as released (unset), or lowest",
          optional=str, since="0.2"),
    Field("model.dropout_rate", 0.0, "dropout after every dense layer except qkv and after the positions are added",
          affects=TRAINING, synonyms="dropout drop drop_rate hidden_dropout_prob"),
    Field("model.stochastic_depth", 0.0, "rate at which the last block drops a residual branch",
          affects=TRAINING, synonyms="drop_path drop_path_rate droppath stoch_depth stochastic_depth_rate"),
    Field("model.stochastic_depth_schedule", "linear", "the rate of the blocks before: linear from 0, or constant",
          affects=TRAINING, since="0.2"),
    # Parameters, softmax, statistics and logits are float32.
    Field("model.dtype", "auto", "type of the activations: float32, bfloat16 or auto (bfloat16 on TPU and GPU)",
          choices=("auto", "float32", "bfloat16"), affects=EXECUTION,
          synonyms="amp amp_dtype bf16 fp16 half_precision mixed_precision precision compute_dtype"),
    Field("model.attention", "auto", "heads_first, tokens_first, fused (TPU), cudnn (GPU) or auto (the fastest here)",
          affects=EXECUTION),
    Field("model.mlp", "auto",
          "how an MLP is computed: jit (by the compiler), shard_map (explicit communication), fused (TPU, a kernel "
          "with norm and residual, in blocks that allow it) or auto (the fastest here)",
          affects=EXECUTION),
    Field("model.remat", "none",
          "recomputed backwards: none, dots (all but matmuls), mlp, attention (all but what TPU kernels return), full",
          affects=EXECUTION,
          synonyms="gradient_checkpointing grad_checkpointing activation_checkpointing remat_policy"),
    Field("model.scan", False, "run the blocks as one loop: compiles sooner, runs slower", affects=EXECUTION),
    # The data. Their place may change in a resumed run, as their fingerprint is compared.
    Field("data.source", "synthetic",
          "the images: KIND or KIND:NAME, such as digits or folder:PATH; docs/data.md lists the kinds",
          on_resume=ACCEPTED, place=Place.SOURCE, synonyms="data dataset dataset_name data_path data_root train_dir"),
    Field("data.data_dir", None, "folder of the TFDS data, local or remote; unset: TFDS's default",
          optional=str, on_resume=ACCEPTED, place=Place.FOLDER, synonyms="tfds_data_dir dataset_dir"),
    Field("data.split", "train", "split to train on, as TFDS writes it: train[:98%]; or folds: train[not fold 2/5]",
          synonyms="train_split"),
    Field("data.exclude", None, "file with a list of images that are left out, of training and evaluations",
          optional=str, on_resume=ACCEPTED, place=Place.FILE, since="0.2", synonyms="ignore_images exclude_images"),
    Field("data.groups", None, "file with the group of each image, such as its patient: folds divide no group",
          optional=str, on_resume=ACCEPTED, place=Place.FILE, since="0.2", synonyms="group_file"),
    Field("data.group_column", None, "column of that file with the groups; unset: group, or the only one beside image",
          optional=str, on_resume=ACCEPTED, since="0.2"),
    Field("data.preprocess", "inception_crop({resolution})|flip_lr|value_range(-1,1)", "of training images",
          synonyms="pp preprocessing transform transforms aug augment augmentation augmentations aa auto_augment "
          "autoaugment randaug randaugment rand_augment reprob random_erasing color_jitter hflip"),
    Field("data.num_classes", None, "or numbers to learn; checked against the data; unset: taken from the data",
          optional=int, on_resume=REFUSED, synonyms="nb_classes n_classes num_labels"),
    Field("data.num_examples", None,
          "images in the training split; checked against the data; unset: taken from the data", optional=int),
    Field("data.max_labels", None, "labels of one image in multi-label data; unset: taken from the data",
          optional=int, minimum=1),
    Field("data.order", "auto",
          "how images are shuffled: global, stream (a few shards at a time), auto: stream if they exceed the cache",
          choices=("auto", "global", "stream"), on_resume=REFUSED, since="0.2", before="global"),
    Field("data.readers", None, "stream: parts of a batch that are read from different shards; unset: 64 at most",
          optional=int, minimum=1, on_resume=REFUSED, since="0.2"),
    Field("data.window", 4, "stream: shards that each of the readers shuffles at a time",
          minimum=1, on_resume=REFUSED, since="0.2", synonyms="shuffle_buffer_size shuffle_buffer"),
    Field("data.balance", 0.0,
          "how far classes are balanced: of n images, shares in proportion to n^(1 - balance); 0: not, 1: equal shares",
          minimum=0, maximum=1, on_resume=REFUSED, since="0.2", synonyms="class_balance balanced_sampler oversampling"),
    Field("data.repeats", 1, "copies of each image in a batch, each augmented anew (repeated augmentation)",
          minimum=1, on_resume=REFUSED, since="0.2", synonyms="repeated_aug num_repeats aug_repeats"),
    Field("data.workers", 0,
          "worker processes that read and decode; 0: threads of this process; auto: by the number of cores",
          minimum=0, auto=True, on_resume=ACCEPTED,
          synonyms="num_workers n_workers dataloader_num_workers num_parallel_calls"),
    Field("data.fast", False,
          "training resizes in whole numbers: faster, a third of the values one grey level higher"),
    Field("data.accept_change", False, "resume although the data differ from those that the run began with",
          on_resume=ACCEPTED),
    Field("data.bad_images", "fail",
          "what an unreadable training image does: fail, or replace (by the next readable)",
          choices=("fail", "replace"), on_resume=ACCEPTED),
    Field("data.max_bad", 0.001, "largest fraction of images to replace, counted by each host since it started",
          minimum=0, maximum=1, on_resume=ACCEPTED),
    # The task that is learnt.
    Field("task.kind", "classify",
          "what is learnt: classify (labels), regress (numbers), distill (labels and a teacher) or masked_patches "
          "(section 4.6)",
          choices=("classify", "regress", "distill", "masked_patches"), since="0.2"),
    Field("task.loss", "softmax",
          "cross-entropy: softmax, or sigmoid (summed over classes); of regress: l1, l2 or huber",
          choices=("softmax", "sigmoid", *REGRESSION_LOSSES), synonyms="task criterion loss_fn loss_type"),
    Field("task.huber_delta", 1.0, "of huber: the standardised error up to which it is squared", minimum=0,
          since="0.2"),
    Field("task.target_means", None,
          "of regress: subtracted from each number; unset: the means of the training split",
          optional=tuple, since="0.2"),
    Field("task.target_deviations", None,
          "of regress: by which what is left is divided; unset: the standard deviations in the training split",
          optional=tuple, minimum=1e-30, since="0.2"),
    Field("task.class_weights", None,
          "weight of each class in the loss: balanced (1 / its images), effective (number), or a file of weights",
          optional=str, place=Place.FILE, since="0.2", synonyms="class_weight weight_classes"),
    Field("task.effective_beta", 0.999, "beta of class_weights=effective; 0: equal weights, near 1: balanced",
          minimum=0, maximum=MOST_DECAY, since="0.2"),
    Field("task.focal_gamma", 0.0, "gamma of the focal loss, by which well classified images count less; 0: off",
          minimum=0, since="0.2", synonyms="focal focal_loss"),
    Field("task.logit_adjustment", 0.0,
          "tau of logit adjustment: tau log(share of the images) is added to a class's logit in training; 0: off",
          minimum=0, since="0.2", synonyms="logit_adjust"),
    Field("task.label_smoothing", 0.0, "softmax: mass spread over all classes; sigmoid: on = 1 - s, off = s",
          minimum=0, maximum=1, synonyms="smoothing label_smoothing_factor"),
    Field("task.mixup", 0.0, "alpha of MixUp's Beta(alpha, alpha); 0: off",
          minimum=0, synonyms="mixup_alpha mixup.p"),
    Field("task.cutmix", 0.0, "alpha of CutMix's Beta(alpha, alpha); 0: off; with MixUp, each in half of the steps",
          minimum=0, synonyms="cutmix_alpha"),
    Field("task.mixed_labels", "share",
          "target of an image's class and of the one mixed into it: their share of the pixels, or 1 (with sigmoid)",
          choices=("share", "one"), since="0.2", synonyms="bce_target_thresh bce_loss"),
    Field("task.mixup_probability", 1.0, "fraction of the steps that mix",
          minimum=0, maximum=1, synonyms="mixup_prob"),
    Field("task.teacher", None, "of distill: the teacher's weights, with their head; as init_from",
          optional=str, on_resume=ACCEPTED, place=Place.WEIGHTS, since="0.2",
          synonyms="teacher_model teacher_path teacher_name"),
    Field("task.teacher_weight", 0.5, "weight of the teacher's loss; that of the labels has the rest",
          minimum=0, maximum=1, since="0.2", synonyms="distillation_alpha"),
    Field("task.teacher_targets", "soft",
          "what is learnt of the teacher: soft (its probabilities), or hard (its best class)",
          choices=("soft", "hard"), since="0.2", synonyms="distillation_type"),
    Field("task.temperature", 1.0, "by which both models' logits are divided before soft targets are compared",
          minimum=1, since="0.2", synonyms="distillation_tau distillation_temperature"),
    Field("task.target", "mean_color",
          "of masked_patches: mean_color, patch4 (4x4 colours) or full (pixels) of a patch",
          choices=("mean_color", "patch4", "full"), since="0.2"),
    Field("task.corrupted", 0.5, "fraction of the patches that are corrupted, and predicted",
          minimum=0, maximum=1, since="0.2"),
    Field("task.masked", 0.8, "fraction of the corrupted patches that the [mask] embedding replaces",
          minimum=0, maximum=1, since="0.2"),
    Field("task.swapped", 0.1,
          "fraction of the corrupted patches that another patch of the image replaces; the others stay as they are",
          minimum=0, maximum=1, since="0.2"),
    # The optimizer. Its name, moment_dtype, frozen_blocks and ema_decay decide which arrays its state has. `OPTIMIZERS`
    # lists which of the fields from beta1 to moment_dtype each optimizer uses, and their values if unset.
    Field("optim.name", "adamw", "optimizer: " + ", ".join(OPTIMIZERS),
          choices=tuple(OPTIMIZERS), on_resume=REFUSED, synonyms="optim optimizer optimiser opt optax_name"),
    Field("optim.beta1", None, "decay of the first moment; " + _if_unset("beta1"),
          optional=float, minimum=0, maximum=MOST_DECAY, synonyms="adam_beta1"),
    Field("optim.beta2", None, "decay of the second moment, see docs/optimizers.md; " + _if_unset("beta2"),
          optional=float, minimum=0, maximum=MOST_DECAY, synonyms="adam_beta2"),
    Field("optim.eps", None, "added to the root of the second moment; " + _if_unset("eps"),
          optional=float, minimum=1e-16, synonyms="adam_epsilon epsilon opt_eps"),
    Field("optim.momentum", None, "decay of the momentum; " + _if_unset("momentum"),
          optional=float, minimum=0, maximum=MOST_DECAY),
    Field("optim.moment_dtype", None,
          "of the first moment or the momentum: float32 or bfloat16; " + _if_unset("moment_dtype"),
          optional=str, choices=("float32", "bfloat16"), on_resume=REFUSED, synonyms="optim_dtype mu_dtype"),
    # The gradients of a hybrid's ResNet always have the dtype of the activations.
    Field("optim.grad_dtype", "auto",
          "of kernels' gradients: auto (as activations) or float32 (doubles their exchange)",
          choices=("auto", "float32"), since="0.2",
          synonyms="reduce_dtype grad_reduce_dtype gradient_dtype allreduce_dtype"),
    Field("optim.weight_decay", 0.0, "weight decay, decoupled from the gradient",
          minimum=0, synonyms="wd l2 l2_decay_factor weight_decay_rate"),
    Field("optim.decays", "kernels", "what decays: kernels (also of adapters) or all", choices=("kernels", "all")),
    Field("optim.decay_factor", "rate", "factor of the decay: rate (the learning rate) or schedule (rate / base_lr)",
          choices=("rate", "schedule")),
    Field("optim.lr_multipliers", "",
          "REGEX=FACTOR,...: the first that matches a whole name counts; encoder/blocks/0/.* is one block; 0 freezes",
          renamed_from="optim.rates", synonyms="rates freeze lr_mults"),
    Field("optim.layer_decay", 1.0,
          "factor of the learning rate from each block to the one before it; the stem is one before the first",
          minimum=0, maximum=1, since="0.2", synonyms="layerwise_lr_decay lr_layer_decay llrd"),
    Field("optim.frozen_blocks", 0, "blocks that are frozen from the first on, with the stem and the positions",
          minimum=0, on_resume=REFUSED, since="0.2", synonyms="freeze_blocks freeze_layers"),
    Field("optim.ema_decay", 0.0, "of a moving average of the weights, which is then evaluated and exported; 0: off",
          minimum=0, maximum=MOST_DECAY, on_resume=REFUSED, synonyms="ema model_ema model_ema_decay ema_rate"),
    Field("optim.sam_rho", 0.0, "length of the move by which SAM looks for larger losses, in two passes; 0: one pass",
          minimum=0, since="0.2", synonyms="rho sam"),
    Field("optim.sam_rho_min", None, "sam_rho when the learning rate has fallen to 0; unset: sam_rho is constant",
          optional=float, minimum=0, since="0.2", synonyms="rho_min"),
    Field("optim.sam_alpha", 0.0, "weight of the gap between both losses: GSAM; 0: SAM", minimum=0, since="0.2",
          synonyms="gsam_alpha"),
    Field("optim.max_nonfinite_skips", 0,
          "consecutive steps with a non-finite loss, gradient or rate to skip before stopping",
          minimum=0),
    # LoRA adapters, with which the kernels of the blocks are not trained.
    Field("adapt.rank", 0, "rank of LoRA adapters of blocks, with which only they and the head are trained; 0: none",
          minimum=0, since="0.2", synonyms="lora_rank lora_r"),
    Field("adapt.alpha", 16.0, "the adapters are multiplied by alpha / rank",
          minimum=0, since="0.2", synonyms="lora_alpha"),
    Field("adapt.where", "attention,mlp", "kernels with adapters: attention, mlp, or attention,mlp",
          choices=("attention,mlp", "attention", "mlp"), since="0.2", synonyms="target_modules lora_target_modules"),
    # The mesh of devices. Its axes are checked against the devices; -1 takes all devices that are left.
    Field("mesh.slice", 1,
          "TPU slices, or groups of hosts: the batch is split over them, only gradients pass between",
          minimum=1, synonyms="num_slices"),
    Field("mesh.data", -1, "devices over which the batch is split and the weights are copied; -1: all the others",
          synonyms="data_parallel"),
    Field("mesh.fsdp", 1, "devices over which both the batch and the weights are split",
          synonyms="mesh sharding"),
    Field("mesh.tensor", 1, "devices over which attention heads and MLPs are split, with their weights",
          minimum=1, synonyms="tensor_parallel model_parallel"),
    # The fields of each evaluation `evals.NAME`. NAME is the start of its metrics: test/accuracy, test/loss, test/n.
    Field("evals.*.kind", "classify",
          "of the head: " + ", ".join(kind for kind, rules in EVAL_KINDS.items() if rules.task)
          + "; of features: " + ", ".join(kind for kind, rules in EVAL_KINDS.items() if not rules.task),
          choices=tuple(EVAL_KINDS), since="0.2"),
    Field("evals.*.source", None, "its data, as data.source; unset: data.source",
          optional=str, place=Place.SOURCE, since="0.2"),
    Field("evals.*.split", "test", "split to evaluate on, as TFDS writes it",
          synonyms="evals val_split validation_split eval_split test_split"),
    Field("evals.*.preprocess", "resize_small({resolution*256/224})|central_crop({resolution})|value_range(-1,1)",
          "preprocessing of evaluated images",
          synonyms="crop_pct pp_eval test_transform"),
    Field("evals.*.every", None, "steps between two of this evaluation; unset: eval_every",
          optional=int, minimum=1, since="0.2"),
    Field("evals.*.labels", None, "ReaL's labels, real.json; unset: those of the data",
          optional=str, place=Place.FILE, since="0.2"),
    Field("evals.*.class_map", None,
          "how classes of the data correspond to the model's: names, order, imagenet_a, or a file",
          optional=str, place=Place.FILE, since="0.2"),
    Field("evals.*.train_split", "train", "split that the classifier on frozen features learns from", since="0.2"),
    Field("evals.*.shots", (1, 5, 10, 25), "images of each class to learn from; gives NAME/<N>shot",
          minimum=1, is_integer=True, since="0.2"),
    Field("evals.*.seeds", 3, "random draws of these images, whose accuracies are averaged",
          minimum=1, since="0.2"),
    Field("evals.*.l2", (1024.0,),
          "strengths of the regularisation; several give NAME/<N>shot_l2_<strength> (of probe: to choose from)",
          minimum=0, since="0.2"),
    Field("evals.*.rates", (0.01, 0.1, 1.0), "learning rates to choose from",
          minimum=0, since="0.2"),
    Field("evals.*.epochs", 100, "passes over the features", minimum=1, since="0.2"),
    Field("evals.*.validation", 0.1,
          "fraction of each class in train_split on which settings are compared; the best is then fitted to all",
          minimum=0, maximum=1, since="0.2"),
    Field("evals.*.k", (1, 5, 20), "numbers of nearest neighbours that vote; gives NAME/<k>nn",
          minimum=1, is_integer=True, since="0.2"),
    Field("evals.*.temperature", 0.07, "a neighbour votes with exp(cosine / temperature)",
          minimum=0.001, since="0.2"),
    Field("evals.*.texts", None, "the names and vectors of the classes, an .npz file",
          optional=str, place=Place.FILE, since="0.2"),
    # The checkpoints that are kept.
    Field("checkpoint.keep_last", 2, "number of newest checkpoints to keep",
          minimum=1, synonyms="save_total_limit checkpoint_hist max_to_keep"),
    Field("checkpoint.keep_best", 1, "number of best checkpoints to keep besides", minimum=0),
    Field("checkpoint.best_metric", "test/accuracy", "metric of the best; NaN is never best",
          synonyms="eval_metric metric_for_best_model monitor"),
    Field("checkpoint.best_is", None, "its best value: highest or lowest; unset: lowest for losses and errors",
          optional=str, choices=("highest", "lowest"), since="0.2", synonyms="greater_is_better"),
)
# fmt: on
FIELDS: Mapping[str, Field] = {row.name: row for row in _ROWS}
# Field that is gone -> (the value that a stored run must have, like which this version behaves; since when it is gone).
REMOVED: Mapping[str, tuple[Any, str]] = {"task.swap_from": ("image", "0.2")}
RENAMED: Mapping[str, str] = {row.renamed_from: row.name for row in _ROWS if row.renamed_from}


def current_name(field: str) -> str:
    """Returns the present name of a field, whose name may be that of an earlier version."""
    return RENAMED.get(field, field)


def declared_name(name: str) -> str:
    """Returns the name under which a field is declared in `FIELDS`: `evals.test.split` -> `evals.*.split`."""
    return re.sub(r"^evals\.[^.]+\.", "evals.*.", name)


def place_of(name: str) -> Place | None:
    """Returns what a field names in files; None: nothing, or there is no such field."""
    field = FIELDS.get(declared_name(name))
    return field.place if field else None


def resume_rule(name: str) -> OnResume:
    """Returns what happens when a run is resumed with another value of a field.

    The field may be one that this version does not have.
    """
    field = FIELDS.get(declared_name(name))
    return field.rule if field else rule_of(name)


def model_fields(*affects: Affects) -> list[str]:
    """Returns the names, without `model.`, of the model's fields that affect one of these; never `name`."""
    rows = {name.removeprefix("model."): row for name, row in FIELDS.items() if name.startswith("model.")}
    return [name for name, row in rows.items() if row.affects in affects and name != "name"]


def eval_rows(kind: str) -> Mapping[str, Field]:
    """Returns name -> declaration of the fields of a kind of evaluation, with names without `evals.*.`."""
    rows = {name.removeprefix("evals.*."): row for name, row in FIELDS.items() if name.startswith("evals.*.")}
    return {name: row for name, row in rows.items() if not row.kinds or kind in row.kinds}


def eval_fields(kind: str) -> list[str]:
    """Returns the names of the fields of a kind of evaluation."""
    return list(eval_rows(kind))


def kinds_of_task(task: str) -> list[str]:
    """Returns the kinds of evaluations for a model that was trained on a kind of task.

    Those that evaluate the head come first, then those that evaluate the features.
    """
    return [kind for wanted in (task, "") for kind, rules in EVAL_KINDS.items() if rules.task == wanted]


def has_classes_of_head(eval_config: ConfigDict) -> bool:
    """Returns whether the data of an evaluation must have the classes of the model's head."""
    others = [field for field in ("labels", "class_map") if eval_config.get(field)]
    return EVAL_KINDS[eval_config.kind].task in ("classify", "regress") and not others


def best_metrics(eval_config: ConfigDict) -> list[str]:
    """Returns the metrics of an evaluation that may choose the best checkpoint, without the evaluation's name."""
    kind, names = EVAL_KINDS[eval_config.kind], []
    for pattern in kind.best:
        if kind.grid and len(eval_config[kind.grid]) > 1:
            pattern = f"{pattern}_{kind.grid}_{{{kind.grid}:g}}"
        fields = re.findall(r"{(\w+):g}", pattern)
        values = itertools.product(*(eval_config[field] for field in fields))
        names += [pattern.format(**dict(zip(fields, combination, strict=True))) for combination in values]
    return names


def is_error(metric: str) -> bool:
    """Returns whether the smallest value of a metric is its best, which its name tells: that of a loss or an error."""
    return metric.endswith(("loss", "error")) or metric.rpartition("/")[2].partition("_")[0] == "mae"


def is_lowest_best(config: ConfigDict) -> bool:
    """Returns whether the smallest value of `checkpoint.best_metric` is the best, as `checkpoint.best_is` says."""
    stated = config.checkpoint.best_is
    return stated == "lowest" if stated else is_error(config.checkpoint.best_metric)


def first_evaluation(config: ConfigDict) -> str:
    """Returns the name of the evaluation that represents a run where only one number is shown.

    It is the first of those that evaluate the head or, if there is none, the first of all. Evaluations are ordered by
    name.
    """
    return min(config.evals, key=lambda name: not EVAL_KINDS[config.evals[name].kind].task)


# Fields of a model that depend on the machine or on the training, not on the weights.
EXECUTION_FIELDS = ("grad_dtype", *model_fields(EXECUTION))

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
