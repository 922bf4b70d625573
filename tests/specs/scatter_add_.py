from support.scatters import scatter_spec

SPEC = scatter_spec("scatter_add_")
