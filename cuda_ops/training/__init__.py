"""Training: the step with its phases timed, the side-by-side run of several backends, and its report."""

from .compare import Run, prepare, train
from .loop import Evaluation, Trainer, evaluate, learning_rate
from .parity import Parity, judge
from .timing import PhaseTimer

__all__ = [
    "Evaluation",
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
