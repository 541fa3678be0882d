"""
The ops of model.py, written out for speed and memory on CPUs, each beside its plain formula
(NAME_plain). Both compute the same values and gradients; tests/test_ops.py compares them. GPUs and
the compiler have fast kernels for the plain formulas, so `written_out` selects by device; an op
that selects otherwise documents why.

Shapes: B batch, T queries, S keys, H heads, K heads of keys and values, Q width of a head, D width
of the model, F width of the feed-forward, N rows, V vocabulary.
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

plain = contextvars.ContextVar("plain", default=False)  # True inside plain_formulas()


@contextlib.contextmanager
def plain_formulas():
    """
    Run all ops inside the block by formulas that PyTorch can differentiate to any order, and
    attention as matrix products; this is slower.

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
    """Decorate a backward() that autograd cannot differentiate: raise RuntimeError if asked to."""
    @functools.wraps(backward)
    def checked(ctx, *grads):
        # create_graph=True enables gradients during backward.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            op = backward.__qualname__.split(".")[0]
            raise RuntimeError(
                f"{op} of engine/ops.py has first derivatives only, and create_graph=True asks for "
                "second ones; compute the loss within ops.plain_formulas()")
        return backward(ctx, *grads)
    return checked


def written_out(x):
    """Return whether ops on x run as written out here, instead of by their plain formulas."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not plain.get()


def compute_dtype(x):
    """Return the dtype of matrix products with x: autocast's if it is enabled, else x's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def rms_norm(x, w, eps):
    """
    Return x / rms(x) * w, computed in float32 over the last dimension, in the dtype of matrix
    products. x: (..., D), w: (D,).
    """
    if written_out(x):
        return RMSNorm.apply(x, w, eps, compute_dtype(x))
    return rms_norm_plain(x, w, eps)


def rms_norm_plain(x, w, eps):
    """
    Compute rms_norm by its formula. It is spelled out for the compiler, which then saves x for
    backward. For F.rms_norm it would save x / rms(x) instead, and backward would have to add up the
    outputs of earlier blocks to get x again.
    """
    if not torch.compiler.is_compiling():
        return F.rms_norm(x.float(), w.shape, w, eps).to(compute_dtype(x))
    scale = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()  # (..., 1)
    return (x.float() * scale * w).to(compute_dtype(x))


class RMSNorm(torch.autograd.Function):
    """
    rms_norm with less memory: PyTorch's own saves two more tensors of the size of x for backward.

    backward needs n = x / rms(x). The Linears that follow save y = n w for their own backward
    anyway, so n is recomputed as y / w, and the norm adds only one number per row.
    """

    @staticmethod
    def forward(ctx, x, w, eps, dtype):
        x = x.float()
        # vector_norm is twenty times as fast as x.square().mean(-1).
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # (..., 1)
        scale = (norm.square() / len(w) + eps).rsqrt()            # (..., 1), 1 / rms(x)
        y = (x * scale).mul_(w).to(dtype)
        # Save x instead where y / w would be inexact (low precision) or undefined (w is 0).
        ctx.keeps_y = dtype == torch.float32 and bool(w.all())
        ctx.save_for_backward(y if ctx.keeps_y else x, w, scale)
        return y

    @staticmethod
    @first_order
    def backward(ctx, dy):
        saved, w, scale = ctx.saved_tensors
        n = saved / w if ctx.keeps_y else saved * scale  # (..., D)
        dy = dy.float()
        dyn = (dy * n).flatten(0, -2)                    # (N, D)
        along = (dyn @ w).view_as(scale) / len(w)        # (..., 1), the component of dy w along n
        dw = dyn.sum(0)
        # dx = (dy w - n along) scale, computed in the memory of dyn
        dx = torch.mul(dy, w, out=dyn.view_as(dy)).sub_(n.mul_(along)).mul_(scale)  # (..., D)
        return dx, dw, None, None


def rotate(x, rope):
    """
    Return x (B, T, H, Q) with rotary positions: each pair (2i, 2i+1), Meta's layout, is rotated by
    the angle whose cosine and sine are in rope, (T, Q/2, 2) or, where the rows have other
    positions, (B, T, Q/2, 2). https://arxiv.org/abs/2104.09864

    Without a compiler a pair is treated as a complex number, on GPUs and in plain_formulas() too:
    one complex product takes a sixth of the time of the real products in rotate_plain, and can be
    differentiated to any order.
    """
    if torch.compiler.is_compiling():
        return rotate_plain(x, rope)
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))  # (B, T, H, Q/2)
    turns = torch.view_as_complex(rope).unsqueeze(-2)  # (..., T, 1, Q/2)
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


