"""Writes a run's results: report.json, report.md, report.png."""

import json

from ..._files import write_files
from ..facts import finite
from ..options import REPORT_FILES as FILES
from ..tables import markdown
from .plots import plot
from .run import Run
from .tables import backend_table, notes, parity_lines, parity_table


def write_report(run: Run, results: dict):
    """The three files, in the run's folder: all of them, or none."""
    contents = {
        "report.json": (json.dumps(finite(results), indent=1, allow_nan=False) + "\n").encode(),
        "report.md": as_markdown(results).encode(),
        "report.png": plot(results),
    }
    write_files({run.settings.out / name: contents[name] for name in FILES})


def as_markdown(results: dict) -> str:
    """report.md."""
    settings = results["settings"]
    config = settings["config"]
    parts = [
        "# GPT-2, side by side",
        f"`{results['command']}`",
        f"On {results['device']['name']}: {settings['model']}, {config['n_layer']} layers of {config['n_head']} heads, "
        f"{config['n_embd']} features, {results['parameters']:,} parameters; {settings['precision']}, "
        f"{settings['steps']} steps of {settings['batch']} sequences of {settings['length']} tokens of "
        f"{settings['data']}; AdamW (β₂ {settings['beta2']:g}, weight decay {settings['weight_decay']:g}), learning "
        f"rate {settings['lr']:g} after {settings['warmup']} steps, falling to {settings['min_lr']:g} along a cosine; "
        f"gradients clipped at {settings['clip']:g}; dropout {config['dropout']:g}, seed {settings['seed']}.",
        *[f"**{problem}**" for problem in results["problems"]],
        markdown(backend_table(results)),
        *notes(results),
        "![loss curves, times, tokens a second, generated text](report.png)",
    ]
    if results["sample"]:
        parts += ["## Generated", f"```text\n{results['sample'].replace('```', '')}\n```"]
    for name in results["parity"]:
        parts += [
            f"## Parity of {name} with native",
            *parity_lines(results, name),
            markdown(parity_table(results, name)),
        ]
    parts += ["## Versions", *[f"- {name}: {version}" for name, version in results["versions"].items()]]
    return "\n\n".join(parts).replace("\n\n- ", "\n- ") + "\n"
