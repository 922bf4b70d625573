"""One module an op: its fake kernels, its autograd.Function, its functional and its module, if it has one."""
