"""
What model.py says, written out for speed and memory, each op beside its plain formula. Both give the same values and
gradients (tests/test_ops.py). written_out(x) says which is used.
"""
import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks


def written_out(x):
    """The compiler makes kernels of the plain formulas for GPUs; all else takes what is written out."""
    return not (torch.compiler.is_compiling() and x.is_cuda)


def on_cpu(x):
    return x.device.type == "cpu"


def compute_dtype(x):
    """The type of matrix products with x: autocast's, if it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


# A Linear keeps its input for backward. Some inputs are soon computed again from what is kept anyway: their memory is saved.
LARGE = 1 << 18  # elements of x from which this is worth the time of the hooks


def recomputable(y, compute):
    """y, which compute() gives again."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        y.recompute = compute, y._version
    return y


def saving_memory(x):
    """A context in which backward does not keep recomputable tensors as large as x but computes them again."""
    forgetful = torch.is_grad_enabled() and not torch.compiler.is_compiling() and x.numel() >= LARGE
    return saved_tensors_hooks(forget, remember) if forgetful else nullcontext()


def forget(saved):
    y = saved if saved._base is None else saved._base  # a Linear keeps a view of its input
    compute, version = getattr(y, "recompute", (None, 0))
    unchanged = saved._version == version and saved.shape[-1] == y.shape[-1] and saved.numel() == y.numel()
    return (compute, saved.shape) if compute and unchanged and saved.is_contiguous() else saved


def remember(kept):
    return kept[0]().view(kept[1]) if isinstance(kept, tuple) else kept


def rms_norm(x, w, eps):
    """x / rms(x) * w over the last dimension, in float32, handed on in the type of matrix products. x: (..., D), w: (D,)."""
    if not written_out(x) or not on_cpu(x):  # GPUs have a kernel of their own for the formula
        return rms_norm_plain(x, w, eps)
    dtype = compute_dtype(x)
    y, scale = RMSNorm.apply(x, w, eps, dtype)
    return recomputable(y, lambda: (x.detach().float() * scale).mul_(w.detach()).to(dtype))


def rms_norm_plain(x, w, eps):
    return F.rms_norm(x.float(), w.shape, w, eps).to(compute_dtype(x))


class RMSNorm(torch.autograd.Function):
    """Backward needs x and one number a row. What PyTorch derives by itself keeps four more copies of x and reads them."""

    @staticmethod
    def forward(ctx, x, w, eps, dtype):
        """-> y in dtype, and 1 / rms(x) (..., 1)"""
        x = x.float()
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # twenty times as fast as x.square().mean(-1)
        scale = (length.square() / len(w) + eps).rsqrt()            # (..., 1)
        ctx.save_for_backward(x, w, scale)
        ctx.mark_non_differentiable(scale)
        return (x * scale).mul_(w).to(dtype), scale

    @staticmethod
    def backward(ctx, dy, _):
        x, w, scale = ctx.saved_tensors
        dy, n = dy.float(), x * scale                   # (..., D)
        dyn = (dy * n).flatten(0, -2)                   # (N, D)
        along = (dyn @ w).view_as(scale) / len(w)       # (..., 1), the part of dy w that lies along n
        dw = dyn.sum(0)
        dx = torch.mul(dy, w, out=dyn.view_as(dy)).sub_(n.mul_(along)).mul_(scale)  # (..., D)
        return dx, dw, None, None


def rotate(x, rope):
    """
    Rotary positions on x (B, T, H, Q), pairs (2i, 2i+1), as Meta lays them out. https://arxiv.org/abs/2104.09864
    rope: (T, Q/2, 2), cosine and sine. A pair is a complex number: one product of those costs a sixth of the real ones.
    """
    if not written_out(x):
        return rotate_plain(x, rope)
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))  # (B, T, H, Q/2)
    return torch.view_as_real(pairs * torch.view_as_complex(rope)[:, None]).flatten(-2).type_as(x)


def rotate_plain(x, rope):
    (a, b), (cos, sin) = x.float().unflatten(-1, (-1, 2)).unbind(-1), rope[:, None].unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).type_as(x)


