"""`cuda_ops.convert`: a model of torch.nn's layers computed by ours, in place, and `cuda_ops.revert`, which undoes it.

Nothing of a model is replaced but the *classes* of some of its modules, each by a subclass of the class it had:
`module.__class__ = …`, as torch.nn.utils.parametrize does. The objects stay where they are, and with them parameters,
buffers, hooks, names, sharing, mode and whatever a user has put on them; state_dict, deepcopy, pickle, DDP and
torch.compile see what they saw before.

layers.py    the classes of single layers: ours, and for a call that our kernels do not take PyTorch's own
fusing.py    runs of layers that one op of ours computes, as functions of these layers; Sequential's forward
attention.py calls of scaled_dot_product_attention in forwards that torch.fx cannot trace, and in transformers' registry
windows.py   attention in windows of images, as torchvision's Swin Transformer and MaxViT have it
traced.py    the forward of other modules, where torch.fx can trace it and it is the same for every input
straight.py  such a trace, and what it depends on
graphs.py    what is found in it
recipes.py   what makes of it a class
rewritten.py the forward of others, which branch on arguments or take any number of them: rewritten as text
fusing_blocks.py  what stands in for statements of such forwards
report.py    what was done, and what was not and why
swap.py      convert and revert
"""

from .report import Report
from .swap import convert, revert

__all__ = ["Report", "convert", "revert"]
