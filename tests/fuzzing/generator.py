"""From a seed to a program."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from tests.fuzzing.catalog import CATALOG
from tests.fuzzing.program import ROWS, Input, Program, Setting, names_in
from tests.fuzzing.scope import Scope, UnfitError
from tests.fuzzing.templates import Filling

MODES = ("forward", "inside", "outside", "second", "unknown", "shares", "axes", "layouts")
MESH = "mesh"  # only where it is asked for: variables that are cut along a second axis
SEVERAL = "several"  # likewise: a mesh of several axes, one of stages among them; needs eight devices
EXPERTS = "experts"  # likewise: variables that are cut along the batch's axis, and used where their parts are
FSDP = "fsdp"  # likewise: a second axis of the rows, along which variables are cut; along the first they are copied
OPEN_SIZES = "sizes"  # likewise: two open sizes, and lengths that are computed of them
_EXPERTS_MESHES = ((2, 1), (2, 1), (3, 1), (4, 1), (2, 2))
_TOO_FEW_ROWS = 0.2  # how often a device has no row: the parts of these variables are gathered then
_UNKNOWN_ROWS = {"layouts": 0.2, MESH: 0.2, SEVERAL: 0.2, EXPERTS: 0.3, FSDP: 0.2}
_MESHES_OF_SEVERAL = (
    {"batch": 2, "model": 2, "expert": 2},
    {"expert": 2, "batch": 2, "model": 2},
    {"model": 2, "expert": 3},
    {"batch": 1, "model": 3, "expert": 2},
    {"stage": 2, "batch": 2},
    {"stage": 2, "model": 2},
    {"stage": 2, "batch": 2, "model": 2},
    {"batch": 2, "stage": 2, "model": 2},
    {"stage": 2, "model": 2, "expert": 2},
    {"stage": 3, "batch": 2},
)
_SCHEDULES = (None, None, "gpipe", "1f1b", "zero-bubble")
MESHES = ((2, 2), (2, 2), (1, 2), (1, 3), (1, 4), (1, 5), (2, 1))
_CUT = 0.75  # how many of the variables that can be cut so are
LAYOUTS = ("sharded", "sharded", "replicated", "replicated", "home", "")
_SHARES = {"ruled": 0.42, "api": 0.32, "unruled": 0.17, "control": 0.09}
_OF_SIZES = 0.6  # how many lines have lengths that are computed, where these are looked at
_OF_VARIABLES = 0.5  # how many lines do something to a variable where these are laid out
_TAPES = {"forward": [(0, 0)], "inside": [(1, 0)], "outside": [(0, 1)], "second": [(2, 0), (1, 1), (0, 2)]}
_MOST_LINES = {"second": 4, "unknown": 4}  # 6 otherwise; twice as many programs a minute find more
_MOST_TRIES = 60


def mode_of(seed: int) -> str:
    """Return the mode of a seed where none is asked for."""
    return MODES[seed % len(MODES)]


def generate(seed: int, mode: str | None = None, ops: Sequence[str] = ()) -> Program:
    """Return the program of a seed.

    Args:
      mode: one of `MODES`, `MESH`, `SEVERAL`, `EXPERTS`, `FSDP` or `OPEN_SIZES`; None for one that the seed decides.
      ops: op types, or names of the API, of which one at least is to be in the program.
    """
    rng = np.random.default_rng([seed, 2021])
    mode = mode or mode_of(seed)
    setting = dataclasses.replace(_setting(rng, mode), at_once=seed // len(MODES) % 2 == 1)
    rows = sorted(set(setting.rows), reverse=True) if setting.sizes != "known" else setting.rows[:1]
    state = mode in ("layouts", MESH, SEVERAL, EXPERTS, FSDP)
    scope = Scope(rng, rows, setting.by_default, state, mode == OPEN_SIZES)
    wanted = [t for templates in CATALOG.values() for t in templates if any(op in t for op in ops)]
    if ops and not wanted:
        raise ValueError(f"No template mentions {', '.join(ops)}; tests/fuzzing/catalog has those that there are.")
    length = int(rng.integers(1, _MOST_LINES.get(mode, 6) + 1))
    for _ in range(_MOST_TRIES):
        if len(scope.lines) >= length:
            break
        most = CATALOG["variables"] if state and rng.random() < _OF_VARIABLES else None
        if mode == OPEN_SIZES and rng.random() < _OF_SIZES:
            most = CATALOG["sizes"]
        grow(scope, wanted if wanted and rng.random() < 0.6 else most)
    program = _program(scope, setting)
    return (
        _laid_out(program, rng, {EXPERTS: "batch", SEVERAL: "", FSDP: "fsdp"}.get(mode, "model")) if state else program
    )


def _laid_out(program: Program, rng: np.random.Generator, along: str) -> Program:
    """Return a program whose variables lie on the devices in ways of their own: along an axis, or "" for several."""
    setting = program.setting
    variables = [
        dataclasses.replace(w, layout=_layout(w, setting, rng, along)) if along else _along_several(w, setting, rng)
        for w in program.variables
    ]
    return dataclasses.replace(program, variables=tuple(variables))


def _along_several(variable: Input, setting: Setting, rng: np.random.Generator) -> Input:
    """Return a variable that is cut along some of the axes of a mesh, each dimension along none, one or several."""
    dimensions: list[tuple[str, ...]] = [() for _ in variable.dims]
    left = [int(size) for size in variable.dims]
    others = [name for name in setting.axes if name != "batch"]
    for name in others:
        fitting = [k for k, size in enumerate(left) if size >= setting.axes[name]]
        if fitting and rng.random() < _CUT:
            k = fitting[rng.integers(len(fitting))]
            dimensions[k] += (name,)
            left[k] //= setting.axes[name]
    if not any(dimensions):
        return dataclasses.replace(variable, layout=str(rng.choice(LAYOUTS)))
    layout = tuple([own if len(own) > 1 else next(iter(own), None) for own in dimensions])
    is_all = len(setting.axes) == sum(map(len, dimensions))
    return dataclasses.replace(variable, layout=layout, rest="" if is_all else str(rng.choice(["", *LAYOUTS[:4]])))


def _layout(variable: Input, setting: Setting, rng: np.random.Generator, along: str) -> str | tuple[str | None, ...]:
    if setting.mesh:
        parts = setting.axes[along]
        axes = [axis for axis, size in enumerate(variable.dims) if int(size) >= parts]
        if axes and rng.random() < _CUT:
            chosen = axes[rng.integers(len(axes))]
            return tuple([along if axis == chosen else None for axis in range(chosen + 1)])
    return str(rng.choice(LAYOUTS))


def grow(scope: Scope, wanted: Sequence[str] | None = None) -> bool:
    """Add a line of some template; return whether that was possible."""
    rng = scope.rng
    families = list(_SHARES)
    templates = wanted or CATALOG[families[rng.choice(len(families), p=list(_SHARES.values()))]]
    inner = CATALOG["ruled"] + CATALOG["api"]
    try:
        return scope.add(Filling(scope, inner).fill(templates[rng.integers(len(templates))]))
    except UnfitError:
        return False


def _setting(rng: np.random.Generator, mode: str) -> Setting:
    tapes = _TAPES.get(mode) or [(0, 0), (1, 0), (0, 1), (0, 0), (1, 0), (0, 1), *_TAPES["second"]]
    inside, outside = tapes[rng.integers(len(tapes))]
    devices = max(int(rng.choice([1, 2, 2, 3, 3, 4, 5])), 2 if mode == "layouts" else 1)
    rows = int(rng.choice([0, 1, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8], p=[0.02, *[0.98 / 11] * 11]))
    setting = Setting(devices, inside, outside, rows=(rows,) * int(rng.choice([1, 1, 2])))
    if mode == "shares" or rng.random() < 0.15:
        shares = rng.integers(0, 4, devices)
        setting = dataclasses.replace(setting, shares=tuple(int(n) for n in shares) if shares.any() else None)
    if mode == MESH:
        mesh = MESHES[rng.integers(len(MESHES))]
        setting = _on_mesh(setting, {"batch": mesh[0], "model": mesh[1]})
    if mode == SEVERAL:
        setting = _on_mesh(setting, _MESHES_OF_SEVERAL[rng.integers(len(_MESHES_OF_SEVERAL))])
        setting = dataclasses.replace(setting, micro_batches=int(rng.choice([1, 1, 2, 3])))
        if "stage" in dict(setting.mesh):
            setting = dataclasses.replace(setting, schedule=_SCHEDULES[rng.integers(len(_SCHEDULES))])
    if mode == EXPERTS:
        mesh = _EXPERTS_MESHES[rng.integers(len(_EXPERTS_MESHES))]
        setting = _on_mesh(setting, {"batch": mesh[0], "model": mesh[1]})
        few = int(rng.integers(1, mesh[0])) if rng.random() < _TOO_FEW_ROWS else None
        setting = dataclasses.replace(setting, rows=tuple([few or max(rows, mesh[0]) for rows in setting.rows]))
    if mode == FSDP:
        setting = _on_mesh(setting, {"data": 2, "fsdp": 2})
    if mode in ("layouts", MESH, SEVERAL, EXPERTS, FSDP):
        setting = dataclasses.replace(setting, rows=setting.rows * 2)  # what a call leaves, the next one finds
    if mode in ("unknown", OPEN_SIZES) or (mode in _UNKNOWN_ROWS and rng.random() < _UNKNOWN_ROWS[mode]):
        count = 6 if mode == OPEN_SIZES else 3
        calls = tuple(int(n) for n in rng.choice([1, 2, 3, 4, 5, 7, 8], count, replace=False))
        setting = dataclasses.replace(setting, rows=calls, sizes="retrace" if rng.random() < 0.4 else "signature")
    default_device = (
        f"CPU:{rng.integers(5)}" if rng.random() < 0.15 and mode not in (MESH, SEVERAL, EXPERTS, FSDP) else None
    )
    by_default = mode != "axes" and bool(rng.random() < 0.5)
    return dataclasses.replace(
        setting, default_device=default_device, by_default=by_default, in_graph=outside > 0 and bool(rng.random() < 0.2)
    )


def _on_mesh(setting: Setting, mesh: Mapping[str, int]) -> Setting:
    return dataclasses.replace(setting, devices=math.prod(mesh.values()), mesh=tuple(mesh.items()), shares=None)


def _program(scope: Scope, setting: Setting) -> Program:
    """Return what is in scope as a program, which returns what nobody has read and some of the rest."""
    if not scope.arguments:
        scope.operand("f", "ab", {})
    rng = scope.rng
    read = {name for line in scope.lines for name in names_in(line.expression)}
    chosen = [line.target for line in scope.lines if line.target not in read or rng.random() < 0.3]
    outputs = chosen[-5:] or [scope.arguments[0].name]
    arguments = scope.arguments
    if setting.by_default:
        arguments = [argument.split_along(0) for argument in arguments]
    elif all(argument.axis is None for argument in arguments):
        arguments = [x.split_along(x.dims.index(ROWS) if ROWS in x.dims else None) for x in arguments]
    return Program(tuple(arguments), tuple(scope.variables), tuple(scope.lines), tuple(outputs), setting).tidied()
