"""The general parts of cuda_ops.training with a model that is not the MNIST CNN."""

import torch

from cuda_ops.data import Batches
from cuda_ops.models import get_backend
from cuda_ops.training import Evaluation, RunSettings, compare, evaluate, judge, prepare, train
from cuda_ops.training.distributed import World

CLASSES = 4


class Perceptron(torch.nn.Module):
    """Called with images it returns logits, called with labels too its loss, as compare.prepare asks."""

    def __init__(self, backend):
        super().__init__()
        self.backend, nn = backend, get_backend(backend).nn
        self.hidden, self.last = nn.Linear(36, 16), nn.Linear(16, CLASSES)

    def forward(self, images, labels=None):
        functional = get_backend(self.backend).functional
        logits = self.last(functional.relu(self.hidden(images.flatten(1))))
        return logits if labels is None else functional.cross_entropy(logits, labels)


def test_side_by_side_run_of_another_model():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (128,), generator=generator)
    images = torch.randint(64, (128, 1, 6, 6), generator=generator, dtype=torch.uint8)
    images[torch.arange(128), 0, labels] = 255  # a bright row tells the class
    batches = Batches(images, labels)
    cpu = torch.device("cpu")
    settings = RunSettings(("custom", "native"), cpu, torch.float32, epochs=4, batch_size=16, lr=0.1, seed=0)
    run = prepare(settings, World(), batches, Perceptron)
    assert run.zero_gradients == ()
    train(run, batches, lambda: False, lambda run: None)
    compare.test(run, batches)
    assert run.steps_done == run.steps_planned == 32
    parity = judge(run, "custom")
    assert parity.ok, parity.problems
    names = {row.name for row in parity.rows if row.kind == "gradient"}
    assert names == {name for name, _ in Perceptron("native").named_parameters()}
    model = run.backends["custom"].model
    for mode in (True, False):
        evaluation = evaluate(model.train(mode), batches)
        assert model.training == mode
    assert evaluation.confusion.shape == (CLASSES, CLASSES)
    assert evaluation.confusion.sum() == 128
    assert evaluation.accuracy > 0.9


def test_confusion_has_labels_in_rows_and_predictions_in_columns():
    evaluation = Evaluation(torch.tensor([0, 2, 2, 1]), torch.tensor([0, 1, 2, 1]), 3)
    assert evaluation.confusion.tolist() == [[1, 0, 0], [0, 1, 1], [0, 0, 1]]
    assert evaluation.misread.tolist() == [1] and evaluation.accuracy == 0.75
