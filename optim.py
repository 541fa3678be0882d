"""
AdamW with decoupled weight decay on the matrices only: norms' scales are not decayed. https://arxiv.org/abs/1711.05101
"""
import torch


def make_optimizer(model, learning_rate, weight_decay, beta1, beta2):
    """The optimizer of the model's parameters, in two groups: matrices (decayed) and vectors (not)."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2), fused=params[0].device.type != "mps")