def rotate_plain(x, rope):
    """
    Compute rotate by its formula. It flips pairs (a, b) to (b, a), because concatenating two halves
    is slower in the compiler's kernels.
    """
    pairs = x.float().unflatten(-1, (-1, 2))                # (B, T, H, Q/2, 2)
    cos, sin = rope.unsqueeze(-3).split(1, -1)              # (..., T, 1, Q/2, 1) each
    across = (pairs * torch.cat((sin, -sin), -1)).flip(-1)  # (-b sin, a sin)
    return (pairs * cos + across).flatten(-2).type_as(x)


class Dropout(torch.nn.Dropout):
    """
    Dropout: zero each element with probability p and scale the rest by 1 / (1 - p).

    On CPUs, 64 random bits decide on four elements. PyTorch draws a number for each element on one
    thread, with which a training step of a model with 2 layers of width 160 takes 7 % longer.
    """

    def forward(self, x):
        if not (self.training and self.p and written_out(x)):
            return super().forward(x)
        bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-2 ** 63, None)
        level = bits.view(torch.int16)[:x.numel()].view(x.shape)  # uniform in [-2^15, 2^15)
        # Zero the lowest fraction p of the levels. A threshold of 2^15 would wrap around in int16.
        threshold = min(round(self.p * 2 ** 16) - 2 ** 15, 2 ** 15 - 1)
        kept = level >= threshold
        return x * kept.to(x.dtype).mul_(1 / (1 - self.p))


def attention(q, k, v, mask=None):
    """
    Return softmax(q k^T / sqrt(Q)) v as (B, T, H Q). q: (B, T, H, Q); k, v: (B, S, K, Q), where
    each head serves H / K heads of q.

    mask: Documents, or bool (T, S) or (B, 1, T, S) that is True where a query sees a key; None:
    causal. There is no dropout of attention weights, since no fast CPU kernel supports it
    (doc/lab/own_text.md).
    """
    if isinstance(mask, Documents):
        return packed_attention(q, k, v, mask)
    heads = q.shape[2]
    if mask is not None and q.is_cuda:
        # No CUDA kernel takes both a mask and K < H; PyTorch would fall back to matrix products.
        k, v = (z.repeat_interleave(heads // z.shape[2], 2) for z in (k, v))
    q, k, v = (z.transpose(1, 2) for z in (q, k, v))  # (B, H or K, T or S, Q)
    if written_out(q) and torch.get_float32_matmul_precision() == "medium":
        y = Float32Attention.apply(q, k, v, mask)  # --dtype=bf32 would round the factors
    else:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None,
                                           enable_gqa=k.shape[1] != heads)
    return y.transpose(1, 2).flatten(2)


class Float32Attention(torch.autograd.Function):
    """
    PyTorch's attention for CPUs, with float32 matrix products in both passes even under
    --dtype=bf32. Its tiles are so small that rounding the factors takes longer than it saves
    (doc/lab/train_speed.md).

    q: (B, H, T, Q); k, v: (B, K, S, Q), where K may be less than H; mask: bool (T, S) or
    (B, 1, T, S), or None for causal.
    """

    @staticmethod
    def forward(ctx, q, k, v, mask):
        ctx.is_causal = mask is None
        bias = None  # added to the scores
        if mask is not None:
            bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -math.inf)
        with float32_products():
            y, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, ctx.is_causal, attn_mask=bias)
        ctx.save_for_backward(q, k, v, y, log_sums, bias)
        return y

    @staticmethod
    @first_order
    def backward(ctx, grad):
        *saved, bias = ctx.saved_tensors
        with float32_products():
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, *saved, 0.0, ctx.is_causal, attn_mask=bias)
        return *grads, None


@contextlib.contextmanager
def float32_products():
    """
    Under --dtype=bf32: compute matrix products inside the block with float32 factors. The setting
    is process-wide, so it also applies to the products of other threads meanwhile.
    """
    rounds = torch.get_float32_matmul_precision() == "medium"
    if rounds:
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if rounds:
            torch.set_float32_matmul_precision("medium")


class Documents(NamedTuple):
    """
    Document boundaries in flattened tokens (B, T); attention stays within a document. Each row
    begins a new document.
    """
    starts: torch.Tensor  # (documents + 1,) int32: index of each document's first token, then B T,
                          # repeated if empty documents pad it
    longest: int          # upper bound of a document's length in tokens: T


