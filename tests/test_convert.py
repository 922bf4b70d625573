"""cuda_ops.convert and revert: changes of modules before and after, copies, compilers, the report."""

import copy
import gc
import inspect
import io
import os
import pickle
import weakref

import pytest
import torch
from support.conversion import (
    FUSED,
    Branching,
    Net,
    assert_converts,
    classes,
    count_calls,
    images,
    loss_of,
    net,
    small_images,
    train,
)
from torch.nn.utils import parametrizations, parametrize

import cuda_ops
from cuda_ops.conversion import layers
from cuda_ops.conversion.layers import LAYERS, native_class

nn = torch.nn
F = torch.nn.functional

pytestmark = pytest.mark.filterwarnings("ignore:.*(spectral|weight)_norm.* is deprecated:FutureWarning")


CHANGES = {
    "forward hook": lambda m: m.register_forward_hook(lambda module, args, output: 0.5 * output),
    "forward pre-hook": lambda m: m.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    "backward hook": lambda m: m.register_full_backward_pre_hook(lambda module, grads: (3 * grads[0],)),
    "forward set on it": lambda m: setattr(m, "forward", lambda x: 0.5 * type(m).forward(m, x)),
}
OF_WEIGHT = {
    "spectral_norm": parametrizations.spectral_norm,
    "weight_norm": parametrizations.weight_norm,
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "frozen": lambda m: m.requires_grad_(False),
}
CASES = [(layer, change) for layer in ("conv", "relu", "linear1", "layer_norm", "head.0") for change in CHANGES]
CASES += [(layer, change) for layer in ("conv", "linear2", "head.0") for change in OF_WEIGHT]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("layer", "change"), CASES)
def test_changed_layers_compute_what_they_did(layer, change, after):
    is_backward, change = change == "backward hook", {**CHANGES, **OF_WEIGHT}[change]
    ours, native = net(), net()
    for model in (ours, native):
        model.relu.inplace = not is_backward  # PyTorch allows not both
        if after and model is ours:
            cuda_ops.convert(ours)
        torch.manual_seed(1)
        change(model.get_submodule(layer))
    if not after:
        cuda_ops.convert(ours)
    results = [train(model, small_images(), steps=1) for model in (ours, native)]
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-11)
    cuda_ops.revert(ours)
    assert not any(native_class(m) or "cuda_ops" in str(type(m).__mro__) for m in ours.modules())
    torch.testing.assert_close(ours(*small_images()), native(*small_images()), rtol=1e-9, atol=1e-11)


def test_parametrized_layers_are_ours_and_stay_parametrized():
    model = net()
    parametrizations.orthogonal(model.linear3)
    cuda_ops.convert(model)
    assert isinstance(model.linear3, cuda_ops.nn.Linear)
    assert parametrize.is_parametrized(model.linear3)
    parametrize.remove_parametrizations(model.linear3, "weight")
    assert native_class(model.linear3) is nn.Linear


def test_layers_replaced_later():
    ours, native = net(), net()
    cuda_ops.convert(ours)
    for model in (ours, native):
        torch.manual_seed(3)
        model.linear2 = nn.Linear(16, 16).double()
        model.pool = nn.AvgPool2d(2)
        model.relu = nn.Tanh()
        model.head.insert(1, nn.Sigmoid())
        model.head.append(nn.Linear(4, 3).double())
    torch.testing.assert_close(train(ours, small_images()), train(native, small_images()), rtol=1e-9, atol=1e-11)


def test_submodules_called_on_their_own_compute_what_they_did():
    ours, native = net(), net()
    cuda_ops.convert(ours)
    x = images(4, 8)
    torch.testing.assert_close(ours.norm(ours.conv(x)), native.norm(native.conv(x)))
    rows = torch.ones(2, 16, dtype=torch.float64)
    torch.testing.assert_close(ours.head[0](rows), native.head[0](rows))
    torch.testing.assert_close(ours.head[:2](rows), native.head[:2](rows))


