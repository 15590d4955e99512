"""What the code of the pages prints: each page in one process, from top to bottom, and each block by itself.

A block of a page without a language, behind a block of Python, shows what that prints. `python ci/pages.py` writes all
of them anew. `...` stands for lines, or for a part of one, that a page leaves out.
"""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
STEP = """
import keras
import tensorflow as tf

import graphsplit as gs

gs.use_logical_devices(8)
layers = [keras.layers.Dense(8, "relu", name=f"block{k}_dense") for k in range(11)]
model = keras.Sequential([keras.Input((20,)), *layers, keras.layers.Dense(1)])
variable = model.trainable_variables[0]
x, y = tf.random.normal((64, 20)), tf.zeros((64, 1))


def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    for weight, gradient in zip(model.trainable_variables, tape.gradient(loss, model.trainable_variables)):
        weight.assign_sub(0.1 * gradient)
    return loss
"""
BEFORE = {  # what pages that show pieces of code take for granted
    "architecture.md": STEP,
    "micro_batches.md": STEP + "encoder, decoder = layers[0], model.layers[-1]\n"
    "def train_step(x, y):\n"
    "    with tf.GradientTape() as tape:\n"
    "        loss = tf.reduce_mean((decoder(encoder(x)) - y) ** 2)\n"
    "    return tape.gradient(loss, variable)\n",
    "variables.md": "import graphsplit as gs\ngs.use_logical_devices(4)\n",
}
PLANNED = ("large_layers.md", "prediction.md")  # their GPUs are planned for, and run nothing
NEEDS_GPU = ("gpu.md",)  # `test_logical_gpus` and `test_gpu` make such devices
ANOTHER_PROCESS = "# a script of its own\n"  # what stands below cannot run where the code above has run
END_OF_BLOCK = "<end of block>"
MOST_LINES_BETWEEN = 2  # of text, between code and what it prints
MOST_LINES_ADDED = 2  # that a page lacks between two that it shows; more are left out
LEFT_OUT = "..."
_ALIKE = 0.5  # of their words

_MEASURED = re.compile(  # others in each run
    r"Timeline of |.* busy \d+ ?%|\s*[\d.]+ ms  |24 blocks: |worker \d+ \(|\s*size: graph "
)
_ROUNDED = re.compile(r"relative|^\s*PASS: ")  # other numbers on another processor
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
_PLACE = re.compile(r"\w+\.py:(?:\d+|\.\.\.)")


@dataclass(frozen=True)
class Fence:
    """A block of a page: its language, and its first line and the one behind its last, without the fences."""

    language: str
    first: int
    end: int


def runs(name: str) -> bool:
    """Return whether a page has code that runs on CPUs."""
    return name not in NEEDS_GPU and "```python" in path_of(name).read_text()


def path_of(name: str) -> Path:
    """Return the file of a page, one of `docs/` or `README.md`."""
    return ROOT / name if name == "README.md" else ROOT / "docs" / name


def code_of(name: str) -> list[str]:
    """Return the blocks of Python of a page as they run here."""
    lines = path_of(name).read_text().split("\n")
    blocks = ["\n".join(lines[f.first : f.end]) + "\n" for f in _fences(lines) if f.language == "python"]
    blocks = [block.replace("DEVICES = 512", "DEVICES = 16") for block in blocks]  # (512 take minutes)
    # (what a comprehension names is planned for: there are not as many here)
    return blocks if name in PLANNED else [re.sub(r'(?<!f)"GPU:', '"CPU:', block) for block in blocks]