def documents_of(tokens, bos_id, device, padded=False):
    """
    Return the Documents of tokens (B, T), on the device; None if bos_id is None. The tokens are in
    CPU memory, because searching them on a GPU would make the CPU wait for it.

    padded: append empty documents until the length of `starts` is a power of two. A CUDA graph is
    recorded for each length, so there should be few.
    """
    if bos_id is None:
        return None
    first = tokens == bos_id
    first[:, 0] = True
    starts = torch.cat((first.flatten().nonzero()[:, 0], torch.tensor([tokens.numel()]))).int()
    if padded:
        more = (1 << (len(starts) - 1).bit_length()) - len(starts)
        starts = F.pad(starts, (0, more), value=tokens.numel())
    if device.type == "cuda":
        starts = starts.pin_memory()
    return Documents(starts.to(device, non_blocking=True), tokens.shape[1])


def has_packed_attention(device, amp, width, fewer_keys):
    """
    Return whether PyTorch's flash attention can run packed_attention.

    amp: autocast context of the forward pass. width: Q. fewer_keys: whether K < H, which only some
    releases of PyTorch support.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    if width % 8 or width > 256:
        return False
    with amp:
        needed = {"window_size", "enable_gqa"} if fewer_keys else {"window_size"}
        return torch.is_autocast_enabled("cuda") and needed <= varlen_parameters()


@functools.cache
def varlen_parameters():
    """Return the names of the parameters of this PyTorch's varlen_attn."""
    from torch.nn.attention.varlen import varlen_attn
    return inspect.signature(varlen_attn).parameters.keys()


def packed_attention(q, k, v, documents):
    """Return attention() within Documents, without a T x T mask or products across borders."""
    from torch.nn.attention.varlen import varlen_attn  # here: it imports the compiler
    starts, longest = documents
    gqa = {"enable_gqa": True} if k.shape[2] != q.shape[2] else {}
    q, k, v = (z.flatten(0, 1) for z in (q, k, v))  # (B T, H or K, Q)
    y = varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(-1, 0), **gqa)
    return y.unflatten(0, (-1, longest)).flatten(2)


def within_documents(tokens, bos_id):
    """
    Return the causal mask within documents: (B, 1, T, T), True where query t sees key s. A document
    begins at every BOS of tokens (B, T).
    """
    document = (tokens == bos_id).cumsum(1)  # (B, T), number of the document within its row
    return (document[:, None, :, None] == document[:, None, None, :]).tril()


def swiglu(a, b):
    """Return silu(a) * b. a, b: (..., F)."""
    return SwiGLU.apply(a, b) if written_out(a) else swiglu_plain(a, b)


def swiglu_plain(a, b):
    return F.silu(a) * b


class SwiGLU(torch.autograd.Function):
    """
    swiglu with less memory: PyTorch's own saves b and silu(a) for backward in addition to a.

    backward needs a and b. The Linear that follows saves p = silu(a) b for its own backward anyway,
    so b is recomputed as p / silu(a).
    """

    @staticmethod
    def forward(ctx, a, b):
        p = F.silu(a).mul_(b)
        # Save b instead where p / silu(a) would be inexact (low precision) or undefined (0 / 0).
        ctx.keeps_p = p.dtype == torch.float32 and bool(p.all())
        ctx.save_for_backward(a, p if ctx.keeps_p else b)
        return p

    @staticmethod
    @first_order
    def backward(ctx, dp):
        a, saved = ctx.saved_tensors
        s = F.silu(a)
        ds = torch.div(saved, s).mul_(dp) if ctx.keeps_p else saved * dp
        return torch.ops.aten.silu_backward(ds, a, grad_input=ds), s.mul_(dp)


def cross_entropy(x, lm_head, targets):
    """
    Return the mean cross-entropy of the logits lm_head(x), in nats; 0 if no row has a target.
    x: (N, D); targets: (N,) int64, negative where a row has none.

    All logits at once may not fit in memory. So the plain formula, which needs them, runs only
    when compiled for GPUs, uncompiled within plain_formulas(), or with an lm_head that computes
    more than a product (the written-out form takes only its weight).
    """
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        # Skip the rows without a target, most of the rows of conversations. Not on a GPU, where
        # finding them would make the CPU wait.
        with_target = (targets >= 0).nonzero()[:, 0]
        if 0 < len(with_target) < len(targets):
            x, targets = x.index_select(0, with_target), targets[with_target]
    use_plain = x.is_cuda if torch.compiler.is_compiling() else plain.get()
    if use_plain or not is_product(lm_head):
        return cross_entropy_plain(x, lm_head, targets)
    dtype = compute_dtype(x)
    is_frozen = hasattr(lm_head, "rows")
    weight, new_rows = lm_head.rows(dtype) if is_frozen else (lm_head.weight, None)
    return CrossEntropy.apply(x, weight, new_rows, targets, dtype, torch.is_grad_enabled())


