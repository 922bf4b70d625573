"""One module an op: its fake kernels, its autograd.Function, its functional and its module, if it has one."""

from .._library import problem

# Without the library the modules in here could not register their fake kernels: tell the reason, not the consequence.
if problem is not None:
    raise ImportError(problem)
