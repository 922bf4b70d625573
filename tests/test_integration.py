"""How the ops live with PyTorch: schemas and fakes, torch.compile, streams, CUDA graphs, devices, bad inputs."""

import re

import pytest
import torch
from support.opspec import Make, as_tuple, assert_close, load_specs, random_grad_outputs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import cuda_ops


def test_opcheck(spec, device):
    """Schema, fake kernel (shapes and strides) and dispatch of every registered op, by PyTorch's own checker."""
    count = 0
    for op, arguments in spec.op_samples(Make(device, torch.float32)):
        torch.library.opcheck(op, arguments)
        count += 1
    assert count > 0, "a specification lists its ops"


def in_other_layouts(arguments):
    """A registered op's arguments as they are, with the 4-d tensors in channels_last, and with the last two dimensions
    of floating tensors exchanged in memory."""

    def channels_last(t):
        return t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t

    def transposed(t):
        return t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.dim() >= 2 and t.is_floating_point() else t

    for layout in (lambda t: t, channels_last, transposed):
        yield tree_map_only(torch.Tensor, lambda t, layout=layout: layout(t.detach().clone()), arguments)


def test_fake_kernels_tell_the_real_strides(spec, device):
    """opcheck compares them on CUDA alone, and in the layouts of its arguments."""
    for op, sample in spec.op_samples(Make(device, torch.float32)):
        for arguments in in_other_layouts(sample):
            try:
                results = as_tuple(op(*arguments))
            except RuntimeError as error:
                # What forward has saved is taken back as it was made; a cache is written where it lies, row by row.
                expected = "expected statistics to be those of forward|to have rows whose elements are neighbours"
                assert re.search(expected, str(error)), error
                continue
            with FakeTensorMode() as mode:
                fake = as_tuple(op(*tree_map_only(torch.Tensor, mode.from_tensor, arguments)))
            for number, (traced, real) in enumerate(zip(fake, results, strict=True)):
                if isinstance(real, torch.Tensor):
                    told, found = ((t.dtype, t.device, t.shape, t.stride()) for t in (traced, real))
                    assert told == found, f"{op}: output {number}"


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_is_one_graph(spec, device, dynamic):
    """torch.compile sees through forward and backward without a graph break, with fixed and with symbolic sizes."""
    if spec.waits:
        pytest.skip("its sizes depend on values")
    for sample in spec.small_samples(Make(device, torch.float32, requires_grad=True)):
        torch._dynamo.reset()
        # aot_eager traces forward and backward through the fakes as inductor does, and leaves out only the code
        # generator, which has nothing to do here and takes a C++ compiler many seconds.
        compiled = torch.compile(spec.function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        results = []
        for function in (spec.function, compiled):
            torch.manual_seed(0)
            outputs = as_tuple(function(*sample.args, **sample.kwargs))
            grads = ()
            grad_outputs = random_grad_outputs(outputs)
            if grad_outputs:
                with_grad = [o for o in outputs if o.requires_grad]
                grads = torch.autograd.grad(with_grad, sample.differentiable(), grad_outputs, allow_unused=True)
            results.append([t for t in (*outputs, *grads) if t is not None])
        for eager, traced in zip(*results, strict=True):
            assert eager.stride() == traced.stride(), sample.name
            if eager.is_floating_point():
                assert_close(traced, eager.double(), spec.tolerance(torch.float32), sample.name)
            else:
                assert torch.equal(eager, traced), sample.name


def test_bad_inputs_are_refused_by_name(spec, device):
    assert spec.bad, "a specification lists its bad inputs"
    for bad in spec.bad:
        with pytest.raises(bad.error, match=bad.match):
            bad.call(device)


def test_a_meta_tensor_beside_others_is_refused(spec):
    """Its result would be memory that nobody has written."""
    for sample in spec.small_samples(Make("cpu", torch.float32)):
        tensors = sample.tensors()
        for left in tensors if len(tensors) > 1 else ():
            mixed = sample.map(lambda t, left=left: t.to("meta") if t is left else t)
            with pytest.raises(
                RuntimeError,
                match=rf"^({spec.stem or spec.name}\w*|{spec.name}): expected \w+ to be on the device of \w+, ",
            ):
                spec.function(*mixed.args, **mixed.kwargs)


@pytest.mark.cuda
def test_mixed_devices_are_refused(spec):
    for sample in spec.small_samples(Make("cuda", torch.float32)):
        tensors = sample.tensors()
        if len(tensors) < 2:
            continue
        last = tensors[-1]
        with pytest.raises(RuntimeError, match="device"):
            mixed = sample.map(lambda t, last=last: t.cpu() if t is last else t)
            spec.function(*mixed.args, **mixed.kwargs)


@pytest.mark.cuda
def test_side_stream(spec):
    """The op runs on the current stream: a consumer on that stream sees its result, behind a long kernel."""
    for sample in spec.small_samples(Make("cuda", torch.float32, requires_grad=True)):
        torch.manual_seed(0)
        expected = as_tuple(spec.function(*sample.args, **sample.kwargs))
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        late = sample.map(lambda t: torch.zeros_like(t).requires_grad_(t.requires_grad))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            with torch.no_grad():
                for target, source in zip(late.tensors(), sample.tensors(), strict=True):
                    target.copy_(source)
            torch.manual_seed(0)
            actual = as_tuple(spec.function(*late.args, **late.kwargs))
            grad_outputs = random_grad_outputs(actual)
            if grad_outputs:
                with_grad = [o for o in actual if o.requires_grad]
                torch.autograd.grad(with_grad, late.differentiable(), grad_outputs, allow_unused=True)
        stream.synchronize()
        for a, e in zip(actual, expected, strict=True):
            assert torch.equal(a, e), sample.name


@pytest.mark.cuda
def test_cuda_graph(spec):
    """Forward and backward are captured into a CUDA graph, and replays follow new inputs."""
    if spec.waits:
        pytest.skip("its sizes depend on values")
    for sample in spec.small_samples(Make("cuda", torch.float32, requires_grad=True)):

        def step(sample=sample):
            outputs = as_tuple(spec.function(*sample.args, **sample.kwargs))
            with_grad = [o for o in outputs if o.requires_grad]
            if not with_grad:
                return outputs
            ones = [torch.ones_like(o) for o in with_grad]
            return (*outputs, *torch.autograd.grad(with_grad, sample.differentiable(), ones, allow_unused=True))

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        with torch.no_grad():
            for tensor in sample.differentiable():
                tensor.mul_(0.5)
        graph.replay()
        torch.cuda.synchronize()
        if spec.random:
            continue
        for c, e in zip(captured, step(), strict=True):
            if c is not None:
                assert torch.equal(c, e), sample.name


@pytest.mark.cuda
def test_second_device(spec):
    """Tensors on cuda:1 while cuda:0 is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for there, here in zip(
        spec.small_samples(Make("cuda:1", torch.float32)),
        spec.small_samples(Make("cuda:0", torch.float32)),
        strict=True,
    ):
        with torch.cuda.device(0):
            torch.manual_seed(0)
            actual = as_tuple(spec.function(*there.args, **there.kwargs))
            torch.manual_seed(0)
            expected = as_tuple(spec.function(*here.args, **here.kwargs))
        for a, e in zip(actual, expected, strict=True):
            assert a.device == torch.device("cuda:1")
            assert torch.equal(a.cpu(), e.cpu())


def test_every_functional_has_a_specification():
    assert sorted(cuda_ops.functional.__all__) == sorted({spec.name for spec in load_specs()})


def test_docstrings_are_complete():
    for name in cuda_ops.functional.__all__:
        text = getattr(cuda_ops.functional, name).__doc__ or ""
        for section in ("Args:", "Returns:", "Raises:", "Example:"):
            assert section in text, f"functional.{name} has no section {section}"
