"""`python ci/command_line.py` writes `docs/generated/command_line.md`: each command, from the program itself."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "generated" / "command_line.md"


def main() -> None:
    """Write the page."""
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(text(), encoding="utf-8")


def text() -> str:
    """Return the page."""
    import typer

    from graphsplit.cli import app

    parts = [
        "# Command line",
        "Written by `python ci/command_line.py`. `graphsplit --install-completion` completes commands, options and "
        "machines in your shell; `graphsplit COMMAND --help` says the same as this page. Wrong arguments are an error "
        "message and exit status 2.",
    ]
    parts += _command("graphsplit", typer.main.get_command(app))
    return "\n\n".join(parts) + "\n"


def _command(name: str, command: Any) -> list[str]:
    """Return the section of a command, and those of its own commands."""
    inner = getattr(command, "commands", {})
    if inner:
        return [part for key, own in inner.items() for part in _command(f"{name} {key}", own)]
    arguments = [own for own in command.params if own.param_type_name == "argument"]
    shown = [own for own in command.params if own.param_type_name == "option" and not own.hidden]
    options = [own for own in shown if own.name != "help"]
    words = [own.metavar or own.name.upper() for own in arguments] + (["[OPTIONS]"] if options else [])
    usage = " ".join([name, *words])
    parts = [f"## {name}", f"```console\n$ {usage}\n```", inspect.cleandoc(command.help or "")]
    rows = [(f"`{own.metavar or own.name.upper()}`", own) for own in arguments]
    rows += [(", ".join(f"`{opt}`" for opt in own.opts), own) for own in options]
    if rows:
        lines = [f"| {what} | {_cell(own.help)} | {_default(own)} |" for what, own in rows]
        parts.append("\n".join(["| | what | by default |", "|---|---|---|", *lines]))
    return parts


def _default(own: Any) -> str:
    if own.required:
        return "required"
    value = own.default() if callable(own.default) else own.default
    return "" if value in (None, "", False, [], ()) else f"`{value}`"


def _cell(said: str | None) -> str:
    return " ".join((said or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
