"""The ops as modules, drop-in for those of torch.nn: same constructor arguments, repr and state_dict."""

__all__ = []
