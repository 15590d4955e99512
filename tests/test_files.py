"""Nothing is lost: what graphsplit writes is written beside and put in place, and replaces only its own kind."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from typer.testing import CliRunner

import graphsplit as gs
from graphsplit.cli import app
from graphsplit.core.storage import files, forms
from graphsplit.inspect import Placement, Timeline, placement_of_graph
from graphsplit.inspect.recorded import OpEvent
from graphsplit.inspect.views.exports import WRITERS
from tests.helpers.messages import message
from tests.helpers.placements import two_device_graph
from tests.helpers.saved_folders import contents, save

NOT_REPLACED = "so it is not replaced. Name another place, or move it away."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("model") / "original")


@pytest.fixture
def placement() -> Placement:
    return placement_of_graph(two_device_graph(), title="graph")


@pytest.fixture
def timeline() -> Timeline:
    return Timeline("step", (OpEvent("a", "MatMul", "/device:CPU:0", 0.0, 0.004, 1),), {}, Placement([], []))


def test_suffixes_are_those_that_are_written():
    assert tuple(WRITERS) == forms.PLACEMENT_SUFFIXES


def everything(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("suffix", [*forms.PLACEMENT_SUFFIXES, ""])
def test_own_files_are_replaced_and_others_are_not(suffix: str, placement: Placement, tmp_path: Path):
    path = tmp_path / f"out{suffix}"
    written = path if suffix else path / "events.out.tfevents.placement"
    placement.save(path)
    first = written.read_bytes()
    assert forms.MARK.encode() in first
    placement.save(path)
    assert written.read_bytes()[:8] == first[:8]  # matplotlib writes the time into an .svg
    written.write_bytes(b"mine, and precious")
    assert message(gs.errors.StorageError, placement.save, path) == (
        f"{str(written)!r} was not written by graphsplit, {NOT_REPLACED}"
    )
    assert written.read_bytes() == b"mine, and precious"
    written.write_bytes(b"")
    placement.save(path)
    assert forms.MARK.encode() in written.read_bytes()
    assert os.listdir(written.parent) == [written.name]


def test_timelines_too(timeline: Timeline, tmp_path: Path):
    path = tmp_path / "out.json"
    timeline.save(path)
    timeline.save(path)
    path.write_bytes(b"mine")
    assert message(gs.errors.StorageError, timeline.save, path).endswith(NOT_REPLACED)
    assert everything(tmp_path) == {path.name: b"mine"}


def test_marked_files_are_whole(placement: Placement, tmp_path: Path):
    figure = pytest.importorskip("matplotlib.figure", reason="the picture needs matplotlib")
    forms.write_figure(str(tmp_path / "p.png"), figure.Figure())
    content, kinds = (tmp_path / "p.png").read_bytes()[8:], []
    while content:
        [size], kind = struct.unpack(">I", content[:4]), content[4:8]
        assert struct.unpack(">I", content[8 + size : 12 + size]) == (zlib.crc32(content[4 : 8 + size]),)
        kinds.append(kind)
        content = content[12 + size :]
    assert kinds[:2] == [b"IHDR", b"tEXt"]
    assert kinds[-1] == b"IEND"
    placement.save(tmp_path / "p.json")
    assert json.loads((tmp_path / "p.json").read_text())["about"] == "written by graphsplit"


def unusual(kind: str, path: Path) -> str:
    """Make something that is no plain file; return what it is called."""
    if kind == "directory":
        path.mkdir()
        return "a directory"
    os.mkfifo(path)
    return "a pipe"


@pytest.mark.parametrize("kind", ["directory", "pipe"])
@pytest.mark.parametrize("suffix", [".html", ".json"])
def test_what_is_no_plain_file(kind: str, suffix: str, timeline: Timeline, tmp_path: Path):
    path = tmp_path / f"out{suffix}"
    called = unusual(kind, path)
    if suffix == ".json":
        assert message(gs.errors.StorageError, timeline.save, path) == f"{str(path)!r} is {called}, {NOT_REPLACED}"
    assert message(gs.errors.StorageError, forms.write, str(path), b"") == f"{str(path)!r} is {called}, {NOT_REPLACED}"
    assert os.listdir(tmp_path) == [path.name]


def test_devices_and_places_that_are_none(placement: Placement, tmp_path: Path):
    (tmp_path / "null.html").symlink_to("/dev/null")
    assert message(gs.errors.StorageError, placement.save, tmp_path / "null.html") == (
        f"{str(tmp_path / 'null.html')!r} is a device, {NOT_REPLACED}"
    )
    (tmp_path / "circle.html").symlink_to("circle.html")
    with pytest.raises((gs.errors.StorageError, gs.errors.ArgumentError), match=r"circle\.html' cannot be written: "):
        placement.save(tmp_path / "circle.html")
    assert (
        message(gs.errors.ArgumentError, forms.write, " ", b"")
        == "The place to write is ' '; name a file or directory."
    )
    long = str(tmp_path / ("x" * 300 + ".html"))
    assert message(gs.errors.StorageError, placement.save, long) == f"{long!r} cannot be written: File name too long."
    (tmp_path / "file").write_text("")
    assert message(gs.errors.StorageError, placement.save, tmp_path / "file" / "p.html").endswith(
        f": {str(tmp_path / 'file')!r}: File exists."
    )
    assert sorted(os.listdir(tmp_path)) == ["circle.html", "file", "null.html"]


@pytest.mark.parametrize("url", ["gs://bucket/x", "ram://x", "file:///tmp/x", "s3:/bucket/x"])
def test_urls_are_no_local_paths(
    url: str, placement: Placement, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one").symlink_to(model)
    before = sorted(os.listdir(tmp_path))
    found = message(gs.errors.ArgumentError, gs.serving.transpile_saved_model, "one", url, 2)
    assert found.startswith(f"{url!r} is a URL, and files are written in local folders only")
    assert message(gs.errors.ArgumentError, placement.save, f"{url}.html").startswith(f"{url + '.html'!r} is a URL")
    assert message(gs.errors.ArgumentError, placement.save, Path(f"{url}.html")).endswith("a tool of the bucket's.")
    assert message(gs.errors.ArgumentError, placement.save, url).startswith(
        f"{url + '/events.out.tfevents.placement'!r} is"
    )
    done = CliRunner().invoke(app, ["transpile", "one", url, "--devices", "2"])
    assert done.exit_code
    assert "is a URL" in done.output
    assert sorted(os.listdir(tmp_path)) == before


def test_a_link_is_followed(tmp_path: Path):
    forms.write(str(tmp_path / "real.html"), b"one")
    (tmp_path / "link.html").symlink_to("real.html")
    forms.write(str(tmp_path / "link.html"), b"two")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "real.html").read_bytes().startswith(b"two")


def test_modes_stay_and_write_protection_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "p.html"
    forms.write(str(path), b"one")
    path.chmod(0o640)
    forms.write(str(path), b"two")
    assert path.stat().st_mode & 0o777 == 0o640
    monkeypatch.setattr(os, "access", lambda *_: False)  # whoever runs the tests may be allowed everything
    assert message(gs.errors.StorageError, forms.write, str(path), b"three") == (
        f"{str(path)!r} is write-protected, {NOT_REPLACED}"
    )


@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize("step", ["write_bytes", "fsync", "replace"])
def test_a_disk_that_is_full(step: str, existing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "new" / "folder" / "p.html"
    if existing:
        forms.write(str(path), b"old")
    before = contents(tmp_path)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    owner, name = {
        "write_bytes": (Path, "write_bytes"),
        "fsync": (os, "fsync"),
        "replace": (os, "replace" if existing else "rename"),
    }[step]
    monkeypatch.setattr(owner, name, full)
    assert message(gs.errors.StorageError, forms.write, str(path), b"new") == (
        f"Writing {str(path)!r} failed, and it was left as it was: [Errno 28] No space left on device"
    )
    assert contents(tmp_path) == before
    assert sorted(p.name for p in tmp_path.rglob("*")) == (["folder", "new", "p.html"] if existing else [])


def test_a_real_full_disk(placement: Placement, tmp_path: Path):
    """Every write to /dev/full fails, as on a full disk; where it can be had, in place of the file that is made."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with pytest.raises(gs.errors.StorageError) as caught, files.replacing(str(tmp_path / "p"), forms.recognize) as made:  # noqa: PT012
        os.symlink("/dev/full", made)
        Path(made).write_bytes(b"x" * 100_000)
    assert "No space left on device" in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_when_two_steps_are_needed_and_the_second_fails(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = tmp_path / "out"
    save(target, 3.0)
    before, renamed = contents(target), os.rename
    monkeypatch.setattr(files, "_exchange", lambda one, other: False)

    def fail(source: Any, destination: Any) -> None:
        if ".partial" in str(source):
            raise OSError(5, "Input/output error")
        renamed(source, destination)

    monkeypatch.setattr(os, "rename", fail)
    found = message(gs.errors.StorageError, gs.serving.transpile_saved_model, model, target, 2, overwrite=True)
    assert found == f"Writing {str(target)!r} failed, and it was left as it was: [Errno 5] Input/output error"
    assert contents(target) == before
    assert os.listdir(tmp_path) == ["out"]


def own_file(folder: Path) -> str:
    save(folder)
    (folder / "notes.txt").write_text("mine")
    return "holds what is no part of a SavedModel (notes.txt)"


def own_asset(folder: Path) -> str:
    save(folder)
    (folder / "assets" / "words.txt").write_text("mine")
    (folder / "variables" / "backup").mkdir()
    return "holds what is no part of a SavedModel (assets/words.txt, variables/backup)"


def own_extras(folder: Path) -> str:
    save(folder)
    (folder / "assets.extra").mkdir()
    (folder / "assets.extra" / "requests").write_text("mine")
    return "holds what is no part of a SavedModel (assets.extra/requests)"


def many_files(folder: Path) -> str:
    save(folder)
    for i in range(9):
        (folder / str(i)).write_text("")
    return "holds what is no part of a SavedModel (0, 1, 2, 3, 4, 5 and 3 more)"


def folder_of_files(folder: Path) -> str:
    folder.mkdir()
    (folder / "thesis.tex").write_text("mine")
    return "is a directory, not a SavedModel's"


def broken_model(folder: Path) -> str:
    folder.mkdir()
    (folder / "saved_model.pb").write_bytes(b"mine")
    return "is a directory, not a SavedModel's"


def file(folder: Path) -> str:
    folder.write_text("mine")
    return "is a plain file, not a SavedModel's directory"


def pipe(folder: Path) -> str:
    os.mkfifo(folder)
    return "is a pipe, not a SavedModel's directory"


FOREIGN: list[Callable[[Path], str]] = [
    own_file,
    own_asset,
    own_extras,
    many_files,
    folder_of_files,
    broken_model,
    file,
    pipe,
]


@pytest.mark.parametrize("make", FOREIGN, ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    "function", [gs.serving.transpile_saved_model, gs.serving.strip_devices], ids=lambda f: f.__name__
)
def test_only_a_model_is_overwritten(function: Any, make: Callable[[Path], str], model: str, tmp_path: Path):
    target = tmp_path / "out"
    why = make(target)
    before = contents(tmp_path) if make is not pipe else {}
    devices = [] if function is gs.serving.strip_devices else [2]
    found = message(gs.errors.StorageError, function, model, target, *devices, overwrite=True)
    assert found == f"{str(target)!r} {why}, {NOT_REPLACED}"
    assert before == (contents(tmp_path) if make is not pipe else {})
    assert os.listdir(tmp_path) == ["out"]


def test_copies_of_the_input_are_not_lost(tmp_path: Path):
    source, target = tmp_path / "in", tmp_path / "out"
    save(source)
    (source / "assets.extra").mkdir()
    (source / "assets.extra" / "requests").write_text("warm up")
    for _ in range(2):
        gs.serving.transpile_saved_model(source, target, 2, overwrite=True)
    assert (target / "assets.extra" / "requests").read_text() == "warm up"
    empty = tmp_path / "empty"
    empty.mkdir()
    gs.serving.transpile_saved_model(source, empty, 2, overwrite=True)
    assert (empty / "saved_model.pb").is_file()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"dear diary", "is no graph's file"),
        (b"\x08\x01", "is no graph's file"),
        (None, "is a directory, not a graph's file"),
    ],
)
@pytest.mark.parametrize("name", ["out.pb", "out.pbtxt"])
def test_only_a_graph_is_overwritten(name: str, content: bytes | None, why: str, tmp_path: Path):
    graph = tf.compat.v1.GraphDef()
    graph.node.add(name="x", op="Placeholder", device="/device:GPU:3").attr["dtype"].type = 1
    source, target = tmp_path / "in.pb", tmp_path / name
    source.write_bytes(graph.SerializeToString())
    target.mkdir() if content is None else target.write_bytes(content)
    found = message(gs.errors.StorageError, gs.serving.strip_devices, source, target, overwrite=True)
    assert found == f"{str(target)!r} {why}, {NOT_REPLACED}"
    assert sorted(os.listdir(tmp_path)) == ["in.pb", name]
    if content is not None:
        assert target.read_bytes() == content
        target.write_bytes(b"")
        gs.serving.strip_devices(source, target, overwrite=True)
        gs.serving.strip_devices(source, target, overwrite=True)
        assert sorted(os.listdir(tmp_path)) == ["in.pb", name]
