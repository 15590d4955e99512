"""Errors compared by their whole message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def raises(kind: type[Exception], message: str) -> Iterator[None]:
    """Assert that an error of this kind is raised, with exactly this message."""
    with pytest.raises(kind) as error:
        yield
    assert str(error.value) == message


def message(kind: type[Exception], call: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Return what an error of this kind says, which a call raises."""
    with pytest.raises(kind) as error:
        call(*args, **options)
    return str(error.value)
