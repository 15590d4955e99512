"""KerasHub's backbones at the sizes of its own tests, in float64: a step that makes what they return small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from benchmarks.coverage_models import Training, integers, numbers

REQUIREMENTS = ("--no-deps keras-hub", "kagglehub", "regex")  # (it asks for a tensorflow-text of its own TensorFlow)
PRECISION = "float64"
_WORDS, _LENGTH = 20, 6
_TEXT = {"vocabulary_size": _WORDS, "num_layers": 2, "hidden_dim": 8, "intermediate_dim": 16}
_BERT = {**_TEXT, "num_heads": 2, "max_sequence_length": 12}
_QUERIES = {**_TEXT, "num_query_heads": 4, "num_key_value_heads": 2}
_ENCODER_AND_DECODER = {**_BERT, "dropout": 0.1}

BACKBONES: dict[str, dict[str, Any]] = {
    "BertBackbone": _BERT,
    "RobertaBackbone": _BERT,
    "XLMRobertaBackbone": _BERT,
    "DistilBertBackbone": _BERT,
    "AlbertBackbone": {**_BERT, "embedding_dim": 6, "num_groups": 1, "num_inner_repetitions": 1},
    "DebertaV3Backbone": {**_BERT, "bucket_size": 4},
    "ElectraBackbone": {
        "vocab_size": _WORDS,
        "num_layers": 2,
        "num_heads": 2,
        "hidden_dim": 8,
        "intermediate_dim": 16,
        "embedding_dim": 6,
        "max_sequence_length": 12,
    },
    "FNetBackbone": {**_TEXT, "max_sequence_length": 12},
    "GPT2Backbone": _BERT,
    "GPTNeoXBackbone": _BERT,
    "OPTBackbone": _BERT,
    "BloomBackbone": {**_TEXT, "num_heads": 2},
    "FalconBackbone": {
        "vocabulary_size": _WORDS,
        "num_layers": 2,
        "num_attention_heads": 2,
        "hidden_dim": 8,
        "intermediate_dim": 16,
    },
    "LlamaBackbone": _QUERIES,
    "MistralBackbone": {**_QUERIES, "sliding_window": 3},
    "MixtralBackbone": {**_QUERIES, "num_experts": 3, "top_k": 2},
    "Phi3Backbone": _QUERIES,
    "QwenBackbone": _QUERIES,
    "GemmaBackbone": {**_QUERIES, "head_dim": 4},
    "BartBackbone": _ENCODER_AND_DECODER,
    "T5Backbone": {**_TEXT, "num_heads": 2},
    "WhisperBackbone": {
        **_BERT,
        "num_mels": 4,
        "max_encoder_sequence_length": 8,
        "max_decoder_sequence_length": 6,
        "max_sequence_length": None,
    },
    "RoformerV2Backbone": {"vocabulary_size": _WORDS, "num_layers": 2, "num_heads": 2, "hidden_dim": 8}
    | {"intermediate_dim": 16, "max_wavelength": 100},
    "ViTBackbone": {
        "image_shape": (16, 16, 3),
        "patch_size": (8, 8),
        "num_layers": 2,
        "num_heads": 2,
        "hidden_dim": 8,
        "mlp_dim": 12,
    },
    "ResNetBackbone": {
        "input_conv_filters": [64],
        "input_conv_kernel_sizes": [7],
        "stackwise_num_filters": [64, 64],
        "stackwise_num_blocks": [1, 1],
        "stackwise_num_strides": [1, 2],
        "block_type": "basic_block",
        "image_shape": (16, 16, 3),
    },
    "DenseNetBackbone": {
        "stackwise_num_repeats": [1, 1],
        "image_shape": (32, 32, 3),
        "compression_ratio": 0.5,
        "growth_rate": 2,
    },
    "VGGBackbone": {
        "stackwise_num_repeats": [1, 1],
        "stackwise_num_filters": [4, 8],
        "image_shape": (16, 16, 3),
    },
    "CSPDarkNetBackbone": {
        "stackwise_num_filters": [4, 8],
        "stackwise_depth": [1, 1],
        "image_shape": (16, 16, 3),
        "block_type": "basic_block",
    },
    "MiTBackbone": {
        "layerwise_depths": [1, 1],
        "image_shape": (32, 32, 3),
        "hidden_dims": [4, 8],
        "num_layers": 2,
        "layerwise_num_heads": [1, 2],
        "layerwise_sr_ratios": [2, 1],
        "max_drop_path_rate": 0.1,
        "layerwise_patch_sizes": [3, 3],
        "layerwise_strides": [2, 2],
    },
}


def models() -> dict[str, Callable[[], Training]]:
    """Return the steps of all backbones that are installed."""
    return {name: lambda name=name, sizes=sizes: _backbone(name, sizes) for name, sizes in BACKBONES.items()}


def _backbone(name: str, sizes: dict[str, Any]) -> Training:
    import keras_hub

    sizes = {key: value for key, value in sizes.items() if value is not None}
    return small_outputs(getattr(keras_hub.models, name)(**sizes))


def small_outputs(model: Any) -> Training:
    """Return the step of a functional model that makes all its results small."""
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer.build(model.trainable_variables)

    def step(inputs: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            outputs = tf.nest.flatten(model(inputs, training=True))
            loss = sum(tf.reduce_mean((output - 0.5) ** 2) for output in outputs)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    def inputs(rows: int) -> tuple[Any, ...]:
        found = model.input
        made = {key: _input(rows, key, tensor) for key, tensor in found.items()} if isinstance(found, dict) else None
        return (made if made is not None else _input(rows, "", found),)

    return Training(step, [*model.variables, *optimizer.variables], inputs)


def _input(rows: int, name: str, like: Any) -> tf.Tensor:
    shape = [_LENGTH if size is None else size for size in like.shape[1:]]
    if "mask" in name:
        lengths = 1 + integers(shape[-1], rows)
        return tf.cast(tf.sequence_mask(lengths, shape[-1]), like.dtype)
    if tf.as_dtype(like.dtype).is_integer:
        below = 2 if "segment" in name else shape[-1] if "position" in name else _WORDS
        return tf.cast(integers(below, rows, *shape, seed=len(name)), like.dtype)
    return tf.cast(numbers(rows, *shape, seed=len(name)), like.dtype)