# Sharing, ties, copies, files, compilers.


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = self.first
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.first.weight
        self.blocks = nn.Sequential(self.first, nn.ReLU(), self.first)

    def forward(self, input):
        return self.tied(self.second(self.blocks(self.first(input))))


def test_shared_modules_and_tied_weights():
    torch.manual_seed(0)
    model = Shared().double()
    optimizer = torch.optim.SGD(model.parameters())
    report = assert_converts(model, (torch.randn(3, 6, dtype=torch.float64),), ["linear_relu"])
    assert [layer.name for layer in report.layers] == ["first", "tied", "blocks.1"]
    assert model.first is model.second is model.blocks[0] is model.blocks[2]
    assert model.tied.weight is model.first.weight is optimizer.param_groups[0]["params"][0]


def test_attributes_modes_and_formats_are_kept():
    model = net().to(memory_format=torch.channels_last)
    model.conv.note, model.norm.training = "mine", False
    model.linear1.bias = None
    model.norm.register_buffer("extra", torch.ones(2))
    model.linear2.weight.requires_grad_(False)
    pointers = [p.data_ptr() for p in model.parameters()]
    cuda_ops.convert(model)
    assert (model.conv.note, model.norm.training, model.linear1.bias) == ("mine", False, None)
    assert "norm.extra" in model.state_dict()
    assert not model.linear2.weight.requires_grad
    assert pointers == [p.data_ptr() for p in model.parameters()]
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert {"cuda_ops" in key for module in model.modules() for key in vars(module)} == {False}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_stay_converted(copied, monkeypatch):
    model = net()
    cuda_ops.convert(model)
    twin = copied(model)
    assert classes(twin) == classes(model)
    assert all(a is not b for a, b in zip(twin.parameters(), model.parameters(), strict=True))
    torch.testing.assert_close(train(twin, small_images()), train(model, small_images()))
    calls = count_calls(monkeypatch, "add_layer_norm")
    twin(*small_images())
    assert len(calls) == 1
    assert classes(cuda_ops.revert(twin)) == classes(net())


def test_state_dicts_go_both_ways():
    ours, native = net(0), net(1)
    cuda_ops.convert(ours)
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    native.load_state_dict(torch.load(file, weights_only=True), strict=True)
    torch.testing.assert_close(ours(*small_images()), native(*small_images()))
    ours.load_state_dict(net(2).state_dict(), strict=True)
    torch.testing.assert_close(ours(*small_images()), net(2)(*small_images()))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_sees_through(backend):
    ours, native = net(), net()
    cuda_ops.convert(ours)
    compiled = torch.compile(ours, fullgraph=True, backend=backend)
    for training in (True, False):
        ours.train(training), native.train(training)
        outputs = compiled(*small_images()), native(*small_images())
        torch.testing.assert_close(*outputs)
        loss_of(outputs[0]).backward(), loss_of(outputs[1]).backward()
    torch.testing.assert_close(*([p.grad for p in m.parameters()] for m in (ours, native)))


def test_a_compiled_model_can_be_converted_and_reverted():
    model, native = net(), net()
    compiled = torch.compile(model, backend="eager")
    expected = native(*small_images())
    for change in (lambda m: None, cuda_ops.convert, cuda_ops.revert):
        change(model)
        model.norm.reset_running_stats()
        torch.testing.assert_close(compiled(*small_images()), expected)


def test_torch_export():
    model = net().eval()
    expected = model(*small_images())
    cuda_ops.convert(model)
    program = torch.export.export(model, small_images())
    torch.testing.assert_close(program.module()(*small_images()), expected)
    assert "cuda_ops.add_layer_norm_forward" in str(program.graph)


def test_ddp_of_one_process(tmp_path):
    ours, native = net(), net()
    cuda_ops.convert(ours)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        torch.testing.assert_close(
            train(nn.parallel.DistributedDataParallel(ours), small_images()), train(native, small_images())
        )
        inside = net()
        wrapped = nn.parallel.DistributedDataParallel(inside)
        assert cuda_ops.convert(wrapped).swapped
        assert native_class(inside.linear1) is nn.Linear
    finally:
        torch.distributed.destroy_process_group()


