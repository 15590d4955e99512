"""The TensorFlow models of transformers, of tf_keras: a step on labels, with their own losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from benchmarks.coverage_models import Training, integers, numbers

REQUIREMENTS = ("transformers < 4.50",)  # the last versions with models for TensorFlow
PRECISION = "float32"
_WORDS, _LENGTH, _CLASSES = 20, 6, 3
_SIZES = {
    "vocab_size": _WORDS,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
    "num_labels": _CLASSES,
    "pad_token_id": 0,
}
_IMAGE = {"image_size": 16, "patch_size": 8, "num_channels": 3}

# Class, class of its configuration, its sizes, its inputs.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "TFBertForSequenceClassification": ("BertConfig", _SIZES, "class"),
    "TFBertForTokenClassification": ("BertConfig", _SIZES, "classes"),
    "TFRobertaForSequenceClassification": ("RobertaConfig", _SIZES, "class"),
    "TFAlbertForSequenceClassification": ("AlbertConfig", {**_SIZES, "embedding_size": 6}, "class"),
    "TFElectraForTokenClassification": ("ElectraConfig", {**_SIZES, "embedding_size": 6}, "classes"),
    "TFDistilBertForSequenceClassification": (
        "DistilBertConfig",
        {"vocab_size": _WORDS, "dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 16, "num_labels": _CLASSES},
        "class",
    ),
    "TFGPT2LMHeadModel": (
        "GPT2Config",
        {"vocab_size": _WORDS, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2},
        "words",
    ),
    "TFOPTForCausalLM": (
        "OPTConfig",
        {**_SIZES, "ffn_dim": 16, "word_embed_proj_dim": 8},
        "words",
    ),
    "TFT5ForConditionalGeneration": (
        "T5Config",
        {"vocab_size": _WORDS, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2}
        | {"decoder_start_token_id": 0},
        "words",
    ),
    "TFBartForConditionalGeneration": (
        "BartConfig",
        {"vocab_size": _WORDS, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16}
        | {"decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
        | {"max_position_embeddings": 16},
        "words",
    ),
    "TFViTForImageClassification": ("ViTConfig", {**_SIZES, **_IMAGE}, "image"),
    "TFDeiTForImageClassification": ("DeiTConfig", {**_SIZES, **_IMAGE}, "image"),
}


def models() -> dict[str, Callable[[], Training]]:
    """Return the steps."""
    return {name: lambda name=name: _model(name, *MODELS[name]) for name in MODELS}


def _model(name: str, config_name: str, sizes: dict[str, Any], kind: str) -> Training:
    import transformers

    no_dropout = {key: 0.0 for key in vars(getattr(transformers, config_name)()) if _is_dropout(key)}
    model = getattr(transformers, name)(getattr(transformers, config_name)(**{**no_dropout, **sizes}))

    def inputs(rows: int) -> tuple[Any, ...]:
        labels = {"class": (), "classes": (_LENGTH,), "words": (_LENGTH,), "image": ()}[kind]
        below = _WORDS if kind == "words" else _CLASSES
        answers = integers(below, rows, *labels, seed=2)
        if kind == "image":
            return numbers(rows, 3, 16, 16), answers
        return integers(_WORDS, rows, _LENGTH), answers

    def step(x: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, labels=labels, training=True).loss)
        for v, g in zip(model.trainable_variables, tape.gradient(loss, model.trainable_variables), strict=True):
            if g is not None:
                v.assign_sub(0.05 * tf.convert_to_tensor(g))
        return loss

    model(inputs(2)[0], labels=inputs(2)[1], training=False)
    return Training(step, model.variables, inputs)


def _is_dropout(name: str) -> bool:
    return any(word in name for word in ("dropout", "pdrop", "layerdrop"))
