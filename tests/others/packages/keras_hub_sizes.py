"""Tiny sizes of KerasHub's backbones, as small as those of its own tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

WORDS, LENGTH = 20, 6
_TEXT = {"vocabulary_size": WORDS, "num_layers": 2, "hidden_dim": 8, "intermediate_dim": 16}
_BERT = {**_TEXT, "num_heads": 2, "max_sequence_length": 12}
_QUERIES = {**_TEXT, "num_query_heads": 4, "num_key_value_heads": 2}
_EXPERTS = {**_QUERIES, "moe_intermediate_dim": 6, "num_experts": 3, "top_k": 2}
_GEMMA = {**_QUERIES, "head_dim": 4, "image_size": 8}
_LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 8,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 3,
}
_T5_GEMMA = {
    "vocabulary_size": WORDS,
    **{
        f"{part}_{name}": size
        for part in ("encoder", "decoder")
        for name, size in {
            "hidden_dim": 8,
            "intermediate_dim": 16,
            "num_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        }.items()
    },
    "sliding_window": 3,
    "dropout_rate": 0.1,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "cross_attention_hidden_size": 8,
    "attn_logit_softcapping": 50.0,
}
_IMAGE = {"image_shape": (16, 16, 3)}
_PATCHES = {**_IMAGE, "patch_size": 4, "num_layers": 2, "num_heads": 2, "hidden_dim": 8}
_RESNET = {
    "input_conv_filters": [64],
    "input_conv_kernel_sizes": [7],
    "stackwise_num_filters": [64, 64],
    "stackwise_num_blocks": [1, 1],
    "stackwise_num_strides": [1, 2],
    "block_type": "basic_block",
    "image_shape": (16, 16, 3),
}
_MIT = {
    "layerwise_depths": [1, 1],
    "image_shape": (32, 32, 3),
    "hidden_dims": [4, 8],
    "num_layers": 2,
    "layerwise_num_heads": [1, 2],
    "layerwise_sr_ratios": [2, 1],
    "max_drop_path_rate": 0.1,
    "layerwise_patch_sizes": [3, 3],
    "layerwise_strides": [2, 2],
}
_HGNET = {
    "embedding_size": 8,
    "stem_channels": [3, 4, 8],
    "hidden_act": "relu",
    "use_learnable_affine_block": True,
    "stackwise_stage_filters": [[8, 4, 16, 1, 1, 3], [16, 8, 32, 1, 1, 3]],
    "apply_downsample": [False, True],
    "use_lightweight_conv_block": [False, True],
    "depths": [1, 1],
    "hidden_sizes": [16, 32],
    "out_features": ["stage1", "stage2"],
}
_VIDEO = {
    **_IMAGE,
    "num_frames": 2,
    "patch_size": 4,
    "hidden_dim": 8,
    "intermediate_dim": 12,
    "num_heads": 2,
    "num_spatial_layers": 1,
    "num_temporal_layers": 1,
    "num_auxiliary_layers": 1,
}

# Backbones that are made of numbers.
SIZES: dict[str, dict[str, Any]] = {
    "BertBackbone": _BERT,
    "RobertaBackbone": _BERT,
    "XLMRobertaBackbone": _BERT,
    "DistilBertBackbone": _BERT,
    "AlbertBackbone": {**_BERT, "embedding_dim": 6, "num_groups": 1, "num_inner_repetitions": 1},
    "DebertaV3Backbone": {**_BERT, "bucket_size": 4},
    "ElectraBackbone": {
        "vocab_size": WORDS,
        "num_layers": 2,
        "num_heads": 2,
        "hidden_dim": 8,
        "intermediate_dim": 16,
        "embedding_dim": 6,
        "max_sequence_length": 12,
    },
    "FNetBackbone": {**_TEXT, "max_sequence_length": 12},
    "ESMBackbone": {**_TEXT, "num_heads": 2},
    "XLNetBackbone": {**_TEXT, "num_heads": 2},
    "RoformerV2Backbone": {**_TEXT, "num_heads": 2, "head_size": 4},
    "RWKV7Backbone": {
        "vocabulary_size": WORDS,
        "hidden_size": 8,
        "num_layers": 2,
        "head_size": 4,
        "intermediate_dim": 16,
        "gate_lora": 4,
        "mv_lora": 4,
        "aaa_lora": 4,
        "decay_lora": 4,
    },
    "GPT2Backbone": _BERT,
    "GPTNeoXBackbone": {**_BERT, "hidden_dim": 16},
    "OPTBackbone": _BERT,
    "BloomBackbone": {**_TEXT, "num_heads": 2},
    "FalconBackbone": {**_TEXT, "num_attention_heads": 2},
    "LlamaBackbone": _QUERIES,
    "Llama3Backbone": _QUERIES,
    "MistralBackbone": {**_QUERIES, "sliding_window": 3},
    "MixtralBackbone": {**_QUERIES, "num_experts": 3, "top_k": 2},
    "Phi3Backbone": _QUERIES,
    "QwenBackbone": _QUERIES,
    "Qwen3Backbone": {**_QUERIES, "head_dim": 4},
    "QwenMoeBackbone": {**_EXPERTS, "shared_expert_intermediate_dim": 6, "decoder_sparse_step": 1},
    "Qwen3MoeBackbone": {**_EXPERTS, "head_dim": 4, "decoder_sparse_step": 1},
    "Qwen3_5Backbone": {**_QUERIES, **_LINEAR_ATTENTION},
    "Qwen3_5MoeBackbone": {
        **{name: size for name, size in _EXPERTS.items() if name != "intermediate_dim"},
        **_LINEAR_ATTENTION,
        "shared_expert_intermediate_size": 6,
    },
    "GptOssBackbone": {**_QUERIES, "num_experts": 2, "top_k": 2, "sliding_window": 2},
    "SmolLM3Backbone": {
        "vocabulary_size": WORDS,
        "hidden_dim": 16,
        "intermediate_dim": 16,
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_layer_enabled_list": [True, False],
        "layer_types": ["attention", "attention"],
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 16,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
    },
    "GemmaBackbone": {**_QUERIES, "head_dim": 4},
    "Gemma3Backbone": {**_GEMMA, "use_sliding_window_attention": True, "sliding_window_size": 3},
    "Gemma3nBackbone": {
        "text_vocab_size": WORDS,
        "text_hidden_size": 8,
        "num_hidden_layers": 1,
        "pad_token_id": 0,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "intermediate_size": [12],
        "hidden_activation": "gelu_approximate",
        "layer_types": ["full_attention"],
        "sliding_window": 4,
        "rope_theta": 10000.0,
        "max_position_embeddings": 12,
        "vocab_size_per_layer_input": WORDS,
        "hidden_size_per_layer_input": 4,
        "altup_num_inputs": 2,
        "laurel_rank": 2,
    },
    "Gemma4Backbone": {**_GEMMA, "sliding_window_size": 3, "sliding_window_pattern": 2},
    "PaliGemmaBackbone": {
        **_GEMMA,
        "vit_patch_size": 4,
        "vit_num_layers": 1,
        "vit_num_heads": 2,
        "vit_hidden_dim": 8,
        "vit_intermediate_dim": 12,
    },
    "BartBackbone": {**_BERT, "dropout": 0.1},
    "EdRecBackbone": {
        "vocab_size": WORDS,
        "num_layers_enc": 1,
        "num_layers_dec": 1,
        "num_heads": 2,
        "hidden_dim": 8,
        "intermediate_dim": 16,
    },
    "T5Backbone": {**_TEXT, "num_heads": 2},
    "T5GemmaBackbone": _T5_GEMMA,
    "T5Gemma2Backbone": {**_T5_GEMMA, "use_query_key_norm": True},
    "WhisperBackbone": {
        "vocabulary_size": WORDS,
        "num_layers": 2,
        "num_heads": 2,
        "hidden_dim": 8,
        "intermediate_dim": 16,
        "num_mels": 4,
        "max_encoder_sequence_length": 8,
        "max_decoder_sequence_length": 6,
    },
    "MoonshineBackbone": {
        "vocabulary_size": WORDS,
        "filter_dim": 16,
        "encoder_num_layers": 1,
        "decoder_num_layers": 1,
        "hidden_dim": 16,
        "intermediate_dim": 16,
        "encoder_num_heads": 2,
        "decoder_num_heads": 2,
    },
    "ViTBackbone": {**_PATCHES, "patch_size": (8, 8), "mlp_dim": 12},
    "DeiTBackbone": {**_PATCHES, "intermediate_dim": 12},
    "DINOV2Backbone": {**_PATCHES, "intermediate_dim": 12, "num_register_tokens": 2, "use_swiglu_ffn": True},
    "DINOV3Backbone": {**_PATCHES, "intermediate_dim": 12, "num_register_tokens": 2},
    "ViTDetBackbone": {
        "image_shape": (16, 16, 3),
        "patch_size": 2,
        "hidden_size": 4,
        "num_layers": 2,
        "global_attention_layer_indices": [1],
        "intermediate_dim": 8,
        "num_heads": 2,
        "num_output_channels": 2,
        "window_size": 3,
    },
    "SwinTransformerBackbone": {
        "image_shape": (32, 32, 3),
        "embed_dim": 8,
        "depths": (2, 2),
        "num_heads": (2, 4),
        "window_size": 4,
    },
    "VideoPrismBackbone": _VIDEO,
    "VideoPrismBackbone with texts": {**_VIDEO, "vocabulary_size": WORDS, "num_text_layers": 1},
    "MiTBackbone": _MIT,
    "ResNetBackbone": _RESNET,
    "ResNetBackbone, bottlenecks": {**_RESNET, "block_type": "bottleneck_block", "use_pre_activation": True},
    "DenseNetBackbone": {
        "stackwise_num_repeats": [1, 1],
        "image_shape": (32, 32, 3),
        "compression_ratio": 0.5,
        "growth_rate": 2,
    },
    "VGGBackbone": {**_IMAGE, "stackwise_num_repeats": [1, 1], "stackwise_num_filters": [4, 8]},
    "CSPNetBackbone": {
        "stem_filters": 8,
        "stem_kernel_size": 3,
        "stem_strides": 1,
        "stackwise_strides": 2,
        "stackwise_depth": [1, 1],
        "stackwise_num_filters": [8, 12],
        "image_shape": (16, 16, 3),
        "down_growth": True,
        "bottle_ratio": (0.5, 1.0),
        "block_ratio": (1.0, 0.5),
        "expand_ratio": (2.0, 1.0),
        "block_type": "dark_block",
        "stage_type": "csp",
        "stem_padding": "same",
    },
    "EfficientNetBackbone": {
        "stackwise_kernel_sizes": [3, 3],
        "stackwise_num_repeats": [1, 2],
        "stackwise_input_filters": [8, 8],
        "stackwise_output_filters": [8, 12],
        "stackwise_expansion_ratios": [1, 4],
        "stackwise_squeeze_and_excite_ratios": [0.0, 0.25],
        "stackwise_strides": [1, 2],
        "stackwise_block_types": ["fused", "unfused"],
        "stackwise_force_input_filters": [0, 0],
        "stackwise_nores_option": [False, False],
        "width_coefficient": 1.0,
        "depth_coefficient": 1.0,
        "input_shape": (32, 32, 3),
        "num_features": 16,
    },
    "XceptionBackbone": {
        "stackwise_conv_filters": [[4, 8], [16, 16], [24, 24]],
        "stackwise_pooling": [False, True, False],
        "image_shape": (64, 64, 3),
    },
    "MobileNetBackbone": {
        "stackwise_expansion": [[8, 12], [16, 16]],
        "stackwise_num_blocks": [2, 2],
        "stackwise_num_filters": [[8, 8], [12, 12]],
        "stackwise_kernel_size": [[3, 3], [5, 5]],
        "stackwise_num_strides": [[2, 1], [2, 1]],
        "stackwise_se_ratio": [[None, None], [0.25, 0.25]],
        "stackwise_activation": [["relu", "relu"], ["hard_swish", "hard_swish"]],
        "stackwise_padding": [[1, 1], [2, 2]],
        "output_num_filters": 16,
        "input_activation": "hard_swish",
        "output_activation": "hard_swish",
        "input_num_filters": 8,
        "image_shape": (32, 32, 3),
        "depthwise_filters": 8,
        "depthwise_stride": 2,
        "depthwise_residual": False,
        "squeeze_and_excite": 0.5,
        "last_layer_filter": 12,
    },
    "MobileNetV5Backbone": {
        "stackwise_block_types": [["er"], ["uir", "uir"]],
        "stackwise_num_blocks": [1, 2],
        "stackwise_num_filters": [[8], [12, 12]],
        "stackwise_strides": [[2], [2, 1]],
        "stackwise_act_layers": [["relu"], ["relu", "relu"]],
        "stackwise_exp_ratios": [[2.0], [2.0, 2.0]],
        "stackwise_se_ratios": [[0.0], [0.0, 0.0]],
        "stackwise_dw_kernel_sizes": [[0], [5, 5]],
        "stackwise_dw_start_kernel_sizes": [[0], [0, 0]],
        "stackwise_dw_end_kernel_sizes": [[0], [0, 0]],
        "stackwise_exp_kernel_sizes": [[3], [0, 0]],
        "stackwise_pw_kernel_sizes": [[1], [0, 0]],
        "stackwise_num_heads": [[0], [0, 0]],
        "stackwise_key_dims": [[0], [0, 0]],
        "stackwise_value_dims": [[0], [0, 0]],
        "stackwise_kv_strides": [[0], [0, 0]],
        "stackwise_use_cpe": [[False], [False, False]],
        "image_shape": (32, 32, 3),
        "stem_size": 8,
        "use_msfa": False,
    },
    "HGNetV2Backbone": {**_HGNET, "image_shape": (32, 32, 3)},
    "FluxBackbone": {
        "input_channels": 8,
        "hidden_size": 32,
        "mlp_ratio": 2.0,
        "num_heads": 4,
        "depth": 1,
        "depth_single_blocks": 1,
        "axes_dim": [2, 4, 2],
        "theta": 10_000,
        "use_bias": True,
        "guidance_embed": True,
        "image_shape": (4, 8),
        "text_shape": (5, 6),
        "image_ids_shape": (4, 3),
        "text_ids_shape": (5, 3),
        "y_shape": (6,),
    },
}
_VAE: dict[str, Any] = {
    "encoder_num_filters": [32, 32],
    "encoder_num_blocks": [1, 1],
    "decoder_num_filters": [32, 32],
    "decoder_num_blocks": [1, 1],
    "sampler_method": "mode",
}


def _two_towers(hub: Any, kind: str, **sizes: Any) -> Any:
    vision = getattr(hub, f"{kind}VisionEncoder")(4, 8, 2, 2, 16, image_shape=(16, 16, 3), name="vision_encoder")
    text = getattr(hub, f"{kind}TextEncoder")(WORDS, 8, 8, 2, 2, 16, max_sequence_length=LENGTH, name="text_encoder")
    return getattr(hub, f"{kind}Backbone")(vision_encoder=vision, text_encoder=text, **sizes)


def _gemma3_with_images(hub: Any) -> Any:
    vision = hub.Gemma3VisionEncoder(
        image_size=8,
        patch_size=2,
        pool_size=2,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=12,
        output_dim=8,
    )
    return hub.Gemma3Backbone(**_GEMMA, vision_encoder=vision)


def _blip2(hub: Any) -> Any:
    vision = hub.BLIP2VisionEncoder(
        image_size=16,
        patch_size=4,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        use_patch_bias=True,
        use_class_token=True,
        use_mha_bias=True,
        use_mlp_bias=True,
        dropout_rate=0.0,
        layer_norm_epsilon=1e-6,
        initializer_range=0.02,
    )
    queries = hub.BLIP2QFormer(
        num_query_tokens=2,
        num_layers=2,
        num_heads=2,
        hidden_dim=4,
        intermediate_dim=8,
        vision_dim=8,
        cross_attention_frequency=1,
        dropout=0.0,
        layer_norm_epsilon=1e-6,
    )
    words = hub.BLIP2CustomOPT(
        vocabulary_size=WORDS,
        num_layers=2,
        num_heads=2,
        hidden_dim=4,
        intermediate_dim=8,
        num_query_tokens=2,
        qformer_hidden_dim=4,
        max_sequence_length=12,
        dropout=0.0,
        language_projection=None,
    )
    return hub.BLIP2Backbone(vision_encoder=vision, qformer=queries, language_model=words)


def _retinanet(hub: Any) -> Any:
    encoder = hub.ResNetBackbone(
        **{**_RESNET, "image_shape": (None, None, 3)}
        | {"stackwise_num_filters": [64] * 4, "stackwise_num_blocks": [1] * 4, "stackwise_num_strides": [1, 2, 2, 2]}
    )
    return hub.RetinaNetBackbone(encoder, min_level=3, max_level=6, use_p5=True, image_shape=(64, 64, 3))


def _d_fine(hub: Any) -> Any:
    return hub.DFineBackbone(
        backbone=hub.HGNetV2Backbone(**_HGNET, image_shape=(None, None, 3)),
        decoder_in_channels=[8, 8],
        encoder_hidden_dim=8,
        num_denoising=4,
        num_labels=4,
        hidden_dim=8,
        learn_initial_query=False,
        num_queries=5,
        anchor_image_size=(32, 32),
        feat_strides=[4, 8],
        num_feature_levels=2,
        encoder_in_channels=[16, 32],
        encode_proj_layers=[1],
        num_attention_heads=2,
        encoder_ffn_dim=12,
        num_encoder_layers=1,
        hidden_expansion=0.5,
        depth_multiplier=0.5,
        eval_idx=-1,
        num_decoder_layers=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=12,
        decoder_n_points=[2, 2],
        lqe_hidden_dim=8,
        num_lqe_layers=2,
        out_features=["stage1", "stage2"],
        image_shape=(32, 32, 3),
        seed=0,
    )


def _sam(hub: Any) -> Any:
    from keras_hub.layers import SAMMaskDecoder, SAMPromptEncoder

    sizes = {**SIZES["ViTDetBackbone"], "num_output_channels": 8, "patch_size": 4}
    return hub.SAMBackbone(
        image_encoder=hub.ViTDetBackbone(**sizes),
        prompt_encoder=SAMPromptEncoder(
            hidden_size=8, image_embedding_size=(4, 4), input_image_size=(16, 16), mask_in_channels=4
        ),
        mask_decoder=SAMMaskDecoder(
            num_layers=1,
            hidden_size=8,
            intermediate_dim=12,
            num_heads=2,
            embedding_dim=8,
            num_multimask_outputs=2,
            iou_head_depth=2,
            iou_head_hidden_dim=8,
        ),
    )


def _stable_diffusion(hub: Any, norm: str | None, dual: tuple[int, ...] | None) -> Any:
    words = {"dtype": None, "intermediate_output_index": -2}
    filters = {name: [32] * 4 if "filters" in name else [1] * 4 for name in _VAE if "num" in name}
    return hub.StableDiffusion3Backbone(
        mmdit_patch_size=2,
        mmdit_hidden_dim=16,
        mmdit_num_layers=2,
        mmdit_num_heads=2,
        mmdit_position_size=8,
        vae=_vae(hub, **filters),
        clip_l=hub.CLIPTextEncoder(WORDS, 8, 8, 2, 2, 16, "quick_gelu", name="clip_l", **words),
        clip_g=hub.CLIPTextEncoder(WORDS, 8, 8, 2, 2, 16, "gelu", name="clip_g", **words),
        mmdit_qk_norm=norm,
        mmdit_dual_attention_indices=dual,
        image_shape=(32, 32, 3),
    )


def _vae(hub: Any, **sizes: Any) -> Any:
    from keras_hub.src.models.vae.vae_backbone import VAEBackbone

    del hub  # (not exported)
    return VAEBackbone(**{**_VAE, **sizes}, name="vae")


def _rqvae(hub: Any) -> Any:
    from keras_hub.src.models.rqvae.rqvae_backbone import RQVAEBackbone

    del hub  # (not exported)
    return RQVAEBackbone(
        input_dim=8,
        encoder_layer_dims=[12, 8],
        output_dim=4,
        decoder_layer_dims=[8, 12],
        num_embeddings=4,
        num_quantizers=2,
        decay=0.99,
        data_variance=1.0,
        commitment_cost=0.25,
    )


def _deeplab(hub: Any) -> Any:
    sizes = {"stackwise_num_filters": [64] * 3, "stackwise_num_blocks": [1] * 3, "stackwise_num_strides": [1, 2, 2]}
    return hub.DeepLabV3Backbone(
        image_encoder=hub.ResNetBackbone(**{**_RESNET, **sizes, "image_shape": (None, None, 3)}),
        low_level_feature_key="P2",
        spatial_pyramid_pooling_key="P4",
        dilation_rates=[2, 3],
        upsampling_size=4,
        image_shape=(32, 32, 3),
    )


def _basnet(hub: Any) -> Any:
    sizes = {"stackwise_num_filters": [64, 128, 256, 512], "stackwise_num_blocks": [2] * 4}
    encoder = hub.ResNetBackbone(
        **{**_RESNET, **sizes, "stackwise_num_strides": [1, 2, 2, 2], "image_shape": (None, None, 3)}
    )
    return hub.BASNetBackbone(image_encoder=encoder, num_classes=1, image_shape=(32, 32, 3))


def _depth_anything(hub: Any) -> Any:
    sizes = {**_PATCHES, "num_layers": 4, "intermediate_dim": 12, "image_shape": (36, 36, 3)}
    return hub.DepthAnythingBackbone(
        image_encoder=hub.DINOV2Backbone(**sizes, apply_layernorm=True, name="image_encoder"),
        reassemble_factors=[4, 2, 1, 0.5],
        neck_hidden_dims=[4, 4, 8, 8],
        fusion_hidden_dim=8,
        head_hidden_dim=4,
        head_in_index=-1,
        feature_keys=["stage1", "stage2", "stage3", "stage4"],
    )


def _parseq(hub: Any) -> Any:
    encoder = hub.ViTBackbone(
        **{**SIZES["ViTBackbone"], "patch_size": (4, 8), "image_shape": (8, 32, 3)},
        use_class_token=False,
        name="image_encoder",
    )
    return hub.PARSeqBackbone(
        image_encoder=encoder,
        vocabulary_size=WORDS,
        max_label_length=LENGTH,
        decoder_hidden_dim=8,
        num_decoder_layers=1,
        num_decoder_heads=2,
        decoder_mlp_dim=12,
        dropout_rate=0.0,
        attention_dropout=0.0,
    )


# Backbones that are made of others, from what `keras_hub.models` has.
COMPOSED: dict[str, Callable[[Any], Any]] = {
    "CLIPBackbone": lambda hub: _two_towers(hub, "CLIP", projection_dim=8),
    "MetaCLIP2Backbone": lambda hub: _two_towers(hub, "MetaCLIP2", projection_dim=8),
    "SigLIPBackbone": lambda hub: _two_towers(hub, "SigLIP"),
    "Gemma3Backbone with images": _gemma3_with_images,
    "BLIP2Backbone": _blip2,
    "RetinaNetBackbone": _retinanet,
    "DFineBackbone": _d_fine,
    "SAMBackbone": _sam,
    "StableDiffusion3Backbone": lambda hub: _stable_diffusion(hub, None, None),
    "StableDiffusion3Backbone, dual attention": lambda hub: _stable_diffusion(hub, "rms_norm", (0,)),
    "VAEBackbone": _vae,
    "RQVAEBackbone": _rqvae,
    "SegFormerBackbone": lambda hub: hub.SegFormerBackbone(image_encoder=hub.MiTBackbone(**_MIT), projection_filters=8),
    "DeepLabV3Backbone": _deeplab,
    "BASNetBackbone": _basnet,
    "DepthAnythingBackbone": _depth_anything,
    "PARSeqBackbone": _parseq,
}

# Parts of these are in float32 whatever the rest is in.
FLOAT32 = frozenset({"MixtralBackbone", "QwenMoeBackbone", "Qwen3MoeBackbone", "Qwen3_5Backbone", "Qwen3_5MoeBackbone"})

# Sizes of inputs whose own shape leaves them open.
OPEN: dict[str, dict[str, tuple[int, ...]]] = {
    "MoonshineBackbone": {"encoder_input_values": (1200, 1), "encoder_padding_mask": (1200,)},
    "WhisperBackbone": {"encoder_features": (8, 4)},
    "SAMBackbone": {"points": (2, 2), "labels": (2,), "boxes": (1, 2, 2), "masks": (1, 16, 16, 1)},
    "VAEBackbone": {"images": (16, 16, 3)},
    "Gemma3Backbone with images": {"images": (1, 8, 8, 3), "vision_indices": (4,)},
}
