"""`python -m tests.fuzzing --minutes 10 --seed 7`: random programs until the time is over; what fails, made small."""

from __future__ import annotations

import argparse
import collections
import json
import queue
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from tests.fuzzing.verdicts import DIFFERENT, KINDS, NOT_TRACEABLE, RAISED, REFUSED

PER_PROCESS = 250  # TensorFlow keeps what it has traced
MOST_SECONDS = 60.0  # for one program, from one word of its process to the next
START_SECONDS = 300.0  # for a process until its first word: it imports TensorFlow, perhaps beside many others
SHRINK_SECONDS = 30.0


class NotStartedError(RuntimeError):
    """A process ended, or said nothing, before its first program."""


def outcomes(first: int, count: int, mode: str, ops: str, ends_at: float) -> Iterator[dict[str, Any]]:
    """Yield what became of each seed; from as many processes as that takes.

    What took too long is tried once more: on a machine with other work, or one that was put to sleep, it need not hang.

    Raises:
      NotStartedError: if a process does not start, and not when tried again either.
    """
    seed, failed, late = first, False, None
    while seed < first + count and time.monotonic() < ends_at:
        chunk = min(PER_PROCESS, first + count - seed)
        try:
            for outcome in _process(seed, chunk, mode, ops, ends_at):
                seed, failed = outcome["seed"], False
                if outcome.get("late") and seed != late:
                    late = seed
                    break
                seed += 1
                yield outcome
        except NotStartedError:
            if failed:
                raise
            failed = True


def _process(first: int, count: int, mode: str, ops: str, ends_at: float) -> Iterator[dict[str, Any]]:
    """Yield the outcomes of one process. If it dies or hangs, that is the outcome of what it was at."""
    command = [sys.executable, "-m", "tests.fuzzing.worker", str(first), str(count), mode, ops, str(SHRINK_SECONDS)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    words: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process.stdout, words), daemon=True).start()
    last: dict[str, Any] = {"seed": first, "doing": "starting"}
    try:
        while time.monotonic() < ends_at or last.get("doing") == "shrinking":
            most = START_SECONDS if last.get("doing") == "starting" else MOST_SECONDS
            try:
                word = words.get(timeout=most + SHRINK_SECONDS * (last.get("doing") == "shrinking"))
            except queue.Empty:
                if last.get("done"):  # between two programs, or after the last: nothing is lost with this process
                    return
                yield {**ended(last, f"took more than {most:.0f} seconds"), "late": True}
                return
            if word is None:
                if not last.get("done"):
                    yield ended(last, f"the process ended with {process.wait()}")
                return
            last = json.loads(word)
            if last.get("done"):
                yield last
    finally:
        process.kill()
        process.wait()


def _read(lines: Any, words: queue.Queue[str | None]) -> None:
    for line in lines:
        if line.startswith("{"):
            words.put(line)
    words.put(None)


def ended(last: dict[str, Any], why: str) -> dict[str, Any]:
    """Return the outcome of a program in whose run the process ended."""
    if last["doing"] == "starting":
        raise NotStartedError(
            f"The worker does not start: {why}. Run python -m tests.fuzzing.worker 0 1 '' '' 1 to see."
        )
    ours = last["doing"] in ("several devices", "shrinking")
    outcome = {"kind": RAISED if ours else NOT_TRACEABLE, "message": f"{last['doing']}: {why}", "source": ""}
    return {"mode": "?", **outcome, **{k: v for k, v in last.items() if k != "doing"}}


def main(arguments: argparse.Namespace) -> int:
    """Run, print failures as they come and counts at the end; return the exit code."""
    start = time.monotonic()
    ends_at = start + 60 * (arguments.minutes or (1e9 if arguments.programs else 10))
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    refusals: collections.Counter[str] = collections.Counter()
    for outcome in outcomes(arguments.seed, arguments.programs or 10**9, arguments.mode, arguments.ops, ends_at):
        counts[outcome["mode"], outcome["kind"]] += 1
        if outcome["kind"] in (DIFFERENT, RAISED):
            print(f"=== seed {outcome['seed']} ({outcome['mode']}): {outcome['kind']}: {outcome['message'][:300]}")
            print(outcome["source"], flush=True)
        if outcome["kind"] == REFUSED:
            refusals[outcome["message"].splitlines()[0][:160]] += 1
    for message, count in refusals.most_common(10):
        print(f"refused {count} times: {message}")
    _print_counts(counts, time.monotonic() - start)
    return 1 if any(counts[key] for key in counts if key[1] in (DIFFERENT, RAISED)) else 0


def _print_counts(counts: collections.Counter[tuple[str, str]], seconds: float) -> None:
    modes = sorted({mode for mode, _ in counts})
    print(f"{'':10}" + "".join(f"{title:>15}" for title in ("programs", *KINDS)))
    for mode in [*modes, "all"]:
        row = [sum(n for (m, k), n in counts.items() if mode in (m, "all") and k == kind) for kind in KINDS]
        print(f"{mode:10}" + "".join(f"{number:>15}" for number in (sum(row), *row)))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = sum(counts.values())
    print(f"{total / seconds:.1f} programs a second, {total / (used.ru_utime + used.ru_stime):.1f} a processor second")


def parse(words: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing", description=__doc__)
    parser.add_argument("--minutes", type=float, help="stop after this time (10, unless --programs is given)")
    parser.add_argument("--programs", type=int, help="stop after this many programs")
    parser.add_argument("--seed", type=int, default=0, help="the first seed; one reproduces a failure: --programs 1")
    parser.add_argument("--ops", default="", help="MatMul,tf.split: one of them is in every program")
    parser.add_argument(
        "--mode",
        default="",
        help="forward, inside, outside, second, unknown, shares, axes, layouts; mesh, several, experts, fsdp, sizes",
    )
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main(parse(sys.argv[1:])))
