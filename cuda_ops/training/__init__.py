"""Training of any model: the step with its phases timed, or as one CUDA graph; the side-by-side run of several backends
and the judge of their parity. `training.mnist` is what the MNIST job adds, its report and its step as one kernel;
`training.gpt` is the job of `python -m cuda_ops gpt`."""

from .compare import Run, RunSettings, prepare, train
from .graph import GraphedStep
from .loop import Evaluation, Trainer, evaluate, learning_rate
from .mnist.step import MnistStep
from .parity import Parity, judge
from .timing import PhaseTimer

__all__ = [
    "Evaluation",
    "GraphedStep",
    "MnistStep",
    "Parity",
    "PhaseTimer",
    "Run",
    "RunSettings",
    "Trainer",
    "evaluate",
    "judge",
    "learning_rate",
    "prepare",
    "train",
]
