"""report.png: the loss curves over each other, the time of each phase, the confusion matrix and misread digits."""

import io

import torch
from torch import Tensor

from ..compare import Run
from ..timing import PHASES

COLORS = {"fused": "tab:blue", "custom": "tab:green", "native": "tab:orange"}
MISREAD_ROWS, MISREAD_COLUMNS = 4, 6


def plot(run: Run, results: dict, test_images: Tensor) -> bytes:
    """The plot of a run.

    Args:
        run: finished or interrupted.
        results: of `results.results`.
        test_images: uint8, (N, 1, 28, 28).

    Returns:
        A PNG file's content.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(12, 9), layout="constrained")
    settings = results["settings"]
    figure.suptitle(
        f"MNIST CNN on {results['device']['name']}, {settings['dtype']}, batch {settings['batch_size']}, "
        f"{results['steps_done']} steps"
    )
    _losses(axes[0, 0], run)
    _phases(axes[0, 1], results)
    shown = next((b for b in run.backends.values() if b.evaluation), None)
    if shown:
        _confusion(axes[1, 0], shown)
        _misread(axes[1, 1], shown, test_images)
    else:
        for axis in axes[1]:
            axis.axis("off")
        axes[1, 0].text(0.5, 0.5, "interrupted before the test", ha="center")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    pyplot.close(figure)
    return buffer.getvalue()


def _losses(axis, run: Run):
    # Drawn from wide to narrow, so that curves that coincide are all seen.
    for i, backend in enumerate(reversed(run.backends.values())):
        axis.plot(
            range(1, len(backend.losses) + 1),
            backend.losses,
            label=backend.name,
            color=COLORS.get(backend.name),
            linewidth=3.0 / (1 + 2 * i),
        )
    axis.set(title="train loss of each step", xlabel="step", ylabel="cross-entropy", yscale="log")
    axis.legend()


def _phases(axis, results: dict):
    backends = [(n, b["milliseconds"]) for n, b in results["backends"].items() if b["milliseconds"]]
    width = 0.8 / max(1, len(backends))
    for i, (name, times) in enumerate(backends):
        positions = [p + (i - (len(backends) - 1) / 2) * width for p in range(len(PHASES))]
        means = [times[phase]["mean"] for phase in PHASES]
        bars = axis.bar(positions, means, width, label=name, color=COLORS.get(name))
        # Upright, since the numbers of neighbours are wider than their bars.
        axis.bar_label(bars, fmt="%.3g", fontsize=8, rotation=90, padding=3)
    axis.set_xticks(range(len(PHASES)), PHASES)
    axis.set(title="milliseconds a step, by phase", ylabel="ms")
    axis.margins(y=0.15)  # room for the numbers
    if backends:
        axis.legend()


def _confusion(axis, backend):
    confusion = backend.evaluation.confusion
    wrong = confusion.clone().fill_diagonal_(0)
    axis.imshow(wrong.numpy(), cmap="Reds")
    for row in range(10):
        for column in range(10):
            count = int(confusion[row, column])
            if count:
                dark = wrong[row, column] > wrong.max() / 2
                axis.text(
                    column, row, str(count), ha="center", va="center", fontsize=8, color="white" if dark else "black"
                )
    axis.set_xticks(range(10))
    axis.set_yticks(range(10))
    accuracy = 100 * backend.evaluation.accuracy
    axis.set(title=f"test set, {backend.name}: {accuracy:.2f} %", xlabel="read as", ylabel="digit")


def _misread(axis, backend, images: Tensor):
    evaluation = backend.evaluation
    indices = evaluation.misread[: MISREAD_ROWS * MISREAD_COLUMNS].tolist()
    canvas = torch.zeros(MISREAD_ROWS * 36, MISREAD_COLUMNS * 36)
    for slot, index in enumerate(indices):
        top, left = slot // MISREAD_COLUMNS * 36, slot % MISREAD_COLUMNS * 36
        canvas[top + 6 : top + 34, left + 4 : left + 32] = images[index, 0]
        answer, label = int(evaluation.predictions[index]), int(evaluation.labels[index])
        axis.text(left + 18, top + 4, f"{label} read as {answer}", color="white", ha="center", fontsize=6)
    axis.imshow(canvas.numpy(), cmap="gray")
    axis.set_title(f"misread digits, {backend.name}: the first {len(indices)} of {len(evaluation.misread)}")
    axis.axis("off")
