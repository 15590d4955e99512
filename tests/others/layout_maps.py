"""`python -m tests.others.layout_maps [NAME]`: KerasHub's own layout maps under `keras.distribution` on TensorFlow.

Each model trains on one device, and as `ModelParallel` with its backbone's `get_layout_map` on 2 x 2 devices, and
generates before and after. Runs in an environment of its own with KerasHub 0.32.0: its maps are being rewritten, and
what is said of them here is of that version. Prints a line of JSON for each model, and ends with status 1 if one of
them is otherwise than on one device, or gathers along "model" what its map cuts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np

import graphsplit as gs
from graphsplit.core.variables.parted_variables import parts_of_variable
from tests.others.environments import Environment

REQUIREMENTS = ("--no-deps keras-hub==0.32.0", "kagglehub", "regex", "tokenizers")
MESH = {"batch": 2, "model": 2}
ROWS, BATCH, LENGTH, WORDS = 19, 7, 6, 21  # 7, 7 and 5 rows; 21 words over two devices
_SIZES = {"vocabulary_size": WORDS, "num_layers": 2, "hidden_dim": 8, "intermediate_dim": 16}
_HEADS = {"num_query_heads": 4, "num_key_value_heads": 2}
_EXPERTS = {"num_experts": 3, "top_k": 2, "moe_intermediate_dim": 8}
MODELS: dict[str, dict[str, Any]] = {
    "Gemma": {**_SIZES, **_HEADS, "head_dim": 4},
    "Llama": {**_SIZES, **_HEADS},
    "Llama3": {**_SIZES, **_HEADS},
    "Qwen": {**_SIZES, **_HEADS},
    "QwenMoe": {**_SIZES, **_HEADS, **_EXPERTS, "shared_expert_intermediate_dim": 16},
    "Qwen3Moe": {**_SIZES, **_HEADS, **_EXPERTS, "head_dim": 4},
}
SAID = {  # of each map, by its plan: what matches nothing, and the large matrices that nothing matches
    "Gemma": [],
    "Llama": ["token_embedding/reverse_embeddings"],
    "Llama3": ["token_embedding/reverse_embeddings"],
    "Qwen": [],
    "QwenMoe": ["expert_feedforward_gate_dense", "expert_feedforward_output_dense", "reverse_embeddings"],
    "Qwen3Moe": [
        "expert_feedforward_gate_dense",
        "expert_feedforward_output_dense",
        "reverse_embeddings",
        "match no variable and no layer's output: 'transformer_layer.*feedforward_intermediate_dense.kernel', "
        "'transformer_layer.*feedforward_output_dense.kernel'",
    ],
}
TOLERANCE = {"float64": 1e-5, "float32": 1e-4}  # (models of float64 compute some of their values in float32, too)


def outcomes(names: list[str]) -> Iterator[dict[str, Any]]:
    """Yield what became of each model."""
    for name in MODELS:
        if names and name not in names:
            continue
        keras.backend.clear_session()
        precision = "float32" if "Moe" in name else "float64"  # (KerasHub's experts multiply float32 by what they get)
        keras.config.set_floatx(precision)
        keras.config.set_dtype_policy(precision)
        try:
            yield {"name": name, "precision": precision, **outcome(name)}
        except Exception as error:
            traceback.print_exc()
            yield {"name": name, "precision": precision, "raised": f"{type(error).__name__}: {error}"[:2000]}


def outcome(name: str) -> dict[str, Any]:
    """Return the largest difference, which variables lie where, and what the plan says of the map."""
    import keras_hub

    backbone = getattr(keras_hub.models, f"{name}Backbone")
    alone, model = _causal(name), _causal(name)
    for own, other in zip(alone.variables, model.variables, strict=True):
        assert np.array_equal(own, other), own.path
    same_tokens = [bool(np.array_equal(_generated(alone), _generated(model)))]
    mesh = keras.distribution.DeviceMesh(tuple(MESH.values()), list(MESH), [f"cpu:{d}" for d in range(4)])
    chosen = keras.distribution.ModelParallel(layout_map=backbone.get_layout_map(mesh), batch_dim_name="batch")
    expected = _fit(alone)
    with gs.keras.enable_distribution() as enabled, chosen.scope():
        found = _fit(model)
        plan = enabled.plan(model, *_batch())
        layouts = {
            variable.path: " x ".join(axis or "-" for axis in parts.layout)
            for variable in model.variables
            if (parts := parts_of_variable(variable.value)) is not None
        }
        same_tokens.append(bool(np.array_equal(_generated(alone), _generated(model))))
        again = _fit(model)  # generating has put the variables together
    pairs = [*zip(expected, found, strict=True), *zip(_fit(alone), again, strict=True)]
    same_tokens.append(bool(np.array_equal(_generated(alone), _generated(model))))  # with no distribution again
    weights = zip(alone.variables, model.variables, strict=True)
    differences = [*[_apart(a, b) for a, b in pairs], *[_apart(a, b) for a, b in weights]]
    return {
        "difference": max(differences),
        "tokens": same_tokens,
        "shards": len(plan.devices),
        "laid_out": layouts,
        "gathered": sorted(plan.state.in_place[own] for own in plan.state.gathered),
        "whole": dict(plan.state.whole),
        "notes": plan.notes,
    }


def _causal(name: str) -> Any:
    import keras_hub

    keras.utils.set_random_seed(1)
    backbone = getattr(keras_hub.models, f"{name}Backbone")(**MODELS[name])
    model = getattr(keras_hub.models, f"{name}CausalLM")(backbone=backbone, preprocessor=None)
    model.compile(
        keras.optimizers.Adam(0.01, epsilon=1e-2),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        sampler="greedy",
        weighted_metrics=["accuracy"],
        jit_compile=False,
    )
    return model


def _batch(rows: int = ROWS) -> tuple[Any, Any]:
    ids = np.random.default_rng(0).integers(1, WORDS, (rows, LENGTH + 1))
    mask = np.arange(LENGTH) < 3 + np.arange(rows)[:, None] % 4
    return {"token_ids": ids[:, :-1], "padding_mask": mask}, ids[:, 1:]


def _fit(model: Any) -> list[Any]:
    keras.utils.set_random_seed(2)
    x, y = _batch()
    return list(model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0).history.values())


def _generated(model: Any) -> np.ndarray:
    x, _ = _batch(3)
    mask = np.arange(LENGTH)[None] < 3
    prompts = {"token_ids": np.where(mask, x["token_ids"], 0), "padding_mask": np.repeat(mask, 3, 0)}
    return np.asarray(model.generate(prompts, stop_token_ids=None)["token_ids"])


def _apart(a: Any, b: Any) -> float:
    own, other = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.max(np.abs(own - other)) / max(np.max(np.abs(own)), 1e-3))


def wrong(line: dict[str, Any]) -> list[str]:
    """Return what is wrong with what became of a model."""
    if "raised" in line:
        return [line["raised"]]
    found = [f"differs by {line['difference']:.1g}"] if line["difference"] > TOLERANCE[line["precision"]] else []
    found += ["generates other tokens"] if not all(line["tokens"]) else []
    found += ["nothing is laid out"] if not line["laid_out"] else []
    found += [f"gathers {path}" for path in line["gathered"] if path in line["laid_out"]]
    found += [f"puts {name} together: {why}" for name, why in line["whole"].items()]
    missing = [text for text in SAID[line["name"]] if not any(text in note for note in line["notes"])]
    return found + [f"its plan does not say {text!r}" for text in missing]


def main() -> int:
    """Run in an environment that has KerasHub, or make one and run there; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.others.layout_maps", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)}; all, if none is named")
    parser.add_argument("--environment", type=Path, help="a folder to keep the environment in; else a temporary one")
    parser.add_argument("--here", action="store_true", help="this is such an environment")
    asked = parser.parse_args()
    if not asked.here:
        with tempfile.TemporaryDirectory() as temporary:
            environment = Environment((asked.environment or Path(temporary) / "environment").absolute())
            if why := environment.install(REQUIREMENTS):
                print(why)
                return 1
            found = []
            for text in environment.run("tests.others.layout_maps", "--here", *asked.names):
                print(text, end="", flush=True)
                found.append(json.loads(text))
        for line in found:
            print(f"{line['name']}: {'; '.join(wrong(line)) or 'as on one device'}")
        return any(map(wrong, found)) or not found
    gs.use_logical_devices(4)
    for line in outcomes(asked.names):
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
