"""
The ops of model.py, written out for speed and memory, each beside its plain formula; both give the same values and gradients
(tests/test_ops.py). GPUs and the compiler have kernels for the plain formulas: `written_out` says which is used, and an op
that decides otherwise says why.
"""
import contextlib
import contextvars
import functools
import inspect
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.spans import span


plain = contextvars.ContextVar("plain", default=False)  # see plain_formulas


@contextlib.contextmanager
def plain_formulas():
    """
    While it lasts, all ops run by their plain formulas, and attention by products: slower, and with derivatives of any order.

        with ops.plain_formulas():
            loss = model(x, y)[1]
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    token = plain.set(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        plain.reset(token)


def first_order(backward):
    """Decorate a backward() without a derivative of its own: refuse one that is to be differentiated again."""
    @functools.wraps(backward)
    def checked(ctx, *grads):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # of create_graph=True
            raise RuntimeError(f"{backward.__qualname__.split('.')[0]} of engine/ops.py has first derivatives only, and "
                               f"create_graph=True asks for second ones; compute the loss within ops.plain_formulas()")
        return backward(ctx, *grads)
    return checked


def written_out(x):
    """Whether ops on x run as they are written out here, rather than by their plain formulas."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not plain.get()


def compute_dtype(x):
    """The type of matrix products with x: autocast's, if it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def rms_norm(x, w, eps):
    """x / rms(x) * w over the last dimension, in float32, returned in the type of matrix products. x: (..., D), w: (D,)."""
    return RMSNorm.apply(x, w, eps, compute_dtype(x)) if written_out(x) else rms_norm_plain(x, w, eps)


def rms_norm_plain(x, w, eps):
    """A compiler keeps of F.rms_norm x / rms(x), and sums x anew from what earlier blocks gave; spelled out, it keeps x."""
    if not torch.compiler.is_compiling():
        return F.rms_norm(x.float(), w.shape, w, eps).to(compute_dtype(x))
    scale = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()  # (..., 1)
    return (x.float() * scale * w).to(compute_dtype(x))


class RMSNorm(torch.autograd.Function):
    """
    Backward needs n = x / rms(x). The Linears that follow keep y = n w anyway, so n is computed from that, and the norm
    itself keeps one number a row. PyTorch's own gradient keeps two more tensors as large as x.
    """

    @staticmethod
    def forward(ctx, x, w, eps, dtype):
        x = x.float()
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # twenty times as fast as x.square().mean(-1)
        scale = (length.square() / len(w) + eps).rsqrt()            # (..., 1)
        y = (x * scale).mul_(w).to(dtype)
        ctx.keeps_y = dtype == torch.float32 and bool(w.all())      # else n would be inexact, or lost where w is 0
        ctx.save_for_backward(y if ctx.keeps_y else x, w, scale)
        return y

    @staticmethod
    @first_order
    def backward(ctx, dy):
        kept, w, scale = ctx.saved_tensors
        n = kept / w if ctx.keeps_y else kept * scale   # (..., D)
        dy = dy.float()
        dyn = (dy * n).flatten(0, -2)                   # (N, D)
        along = (dyn @ w).view_as(scale) / len(w)       # (..., 1), the part of dy w that lies along n
        dw = dyn.sum(0)
        dx = torch.mul(dy, w, out=dyn.view_as(dy)).sub_(n.mul_(along)).mul_(scale)  # (..., D)
        return dx, dw, None, None


def rotate(x, rope):
    """
    Rotary positions on x (B, T, H, Q), pairs (2i, 2i+1), as Meta lays them out. https://arxiv.org/abs/2104.09864
    rope: (T, Q/2, 2), cosine and sine. Without a compiler a pair is a complex number, on GPUs too: one product of those
    costs a sixth of the real ones.
    """
    if torch.compiler.is_compiling():
        return rotate_plain(x, rope)
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))  # (B, T, H, Q/2)
    return torch.view_as_real(pairs * torch.view_as_complex(rope)[:, None]).flatten(-2).type_as(x)


def rotate_plain(x, rope):
    """With the pairs (b, a) beside (a, b): to put two halves together is slower for a compiler's kernels."""
    pairs, (cos, sin) = x.float().unflatten(-1, (-1, 2)), rope[:, None].split(1, -1)  # (B, T, H, Q/2, 2), (T, 1, Q/2, 1)
    across = (pairs * torch.cat((sin, -sin), -1)).flip(-1)                             # (-b sin, a sin)
    return (pairs * cos + across).flatten(-2).type_as(x)


