"""Files: written beside first, then put in place in one step, so that nothing is ever half written or lost.

Every file and folder that graphsplit writes goes through `replacing`. One rule holds for all of them: what is in the
way is replaced only if it is known to be of the same kind and origin (`Recognizer`), and until the new one is whole,
and whenever writing fails, the old one stays and nothing else is left behind.

Models are found by the names of their files alone. Nothing here reads them, or imports TensorFlow.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from graphsplit.errors import ArgumentError, StorageError

Recognizer = Callable[[Path], str]  # returns why what is there is none of ours, "" if it may be replaced
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # (`Path` makes one slash of two; a drive has one letter)
_AT_WORKING_DIRECTORY, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of linux/fs.h


def resolve_target(target: str) -> Path:
    """Return the absolute path to write, links followed.

    Raises:
      ArgumentError: if that is no path, or one of another file system's.
      StorageError: if the system cannot look there: a name is too long, or links form a circle.
    """
    if not target.strip():
        raise ArgumentError(f"The place to write is {target!r}; name a file or directory.")
    if _URL.match(target):
        raise ArgumentError(
            f"{target!r} is a URL, and files are written in local folders only, where they can be put in place in one "
            "step. Name a local path, and copy what is there: by tf.io.gfile.copy, or a tool of the bucket's."
        )
    try:
        final = Path(target).resolve()
        find(final)
    except (ValueError, RuntimeError) as error:  # a zero byte; a circle of links, before Python 3.13
        raise ArgumentError(f"{target!r} cannot be written: {error}.") from error
    except OSError as error:
        raise StorageError(f"{target!r} cannot be written: {error.strerror}.") from error
    return final


def find(path: Path) -> os.stat_result | None:
    """Return what the system says of a path, None if nothing is there."""
    try:
        return path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None


def kind_of(path: Path) -> str:
    """Return what is at a path, as people say it: `"a directory"`, `"a plain file"`, `"a device"`; "" for nothing."""
    status = find(path)
    kinds: dict[Callable[[int], bool], str] = {
        stat.S_ISREG: "a plain file",
        stat.S_ISDIR: "a directory",
        stat.S_ISLNK: "a link",
        stat.S_ISBLK: "a device",
        stat.S_ISCHR: "a device",
        stat.S_ISFIFO: "a pipe",
        stat.S_ISSOCK: "a socket",
    }
    return "" if status is None else next((name for test, name in kinds.items() if test(status.st_mode)), "no file")


def check_apart(source: str, target: str) -> None:
    """Raise `ArgumentError` if writing `target` would touch `source`."""
    source_path, target_path = Path(source).resolve(), resolve_target(target)
    if source_path == target_path or source_path in target_path.parents or target_path in source_path.parents:
        raise ArgumentError(f"{target!r} is, contains or is inside of the input {source!r}, which is not changed.")


def check_free(target: str, overwrite: bool) -> None:
    """Raise `ArgumentError` if there is something at `target`, and it is not to be overwritten."""
    if find(resolve_target(target)) is not None and not overwrite:
        raise ArgumentError(
            f"{target!r} exists; name another place, or allow overwriting it (overwrite=True, --overwrite)."
        )


def check_replaceable(target: str, recognize: Recognizer) -> Path:
    """Return the resolved path of `target`, which is free, or holds what may be replaced.

    Raises:
      ArgumentError: if `target` is no path.
      StorageError: if what is there is not to be lost, or the place cannot be reached.
    """
    final = resolve_target(target)
    if find(final) is None:
        return final
    try:
        why = recognize(final)
        if not why and not os.access(final, os.W_OK):
            why = "is write-protected"
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
    if why:
        raise StorageError(f"{target!r} {why}, so it is not replaced. Name another place, or move it away.")
    return final


def check_writable(target: str, recognize: Recognizer) -> None:
    """Raise what `replacing` would raise before its block begins, and leave nothing behind."""
    with _workshop(check_replaceable(target, recognize), target, trial=True):
        pass


def write(target: str, content: bytes, recognize: Recognizer) -> None:
    """Write a file. See `replacing`."""
    with replacing(target, recognize) as new_path:
        Path(new_path).write_bytes(content)


@contextlib.contextmanager
def replacing(target: str, recognize: Recognizer) -> Iterator[str]:
    """Yield the path of a file or directory to write, and put it in the place of `target` when the block ends.

    Until then, and whenever the block fails, `target` is what it was. What was there is exchanged in one step where
    the system can do that. (A process that is killed leaves a hidden `.graphsplit.*.partial` directory beside it.)

    Raises:
      ArgumentError: if `target` is no path.
      StorageError: if what is there may not be replaced, or writing fails: the disk is full, or the place may not be
        written.
    """
    final = check_replaceable(target, recognize)
    with _workshop(final, target) as workshop:
        new_path = workshop / final.name
        try:
            yield str(new_path)
            _flush(new_path)
            check_replaceable(target, recognize)  # once more: writing may have taken long
            _put_in_place(new_path, final)
        except StorageError:
            raise
        except OSError as error:
            raise writing_failed(target, error) from error


def writing_failed(target: str, error: object) -> StorageError:
    """Return the error that says that writing failed, and what became of `target`."""
    failed: StorageError = StorageError(f"Writing {target!r} failed, and it was left as it was: {error}")
    return failed


@contextlib.contextmanager
def _workshop(final: Path, target: str, trial: bool = False) -> Iterator[Path]:
    """Yield a new directory beside `final`.

    After a failure, and a trial, directories that had to be made for it are gone again.
    """
    absent = [folder for folder in final.parents if find(folder) is None]
    done = False
    try:
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            workshop = Path(tempfile.mkdtemp(prefix=".graphsplit.", suffix=".partial", dir=final.parent))
        except OSError as error:
            raise writing_failed(target, f"{str(final.parent)!r}: {error.strerror}.") from error
        try:
            yield workshop
            done = not trial
        finally:
            shutil.rmtree(workshop, ignore_errors=True)
    finally:
        for folder in absent if not done else ():
            with contextlib.suppress(OSError):  # not made, or somebody else has put something there
                folder.rmdir()


def _flush(new_path: Path) -> None:
    """Have everything on the disk before it takes the place of something: a full disk may show itself only now."""
    for path in (new_path, *new_path.rglob("*")) if new_path.is_dir() else (new_path,):
        if path.is_file() and not path.is_symlink():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _put_in_place(new_path: Path, final: Path) -> None:
    if find(final) is None:
        os.rename(new_path, final)
    elif final.is_file() and new_path.is_file():
        shutil.copymode(final, new_path)
        os.replace(new_path, final)
    elif not _exchange(str(new_path), str(final)):  # in two steps; the old one keeps a name all the time
        aside = Path(tempfile.mkdtemp(prefix=".graphsplit.", suffix=".replaced", dir=final.parent))
        os.rename(final, aside / final.name)
        try:
            os.rename(new_path, final)
        except OSError:
            os.rename(aside / final.name, final)
            aside.rmdir()
            raise
        shutil.rmtree(aside)


def _exchange(path: str, other: str) -> bool:
    """Let two paths change places in one step; return whether the system did. See renameat2(2)."""
    if sys.platform != "linux":
        return False
    rename: Callable[..., int] | None = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    directory = _AT_WORKING_DIRECTORY
    return rename(directory, os.fsencode(path), directory, os.fsencode(other), _EXCHANGE) == 0


GRAPH_SUFFIXES = (".pb", ".pbtxt")


def model_file(directory: str) -> Path:
    """Return the file that holds the graph of the SavedModel in a directory."""
    folder = Path(directory)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ArgumentError(f"{directory!r} {what}; give the directory of a SavedModel, or a graph's .pb or .pbtxt.")
    for name in ("saved_model.pb", "saved_model.pbtxt", "saved_model.cpb"):
        if (folder / name).is_file():
            return folder / name
    entries = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
    raise ArgumentError(
        f"{directory!r} is not a SavedModel: it has no saved_model.pb; it holds {entries}. "
        "Keras models are written as one by model.export(directory)."
    )


def is_graph_file(path: str) -> bool:
    """Return whether a path is called like the file of a graph, and not that of a SavedModel's directory."""
    return path.endswith(GRAPH_SUFFIXES) and not Path(path).is_dir()


def why_other_kind(path: Path, source: str) -> str:
    """Return why a path holds another kind of thing than is made of `source`, "" if it does not."""
    kind = kind_of(path)
    if Path(source).is_dir():
        return "" if kind == "a directory" else f"is {kind}, not a SavedModel's directory"
    return "" if kind == "a plain file" else f"is {kind}, not a graph's file"


def check_graph_file(path: str) -> None:
    """Raise `ArgumentError` unless there is a file at `path`."""
    kind = kind_of(Path(path).resolve())
    if kind != "a plain file":
        raise ArgumentError(f"{path!r} {f'is {kind}' if kind else 'does not exist'}; give a GraphDef as .pb or .pbtxt.")
