"""A pytest plugin that runs tests with their calls going through graphsplit, or plainly.

`pytest -p tests.others.plugin --others-record FILE ...`; `python -m tests.others keras` gives it Keras' tests. A test
fails through graphsplit also if one of its calls gives other numbers, or raises.
"""

from __future__ import annotations

import json
import os
import sys
import time
import types
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pytest
from _pytest.runner import runtestprotocol

from tests.others.processes import FAILED, NOT_OURS, PASSED, SKIPPED

_COLLECTED = pytest.StashKey[dict[str, int]]()  # how many tests each file has
_LEFT = pytest.StashKey[int]()  # how many tests are for another process


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what `python -m tests.others` says."""
    group = parser.getgroup("others")
    group.addoption("--others-record", type=Path, help="append what became of each test to this file, as JSON")
    group.addoption("--others-devices", type=int, default=3)
    group.addoption("--others-layout", default="home")
    group.addoption("--others-micro-batches", type=int, default=1)
    group.addoption("--others-every", type=int, default=1, help="of each file, every how many tests")
    group.addoption("--others-plainly", action="store_true", help="run tests as they are")
    group.addoption("--others-only", type=Path, help="a file of the tests to run; all, if there is none")
    group.addoption("--others-skip", type=Path, help="a file of tests that ran already, or ended their process")
    group.addoption("--others-most", type=int, default=0, help="how many tests in this process; 0: all")


def pytest_configure(config: pytest.Config) -> None:
    """Start TensorFlow with logical devices, and put graphsplit between tests and Keras."""
    import tensorflow as tf

    import graphsplit as gs
    from tests.others.comparison import Through
    from tests.others.keras_calls import routed

    config.addinivalue_line("markers", "requires_trainable_backend: Keras' own")
    sys.modules.setdefault("conftest", _conftest_of_keras())
    gs.use_logical_devices(config.option.others_devices)
    tf.config.list_logical_devices()
    through = Through(config.option.others_devices, config.option.others_layout, config.option.others_micro_batches)
    if not config.option.others_plainly:
        patches = routed(through)
        patches.__enter__()
        config.add_cleanup(lambda: patches.__exit__(None, None, None))
    config.pluginmanager.register(_Recorded(through, config.option.others_plainly, config.option.others_record))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what was not asked for."""
    done, only = [
        set(path.read_text().splitlines()) if path is not None else None
        for path in (config.option.others_skip, config.option.others_only)
    ]
    seen: dict[Path, int] = {}
    chosen = []
    for item in items:
        seen[item.path] = seen.get(item.path, -1) + 1
        if (
            item.nodeid not in (done or ())
            and (only is None or item.nodeid in only)
            and seen[item.path] % config.option.others_every == 0
        ):
            chosen.append(item)
    most = config.option.others_most or len(chosen)
    config.stash[_LEFT] = len(chosen[most:])
    del chosen[most:]
    config.stash[_COLLECTED] = {item.nodeid.split("::")[0]: seen[item.path] + 1 for item in items}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def _conftest_of_keras() -> types.ModuleType:
    """Return the module of Keras' repository that some of its tests import, and that its wheel has not."""
    module = types.ModuleType("conftest")

    def skip_if_backend(name: str, reason: str) -> pytest.MarkDecorator:
        return pytest.mark.skipif(name == "tensorflow", reason=reason)

    module.skip_if_backend = skip_if_backend  # type: ignore[attr-defined]
    return module


class _Recorded:
    """Writes what becomes of each test."""

    def __init__(self, through: Any, plainly: bool, record: Path | None):
        self._through = through
        self._plainly = plainly
        self._record = record

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        from tests.others.not_ours import reason_against

        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        self._write({"begins": item.nodeid})
        if reason_against(item.nodeid):
            self._write({"test": item.nodeid, "plain": NOT_OURS, "through": None})
            return True
        started = time.monotonic()
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        found = {"test": item.nodeid, "seconds": round(time.monotonic() - started, 2), "message": _message(reports)}
        outcome = _outcome(reports)
        if self._plainly or outcome == SKIPPED:
            found |= {"plain": outcome, "through": None}
        else:  # (whoever fails is run plainly afterwards)
            found |= {"plain": PASSED, "through": outcome, **self._through.calls.as_json()}
        self._write(found)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        import keras

        from tests.others.keras_calls import before_test

        # The numbers of a test are the same in each run: with others, a sum may be 0 on one device by chance.
        keras.utils.set_random_seed(zlib.crc32(item.name.encode()))
        if self._plainly:
            return (yield)
        with self._through.on() as calls:
            before_test(self._through)
            result = yield
        if calls.broken():
            pytest.fail("\n".join(calls.broken()), pytrace=False)
        return result

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Say which files could not be read."""
        if report.failed:
            why = report.longreprtext.strip().splitlines()[-1].removeprefix("E ").strip()
            self._write({"not_collected": report.nodeid, "why": why})

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Say that nothing ended this process, and how many tests are left for another."""
        self._write({"collected": session.config.stash.get(_COLLECTED, {})})
        self._write({"finished": True, "left": session.config.stash.get(_LEFT, 0)})

    def _write(self, line: dict[str, Any]) -> None:
        if self._record is not None:
            with self._record.open("a") as file:
                file.write(json.dumps(line) + "\n")


def _outcome(reports: list[Any]) -> str:
    if any(report.failed for report in reports):
        return FAILED
    return SKIPPED if any(report.skipped for report in reports) else PASSED


def _message(reports: list[Any]) -> str:
    return "\n".join(report.longreprtext[-1500:] for report in reports if report.failed)
