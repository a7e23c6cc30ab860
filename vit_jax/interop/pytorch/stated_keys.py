"""Every key of the configurations that timm and transformers publish: read, without effect, or with few values.

Sources: timm 1.0.31, models/_hub.py, models/_pretrained.py, vision_transformer.py and resnetv2.py; transformers 4 and
5.24, configuration_utils.py and the configurations and image processors of the families that are read.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from vit_jax import UserError, printable


class Keys(NamedTuple):
    """The keys of a configuration.

    Attributes:
        file: the name of the configuration in messages.
        read: the keys whose values are read.
        without_effect: the keys that change nothing of what a trained model computes: those of training, of downloads
            and of outputs, and those of sizes that arrays tell.
        supported: key -> the values with which the model is one of ours. None always stands for the default.
    """

    file: str
    read: frozenset[str]
    without_effect: frozenset[str]
    supported: Mapping[str, tuple[Any, ...]]

    def check(self, content: Mapping[str, Any]) -> None:
        """Checks that nothing in a configuration is passed over.

        Raises:
            UserError: a key is unknown, or has a value that is not supported.
        """
        for key, value in content.items():
            if key in self.supported and value is not None and value not in self.supported[key]:
                raise UserError(
                    f"{self.file} states {key} {printable(repr(value), 60)}, which vit_jax does not compute, but only "
                    f"{' or '.join(map(repr, self.supported[key])) or 'the default'}"
                )
            if key not in self.read | self.without_effect | self.supported.keys() and not key.startswith("_"):
                raise UserError(
                    f"{self.file} states {printable(key, 60)}, which vit_jax does not know; if it does not change what "
                    "the model computes, remove it from there"
                )


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SOURCE_READ = _words("input_size fixed_input_size interpolation crop_pct crop_mode mean std label_names")
_SOURCE_WITHOUT_EFFECT = _words(
    """url file state_dict hf_hub_id hf_hub_filename custom_load source tag architecture num_classes test_input_size
    min_input_size test_crop_pct pool_size test_pool_size first_conv classifier license description origin_url
    paper_name paper_ids notes label_descriptions num_features"""
)
_TIMM_READ = _words("architecture num_classes global_pool model_args pretrained_cfg label_descriptions vit_jax_loss")
_SOURCE_SUPPORTED: Mapping[str, tuple[Any, ...]] = {"label_offset": (0,)}

TIMM_SOURCE = Keys("pretrained_cfg", _SOURCE_READ, _SOURCE_WITHOUT_EFFECT, _SOURCE_SUPPORTED)
# Older files have the keys of pretrained_cfg one level higher.
TIMM = Keys("config.json", _TIMM_READ | _SOURCE_READ, _SOURCE_WITHOUT_EFFECT - _TIMM_READ, _SOURCE_SUPPORTED)
TIMM_ARGUMENTS = Keys(
    "model_args",
    _words(
        """img_size dynamic_img_size strict_img_size patch_size global_pool embed_dim depth num_heads act_layer
        reg_tokens"""
    ),
    _words(
        """num_classes mlp_ratio init_values class_token no_embed_class fc_norm qk_norm weight_init fix_init
        drop_rate pos_drop_rate patch_drop_rate proj_drop_rate attn_drop_rate drop_path_rate device dtype
        layers width_factor stem_chs channels zero_init_last"""
    ),
    {
        "in_chans": (3,),
        "qkv_bias": (True,),
        "proj_bias": (True,),
        "scale_attn_norm": (False,),
        "scale_mlp_norm": (False,),
        "pos_embed": ("learn", "none", ""),
        "pre_norm": (False,),
        "final_norm": (True,),
        "pool_include_prefix": (False,),
        "dynamic_img_pad": (False,),
        "output_stride": (32,),
        "stem_type": ("", "fixed"),
        "avg_down": (False,),
        "preact": (True,),
        "basic": (False,),
        "bottle_ratio": (0.25,),
        **dict.fromkeys(("embed_layer", "embed_norm_layer", "norm_layer"), ()),
        **dict.fromkeys(("block_fn", "mlp_layer", "attn_layer", "conv_layer"), ()),
    },
)
TRANSFORMERS = Keys(
    "config.json",
    _words(
        """model_type hidden_size num_hidden_layers num_attention_heads intermediate_size mlp_ratio hidden_act
        layer_norm_eps image_size patch_size use_swiglu_ffn num_register_tokens id2label problem_type vision_config
        vit_jax_loss"""
    ),
    _words(
        """architectures transformers_version dtype torch_dtype text_config projection_dim initializer_factor
        initializer_range logit_scale_init_value hidden_dropout_prob attention_probs_dropout_prob attention_dropout
        dropout drop_path_rate layerscale_value pooler_output_size encoder_stride use_mask_token num_labels label2id
        out_features out_indices stage_names apply_layernorm reshape_hidden_states output_hidden_states
        output_attentions return_dict use_return_dict torchscript use_bfloat16 tf_legacy_loss use_cache
        chunk_size_feed_forward tie_word_embeddings tie_encoder_decoder tokenizer_class prefix finetuning_task
        task_specific_params bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id
        cross_attention_hidden_size gradient_checkpointing max_length min_length do_sample early_stopping num_beams
        num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
        no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
        return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values suppress_tokens
        begin_suppress_tokens exponential_decay_length_penalty attn_implementation"""
    ),
    {
        "num_channels": (3,),
        "qkv_bias": (True,),
        "pooler_act": ("tanh",),
        "vision_use_head": (True,),
        "pruned_heads": ({},),
        "is_encoder_decoder": (False,),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "quantization_config": (),
        "auto_map": (),
    },
)
TRANSFORMERS_PROCESSOR = Keys(
    "preprocessor_config.json",
    _words(
        """image_processor_type feature_extractor_type do_resize size resample do_center_crop crop_size rescale_factor
        do_normalize image_mean image_std"""
    ),
    _words(
        """processor_class do_convert_rgb return_tensors data_format input_data_format device disable_grouping
        default_to_square image_seq_length"""
    ),
    {
        "do_rescale": (True,),
        "offset": (False,),
        "do_pad": (False,),
        "pad_size": (),
        "crop_pct": (),
        "do_flip_channel_order": (False,),
        "do_thumbnail": (False,),
        "do_align_long_axis": (False,),
        "do_reduce_labels": (False,),
        "reduce_labels": (False,),
        "size_divisor": (),
        "auto_map": (),
    },
)
