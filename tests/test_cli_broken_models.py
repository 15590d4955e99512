"""What the command line says of models and graphs that are damaged, changed or none."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from graphsplit.core.storage.stored_models import read_saved_model
from tests.helpers.broken_models import broken, model, said
from tests.helpers.saved_model_cases import WITH_FINGERPRINTS, tensorflow_1

__all__ = ["broken", "model"]


def both(broken: Path, tmp_path: Path) -> str:
    """Return what `inspect` and `transpile` say alike of a broken model."""
    found = said("inspect", broken)
    assert said("transpile", broken, tmp_path / "out", "--devices", "2") == found
    assert not (tmp_path / "out").exists()
    return found


def test_a_graph_cut_short(broken: Path, tmp_path: Path):
    path = broken / "saved_model.pb"
    path.write_bytes(path.read_bytes()[:1000])
    *_, said_by_protobuf = both(broken, tmp_path).partition(f"{str(path)!r} cannot be read as a SavedModel: ")
    assert said_by_protobuf in (
        "Error parsing message with type 'tensorflow.SavedModel': Wire format was corrupt",
        "Error parsing message",  # protobuf before 5
    )


@WITH_FINGERPRINTS
def test_a_graph_that_was_changed(broken: Path, tmp_path: Path):
    path = broken / "saved_model.pb"
    path.write_bytes(path.read_bytes().replace(b"StringLower", b"StringUpper"))
    assert both(broken, tmp_path) == (
        f"{str(path)!r} is not the graph that was saved: its fingerprint (fingerprint.pb) is another. It was damaged, "
        "or changed afterwards. Save or copy the model again; if it was changed on purpose, delete fingerprint.pb."
    )


def test_a_foreign_graph(broken: Path, tmp_path: Path):
    path = broken / "saved_model.pb"
    path.write_bytes(b"")
    assert both(broken, tmp_path) == f"{str(broken)!r} holds no graph: {str(path)!r} is empty, or no SavedModel."


def test_an_operation_that_is_not_registered(broken: Path, tmp_path: Path):
    proto = read_saved_model(str(broken))
    proto.meta_graphs[0].graph_def.node.add(name="mine", op="MyOwnOp")
    (broken / "saved_model.pb").write_bytes(proto.SerializeToString())
    (broken / "fingerprint.pb").unlink()
    assert both(broken, tmp_path) == (
        f"{str(broken)!r} has operations of types that are not registered in this process:\n  - MyOwnOp (node 'mine')\n"
        "Import the package that defines them, or call tf.load_op_library(...), first."
    )


def test_variables_and_assets_that_are_missing(broken: Path, tmp_path: Path):
    index = broken / "variables" / "variables.index"
    index.unlink()
    assert both(broken, tmp_path) == (
        f"The SavedModel {str(broken)!r} lacks its variables: there is no {str(index)!r}."
    )
    (broken / "assets" / "original.txt").unlink()
    assert both(broken, tmp_path) == (
        f"The SavedModel {str(broken)!r} lacks assets that its graph reads:\n  - original.txt"
    )


@pytest.mark.parametrize("version", [1, 2])
def test_variables_that_are_damaged(version: int, broken: Path, tmp_path: Path):
    if version == 1:
        shutil.rmtree(broken)
        tensorflow_1(str(broken))
    [data] = broken.glob("variables/variables.data*")
    content = data.read_bytes()
    data.write_bytes(content[:10])
    where = f"The variables of the SavedModel {str(broken)!r} cannot be read: "
    assert both(broken, tmp_path).startswith(where)
    data.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    found = both(broken, tmp_path)
    assert found.startswith(where)
    assert "Checksum does not match" in found


def graph_file(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


FLOAT = 'attr { key: "%s" value { type: DT_FLOAT } }'
INPUT = 'node { name: "x" op: "Placeholder" ' + FLOAT % "dtype" + " }"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            INPUT + ' node { name: "y" op: "Neg" input: "nowhere" ' + FLOAT % "T" + " }",
            "The graph is damaged:\n  - 'y' reads 'nowhere', which is not there",
        ),
        (
            INPUT + ' node { name: "y" op: "Neg" input: "x:1" ' + FLOAT % "T" + " }",
            "TensorFlow cannot import the graph: ValueError: Node 'y': Connecting to invalid output 1 of source node x "
            "which has 1 outputs.",
        ),
        ("versions { producer: 1 }", "{path!r} is no graph: it has no nodes."),
    ],
)
def test_graphs(content: str, expected: str, tmp_path: Path):
    path = graph_file(tmp_path / "in.pbtxt", content)
    found = said("transpile", path, tmp_path / "out.pb", "--devices", "2")
    assert found == expected.replace("{path!r}", repr(str(path)))
    assert os.listdir(tmp_path) == ["in.pbtxt"]


def test_what_is_no_graph(tmp_path: Path):
    path = graph_file(tmp_path / "in.pbtxt", "dear diary")
    found = said("transpile", path, tmp_path / "out.pb", "--devices", "2")
    assert found.startswith(f"{str(path)!r} cannot be read as a GraphDef: 1:")
    shutil.copy(path, tmp_path / "in.pb")
    found = said("transpile", tmp_path / "in.pb", tmp_path / "out.pb", "--devices", "2")
    assert found.startswith(f"{str(tmp_path / 'in.pb')!r} cannot be read as a GraphDef: Error parsing message")
    (tmp_path / "in.pb").write_bytes(b"\x08\x01")  # a SavedModel's first field
    found = said("transpile", tmp_path / "in.pb", tmp_path / "out.pb", "--devices", "2")
    assert found == f"{str(tmp_path / 'in.pb')!r} is no graph: it has fields that a GraphDef does not have."
