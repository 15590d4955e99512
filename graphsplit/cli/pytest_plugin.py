"""A pytest plugin: logical devices before any test starts TensorFlow.

`pytest --graphsplit-devices 4` divides the CPU into four devices, in every process that runs tests; the fixture
`logical_devices` gives their names, and makes `DEFAULT` of them where the option is not given.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

DEFAULT = 4
_OPTION = "--graphsplit-devices"
_TOLD = "GRAPHSPLIT_PYTEST_DEVICES"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.getgroup("graphsplit").addoption(
        _OPTION, type=int, metavar="N", help="divide the CPU into N logical devices before TensorFlow starts"
    )


def pytest_load_initial_conftests(early_config: Any) -> None:
    """Make the devices that were asked for, before any file of the user's is imported.

    Where several processes run the tests (pytest-xdist), each has its own, and the one that starts them has none: it
    tells them by the environment. Who was told forgets it: a test may run pytest itself, which nobody told.
    """
    arguments, count_of_parent = early_config.known_args_namespace, os.environ.pop(_TOLD, None)
    count = arguments.graphsplit_devices if count_of_parent is None else int(count_of_parent)
    if count is not None and count_of_parent is None and getattr(arguments, "numprocesses", None):
        os.environ[_TOLD] = str(count)
    elif count is not None:
        make_devices(count)


@pytest.fixture(scope="session")
def logical_devices(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The names of the logical CPU devices, `("CPU:0", "CPU:1", ...)`."""
    count = request.config.getoption(_OPTION)
    return make_devices(DEFAULT if count is None else count)


def make_devices(count: int) -> tuple[str, ...]:
    """Divide the CPU.

    Raises:
      pytest.UsageError: if that is no number of devices, or TensorFlow has started with others.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow's word on every start
    import graphsplit as gs

    try:
        return gs.use_logical_devices(count)
    except gs.errors.ArgumentError as error:
        raise pytest.UsageError(f"{_OPTION} {count}: {error}") from error
    except gs.errors.DeviceError as error:
        raise pytest.UsageError(
            f"{error}\nSomething started it before the tests: a conftest.py, a plugin, or the top of a module that "
            f"makes a tensor, variable or model. Run pytest {_OPTION} {count}, which comes before them all, or start "
            "TensorFlow inside of tests only."
        ) from error
