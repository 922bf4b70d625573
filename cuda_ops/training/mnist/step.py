"""The training step of the MNIST CNN as one kernel."""

import torch
from torch import Tensor

from ..._arguments import check_tensors
from ..._grad_mode import without_grad
from ..._library import problem
from ..._modules import unlike
from ...data.mnist import MEAN, STD
from ...models.mnist_cnn import MnistCNN
from ...optim import SGD

CONVOLUTIONS = ("conv1", "norm1", "conv2", "norm2")
LINEAR = ("linear1", "linear2")
if problem is None:
    from ...models import mnist_cnn
    from ...ops.conv_bn_relu_pool import BATCH_NORM2DS, CONV2DS
    from ...ops.mnist_step import MAX_BATCH, mnist_step_, mnist_step_supported, mnist_step_workspace

    # The layers that the kernel computes: of what class, and with what options beside the shapes of parameters, which
    # the op checks, and the options of the batch norms, which it is given.
    CONV2D = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1, "padding_mode": "zeros"}
    POOL = {"kernel_size": 2, "stride": 2, "padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False}
    LAYERS: dict[str, tuple[tuple[type, ...], dict]] = {
        "conv1": (CONV2DS, CONV2D),
        "norm1": (BATCH_NORM2DS, {}),
        "conv2": (CONV2DS, CONV2D),
        "norm2": (BATCH_NORM2DS, {}),
        "relu": (mnist_cnn.RELUS, {}),
        "pool": (mnist_cnn.MAX_POOL2DS, POOL),
        "linear1": (mnist_cnn.LINEARS, {}),
        "linear2": (mnist_cnn.LINEARS, {}),
    }


def unlike_the_kernel(model: MnistCNN, optimizer: torch.optim.Optimizer) -> str | None:
    """What a step of this model by this optimizer does that the kernel, which calls neither, does not; or None."""
    if reason := unlike(model, (MnistCNN,)):
        return f"the model {reason}"
    for name, (types, options) in LAYERS.items():
        layer = model._modules[name]
        if reason := unlike(layer, types):
            return f"{name} {reason}"
        for option, expected in options.items():
            if (value := getattr(layer, option)) != expected:
                return f"{name} has {option}={value!r}, and the kernel computes with {expected!r}"
        for parameter, value in layer._parameters.items():
            if value is None:
                return f"{name} has no {parameter}"
            if not value.requires_grad:
                return f"{name}.{parameter} does not require grad, and the kernel trains all parameters"
            if value._backward_hooks or value._post_accumulate_grad_hooks:
                return f"{name}.{parameter} has hooks"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "the optimizer has hooks"
    return None


class MnistStep:
    r"""Training steps of :class:`cuda_ops.models.MnistCNN` by plain SGD, any number of them in one kernel launch.

    A batch of 64 is microseconds of arithmetic, and a graph of kernels spends most of its time between kernels. Here
    128 thread blocks stay on their multiprocessors, keep weights and activations in shared memory, and synchronise at
    eight grid-wide barriers a step (csrc/cuda/mnist_step/sm90.cu says what happens between them). With up to 256
    images only sums and features leave a multiprocessor; with more, up to 1024, activations that do not fit are staged
    through the L2 cache. Activations are bfloat16, parameters and sums float32, as under torch.autocast with bfloat16;
    results are bitwise reproducible, and do not depend on how steps are distributed over calls.

    Args:
        model: a MnistCNN in training mode on a CUDA device, of any backend: its parameters and running statistics are
            what is trained, in place. Gradients are neither made nor read.
        optimizer: :class:`cuda_ops.optim.SGD` or torch.optim.SGD with one parameter group of all parameters, or with
            two: that of conv1, norm1, conv2 and norm2, and that of linear1 and linear2, in either order. Without
            momentum, weight decay and `maximize`.
        images: [N, 28, 28] or [N, 1, 28, 28], uint8, on the model's device: the data set.
        labels: [N], int64, on the model's device.
        mean, std: of all pixels, as fractions of 255.
        label_smoothing: as for torch.nn.functional.cross_entropy, in [0, 1].

    Raises:
        NotImplementedError: a device that is no Hopper with 128 multiprocessors, or a build without its kernels; a
            dtype, an option of the optimizer or of a layer that the kernel does not have; model, layers or optimizer
            that have hooks, parametrizations or a class of their own, or parameters that do not require grad: here
            and at later calls.
        ValueError: the parameter groups are not those above.

    Example:
        >>> from cuda_ops.data import mnist
        >>> if MnistStep.why_not("cuda") is None:
        ...     model = MnistCNN("fused").cuda()
        ...     images, labels = (tensor.cuda() for tensor in mnist())
        ...     step = MnistStep(model, cuda_ops.optim.SGD(model.parameters(), lr=0.1), images, labels)
        ...     losses = step(torch.randint(len(labels), (100, 64), device="cuda"))
    """

    def __init__(
        self,
        model: MnistCNN,
        optimizer: torch.optim.Optimizer,
        images: Tensor,
        labels: Tensor,
        *,
        mean: float = MEAN,
        std: float = STD,
        label_smoothing: float = 0.0,
    ):
        check_tensors("MnistStep", images=images, labels=labels)
        if not isinstance(model, MnistCNN):
            raise TypeError(f"MnistStep: expected a MnistCNN, got {type(model).__name__}")
        self.model, self.optimizer, self.images, self.labels = model, optimizer, images, labels
        self.device = model.conv1.weight.device
        reason = self.why_not(self.device)
        if reason:
            raise NotImplementedError(f"MnistStep: {reason}")
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"MnistStep: expected label_smoothing to be in [0, 1], got {label_smoothing}")
        self._check_layers()
        self._groups = self._check_optimizer()
        self._constants = (float(mean), float(std), float(label_smoothing))
        self._workspaces: dict[int, Tensor] = {}  # by their bytes; graphs hold their addresses, so that each stays
        self._rates: tuple = (None, None)

    @staticmethod
    def why_not(device, batch: int = 1) -> str | None:
        """Why the kernel cannot run there, or None if it can."""
        device = torch.device(device)
        if problem is not None:
            return "the compiled ops are missing"
        if device.type != "cuda":
            return f"runs on CUDA alone, got {device}"
        if not torch.cuda.is_available():
            return "no CUDA device is visible"
        if not mnist_step_supported(device, batch):
            return (
                f"batches of {batch} on {torch.cuda.get_device_name(device)}: needs 1 to {MAX_BATCH} images, a "
                "Hopper GPU with 128 multiprocessors or more, and a build for it"
            )
        return None

    def __call__(self, indices: Tensor, lr: float | Tensor | None = None) -> Tensor:
        """Takes a step for each row of `indices`.

        Args:
            indices: [batch] or [steps, batch], int64: the images of each step; 1 to 1024 a batch. More than 256 need
                a workspace of 84 MiB instead of 25, which the object keeps.
            lr: the learning rate of all parameters, or a tensor of one for each parameter group; or a tensor of
                [steps] or [steps, groups]. None takes the optimizer's.

        Returns:
            The mean loss of each step, on the device: no dimension for [batch], else [steps].

        Raises:
            IndexError: an index is not in [0, N), by a later call: as for
                :func:`cuda_ops.functional.gather_normalize`.
        """
        check_tensors("MnistStep", indices=indices)
        if indices.dim() not in (1, 2):
            raise ValueError(f"MnistStep: expected indices of [batch] or [steps, batch], got {list(indices.shape)}")
        rows = indices if indices.dim() == 2 else indices[None]
        rows = rows.to(self.device, torch.int64, non_blocking=True).contiguous()
        losses = torch.empty(len(rows), dtype=torch.float32, device=self.device)
        self._check_layers()
        modules, norms = self.model._modules, (self.model.norm1, self.model.norm2)
        if not all(norm.training for norm in norms):
            raise NotImplementedError("MnistStep: the model is in evaluation mode; call model.train()")
        tensors = []
        for conv, norm in (("conv1", "norm1"), ("conv2", "norm2")):
            conv, norm = modules[conv], modules[norm]
            tensors += [conv.weight, conv.bias, norm.weight, norm.bias]
            tensors += [norm.running_mean, norm.running_var, norm.num_batches_tracked]
            if norm.momentum is None or norm.running_mean is None or not norm.track_running_stats:
                raise NotImplementedError("MnistStep: needs batch norms with statistics and a momentum")
        tensors += [modules[name]._parameters[kind] for name in LINEAR for kind in ("weight", "bias")]
        needed = mnist_step_workspace(self.images, rows.shape[1])
        if needed not in self._workspaces:
            self._workspaces[needed] = torch.zeros(needed, dtype=torch.uint8, device=self.device)
        options = [value for norm in norms for value in (norm.eps, norm.momentum)]
        rates = self._rate_table(lr, len(rows))
        without_grad(mnist_step_)(
            tensors,
            losses,
            self._workspaces[needed],
            self.images,
            self.labels,
            rows,
            rates,
            [*options, *self._constants],
        )
        return losses if indices.dim() == 2 else losses[0]

    def run(self, indices: Tensor, lr: float | Tensor | None = None) -> Tensor:
        """A call, under the name that :class:`GraphedStep` has for many steps: the rows of a permutation, say."""
        return self(indices, lr)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.model).__name__}, {type(self.optimizer).__name__}, {self.device})"

    def _check_layers(self):
        if reason := unlike_the_kernel(self.model, self.optimizer):
            raise NotImplementedError(f"MnistStep: {reason}")

    def _check_optimizer(self) -> list[int]:
        """Which parameter group has the convolutions and batch norms, and which the linear layers."""
        if type(self.optimizer) not in (SGD, torch.optim.SGD):
            raise NotImplementedError(f"MnistStep: expected SGD, got {type(self.optimizer).__name__}")
        found = []
        for names in (CONVOLUTIONS, LINEAR):
            wanted = {id(p) for name in names for p in self.model._modules[name].parameters()}
            groups = [
                number
                for number, group in enumerate(self.optimizer.param_groups)
                if wanted <= {id(p) for p in group["params"]}
            ]
            if len(groups) != 1:
                raise ValueError(
                    f"MnistStep: expected the parameters of {', '.join(names)} in one parameter group of the optimizer"
                )
            found += groups
        if len(self.optimizer.param_groups) != len(set(found)):
            raise ValueError("MnistStep: expected no parameter groups but those of the model's layers")
        for group in self.optimizer.param_groups:
            for name in ("momentum", "dampening", "weight_decay", "nesterov", "maximize"):
                if group.get(name):
                    raise NotImplementedError(f"MnistStep: plain SGD, got {name}={group[name]}")
        return found

    def _rate_table(self, lr, steps: int) -> Tensor:
        """[steps, 2] on the device. Numbers that stay the same are copied there once."""
        groups = len(self.optimizer.param_groups)
        if lr is None:
            lr = [group["lr"] for group in self.optimizer.param_groups]
            if any(isinstance(rate, Tensor) for rate in lr):
                lr = torch.stack([torch.as_tensor(rate, device=self.device).reshape(()).float() for rate in lr])
        if not isinstance(lr, Tensor):
            rates = lr if isinstance(lr, list) else [lr] * groups
            key = (steps, *rates)
            if self._rates[0] != key:
                table = torch.tensor([rates[number] for number in self._groups], dtype=torch.float32)
                self._rates = key, table.expand(steps, 2).contiguous().to(self.device)
            return self._rates[1]
        table = lr.detach().to(self.device, torch.float32, non_blocking=True)
        if table.shape == (steps,) and not (steps == groups and groups > 1):
            table = table[:, None].expand(steps, groups)
        elif table.dim() <= 1:
            if table.dim() and len(table) not in (1, groups):
                raise ValueError(f"MnistStep: expected a learning rate for each of {steps} steps, got {len(table)}")
            table = table.expand(steps, groups)
        if table.shape != (steps, groups):
            raise ValueError(
                f"MnistStep: expected learning rates of [steps], [groups] or [steps, groups] with {steps} steps and "
                f"{groups} groups, got {list(lr.shape)}"
            )
        return table[:, self._groups].contiguous()
