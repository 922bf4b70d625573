"""Optimizers, drop-in for those of torch.optim: same arguments, same state_dict."""

__all__ = []
