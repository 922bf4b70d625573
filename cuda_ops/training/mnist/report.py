"""Writes a run's results: report.json, report.md, report.png, and the weights."""

import io
import json
from pathlib import Path

import torch

from ..._files import write_file, write_files
from ..compare import Run
from ..facts import finite
from ..options import REPORT_FILES as FILES
from ..tables import markdown
from .plots import plot
from .tables import backend_table, notes, parity_lines, parity_table


def save_weights(run: Run, path: Path):
    """The state_dict of the first backend of the run, on the CPU, for torch.load(path, weights_only=True)."""
    model = next(iter(run.backends.values())).model
    buffer = io.BytesIO()
    torch.save({name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}, buffer)
    write_file(path, buffer.getvalue())


def write_report(run: Run, results: dict, test_images):
    """The three files, in the run's folder: all of them, or none."""
    folder = run.settings.out
    contents = {
        "report.json": (json.dumps(finite(results), indent=1, allow_nan=False) + "\n").encode(),
        "report.md": as_markdown(results).encode(),
        "report.png": plot(run, results, test_images),
    }
    write_files({folder / name: contents[name] for name in FILES})


def as_markdown(results: dict) -> str:
    """report.md."""
    settings = results["settings"]
    parts = [
        "# MNIST, side by side",
        f"`{results['command']}`",
        f"On {results['device']['name']}; {settings['dtype']}, {settings['epochs']} epochs of batches of "
        f"{settings['batch_size']}, plain SGD with a learning rate of {settings['lr']:g} (rising over the first three "
        f"tenths of the run, then falling to zero), seed {settings['seed']}, data in {settings['data_on']} memory.",
        *[f"**{problem}**" for problem in results["problems"]],
        markdown(backend_table(results)),
        *notes(results),
        "![loss curves, times, confusion matrix, misread digits](report.png)",
    ]
    for name in results["parity"]:
        parts += [
            f"## Parity of {name} with native",
            *parity_lines(results, name),
            "Gradients of the first step, as relative norms. The gradients of biases before a batch norm are zero but "
            "for rounding, and are set against the norm of all gradients.",
            markdown(parity_table(results, name)),
        ]
    parts += ["## Versions", *[f"- {name}: {version}" for name, version in results["versions"].items()]]
    return "\n\n".join(parts).replace("\n\n- ", "\n- ") + "\n"
