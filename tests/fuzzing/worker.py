"""One process of the fuzzer: judges some seeds, says on standard output what it does, one JSON object a line."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import tensorflow as tf

import graphsplit as gs
from tests.fuzzing.generator import generate, mode_of
from tests.fuzzing.oracle import judge
from tests.fuzzing.program import Program
from tests.fuzzing.shrinker import shrink
from tests.fuzzing.verdicts import RAISED, Verdict

DEVICES = 8


def prepare() -> None:
    """Start TensorFlow with eight devices, without its graph optimizer: what is written is what is compared."""
    gs.use_logical_devices(DEVICES, threads_per_device=1)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    tf.get_logger().setLevel("ERROR")
    warnings.simplefilter("ignore")


def explain(program: Program, verdict: Verdict, most_seconds: float) -> str:
    """Return the source of a small program that fails alike, and what it says."""
    small = shrink(program, lambda candidate: judge(candidate).is_like(verdict), most_seconds)
    said = judge(small).message.splitlines()
    return "\n".join([*[f"# {line}" for line in said[:12]], small.source])


def work(seeds: Sequence[int], mode: str | None, ops: Sequence[str], shrink_seconds: float) -> None:
    """Judge programs."""

    def say(**words: object) -> None:
        print(json.dumps(words), flush=True)

    prepare()
    known: list[tuple[int, Verdict]] = []
    for seed in seeds:
        say(seed=seed, doing="generating")
        program = generate(seed, mode, ops)
        verdict = judge(program, lambda doing, seed=seed: say(seed=seed, doing=doing))
        if verdict.has_no_gradient and program.has_tapes:
            program = program.without_tapes()
            verdict = judge(program, lambda doing, seed=seed: say(seed=seed, doing=doing))
        found = {"kind": verdict.kind, "message": verdict.message, "mode": mode or mode_of(seed)}
        if verdict.failed:
            say(seed=seed, doing="shrinking", **found, source=program.source)
            alike = [first for first, other in known if verdict.kind == RAISED and other.is_like(verdict)]
            found["source"] = f"# as seed {alike[0]}" if alike else explain(program, verdict, shrink_seconds)
            known.append((seed, verdict))
        say(seed=seed, done=True, **found)


if __name__ == "__main__":
    first, count, chosen, restricted, seconds = sys.argv[1:]
    ops = [op for op in restricted.split(",") if op]
    work(range(int(first), int(first) + int(count)), chosen or None, ops, float(seconds))
