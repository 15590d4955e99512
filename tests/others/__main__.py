"""`python -m tests.others keras --layers`: tests of the installed Keras, with their calls going through graphsplit.

`python -m tests.others models`: training steps of models of other packages, in an environment of their own.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import pages
from tests.others import keras_table, model_table
from tests.others.environments import Environment
from tests.others.not_ours import reason_against
from tests.others.processes import GROUPS, Options, chunks, each, files_of, keras_folder
from tests.others.summary import by_file, row, rows_by, table

_TITLE, _MODELS = "Other people's tests", "Other people's models"
_SHOWN = 25


def parse(words: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="python -m tests.others", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    keras = commands.add_parser("keras", help="tests in Keras' wheel")
    keras.add_argument("files", nargs="*", metavar="FILE", help="files or folders of keras/src; all, if none is named")
    for name, folders in GROUPS.items():
        keras.add_argument(f"--{name}", action="store_true", help=f"the tests in {', '.join(folders)}")
    keras.add_argument("--devices", type=int, default=3)
    keras.add_argument("--layout", choices=("home", "replicated", "sharded"), default="home", help="of variables")
    keras.add_argument("--micro-batches", type=int, default=1)
    keras.add_argument("--every", type=int, default=1, help="of each file, every how many tests")
    keras.add_argument("--keyword", default="", help="as pytest's -k")
    keras.add_argument("--packages", default="", help="a folder with packages that tests import, as jax")
    keras.add_argument("--record", type=Path, help="also write what became of each test, a line of JSON each")
    keras.add_argument("--resume", action="store_true", help="run no test again that is in the record")
    keras.add_argument(
        "--read", type=Path, nargs="+", help="run nothing; sum up such records, the last run of each test"
    )
    keras.add_argument("--log", type=Path, help="also write what pytest says")
    keras.add_argument("--page", action="store_true", help=f"also write {pages.COVERAGE.name}")
    models = commands.add_parser("models", help="models of other packages, in an environment of their own")
    models.add_argument("names", nargs="*", metavar="NAME", help="models; all, if none is named")
    models.add_argument("--package", choices=model_table.PACKAGES, action="append", help="all, if none is named")
    models.add_argument("--environment", type=Path, help="a folder to keep the environment in; else a temporary one")
    models.add_argument("--devices", type=int, nargs="+", default=[2, 3])
    models.add_argument("--seconds", type=int, default=1200, help="the longest that a model may take")
    models.add_argument("--record", type=Path, help="also write what became of each model, a line of JSON each")
    models.add_argument("--resume", action="store_true", help="run no model again that is in the record")
    models.add_argument("--read", type=Path, nargs="+", help="run nothing; sum up such records")
    models.add_argument(
        "--page", action="store_true", help=f"also write {pages.COVERAGE.name}, whose rows of other models stay"
    )
    return parser.parse_args(words)


def models(arguments: argparse.Namespace) -> int:
    """Run models of other packages; return the exit code."""
    is_resumed = arguments.resume and arguments.record.exists()
    before = read(arguments.read or ([arguments.record] if is_resumed else []))
    lines = list({(line["package"], line["name"]): line for line in before if line["name"] != "the rest"}.values())
    for line in lines:
        print(f"{line['package']}, {line['name']}: {model_table.brief(line)}")
    if not arguments.read:
        with tempfile.TemporaryDirectory() as temporary:
            environment = Environment((arguments.environment or Path(temporary) / "environment").absolute())
            for package in arguments.package or model_table.PACKAGES:
                done = [line["name"] for line in lines if line["package"] == package]
                options = model_table.Options(arguments.names, done, arguments.devices, arguments.seconds)
                for line in model_table.run(package, options, environment):
                    lines.append(line)
                    write(arguments.record, [line])
                    print(f"{line['package']}, {line['name']}: {model_table.brief(line)}", flush=True)
    if arguments.page:
        page = pages.COVERAGE.read_text() if pages.COVERAGE.exists() else ""
        pages.write_section(_MODELS, model_table.document(lines, pages.section_of(page, _MODELS)))
    return any(map(model_table.verdict, lines)) or not any("difference" in line for line in lines)


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the lines of records."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def write(path: Path | None, lines: Iterable[dict[str, Any]]) -> None:
    """Append lines to a record."""
    if path is not None:
        with path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def keras(arguments: argparse.Namespace) -> int:
    """Run Keras' tests; return the exit code."""
    chosen = [folder for name, folders in GROUPS.items() if getattr(arguments, name) for folder in folders]
    chosen = [*arguments.files, *chosen] or [folder for folders in GROUPS.values() for folder in folders]
    options = Options(
        arguments.devices,
        arguments.layout,
        arguments.micro_batches,
        arguments.every,
        arguments.keyword,
        arguments.packages,
    )
    lines: list[dict[str, Any]] = []
    if arguments.read:
        lines = last_of_each(map(_listed, read(arguments.read)))
    else:
        if arguments.resume and arguments.record.exists():
            lines = read([arguments.record])
        done = [line["test"] for line in lines if "test" in line]
        for files in chunks(files_of(chosen)):
            started = time.monotonic()
            found = []
            for line in each(files, options, arguments.log, done):
                found.append(line)
                write(arguments.record, [line])
            lines += found
            where = files[0].parent.relative_to(keras_folder())
            print(f"{where}: {len(found)} tests, {time.monotonic() - started:.0f} s {row('', found).wrong}", flush=True)
        lines = last_of_each(lines)
    return report(lines, arguments)


def last_of_each(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last line of each test: records may hold several runs."""
    found: dict[Any, dict[str, Any]] = {}
    for number, line in enumerate(lines):
        name = line.get("test") or line.get("not_collected") or number
        found[name, line.get("how", Options().how)] = line
    return list(found.values())


def _listed(line: dict[str, Any]) -> dict[str, Any]:
    """Return the line of a test, which may have run before it was listed as one that says nothing of graphsplit."""
    against = reason_against(line.get("test", ""))
    return {"test": line["test"], "plain": "not ours", "through": None} if against else line


def report(lines: list[dict[str, Any]], arguments: argparse.Namespace) -> int:
    """Print what was found, write the page; return the exit code."""
    whole = row("all", lines)
    for line in lines:
        if line.get("through") in ("failed", "died"):
            print(f"=== {line['test']}\n{line['message'][-1200:]}")
        if "not_collected" in line:
            print(f"not collected: {line['not_collected']}: {line['why']}")
    print(table(rows_by(lines, by_file)))
    for title, counts in (("ran without graphsplit", whole.calls.not_routed), ("at home", whole.calls.at_home)):
        print(f"{title}:", *[f"  {count} x {what}" for what, count in counts.most_common(_SHOWN)], sep="\n")
    if arguments.page:
        pages.write_section(_TITLE, keras_table.document(lines))
    nothing = "" if whole.tests else "no test has run: is it what --keyword names, and can its file be imported?"
    print(whole.wrong or nothing or "no test, and no call, is otherwise on several devices")
    return bool(whole.wrong or nothing)


if __name__ == "__main__":
    given = parse(sys.argv[1:])
    sys.exit({"keras": keras, "models": models}[given.command](given))
