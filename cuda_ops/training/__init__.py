"""Training: the step with its phases timed, as one CUDA graph, or as one kernel; the side-by-side run of several
backends, and its report."""

from .compare import Run, prepare, train
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
    "Trainer",
    "evaluate",
    "judge",
    "learning_rate",
    "prepare",
    "train",
]