REFUSALS = {  # as conv2d and gemm, and as the ops with tables of paths say it
    "own": "conv2d: CUDA_OPS_CONV2D_PATH=sm90 cannot do this convolution on this device: forward, shape [1, 1, 3, 3]",
    "table": "linear: the path that the environment's CUDA_OPS_<OP>_PATH names cannot do this call on this device",
}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
def test_a_forced_path_that_cannot_do_a_call_is_told(refusal):
    def refusing(text):
        def call(*args, **kwargs):
            raise NotImplementedError(text)

        return call

    model, x = nn.Linear(3, 2), torch.ones(1, 3)
    for text, is_told in ((refusal, True), ("linear: arguments of this kind are not supported", False)):
        forward = layers._forward(refusing(text), nn.Linear)
        function = layers._function("linear", refusing(text), F.linear)
        for call in (lambda f=forward: f(model, x), lambda f=function: f(x, model.weight, model.bias)):
            if is_told:
                with pytest.raises(NotImplementedError, match=r"CUDA_OPS_.*_PATH"):
                    call()
            else:
                assert torch.equal(call(), model(x))


@pytest.mark.cuda
def test_a_forced_path_that_cannot_do_a_call_is_told_on_a_gpu(monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, 4, 3)).cuda()
    cuda_ops.convert(model)
    monkeypatch.setenv("CUDA_OPS_CONV2D_PATH", "depthwise")
    with pytest.raises(NotImplementedError, match="CUDA_OPS_CONV2D_PATH=depthwise cannot"):
        model(torch.ones(1, 3, 8, 8, device="cuda"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast_on_the_cpu(dtype):
    """As exact as PyTorch's own."""
    ours, native, exact = net().float(), net().float(), net().double()
    cuda_ops.convert(ours)
    x = images(4, 8).float()

    def check(*outputs):
        assert {output.dtype for output in outputs} == {dtype}
        error, theirs = ((output.double() - exact(x.double())).norm() for output in outputs)
        assert error <= 2 * theirs

    with torch.autocast("cpu", dtype):
        check(ours(x), native(x))
    check(ours.to(dtype)(x.to(dtype)), native.to(dtype)(x.to(dtype)))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_on_cuda(dtype):
    ours, native, exact = net().float().cuda(), net().float().cuda(), net().double().cuda()
    cuda_ops.convert(ours)
    x = images(4, 8).float().cuda()
    loss_of(exact(x.double()).cpu()).backward()
    with torch.autocast("cuda", dtype):
        outputs = ours(x), native(x)
    torch.testing.assert_close(*outputs, rtol=3e-2, atol=3e-2)
    for output in outputs:
        loss_of(output.cpu()).backward()
    # Normalised over few values, gradients in halves are a tenth off on both sides.
    for a, b, e in zip(ours.parameters(), native.parameters(), exact.parameters(), strict=True):
        error, allowed = ((p.grad.double() - e.grad).norm() for p in (a, b))
        assert error <= 2 * allowed + 2e-2 * e.grad.norm() + 1e-2


@pytest.mark.cuda
def test_on_cuda():
    model = net().cuda()
    native = copy.deepcopy(model)
    cuda_ops.convert(model)
    x = (images(4, 8).cuda(),)
    torch.testing.assert_close(
        [t.cpu() for t in train_on_cuda(model, x)], [t.cpu() for t in train_on_cuda(native, x)], rtol=1e-9, atol=1e-10
    )


def train_on_cuda(model, inputs):
    loss = model(*inputs).square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters()), *model.buffers()]