class Dropout(torch.nn.Dropout):
    """
    Each number of x becomes 0 with probability p, and else 1 / (1 - p) times itself. PyTorch draws a number for each on one
    thread, and a step of 160 x 2 takes 7 % longer; here 64 random bits do for four.
    """

    def forward(self, x):
        if not (self.training and self.p and written_out(x)):
            return super().forward(x)
        bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-2 ** 63, None)
        level = bits.view(torch.int16)[:x.numel()].view(x.shape)  # each number from -2^15 on is as likely
        kept = level >= min(round(self.p * 2 ** 16) - 2 ** 15, 2 ** 15 - 1)
        return x * kept.to(x.dtype).mul_(1 / (1 - self.p))


def attention(q, k, v, mask=None):
    """
    softmax(q k^T / sqrt(Q)) v. q: (B, T, H, Q); k, v: (B, S, K, Q), each for H / K heads of q -> (B, T, H Q). mask:
    (T, S) or (B, 1, T, S), what a query may see of the keys, or Documents; None: itself and all before. Its weights are never
    dropped out: no fast kernel of a CPU can do that. doc/lab/own_text.md
    """
    if isinstance(mask, Documents):
        return packed_attention(q, k, v, mask)
    heads = q.shape[2]
    if mask is not None and q.is_cuda:  # else plain products there: no kernel has both a mask and fewer keys' heads
        k, v = (z.repeat_interleave(heads // z.shape[2], 2) for z in (k, v))
    y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask,
                                       is_causal=mask is None, enable_gqa=k.shape[2] != heads)
    return y.transpose(1, 2).flatten(2)


class Documents(NamedTuple):
    """Where the parts of tokens (B, T) that see each other begin, and B T: (N + 1,) int32; none is longer than T."""
    starts: torch.Tensor
    longest: int


def documents_of(tokens, bos_id, device):
    """
    The Documents of tokens (B, T), which are in the CPU's memory, on the device: to find them there is to wait for it. None
    where no token tells where one begins.
    """
    if bos_id is None:
        return None
    first = tokens == bos_id
    first[:, 0] = True
    starts = torch.cat((first.flatten().nonzero()[:, 0], torch.tensor([tokens.numel()]))).int()
    if device.type == "cuda":
        starts = starts.pin_memory()
    return Documents(starts.to(device, non_blocking=True), tokens.shape[1])


def has_packed_attention(device, amp, width, fewer_keys):
    """
    Whether PyTorch has a kernel for the Documents of heads of this width, computed in as amp says: flash attention's.
    fewer_keys: for fewer heads of keys than of queries, which not all of its releases take.
    """
    if device.type != "cuda" or width % 8 or width > 256 or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    with amp:
        return torch.is_autocast_enabled("cuda") and {"window_size", *["enable_gqa"] * fewer_keys} <= varlen_words()


@functools.cache
def varlen_words():
    """What varlen_attn of this PyTorch can be told."""
    from torch.nn.attention.varlen import varlen_attn
    return inspect.signature(varlen_attn).parameters.keys()


def packed_attention(q, k, v, documents):
    """attention within documents without a mask: no T x T, and no products across a border."""
    from torch.nn.attention.varlen import varlen_attn  # brings the compiler along, which a CPU is spared
    (starts, longest), gqa = documents, {"enable_gqa": True} if k.shape[2] != q.shape[2] else {}
    q, k, v = (z.flatten(0, 1) for z in (q, k, v))  # (B T, H or K, Q)
    y = varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(-1, 0), **gqa)
    return y.unflatten(0, (-1, longest)).flatten(2)


def within_documents(tokens, bos_id):
    """tokens (B, T), in which a document begins at every BOS -> (B, 1, T, T): whether query t may see key s."""
    document = (tokens == bos_id).cumsum(1)  # (B, T), its number
    return (document[:, None, :, None] == document[:, None, None, :]).tril()


