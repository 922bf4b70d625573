from support.losses import loss_spec, weighted

SPEC = loss_spec("l1_loss", more=weighted)