def test_what_ours_do_not_take_is_pytorchs():
    model = nn.Sequential(nn.ReLU(), nn.MaxPool2d(1), nn.Softmax(-1))
    cuda_ops.convert(model)
    assert model[0](torch.tensor([-1, 2])).tolist() == [0, 2]
    assert model[0](input=torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]
    sparse = torch.tensor([[0.0, -1.0], [2.0, 0.0]]).to_sparse()
    assert model[0](sparse).to_dense().tolist() == [[0, 0], [2, 0]]

    class Tagged(torch.Tensor):
        pass

    tagged = torch.tensor([1.0, -1.0]).as_subclass(Tagged)
    assert type(model[0](tagged)) is Tagged


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"sparse": True}, {"max_norm": 0.5, "padding_idx": 1}], ids=str)
def test_embeddings_that_ours_refuse_are_pytorchs(options, after):
    torch.manual_seed(0)
    native = nn.Embedding(5, 3, **options)
    ours = copy.deepcopy(native)
    if after:
        ours.max_norm, ours.sparse = None, False
    (layer,) = cuda_ops.convert(ours).layers
    assert layer.reason == (None if after else "max_norm" if "max_norm" in options else "sparse gradients")
    ours.max_norm, ours.sparse = native.max_norm, native.sparse
    indices = torch.tensor([[4, 1], [0, 4]])
    for model in (ours, native):
        model(indices).square().sum().backward()
    assert ours.weight.grad.layout is native.weight.grad.layout
    torch.testing.assert_close(ours.weight, native.weight, rtol=0, atol=0)  # max_norm writes into it
    torch.testing.assert_close(ours.weight.grad.to_dense(), native.weight.grad.to_dense())


def test_what_a_native_forward_calls_is_pytorchs_too():
    """torch.nn's instance normalisations call a method of their own, which ours override."""
    norm = nn.InstanceNorm2d(2, affine=True)
    native = copy.deepcopy(norm)
    cuda_ops.convert(norm)
    with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
        norm(torch.ones(1, 2, 3, 3, dtype=torch.int64))
    x = torch.randn(2, 2, 3, 3)
    for batch in (x, x[0]):
        torch.testing.assert_close(norm(batch), native(batch))
    for module in (norm, native):
        module.weight = None
        module.eps = 0.0
    torch.testing.assert_close(norm(x), native(x))


# The report, and what is chosen.


def zoo():
    class MyLinear(nn.Linear):
        pass

    odd = nn.Linear(2, 2)
    odd.forward = lambda x: x
    return nn.ModuleDict(
        {
            "a": nn.Linear(2, 2),
            "b": MyLinear(2, 2),
            "c": odd,
            "d": nn.LazyLinear(2),
            "e": nn.Fold(4, 2),
            "f": nn.Flatten(),
            "g": nn.BatchNorm2d(2, eps=0.0),
            "h": Branching(),
            "i": nn.Bilinear(2, 2, 2),
            "j": cuda_ops.nn.Linear(2, 2),
            "k": torch.jit.script(nn.Linear(2, 2)),
        }
    )


def test_the_report_says_what_was_left_and_why():
    model = zoo()
    before = classes(model)
    report = cuda_ops.convert(model)
    left = {layer.name: layer.reason for layer in report.left}
    assert left == {
        "b": "a subclass of Linear",
        "c": "has a forward that was set on it",
        "d": "lazy: convert after the first forward",
        "e": "cuda_ops.nn has none",
        "f": "nothing to compute",
        "g": "eps is not above 0",
        "i": "cuda_ops.nn has none",
        "k": "TorchScript",
    }
    assert {layer.name for layer in report.swapped} >= {"a", "j", "h.linear", "h.relu"}
    assert ("Linear", 4, 1, "has a forward that was set on it") in report.rows()
    text = str(report)
    assert text.startswith("ModuleDict: 6 of 14 layers are ours")
    assert all(len(line) < 200 for line in text.splitlines())
    assert "b: " in report.names() and "a subclass of Linear" in report.names()
    assert "h: not traced: forward branches or loops" in report.names()
    data = report.as_dict()
    assert pickle.loads(pickle.dumps(data)) == data
    assert data["left"]["g"] == {"class": "BatchNorm2d", "reason": "eps is not above 0"}
    assert cuda_ops.convert(model).as_dict() == data
    assert classes(cuda_ops.revert(model)) == before


