"""A pytest plugin that runs each test twice: plainly, and with its calls going through graphsplit.

`pytest -p tests.others.plugin --others-record FILE ...`; `python -m tests.others keras` gives it Keras' tests. What
fails plainly counts for nobody and is not run again. A test fails if it fails through graphsplit only, or if one of
its calls gives other numbers, or raises.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pytest
from _pytest.runner import runtestprotocol

PASSED, FAILED, SKIPPED, NOT_OURS = "passed", "failed", "skipped", "not ours"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what `python -m tests.others` says."""
    group = parser.getgroup("others")
    group.addoption("--others-record", type=Path, help="append what became of each test to this file, as JSON")
    group.addoption("--others-devices", type=int, default=3)
    group.addoption("--others-layout", default="home")
    group.addoption("--others-micro-batches", type=int, default=1)
    group.addoption("--others-every", type=int, default=1, help="of each file, every how many tests")
    group.addoption("--others-skip", type=Path, help="a file of tests that ran already, or ended their process")


def pytest_configure(config: pytest.Config) -> None:
    """Start TensorFlow with logical devices, and put graphsplit between tests and Keras."""
    import tensorflow as tf

    import graphsplit as gs
    from tests.others.comparison import Through
    from tests.others.keras_calls import routed

    config.addinivalue_line("markers", "requires_trainable_backend: Keras' own")
    gs.use_logical_devices(config.option.others_devices)
    tf.config.list_logical_devices()
    through = Through(config.option.others_devices, config.option.others_layout, config.option.others_micro_batches)
    patches = routed(through)
    patches.__enter__()
    config.add_cleanup(lambda: patches.__exit__(None, None, None))
    config.pluginmanager.register(_Twice(through, config.option.others_record))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what was not asked for."""
    done = config.option.others_skip
    names = set(done.read_text().splitlines()) if done is not None else set()
    seen: dict[Path, int] = {}
    chosen = []
    for item in items:
        seen[item.path] = seen.get(item.path, -1) + 1
        if item.nodeid not in names and seen[item.path] % config.option.others_every == 0:
            chosen.append(item)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


class _Twice:
    """Runs tests twice."""

    def __init__(self, through: Any, record: Path | None):
        self._through = through
        self._record = record
        self._routes = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        from tests.others.not_ours import reason_against

        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        self._write({"begins": item.nodeid, "run": "plain"})
        found: dict[str, Any] = {"test": item.nodeid, "plain": SKIPPED, "through": None, "message": ""}
        against = reason_against(item.nodeid)
        started = time.monotonic()
        reports = [] if against else runtestprotocol(item, log=False, nextitem=nextitem)
        found["plain_s"] = round(time.monotonic() - started, 2)
        found["plain"] = NOT_OURS if against else _outcome(reports)
        if found["plain"] == PASSED:
            self._write({"begins": item.nodeid, "run": "through"})
            self._routes = True
            if hasattr(item, "_initrequest"):
                item._initrequest()  # as pytest-rerunfailures does before it runs an item again
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
            self._routes = False
            found["both_s"] = round(time.monotonic() - started, 2)
            found |= {"through": _outcome(reports), "message": _message(reports), **self._through.calls.as_json()}
            for report in reports:
                item.ihook.pytest_runtest_logreport(report=report)
        self._write(found)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        from tests.others.keras_calls import before_test

        if not self._routes:
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

    def pytest_sessionfinish(self) -> None:
        """Say that nothing ended this process."""
        self._write({"finished": True})

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
