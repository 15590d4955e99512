"""A hundred programs of the fuzzer, always the same. `python -m tests.fuzzing` tries others."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator

import pytest

from tests.fuzzing.__main__ import outcomes
from tests.fuzzing.generator import EXPERTS, FSDP, MESH, MODES, OPEN_SIZES, SEVERAL, generate
from tests.fuzzing.oracle import judge
from tests.fuzzing.verdicts import DIFFERENT, RAISED
from tests.fuzzing.worker import explain

SEEDS = 100
SHRINK_SECONDS = 60.0
NOT_MENDED: dict[int, str] = {}  # strict: who mends one deletes its line


@pytest.mark.sampled(10)
@pytest.mark.usefixtures("plain_oracle")
@pytest.mark.filterwarnings("ignore")  # random programs give TensorFlow reasons to warn
@pytest.mark.parametrize("seed", range(SEEDS))
def test_seed(seed: int, request: pytest.FixtureRequest) -> None:
    if seed in NOT_MENDED:
        request.applymarker(pytest.mark.xfail(strict=True, reason=NOT_MENDED[seed]))
    program = generate(seed)
    verdict = judge(program)
    if verdict.failed:
        seconds = 0.0 if seed in NOT_MENDED else SHRINK_SECONDS
        pytest.fail(explain(program, verdict, seconds), pytrace=False)


LAID_OUT = 1000  # programs over variables that lie in parts or in copies; the first twenty by default
NOT_MENDED_LAID_OUT: dict[int, str] = {}
MOST_SECONDS = 120  # for ten of them, which take three on an idle core


@pytest.fixture
def bounded() -> Iterator[None]:
    """End the process of a program that does not end: pytest-xdist names the test and goes on with another one."""
    faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("plain_oracle", "bounded")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "first", [pytest.param(i, marks=pytest.mark.long if i >= 20 else ()) for i in range(0, LAID_OUT, 10)]
)
def test_laid_out_variables(first: int) -> None:
    """Ten programs at a time: what is wrong is said of the first that fails."""
    for seed in range(first, first + 10):
        program = generate(seed, "layouts")
        verdict = judge(program)
        assert verdict.failed == (seed in NOT_MENDED_LAID_OUT), (
            f"seed {seed}: {explain(program, verdict, SHRINK_SECONDS)}"
        )


ON_MESHES = 1000  # programs over variables that are cut along a second axis; the first five by default
NOT_MENDED_ON_MESHES: dict[int, str] = {}
FOUND_ON_MESHES = (10248, 10357, 10595)  # others that failed once


@pytest.mark.usefixtures("plain_oracle", "bounded")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "first", [pytest.param(i, marks=pytest.mark.long if i else ()) for i in range(0, ON_MESHES, 5)]
)
def test_meshes(first: int) -> None:
    for seed in [*range(first, first + 5), *(FOUND_ON_MESHES if first == 0 else ())]:
        program = generate(seed, MESH)
        verdict = judge(program)
        assert verdict.failed == (seed in NOT_MENDED_ON_MESHES), (
            f"seed {seed}: {explain(program, verdict, SHRINK_SECONDS)}"
        )


IN_GROUPS = 200  # programs over variables that are cut along one axis of the rows; the first five by default


@pytest.mark.usefixtures("plain_oracle", "bounded")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "first", [pytest.param(i, marks=pytest.mark.long if i else ()) for i in range(0, IN_GROUPS, 5)]
)
def test_two_axes_of_the_rows(first: int) -> None:
    for seed in range(first, first + 5):
        program = generate(seed, FSDP)
        verdict = judge(program)
        assert not verdict.failed, f"seed {seed}: {explain(program, verdict, SHRINK_SECONDS)}"


WITH_EXPERTS = 300  # programs over variables that are cut along the batch's axis, in place; the first four by default


@pytest.mark.usefixtures("plain_oracle", "bounded")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "first", [pytest.param(i, marks=pytest.mark.long if i else ()) for i in range(0, WITH_EXPERTS, 4)]
)
def test_experts(first: int) -> None:
    for seed in range(first, first + 4):
        program = generate(seed, EXPERTS)
        verdict = judge(program)
        assert not verdict.failed, f"seed {seed}: {explain(program, verdict, SHRINK_SECONDS)}"


WITH_OPEN_SIZES = 24  # programs of two open sizes, with lengths computed of them; the first three by default


@pytest.mark.usefixtures("plain_oracle", "bounded")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "first", [pytest.param(i, marks=pytest.mark.long if i else ()) for i in range(0, WITH_OPEN_SIZES, 3)]
)
def test_open_sizes(first: int) -> None:
    for seed in range(first, first + 3):
        program = generate(seed, OPEN_SIZES)
        verdict = judge(program)
        assert not verdict.failed, f"seed {seed}: {explain(program, verdict, SHRINK_SECONDS)}"


ON_SEVERAL_AXES = 300  # programs over meshes of two and three axes, stages among them; all in the long run


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(0, ON_SEVERAL_AXES, 100))
def test_several_axes(first: int) -> None:
    """In processes of their own, which have eight devices."""
    found = list(outcomes(first, 100, SEVERAL, "", float("inf")))
    assert [own["seed"] for own in found] == [*range(first, first + 100)]
    failed = [own for own in found if own["kind"] in (DIFFERENT, RAISED)]
    assert not failed, "\n".join(f"seed {own['seed']}: {own['message']}\n{own['source']}" for own in failed)


def test_programs_are_really_on_several_axes() -> None:
    programs = [generate(seed, SEVERAL) for seed in range(60)]
    meshes = [dict(program.setting.mesh) for program in programs]
    assert sum("stage" in mesh for mesh in meshes) >= 20
    assert sum(len(mesh.keys() - {"batch"}) == 2 for mesh in meshes) >= 20
    assert {program.setting.schedule for program in programs} == {None, "gpipe", "1f1b", "zero-bubble"}
    laid = [w for program in programs for w in program.variables if isinstance(w.layout, tuple)]
    assert sum(any(isinstance(own, tuple) for own in w.layout) for w in laid) >= 3  # a dimension along two axes
    assert {w.rest for w in laid} >= {"", "sharded", "replicated"}


def test_variables_are_really_used_in_place() -> None:
    programs = [generate(seed, EXPERTS) for seed in range(40)]
    assert sum('gs.cut("batch", in_place=True)' in program.source for program in programs) >= 20
    settings = [program.setting for program in programs]
    assert {setting.sizes for setting in settings} == {"known", "signature", "retrace"}
    unknown = [program for program in programs if program.setting.sizes != "known"]
    assert sum('gs.cut("batch", in_place=True)' in program.source for program in unknown) >= 5
    few = [setting for setting in settings if setting.mesh and min(setting.rows) < setting.axes["batch"]]
    assert any(setting.sizes == "known" for setting in few)
    assert any(max(setting.rows) >= setting.devices for setting in few)  # one of its calls has enough, another too few


def test_variables_are_really_laid_out() -> None:
    programs = [generate(seed, "layouts") for seed in range(60)]
    laid_out = [w.layout for program in programs for w in program.variables]
    assert {layout: laid_out.count(layout) >= 10 for layout in ("sharded", "replicated", "home")} == dict.fromkeys(
        ("sharded", "replicated", "home"), True
    )
    assert all("gs.set_variable_layout(" in p.source for p in programs if any(w.layout for w in p.variables))


def test_variables_are_really_cut_along_a_mesh() -> None:
    programs = [generate(seed, MESH) for seed in range(40)]
    assert {tuple(program.setting.axes.values()) for program in programs} >= {(2, 2), (1, 2), (1, 3), (1, 4)}
    assert sum(isinstance(w.layout, tuple) for program in programs for w in program.variables) >= 25
    for program in programs:
        rows, columns = program.setting.axes.values()
        assert f'g = gs.parallelize(f, mesh={{"batch": {rows}, "model": {columns}}}' in program.source
        for w in program.variables:
            if isinstance(w.layout, tuple):
                assert int(w.dims[w.layout.index("model")]) >= columns
                assert f"gs.set_variable_layout(variable, layout, {program.setting.on_devices})" in program.source


def test_seeds_are_of_all_modes() -> None:
    assert 10 * len(MODES) <= SEEDS
