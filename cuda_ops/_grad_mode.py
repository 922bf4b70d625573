"""torch.no_grad() that an interrupt cannot leave switched off.

The `__exit__` of a context manager that is written in Python, as PyTorch's is, begins with a look at pending signals: a
Ctrl-C that arrives just then skips it, and gradients are off for good. A `finally` whose first call is the C function
itself has no such gap, since Python looks at signals when a call has returned.
"""

import functools

import torch

_set_grad_enabled = torch._C._set_grad_enabled


def without_grad(function):
    """The function, run without recording gradients; as a decorator, like torch.no_grad()."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        before = torch.is_grad_enabled()
        try:
            _set_grad_enabled(False)
            return function(*args, **kwargs)
        finally:
            _set_grad_enabled(before)

    return run
