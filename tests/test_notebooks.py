"""The notebooks run from top to bottom, without a GPU, and have in them what their cells print and draw."""

import base64
import json
import re
from pathlib import Path

import pytest

from cuda_ops.ladder import notebook

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "notebooks").glob("*.ipynb"))


def code_cells(whole):
    assert whole["nbformat"] == 4
    return [cell for cell in whole["cells"] if cell["cell_type"] == "code"]


def printed(cell):
    """What a cell prints, but for what depends on the processor: rounding errors, and how fast Python is."""
    text = "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")
    measured = r"\d\.\d+e-\d+|(?<=error is )\S+|\s*\S+(?= million multiply-adds| GFLOP/s)"
    return re.sub(measured, "(a number)", text)


def pictures(cell):
    data = [output.get("data", {}) for output in cell["outputs"]]
    return [base64.b64decode(one["image/png"]) for one in data if "image/png" in one]


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_what_it_prints_and_draws(path, tmp_path, monkeypatch):
    """python -m cuda_ops.ladder.notebook writes it."""
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.chdir(tmp_path)
    committed = json.loads(path.read_text())
    now = notebook.run(notebook.without_outputs(committed), path.name)
    assert any(printed(cell) for cell in code_cells(now))
    for old, new in zip(code_cells(committed), code_cells(now), strict=True):
        assert old["execution_count"] == new["execution_count"]
        assert printed(old) == printed(new), "".join(old["source"])
        assert len(pictures(old)) == len(pictures(new))
    drawn = [picture for cell in code_cells(committed) for picture in pictures(cell)]
    assert drawn and all(picture.startswith(b"\x89PNG") for picture in drawn)