@pytest.mark.parametrize(
    ("options", "swapped"),
    [
        ({"only": "Linear"}, {"linear1", "linear2", "linear3", "head.0", "head.2"}),
        ({"only": [nn.LayerNorm, "head"]}, {"layer_norm", "head.0", "head.1", "head.2"}),
        ({"only": "linear?", "exclude": "linear2"}, {"linear1", "linear3"}),
        ({"exclude": ["head", "Linear", nn.Conv2d]}, {"norm", "relu", "pool", "drop", "layer_norm"}),
    ],
)
def test_only_and_exclude(options, swapped):
    model = net()
    report = cuda_ops.convert(model, **options)
    assert {layer.name for layer in report.swapped} == swapped
    assert {name for name, module in model.named_modules() if type(module) in LAYERS.values()} == swapped
    torch.testing.assert_close(train(model, small_images()), train(net(), small_images()))


def test_a_name_that_begins_with_another_is_not_of_it():
    for options, swapped in (({"only": "head"}, {"head.0"}), ({"exclude": "head"}, {"heads.0"})):
        model = nn.ModuleDict({name: nn.Sequential(nn.Linear(2, 2)) for name in ("head", "heads")})
        assert {layer.name for layer in cuda_ops.convert(model, **options).swapped} == swapped


def test_converting_again_takes_what_is_new():
    model = net()
    first, before = cuda_ops.convert(model), classes(model)
    assert cuda_ops.convert(model).as_dict() == first.as_dict()
    assert classes(model) == before
    model.linear2, model.drop = nn.Linear(16, 16).double(), nn.Identity()
    report = cuda_ops.convert(model)
    assert {fusion.op for fusion in report.fusions} == set(FUSED)
    assert ("add()", "layer_norm") in [fusion.parts for fusion in report.fusions]


def test_without_fusing_classes_of_layers_alone_change():
    model = net()
    report = cuda_ops.convert(model, fuse=False)
    assert report.fusions == [] and report.untraced == {}
    assert type(model) is Net and type(model.head) is nn.Sequential
    assert native_class(model.conv) is nn.Conv2d


def test_bad_arguments_are_named():
    with pytest.raises(TypeError, match=r"convert: expected model to be a torch\.nn\.Module, got int"):
        cuda_ops.convert(3)
    with pytest.raises(TypeError, match=r"revert: expected model to be a torch\.nn\.Module, got Tensor"):
        cuda_ops.revert(torch.ones(1))
    for argument in ("only", "exclude"):
        with pytest.raises(TypeError, match=f"convert: expected {argument} to be names or classes"):
            cuda_ops.convert(nn.ReLU(), **{argument: 3})


@pytest.mark.parametrize("native", LAYERS, ids=lambda cls: cls.__name__)
def test_a_converted_class_differs_in_forward_alone(native):
    """Else a module that torch.nn's constructor made lacks what ours would have."""
    converted = LAYERS[native]
    assert converted.__name__ == native.__name__
    assert converted.__init__ is native.__init__
    assert inspect.signature(converted.forward) == inspect.signature(native.forward)
    assert pickle.loads(pickle.dumps(converted)) is converted
    assert os.path.basename(converted.__module__.replace(".", "/")) == "layers"


def test_classes_that_are_made_anew_do_not_stay():
    """As those of a function that makes models: with what their forwards close over."""

    def make():
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

            def forward(self, x):
                return F.relu(self.norm(self.conv(x)) + x)

        class Attention(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(3, 3)

            def forward(self, x, mask=None):
                if mask is None:
                    x = self.linear(x)
                return F.scaled_dot_product_attention(x, x, x)

        return nn.Sequential(nn.Sequential(Block(), Block()), nn.Flatten(2), nn.Linear(4, 3), Attention())

    def use():
        model = make()
        assert cuda_ops.convert(model).fusions
        model(torch.randn(2, 3, 2, 2)).sum().backward()
        natives = {native_class(module) for module in model.modules()} - {None}
        return [weakref.ref(native) for native in natives if native.__module__ == __name__]

    references = use()
    assert len(references) == 2
    cuda_ops.convert(nn.ReLU())  # forgets what it knows of the runs of layers
    for _ in range(3):  # the converted classes first, and then what these were made of
        gc.collect()
    assert [reference() for reference in references] == [None, None]