def cross_entropy_plain(x, lm_head, targets):
    total = F.cross_entropy(lm_head(x).float(), targets.clamp(min=-1), ignore_index=-1,
                            reduction="sum")
    return total / (targets >= 0).sum().clamp(min=1)


def is_product(linear):
    """
    Return whether a call of this module computes x W^T only: an nn.Linear without bias, or LoRA's
    frozen classifier, and no hooks.
    """
    if type(linear) is torch.nn.Linear:
        if linear.bias is not None or "forward" in vars(linear):
            return False
    elif not hasattr(linear, "rows"):
        return False
    return not any((linear._forward_hooks, linear._forward_pre_hooks,
                    linear._backward_hooks, linear._backward_pre_hooks))


class CrossEntropy(torch.autograd.Function):
    """
    cross_entropy with less memory: the logits z of a large vocabulary would take more memory than
    everything else, so they are computed for a chunk of the rows at a time. forward also computes
    the gradients, since it has the logits: dloss/dz is softmax(z), minus 1 at the target. backward
    only scales them.
    """
    PIECE, GPU_PIECE = 1 << 24, 1 << 27  # max number of logits at once, on CPU and on GPU

    @staticmethod
    def forward(ctx, x, weight, new_rows, targets, dtype, needs_grad):
        """
        x: (N, D); weight: (V, D); targets: (N,). new_rows: None, or the rows (n, D) of the
        vocabulary's last n tokens; weight is then (V - n, D). dtype: of the matrix products;
        softmax and sums are float32. needs_grad: whether to compute gradients, too; the caller
        decides, as ctx.needs_input_grad is True even under no_grad. A frozen weight gets no
        gradient.
        """
        w = weight.to(dtype)
        if new_rows is not None:
            w = torch.cat((w, new_rows.to(dtype)))
        trained = weight if new_rows is None else new_rows
        is_trained = needs_grad and trained.requires_grad
        max_logits = CrossEntropy.PIECE if x.device.type == "cpu" else CrossEntropy.GPU_PIECE
        pieces = math.ceil(len(x) * len(w) / max_logits)
        rows = math.ceil(len(x) / pieces)
        buffer = torch.empty(rows, len(w), device=x.device)
        total = torch.zeros((), device=x.device)
        # Without gradients, dx is never written: x is a placeholder for it.
        dx = torch.empty_like(x) if needs_grad else x
        dw = torch.empty_like(trained) if is_trained else None
        parts = zip(x.to(dtype).split(rows), targets[:, None].split(rows), dx.split(rows))
        for i, (h, target, dh) in enumerate(parts):  # (rows, D), (rows, 1), (rows, D)
            z = buffer[:len(h)]  # logits, then their softmax, then their gradients
            counted, target = target >= 0, target.clamp(min=0)
            into(z, h, w.mT)
            top, at_target = z.amax(1, keepdim=True), z.gather(1, target)
            torch.softmax(z, 1, out=z)
            # The row's largest softmax is exp(top) / sum(exp(z)); solve for log(sum(exp(z))).
            log_sum = top - z.amax(1, keepdim=True).log()
            total += ((log_sum - at_target) * counted).sum()
            if needs_grad:
                with span("backward"):
                    dz = z.scatter_add_(1, target, -torch.ones_like(at_target)).to(dtype)
                    into(dh, dz, w).mul_(counted)
                    if is_trained:
                        into(dw, dz[:, -len(dw):].mT, h * counted, add=i > 0)
        n = (targets >= 0).sum().clamp(min=1)
        if needs_grad:
            ctx.save_for_backward(dx, dw, n)
            ctx.has_new_rows = new_rows is not None
        return total / n

    @staticmethod
    @first_order
    def backward(ctx, grad):
        dx, dw, n = ctx.saved_tensors
        dw = dw.mul_(grad / n) if dw is not None else None
        of_weights = (None, dw) if ctx.has_new_rows else (dw, None)
        return dx.mul_(grad / n), *of_weights, None, None, None


def into(out, a, b, add=False):
    """Write the matrix product a b to `out`, of any dtype, or add it there. Return `out`."""
    if out.dtype == a.dtype:
        return out.addmm_(a, b, beta=int(add))
    return out.add_(a @ b) if add else out.copy_(a @ b)