def swiglu(a, b):
    """silu(a) * b. a, b: (..., F)"""
    return SwiGLU.apply(a, b) if written_out(a) else swiglu_plain(a, b)


def swiglu_plain(a, b):
    return F.silu(a) * b


class SwiGLU(torch.autograd.Function):
    """
    Backward needs a and b. The Linear that follows keeps p = silu(a) b anyway, so b is computed from that. PyTorch's own
    gradient keeps b and silu(a) too.
    """

    @staticmethod
    def forward(ctx, a, b):
        p = F.silu(a).mul_(b)
        ctx.keeps_p = p.dtype == torch.float32 and bool(p.all())  # else b would be inexact, or lost where silu(a) is 0
        ctx.save_for_backward(a, p if ctx.keeps_p else b)
        return p

    @staticmethod
    @first_order
    def backward(ctx, dp):
        a, kept = ctx.saved_tensors
        s = F.silu(a)
        ds = torch.div(kept, s).mul_(dp) if ctx.keeps_p else kept * dp
        return torch.ops.aten.silu_backward(ds, a, grad_input=ds), s.mul_(dp)


def cross_entropy(x, lm_head, targets):
    """
    The mean cross entropy, in nats, of the logits z = lm_head(x); 0 without any target. x: (N, D), targets: (N,) int64,
    -1 where none. Written out on GPUs too, where no compiler is, since all logits at once may not fit.
    """
    compiled = torch.compiler.is_compiling()
    if x.is_cuda and compiled or not is_product(lm_head) or not compiled and plain.get():
        return cross_entropy_plain(x, lm_head, targets)
    return CrossEntropy.apply(x, lm_head.weight, targets, compute_dtype(x), torch.is_grad_enabled())


def cross_entropy_plain(x, lm_head, targets):
    return F.cross_entropy(lm_head(x).float(), targets, ignore_index=-1, reduction="sum") / (targets >= 0).sum().clamp(min=1)


def is_product(linear):
    """Whether calling this module is x W^T and nothing else: no other type in its place, no bias, no hook."""
    hooks = linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks
    return type(linear) is torch.nn.Linear and linear.bias is None and "forward" not in vars(linear) and not any(hooks)


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
        w = weight.to(dtype)
        most = CrossEntropy.PIECE if x.device.type == "cpu" else CrossEntropy.GPU_PIECE
        n, pieces = (targets >= 0).sum().clamp(min=1), math.ceil(len(x) * len(w) / most)
        rows = math.ceil(len(x) / pieces)  # in a piece
        buffer = torch.empty(rows, len(w), device=x.device)
        total = torch.zeros((), device=x.device)
        dx, dw = (torch.empty_like(t) if learns else t for t in (x, weight))
        for i, (h, target, dh) in enumerate(zip(x.to(dtype).split(rows), targets[:, None].split(rows), dx.split(rows))):
            z, counted, target = buffer[:len(h)], target >= 0, target.clamp(min=0)
            into(z, h, w.mT)
            top, at_target = z.amax(1, keepdim=True), z.gather(1, target)
            torch.softmax(z, 1, out=z)
            total += ((top - z.amax(1, keepdim=True).log() - at_target) * counted).sum()  # top - log p_top: log sum e^z
            if learns:
                with span("backward"):
                    dz = z.scatter_add_(1, target, -torch.ones_like(at_target)).to(dtype)
                    into(dh, dz, w).mul_(counted)
                    into(dw, dz.mT, h * counted, keep=i > 0)
        if learns:
            ctx.save_for_backward(dx, dw, n)
        return total / n

    @staticmethod
    @first_order
    def backward(ctx, grad):
        dx, dw, n = ctx.saved_tensors
        return dx.mul_(grad / n), dw.mul_(grad / n), None, None, None


def into(out, a, b, keep=False):
    """out = a b, or, to keep what is there, out += a b; for an `out` of another dtype too."""
    if out.dtype == a.dtype:
        return out.addmm_(a, b, beta=int(keep))
    return out.add_(a @ b) if keep else out.copy_(a @ b)
