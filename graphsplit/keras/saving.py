"""Saving: a file of Keras' is written beside the old one, which stays as it is until the new one is whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from graphsplit.core.storage.files import kind_of, replacing

_SUFFIXES = (".keras", ".h5")
_IN_THE_WAY = ("", "a plain file")  # what Keras replaces without a word


def save_whole(save: Callable[..., Any], filepath: Any, overwrite: bool, *args: Any, **options: Any) -> Any:
    """Call a `save` of Keras', so that an interruption leaves the old file whole.

    What is no single file on this machine (a SavedModel, weights in several files, a bucket, an open file) is Keras'
    own business, and so is the question whether to replace something.

    Args:
      save: takes what follows.
      filepath: where to write.
      overwrite: whether a file there is replaced without asking.
      *args, **options: of the method.
    """
    path = os.fspath(filepath) if isinstance(filepath, (str, os.PathLike)) else ""
    single = path.endswith(_SUFFIXES) and "://" not in path and options.get("max_shard_size") is None
    zipped = options.get("zipped", args[0] if args else None) is not False
    if not (single and overwrite and zipped and kind_of(Path(path)) in _IN_THE_WAY):
        return save(filepath, overwrite, *args, **options)
    with replacing(path, lambda _: "") as made:
        return save(made, overwrite, *args, **options)