def swiglu(a, b):
    """silu(a) * b. a, b: (..., F)"""
    if not written_out(a):
        return swiglu_plain(a, b)
    return recomputable(SwiGLU.apply(a, b), lambda: F.silu(a.detach()).mul_(b.detach()))


def swiglu_plain(a, b):
    return F.silu(a) * b


class SwiGLU(torch.autograd.Function):
    """Backward keeps a and b alone: silu(a) would fill as much memory as either."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return F.silu(a).mul_(b)

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        return torch.ops.aten.silu_backward(dy * b, a), F.silu(a).mul_(dy)


def cross_entropy(x, lm_head, targets):
    """
    The mean cross entropy, in nats, of the logits z = lm_head(x); 0 without any target. x: (N, D), targets: (N,) int64,
    -1 where none.
    """
    if not written_out(x) or not is_product(lm_head):
        return cross_entropy_plain(x, lm_head, targets)
    return CrossEntropy.apply(x, lm_head.weight, targets, compute_dtype(x), torch.is_grad_enabled())


def cross_entropy_plain(x, lm_head, targets):
    return F.cross_entropy(lm_head(x).float(), targets, ignore_index=-1, reduction="sum") / (targets >= 0).sum().clamp(min=1)


def is_product(linear):
    """Whether calling this module is x W^T and nothing else: no LoRA or another type in its place, no hook on it."""
    hooks = linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks
    return type(linear) is torch.nn.Linear and linear.bias is None and not any(hooks)


class CrossEntropy(torch.autograd.Function):
    """
    The logits of a large vocabulary outweigh all else in memory, so they come and go a piece of the batch at a time.
    The gradients are made with them, since dloss/dz is softmax(z) less 1 at the target: nothing is computed twice.
    """
    PIECE, GPU_PIECE = 1 << 24, 1 << 27  # logits in memory at once

    @staticmethod
    def forward(ctx, x, weight, targets, dtype, learns):
        """
        dtype: of the matrix products; softmax and sums are in float32. learns: whether gradients are wanted, which ctx
        does not know: its needs_input_grad is true under no_grad too.
        """
        h, w = x.to(dtype), weight.to(dtype)
        most = CrossEntropy.PIECE if on_cpu(x) else CrossEntropy.GPU_PIECE
        n, pieces = (targets >= 0).sum().clamp(min=1), math.ceil(len(x) * len(w) / most)
        rows = math.ceil(len(x) / pieces)  # in a piece
        buffer = torch.empty(rows, len(w), device=x.device)
        total = torch.zeros((), device=x.device)
        dx, dw = (torch.empty_like(t) if learns else t for t in (x, weight))
        for i, (h, target, dh) in enumerate(zip(h.split(rows), targets[:, None].split(rows), dx.split(rows))):
            z, counted, target = buffer[:len(h)], target >= 0, target.clamp(min=0)
            into(z, h, w.mT)
            top, at_target = z.amax(1, keepdim=True), z.gather(1, target)
            torch.softmax(z, 1, out=z)
            total += ((top - z.amax(1, keepdim=True).log() - at_target) * counted).sum()  # top - log p_top: log sum e^z
            if learns:
                dz = z.scatter_add_(1, target, -torch.ones_like(at_target)).to(dtype)
                into(dh, dz, w).mul_(counted)
                into(dw, dz.mT, h * counted, keep=i > 0)
        if learns:
            ctx.save_for_backward(dx, dw, n)
        return total / n

    @staticmethod
    def backward(ctx, grad):
        dx, dw, n = ctx.saved_tensors
        return dx.mul_(grad / n), dw.mul_(grad / n), None, None, None


def into(out, a, b, keep=False):
    """out = a b, or, to keep what is there, out += a b; for an `out` of another dtype too."""
    if out.dtype == a.dtype:
        return out.addmm_(a, b, beta=int(keep))
    return out.add_(a @ b) if keep else out.copy_(a @ b)
