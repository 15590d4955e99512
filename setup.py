"""What setup.cfg cannot say: README.md as a package index shows it, where the files that it leads to are not."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

ADDRESS = ""  # of the repository's files, such as "https://example.org/graphsplit/blob/main/"; there is none yet


def readable_alone(text: str, address: str) -> str:
    r"""Return a page whose links lead to this address; without one, links are their words, and pictures are left out.

    >>> readable_alone("![A plan](plan.svg)\n\nSee [limits](docs/limits.md#rules), [TensorFlow](https://tf.org).", "")
    'See limits, [TensorFlow](https://tf.org).'
    >>> readable_alone("[limits](docs/limits.md)", "https://a.org/")
    '[limits](https://a.org/docs/limits.md)'
    """
    own = r"\((?![a-z]+:|#)([^)\s]+)\)"  # the place of a link to a file of the repository
    if address:
        return re.sub(rf"\]{own}", lambda link: f"]({address}{link.group(1)})", text)
    text = re.sub(rf"!\[[^\]]*\]{own}\n*", "", text)
    return re.sub(rf"\[([^\]]*)\]{own}", r"\1", text)


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(long_description=readable_alone(readme, ADDRESS), long_description_content_type="text/markdown")
