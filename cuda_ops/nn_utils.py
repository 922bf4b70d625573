"""cuda_ops.nn.utils: drop-ins for torch.nn.utils."""

from .ops.clip_grad_norm import clip_grad_norm_

__all__ = ["clip_grad_norm_"]