def run(name: str, folder: Path) -> list[list[str]]:
    """Run the code of a page, in an empty folder, and return the lines that each of its blocks printed."""
    marked = [f"{block}\nprint({END_OF_BLOCK!r}, flush=True)\n" for block in code_of(name)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1"}
    printed = ""
    for script in "".join([BEFORE.get(name, ""), *marked]).split(ANOTHER_PROCESS):
        (folder / "page.py").write_text(script)
        done = subprocess.run(
            [sys.executable, "page.py"], capture_output=True, text=True, check=False, cwd=folder, env=environment
        )
        assert done.returncode == 0, done.stderr[-3000:]
        printed += done.stdout
    return [[line.rstrip() for line in text.strip("\n").split("\n")] for text in printed.split(END_OF_BLOCK)[:-1]]


def written(text: str, printed: list[list[str]], name: str) -> tuple[str, list[str]]:
    """Return a page that shows what its code printed, and the lines that it shows and that nothing like was printed.

    Args:
      text: of the page.
      printed: by each of its blocks of Python.
      name: of the page.

    A line that says the same with numbers that rounding or the clock explains stays as it is.
    """
    lines = text.split("\n")
    fences, missing = _fences(lines), []
    for k, fence in reversed([*enumerate(fences)]):
        shown = lines[fence.first : fence.end]
        if k and fence.language == "" and _shows(lines, fences[k - 1], fence) and not any(" 512 " in t for t in shown):
            block = sum(own.language == "python" for own in fences[:k]) - 1  # (what says 512 ran with 16)
            lines[fence.first : fence.end], lost = _renewed(shown, printed[block], name in PLANNED)
            missing += lost
    return "\n".join(lines), missing


def _fences(lines: list[str]) -> list[Fence]:
    marks = [k for k, line in enumerate(lines) if line.startswith("```")]
    return [Fence(lines[a][3:], a + 1, b) for a, b in zip(marks[::2], marks[1::2], strict=True)]


def _shows(lines: list[str], code: Fence, fence: Fence) -> bool:
    """Return whether a block shows what the one before it prints."""
    text = [line for line in lines[code.end + 1 : fence.first - 1] if line.strip()]
    return code.language == "python" and len(text) <= MOST_LINES_BETWEEN and not any(t[0] in "#|" for t in text)


def _renewed(shown: list[str], printed: list[str], planned: bool) -> tuple[list[str], list[str]]:
    """Return the lines that a block is to show, and those that it shows and that are like nothing printed."""
    found: list[str] = []
    missing: list[str] = []
    at = 0  # the first printed line that may come next
    elides = True  # whether lines may be missing before it
    for line in shown:
        if line.strip() == LEFT_OUT:
            found.append(line)
            elides = True
            continue
        if any(_varies_alike(line, own) for own in printed[at:]):
            found.append(line)
            elides = True
            continue
        place = _place_of(line, printed, at)
        is_there = place is not None and _fits(line, printed[place])
        if not is_there and any(_fits(line, own) for own in printed[:at]):
            continue  # it stands above: the order is another one
        if place is None:
            found.append(line)
            missing.append(line)
            elides = True
            continue
        between = [] if elides else printed[at:place]
        if len(between) > MOST_LINES_ADDED:
            found.append(LEFT_OUT)
        else:
            found += [_line("", own, shown, planned) for own in between]
        found.append(_line(line, printed[place], shown, planned))
        at, elides = place + 1, False
    return found, missing


def _varies_alike(shown: str, printed: str) -> bool:
    """Return whether two lines say the same, in numbers that are others in each run or on another processor."""
    measured = _MEASURED.match(shown) and _MEASURED.match(printed)
    rounded = _ROUNDED.search(shown) and _ROUNDED.search(printed) and shown.split()[0] == printed.split()[0]
    drawn = re.fullmatch(r"[\d.]+\.\.\.", shown) and _NUMBER.fullmatch(printed)  # (a loss of random data)
    return bool(measured or rounded or drawn)


def _place_of(line: str, printed: list[str], begin: int) -> int | None:
    """Return which printed line a shown one is.

    It is the most similar of those that differ in numbers only; else of those that begin alike, or of all.
    """
    close = [k for k in range(begin, len(printed)) if _fits(line, printed[k])]
    head = " ".join(_skeleton(line).split()[:3])
    alike = [k for k in range(begin, len(printed)) if len(head) > 8 and _skeleton(printed[k]).startswith(head)]
    if LEFT_OUT in line and not close:  # (a list of types in a plan ends so)
        return alike[0] if alike and (LEFT_OUT in printed[alike[0]] or line.endswith(LEFT_OUT)) else None
    scores = {k: _similar(_plain(line), _plain(printed[k])) for k in close or alike or range(begin, len(printed))}
    best = max(scores, key=lambda k: (scores[k], -k), default=None)
    is_alike = best is not None and (close or alike or _similar(_skeleton(line), _skeleton(printed[best])) > _ALIKE)
    return best if is_alike else None


def _fits(shown: str, printed: str) -> bool:
    """Return whether two lines differ in numbers, and in what the first leaves out, only."""
    return _pattern(shown).fullmatch(_plain(printed)) is not None


def _similar(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one.split(), other.split()).ratio()


def _plain(line: str) -> str:
    return _PLACE.sub("page.py", line.replace("GPU:", "CPU:")).strip()


def _skeleton(line: str) -> str:
    return _NUMBER.sub("0", _plain(line))


def _pattern(line: str) -> re.Pattern[str]:
    """Return what lines fit that differ from one in numbers, and in what it leaves out."""
    parts = [_NUMBER.sub("0", part) for part in _plain(line).split(LEFT_OUT)]
    escaped = [re.escape(part).replace("0", f"(?:{_NUMBER.pattern})") for part in parts]
    return re.compile(".*?".join([f"({part})" for part in escaped]))


def _line(shown: str, printed: str, block: list[str], planned: bool) -> str:
    """Return a line as a page shows it: as it was where only rounding or the clock differ, else as it is printed."""
    if shown and (same := _pattern(shown).fullmatch(_plain(printed))) is not None:
        pairs = list(zip(_numbers(shown), _numbers(LEFT_OUT.join(same.groups())), strict=True))
        if all(_is_near(*pair) for pair in pairs):
            return shown
        if LEFT_OUT in shown and LEFT_OUT not in printed:
            printed = shown[: len(shown) - len(shown.lstrip())] + LEFT_OUT.join(same.groups())
    elif shown.endswith(LEFT_OUT) and LEFT_OUT not in printed:  # (it says something else now: cut where it was)
        words = printed[: len(shown)].rpartition(" ")[0]
        printed = f"{words} {LEFT_OUT}"
    if (place := _PLACE.search(shown)) is not None:
        printed = _PLACE.sub(place.group(), printed).replace("(page.py)", f"({place.group()})")
    about = shown or "\n".join(block)
    if not planned and "GPU:" in about and "CPU:" not in about:
        printed = printed.replace("CPU:", "GPU:")
    return printed.rstrip()


def _numbers(line: str) -> list[float]:
    return [float(number.replace(",", "")) for number in _NUMBER.findall(_plain(line).replace("page.py", ""))]


def _is_near(shown: float, printed: float) -> bool:
    """Return whether two numbers are equal, or long ones that rounding makes differ on another processor."""
    is_long = shown != round(shown, 3) and abs(shown) > 1e-6
    return shown == printed or (is_long and abs(shown - printed) <= 1e-3 * abs(shown))
