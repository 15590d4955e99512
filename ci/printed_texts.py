"""`python ci/printed_texts.py` writes `tests/golden/`: what graphsplit prints for programs, a text for each."""

from __future__ import annotations

from logical_devices import start


def main() -> None:
    """Write the files, and remove those of programs that are gone."""
    start()
    from tests.helpers.printed_texts import FOLDER, TEXTS, file_of, text_of  # makes tensors

    FOLDER.mkdir(exist_ok=True)
    texts = {file_of(name): text_of(name) for name in TEXTS}
    for path in set(FOLDER.iterdir()) - set(texts):
        path.unlink()
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
