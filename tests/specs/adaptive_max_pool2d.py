from support.adaptive_pools import adaptive_spec

SPEC = adaptive_spec("adaptive_max_pool2d", values=lambda make, *shape: make.distinct(*shape), returns_indices=True)
