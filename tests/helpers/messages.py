"""Errors compared by their whole message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def raises(kind: type[Exception], message: str) -> Iterator[None]:
    """Assert that an error of this kind is raised, with exactly this message."""
    with pytest.raises(kind) as error:
        yield
    assert str(error.value) == message
