"""Training one model: the step with its phases timed, the learning rate, the evaluation."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .._grad_mode import without_grad
from ..data import Batches
from ..models import Backend, get_backend
from .timing import PhaseTimer

# Fraction of the run in which the learning rate rises. With less the first steps overshoot: the loss climbs before it
# falls, and two runs that differ by rounding diverge there.
WARMUP_SHARE = 0.3
# float16 gradients are held above its smallest numbers by a constant factor; the optimizer sees them without it.
FLOAT16_LOSS_SCALE = 1024.0


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Rises linearly to `peak` over the first three tenths of the run, then falls linearly to zero.

    Example:
        >>> [round(learning_rate(i, 20, 0.1), 3) for i in (0, 5, 6, 13, 19)]
        [0.017, 0.1, 0.1, 0.05, 0.007]
    """
    rising = (step + 1) / (WARMUP_SHARE * steps)
    falling = (steps - step) / (steps - WARMUP_SHARE * steps)
    return peak * min(rising, falling, 1.0)


class Trainer:
    """One backend's model, loss, optimizer and clock.

    Args:
        model: called with inputs and labels it returns the loss, as MnistCNN does; may be wrapped in
            DistributedDataParallel.
        batches: the training set.
        backend: whose optimizer and batch gather to use: a Backend or its name ("custom", "native").
        lr: learning rate of plain SGD; `step` may be given another.
        autocast: torch.bfloat16 or torch.float16 for mixed precision, else None.

    Example:
        >>> batches = Batches(*cuda_ops.data.mnist())
        >>> trainer = Trainer(MnistCNN("custom"), batches, "custom", lr=0.1)
        >>> for indices in torch.randperm(len(batches)).split(128):
        ...     loss = trainer.step(indices)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        batches: Batches,
        backend: str | Backend = "custom",
        lr: float = 0.07,
        autocast: torch.dtype | None = None,
    ):
        backend = get_backend(backend) if isinstance(backend, str) else backend
        self.model, self.batches, self.autocast = model, batches, autocast
        self.load = batches.gather if backend.needs_extension else batches
        self.optimizer = backend.optim.SGD(model.parameters(), lr=lr)
        self.timer = PhaseTimer(batches.device)
        # Its growth is switched off: a factor that changes would let the backends' steps differ in kind.
        self.scaler = torch.amp.GradScaler(
            batches.device.type,
            init_scale=FLOAT16_LOSS_SCALE,
            growth_interval=2**31 - 1,
            enabled=autocast == torch.float16,
        )

    def step(self, indices: Tensor, lr: float | None = None, on_gradients: Callable[[], None] | None = None) -> Tensor:
        """One step of training.

        Args:
            indices: of the samples in the batch.
            lr: learning rate of this step, if not the optimizer's own.
            on_gradients: called when the gradients are there, before the update.

        Returns:
            The loss, without dimensions, detached; on the device, so that nothing waits for it.
        """
        if lr is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
        timer = self.timer
        timer.begin()
        images, labels = self.load(indices)
        timer.lap()
        with autocast(self.batches.device, self.autocast):
            loss = self.model(images, labels)
        timer.lap()
        self.scaler.scale(loss).backward()
        timer.lap()
        if on_gradients:
            on_gradients()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        timer.lap()
        self.optimizer.zero_grad()
        timer.lap()
        return loss.detach()


def autocast(device: torch.device, dtype: torch.dtype | None):
    """torch.autocast in `dtype`, or nothing where it is None."""
    return torch.autocast(device.type, dtype) if dtype else contextlib.nullcontext()


@dataclass
class Evaluation:
    """A model's predictions for a test set."""

    predictions: Tensor
    """int64, on the CPU."""
    labels: Tensor
    classes: int = 10

    @property
    def accuracy(self) -> float:
        """Fraction of correct predictions, 0 to 1."""
        return (self.predictions == self.labels).double().mean().item()

    @property
    def confusion(self) -> Tensor:
        """[classes, classes]: how often the class of the row was predicted as that of the column."""
        shape = (self.classes, self.classes)
        return torch.bincount(self.labels * self.classes + self.predictions, minlength=self.classes**2).view(shape)

    @property
    def misread(self) -> Tensor:
        """Indices of the misclassified samples."""
        return (self.predictions != self.labels).nonzero().flatten()


@without_grad
def evaluate(
    model: torch.nn.Module,
    batches: Batches,
    batch_size: int = 500,
    autocast_dtype: torch.dtype | None = None,
) -> Evaluation:
    """Runs the model over all of `batches` in evaluation mode, and leaves it in the mode that it was in.

    Args:
        model: gives one logit a class.
        batches: the test set.
        batch_size: samples at a time.
        autocast_dtype: for mixed precision, as in training.

    Returns:
        Its predictions and the labels.

    Example:
        >>> images, labels = cuda_ops.data.mnist(train=False)
        >>> evaluate(model, Batches(images, labels)).accuracy
        0.9867
    """
    was_training = model.training
    model.eval()
    predictions, classes = [], 0
    try:
        for indices in torch.arange(len(batches)).split(batch_size):
            images, _ = batches(batches.place(indices))
            with autocast(batches.device, autocast_dtype):
                logits = model(images)
            classes = logits.shape[1]
            predictions.append(logits.argmax(1))
    finally:
        model.train(was_training)
    return Evaluation(torch.cat(predictions).cpu(), batches.labels.cpu(), classes)
