"""A run's checkpoint: all that its further steps depend on, so that a run that is resumed goes on bit by bit."""

import dataclasses
import io
from pathlib import Path

import torch

from ..._errors import UserError
from ..._files import write_file
from ...models import BACKENDS, GPTConfig
from .run import Run, load_archive
from .settings import COMPILED, PRECISIONS, RECIPES, Recipe

FORMAT = "cuda_ops gpt 1"


def save_checkpoint(run: Run, path: Path):
    """Writes it, whole or not at all: the first process does, all of them have to call it. Any number of processes can
    go on from it; bit by bit as many as there were, since each draws random numbers of its own.

    Raises:
        OSError: it cannot be written.
    """
    content = {
        "format": FORMAT,
        "model": run.settings.model,
        "recipe": dataclasses.asdict(run.settings.recipe),
        "device": run.settings.device.type,
        "corpus": run.corpus.fingerprint,
        "backends": {name: learner.state_dict() for name, learner in run.backends.items()},
        "seconds": run.seconds,
    }
    run.settings.world.first_alone(lambda: _write(content, path))


def _write(content: dict, path: Path):
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_file(path, buffer.getvalue())


def read_checkpoint(path: Path) -> dict:
    """The content of a checkpoint, its recipe as a Recipe.

    Raises:
        UserError: it cannot be read, or is none.
    """
    try:
        content = load_archive(path, "checkpoint")
        if content.get("format") != FORMAT:
            raise ValueError(f"{path} is no checkpoint of `python -m cuda_ops gpt --save`")
        recipe = dict(content["recipe"])
        content["recipe"] = Recipe(**{**recipe, "config": GPTConfig(**recipe["config"])})
        known = content["model"] in RECIPES and content["recipe"].precision in PRECISIONS
        if not known or not content["backends"] or not set(content["backends"]) <= {*BACKENDS, COMPILED}:
            raise ValueError(f"{path} is damaged: it names a model, precision or backend that there is not")
        return content
    except OSError as error:
        raise UserError(f"--resume {path} cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise UserError(f"--resume: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"--resume: {path} is damaged ({type(error).__name__}: {error})") from error


def resume(run: Run, content: dict):
    """Puts a run where its checkpoint was.

    Raises:
        UserError: the checkpoint does not fit it.
    """
    path = run.settings.resume
    if content.get("corpus") != run.corpus.fingerprint:
        raise UserError(f"--resume: {path} was trained on other data than {run.corpus.name}")
    if content.get("device") != run.settings.device.type:
        was = content.get("device")
        raise UserError(f"--device {run.settings.device}: {path} was trained on {was}, whose random numbers are others")
    try:
        for name, learner in run.backends.items():
            learner.load_state_dict(content["backends"][name])
            if not 0 <= learner.steps_taken == len(learner.losses):
                raise ValueError("its steps are not those of its losses")
        run.seconds = float(content["seconds"])
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(f"--resume: {path} is damaged ({type(error).__name__}: {reason})") from error
    most = max(learner.steps_taken for learner in run.backends.values())
    if most > run.steps_planned:
        raise UserError(f"--steps {run.steps_planned}: {path} has taken {most} already")
