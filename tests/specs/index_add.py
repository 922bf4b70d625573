from support.scatters import scatter_spec

SPEC = scatter_spec("index_add")
