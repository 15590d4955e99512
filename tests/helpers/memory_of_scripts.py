"""Scripts in processes of their own, which say how much memory they had at most."""

from __future__ import annotations

import subprocess
import sys

_BEGINS = """
import gc, os, sys
import keras, numpy as np, tensorflow as tf
import graphsplit as gs

def memory(field):
    [line] = [line for line in open("/proc/self/status") if line.startswith(field)]
    return int(line.split()[1]) * 1024

def memory_from_now_on():
    gc.collect()
    before = memory("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # so that VmHWM is the peak from now on
    return before

gs.use_logical_devices(8)
"""


def printed(script: str, *arguments: str) -> list[int]:
    """Return the numbers that a script prints in the end, on eight devices.

    It has Keras, numpy, TensorFlow and graphsplit by their usual names; `memory("VmRSS")` and `memory("VmHWM")`, the
    bytes that it has now and had at most; and `memory_from_now_on()`, which returns the first, and begins the second
    anew.
    """
    command = [sys.executable, "-c", _BEGINS + script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500)
    return list(map(int, done.stdout.split()))
