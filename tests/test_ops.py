"""
Check the hand-written ops of engine/ops.py against their plain formulas, in values and gradients,
and that the forward of every Linear is called.
"""
import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from engine import ops
from tests.test_model import SMALL, build


def classifier(w):
    """Return an lm_head whose weight is a trainable copy of w."""
    head = nn.Linear(w.shape[1], w.shape[0], bias=False)
    head.weight = nn.Parameter(w.detach().clone())
    return head


def gradients(function, *inputs, dy=None):
    """Return [y, the gradient of each input]."""
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    y = function(*inputs)
    return [y, *torch.autograd.grad(y, inputs,
                                    torch.ones_like(y) if dy is None else dy.to(y.dtype))]


@pytest.mark.parametrize("masked", ["causal", "all alike", "each"])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_attention_of_bf32_has_float32_products(kv_heads, masked):
    """--dtype=bf32 rounds the factors of matrix products where the CPU can, but not attention's."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 64, 4, 32), torch.randn(2, 64, kv_heads, 32),
               torch.randn(2, 64, kv_heads, 32))
    mask = (torch.rand(2, 1, 64, 64) < 0.5).tril() | torch.eye(64, dtype=torch.bool)
    mask = {"causal": None, "all alike": mask[0, 0], "each": mask}[masked]
    def run():
        return gradients(lambda *heads: ops.attention(*heads, mask), q, k, v,
                         dy=torch.linspace(-1, 1, 128).expand(2, 64, 128))
    exact = run()
    torch.set_float32_matmul_precision("medium")
    rounded = run()
    with torch.no_grad():
        assert torch.equal(ops.attention(q, k, v, mask), exact[0])
    assert torch.get_float32_matmul_precision() == "medium"
    assert all(map(torch.equal, rounded, exact))
    with ops.float32_products():
        assert torch.get_float32_matmul_precision() == "highest"
    frozen = q.clone().requires_grad_()  # keys and values without gradients
    ops.attention(frozen, k, v, mask).sum().backward()
    assert frozen.grad.abs().sum() > 0
    with pytest.raises(RuntimeError):
        ops.attention(q, k[:, :, :, :8], v, mask)
    assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.parametrize("zero", [False, True], ids=["", "with zeros"])
@pytest.mark.parametrize("dtype, near", [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_written_out_ops_equal_their_plain_formulas(dtype, near, zero):
    """
    This also holds where a factor is 0 or so small that it underflows in float32, so that the other
    factor cannot be recovered from their product.
    """
    torch.manual_seed(0)
    x, w, a, b = (torch.randn(3, 5, 16), torch.randn(16), torch.randn(3, 5, 24).to(dtype),
                  torch.randn(3, 5, 24).to(dtype))
    heads, rope, dy = torch.randn(2, 5, 3, 8).to(dtype), torch.randn(5, 4, 2), torch.randn(3, 5, 16)
    rows = torch.randn(2, 5, 4, 2)  # rope for positions that differ between rows
    if zero:
        w[3], x[1, 2], a[0, 1], a[1], b[2, 1] = 0, 0, 0, -200, 0
    cases = [(lambda f: gradients(lambda x, w: f(x, w, 1e-5), x, w, dy=dy), ops.rms_norm,
              ops.rms_norm_plain),
             (lambda f: gradients(f, a, b, dy=torch.ones(3, 5, 24)), ops.swiglu, ops.swiglu_plain),
             (lambda f: gradients(lambda x: f(x, rope), heads), ops.rotate, ops.rotate_plain),
             (lambda f: gradients(lambda x: f(x, rows), heads), ops.rotate, ops.rotate_plain),
             (lambda f: gradients(lambda x: f(x, rows), heads), ops.rotate,
              lambda x, rows: torch.cat([ops.rotate(x[b:b + 1], rows[b]) for b in range(2)]))]
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        for run, written_out, plain in cases:
            for ours, theirs in zip(run(written_out), run(plain)):
                assert ours.dtype == theirs.dtype
                assert torch.allclose(ours, theirs, atol=near, rtol=near)


def test_the_norm_that_the_compiler_gets_is_pytorchs(monkeypatch):
    torch.manual_seed(0)
    x, w = torch.randn(3, 5, 16), torch.randn(16)
    # Only pretend to compile: the compiler itself takes a minute.
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.allclose(ops.rms_norm_plain(x, w, 1e-5), F.rms_norm(x, (16,), w, 1e-5), atol=1e-6)


@pytest.mark.parametrize("piece", [1, 101 * 16, 1 << 24],
                         ids=["a row at a time", "with a rest", "whole"])
@pytest.mark.parametrize("dtype, near", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_cross_entropy_equals_its_plain_formula(monkeypatch, piece, dtype, near):
    """
    Loss and gradients are equal for every size of the pieces, with ignored targets and with logits
    far from 0.
    """
    monkeypatch.setattr(ops.CrossEntropy, "PIECE", piece)
    torch.manual_seed(0)
    x, head, y = (torch.randn(70, 48, requires_grad=True), classifier(5 * torch.randn(101, 48)),
                  torch.randint(101, (70,)))
    y[::7] = -1
    with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
        ours = ops.cross_entropy(x, head, y)
    expected = ops.cross_entropy_plain(x, head, y)
    assert ours.item() == pytest.approx(
        F.cross_entropy(head(x), y, ignore_index=-1).item(), rel=near)
    inputs = (x, head.weight)
    for a, b in zip(torch.autograd.grad(0.7 * ours, inputs),
                    torch.autograd.grad(0.7 * expected, inputs)):
        assert (a - b).norm() <= 2 * near * b.norm()


def test_cross_entropy_computes_logits_only_where_there_is_a_target(monkeypatch):
    x, head, y = torch.randn(70, 48), classifier(torch.randn(101, 48)), torch.full((70,), -1)
    y[[3, 5, 69]] = 7
    rows, into = [], ops.into
    monkeypatch.setattr(
        ops, "into", lambda out, *rest, **more: rows.append(len(out)) or into(out, *rest, **more))
    with torch.no_grad():
        loss = ops.cross_entropy(x, head, y)
    assert rows == [3]
    assert loss.item() == pytest.approx(ops.cross_entropy_plain(x, head, y).item(), rel=1e-6)


def test_what_compilers_get_equals_what_is_written_out(monkeypatch):
    """
    The plain formulas give a model the same loss and gradients, and compile to one graph without
    breaks.
    """
    net, x = build(**SMALL, n_kv_heads=2), torch.randint(101, (3, 21))

    def step(f):
        loss = f(x[:, :-1], x[:, 1:])[1]
        return [loss, *torch.autograd.grad(loss, list(net.parameters()))]

    found = [step(net)]
    for name in ("rms_norm", "rotate", "swiglu", "cross_entropy"):
        monkeypatch.setattr(ops, name, getattr(ops, f"{name}_plain"))
    found += [step(net), step(torch.compile(net, backend="aot_eager", fullgraph=True))]
    for expected, *others in zip(*found):
        assert all((a - expected).norm() <= 1e-5 * expected.norm() for a in others)


def by_documents(q, k, v, starts):
    """
    Attend to packed documents one by one, as flash attention does.

    q: (B T, H, Q); k, v: (B T, K, Q); starts: positions where documents start, and the end.
    """
    parts = zip(*(z.transpose(0, 1)[None].split(starts.diff().tolist(), 2) for z in (q, k, v)))
    done = [F.scaled_dot_product_attention(*part, is_causal=True,
                                           enable_gqa=k.shape[1] != q.shape[1]) for part in parts]
    return torch.cat(done, 2)[0].transpose(0, 1)


@pytest.fixture(scope="module")
def varlen():
    """PyTorch's attention of packed documents, with CPU kernels added, which PyTorch lacks."""
    from torch.nn.attention import varlen

    def forward(q, k, v, starts_q, starts_k, max_q, max_k, is_causal=False, scale=None,
                window_size=None, *_):
        assert is_causal
        assert torch.equal(starts_q, starts_k)
        assert max_q == max_k >= starts_q.diff().max()
        assert scale is None
        y = by_documents(q, k, v, starts_q)
        return y.contiguous(), y.new_zeros(q.shape[1], len(q)), torch.zeros(2, dtype=torch.uint64)

    def backward(dy, q, k, v, out, lse, starts, *_):
        leaves = [z.detach().requires_grad_() for z in (q, k, v)]
        # Autograd is disabled inside a kernel, so another thread computes the gradients.
        with ThreadPoolExecutor() as apart:
            grads = apart.submit(lambda: torch.autograd.grad(
                by_documents(*leaves, starts), leaves, dy)).result()
        return tuple(torch.empty_like(z).copy_(grad) for z, grad in zip((q, k, v), grads))

    varlen._varlen_attn.register_kernel("cpu")(forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(backward)


def test_packed_documents_equal_the_mask(varlen, monkeypatch):
    """
    A model has the same loss and gradients; compiled, it is one graph without breaks. One row of
    tokens starts inside a document.
    """
    net, x = build(**SMALL, n_kv_heads=2), torch.randint(3, 101, (3, 21))
    x[0, ::5], x[1, 7], x[2, 3:5], net.bos_id = 1, 1, 1, 1
    documents = ops.documents_of(x[:, :-1], 1, x.device)
    assert documents.starts.tolist() == [0, 5, 10, 15, 20, 27, 40, 43, 44, 60]
    assert documents.longest == 20
    assert ops.documents_of(x, None, x.device) is None
    padded = ops.documents_of(x[:, :-1], 1, x.device, padded=True)
    assert padded.starts.tolist() == documents.starts.tolist() + [60] * 6
    # Two documents, the end, and one of padding.
    assert len(ops.documents_of(x[:2, :5], 1, x.device, padded=True).starts) == 4

    def step(f, **known):
        loss = f(x[:, :-1], x[:, 1:], **known)[1]
        return [loss, *torch.autograd.grad(loss, list(net.parameters()))]

    found = [step(net), step(net, documents=documents), step(net, documents=padded)]
    monkeypatch.setattr(ops, "cross_entropy", ops.cross_entropy_plain)
    found += [step(torch.compile(net, backend="aot_eager", fullgraph=True), documents=documents)]
    for expected, *others in zip(*found):
        assert all((a - expected).norm() <= 1e-5 * expected.norm() for a in others)


def gpu_problem():
    """Return why PyTorch's own kernel for packed documents cannot run here, or None."""
    if not torch.cuda.is_available():
        return "no GPU here"
    amp = torch.autocast("cuda", torch.bfloat16)
    there = ops.has_packed_attention(torch.device("cuda", 0), amp, 16, fewer_keys=False)
    return None if there else "PyTorch has no such kernel for this GPU"


@pytest.mark.skipif(bool(gpu_problem()), reason=gpu_problem() or "")
def test_packed_documents_equal_the_mask_on_the_gpu():
    """A model in bfloat16 has the same loss and gradients with PyTorch's kernel."""
    net, x = (build(dim=64, n_layers=2, n_heads=4, hidden_dim=96, vocab_size=101,
                    max_seq_len=256).cuda(), torch.randint(3, 101, (3, 201)))
    x[0, ::50], x[1, 7], x[2, 3:5], net.bos_id = 1, 1, 1, 1
    documents, x = ops.documents_of(x[:, :-1], 1, torch.device("cuda", 0)), x.cuda()

    def step(**known):
        with torch.autocast("cuda", torch.bfloat16):
            loss = net(x[:, :-1], x[:, 1:], **known)[1]
        return [loss, *torch.autograd.grad(loss, list(net.parameters()))]

    padded = ops.documents_of(x[:, :-1].cpu(), 1, torch.device("cuda", 0), padded=True)
    for masked, *others in zip(step(), step(documents=documents), step(documents=padded)):
        assert all((packed - masked).norm() <= 2e-2 * masked.norm() for packed in others)


def test_cross_entropy_of_the_nearly_impossible():
    """The loss of a target is exact even if its probability is too small for float32."""
    x, head = torch.eye(2), classifier(torch.tensor([[200.0, 0.0], [0.0, 0.0]]))
    assert ops.cross_entropy(x, head, torch.tensor([1, -1])).item() == 200


def test_a_batch_without_targets_has_no_loss_and_no_gradient():
    for cross_entropy in (ops.cross_entropy, ops.cross_entropy_plain):
        x, head = torch.randn(10, 8, requires_grad=True), classifier(torch.randn(20, 8))
        loss = cross_entropy(x, head, torch.full((10,), -1))
        assert loss.item() == 0
        assert not any(g.any() for g in torch.autograd.grad(loss, (x, head.weight)))


class Products(TorchDispatchMode):
    """A mode that notes the dtypes of the factors of matrix products, in-place ones included."""

    def __init__(self):
        super().__init__()
        self.types = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm,
                                       torch.ops.aten.addmm_):
            self.types.append({args[-2].dtype, args[-1].dtype})
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("context, most", [
    (torch.no_grad, 1), (torch.inference_mode, 1), (nullcontext, 3)])
def test_evaluation_makes_no_gradients(context, most):
    """
    The loss alone needs one product, that of the logits. In training, the gradients are computed
    with it, by two more.
    """
    x, head = torch.randn(10, 8, requires_grad=True), classifier(torch.randn(20, 8))
    with context(), Products() as products:
        ops.cross_entropy(x, head, torch.arange(10))
    assert len(products.types) == most


def test_the_classifier_multiplies_pieces_in_autocasts_type(monkeypatch):
    """
    Both pieces compute logits and two gradients in bfloat16; the gradient of the model's float32
    weight is float32.
    """
    monkeypatch.setattr(ops.CrossEntropy, "PIECE", 5 * 20)
    x, head = torch.randn(10, 8, requires_grad=True), classifier(torch.randn(20, 8))
    with torch.autocast("cpu", torch.bfloat16), Products() as products:
        ops.cross_entropy(x, head, torch.arange(10)).backward()
    assert products.types == [{torch.bfloat16}] * 6 and head.weight.grad.dtype == torch.float32


class LoRA(nn.Module):
    """A Linear with a low-rank addition, which alone is trained."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(0.1 * torch.randn(2, base.in_features))
        self.b = nn.Parameter(0.1 * torch.randn(base.out_features, 2))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


@pytest.mark.parametrize("recompute", [False, True])
def test_every_linear_is_called(recompute):
    """
    A forward hook of each Linear is called, and a module that replaces a Linear changes the loss
    and receives its gradients.
    """
    def linears(model):
        return [(parent, name, m) for parent in list(model.modules())
                for name, m in parent.named_children() if isinstance(m, nn.Linear)]

    model, x, called = build(**SMALL, tied=False).train(), torch.randint(101, (2, 21)), []
    model.recompute = recompute
    hooks = [m.register_forward_hook(lambda m, *_: called.append(m)) for _, _, m in linears(model)]
    before = model(x[:, :-1], x[:, 1:])[1].item()
    assert {id(m) for m in called} == {id(m) for _, _, m in linears(model)}
    assert len(hooks) == 7 * 3 + 1
    for hook in hooks:
        hook.remove()
    for parent, name, m in linears(model):
        setattr(parent, name, LoRA(m))
    found = []
    for suffix in ("", "_plain"):
        model.zero_grad()
        with pytest.MonkeyPatch.context() as patch:
            for name in ("rms_norm", "rotate", "swiglu", "cross_entropy"):
                patch.setattr(ops, name, getattr(ops, name + suffix))
            loss = model(x[:, :-1], x[:, 1:])[1]
            loss.backward()
        found.append([loss.detach(), *(p.grad for n, p in model.named_parameters()
                                       if n.endswith((".a", ".b")))])
    assert abs(found[0][0] - before) > 1e-4 and len(found[0]) == 1 + 2 * 22
    assert all(b.any() and (a - b).norm() <= 1e-4 * b.norm() for a, b in zip(*found))


def doubled(head):
    head.forward = lambda x, forward=head.forward: 2 * forward(x)


@pytest.mark.parametrize("change", [
    lambda head: head.register_forward_hook(lambda _, inputs, z: 2 * z),
    lambda head: head.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],)),
    lambda head: head.register_full_backward_hook(lambda _, dx, dz: (2 * dx[0],)),
    lambda head: head.register_full_backward_pre_hook(lambda _, dz: (2 * dz[0],)),
    doubled, lambda head: setattr(head, "bias", nn.Parameter(torch.arange(20.0)))])
def test_the_lm_head_is_called_where_it_is_more_than_a_product(change):
    torch.manual_seed(0)
    x, head, y = (torch.randn(10, 8, requires_grad=True), classifier(torch.randn(20, 8)),
                  torch.arange(10))

    def found(cross_entropy):
        loss = cross_entropy(x, head, y)
        return [loss, *torch.autograd.grad(loss, (x, head.weight))]

    before = found(ops.cross_entropy)
    change(head)
    ours, plain = found(ops.cross_entropy), found(ops.cross_entropy_plain)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain))
    assert not torch.allclose(ours[1], before[1])


def test_a_block_keeps_for_backward_what_its_linears_keep_and_no_more():
    """Its Linears' inputs, q, k, v, the gate and a few numbers per row are kept, all in float32."""
    model, kept = build(**SMALL, n_kv_heads=2), {}
    a, block = model.args, model.layers[1]
    x = torch.randn(2, 21, a.dim, requires_grad=True)

    def keep(t):
        storage = t.untyped_storage()
        kept[storage.data_ptr()] = storage  # keep it, so that its address is not reused
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        block(x, model.rope[:21])
    for p in (*model.parameters(), model.rope, x):
        kept.pop(p.untyped_storage().data_ptr(), None)
    floats = sum(storage.nbytes() for storage in kept.values()) / 4 / (2 * 21)  # per token
    few = a.n_heads + 2  # attention's sums, and one number per norm
    assert floats <= 4 * a.dim + 2 * a.n_kv_heads * a.head_dim + 2 * a.hidden_dim + few + 1


def test_a_hook_that_changes_in_place_what_backward_needs_is_refused():
    """
    A hook may replace its input. A change in place is refused, since the ops save that same tensor
    and PyTorch tracks its version.
    """
    model, x = build(**SMALL), torch.randint(101, (2, 21))
    for linear in (model.layers[1].feed_forward.w2, model.layers[1].attention.wq):
        handle = linear.register_forward_pre_hook(lambda _, inputs: (1.5 * inputs[0],))
        model(x[:, :-1], x[:, 1:])[1].backward()
        handle.remove()
        handle = linear.register_forward_pre_hook(lambda _, inputs: (inputs[0].mul_(1.5),))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(x[:, :-1], x[:, 1:])[1].backward()
        handle.remove()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.99999])
def test_dropout_is_that_of_pytorch_but_for_what_it_draws(p):
    """
    Elements are zeroed with probability p, independently of each other, and the rest are scaled by
    1 / (1 - p), gradients too. The same seed zeroes the same elements.
    """
    dropout, x, drawn = ops.Dropout(p), torch.randn(3, 7, 1001, requires_grad=True), []
    for n in range(60):
        torch.manual_seed(n)
        y = dropout(x)
        y.sum().backward()
        drawn.append(y != 0)
        assert torch.equal(y.detach(), x.detach() * x.grad)
        assert x.grad.unique().tolist() in ([0, pytest.approx(1 / (1 - p))], [0])
        x.grad = None
    torch.manual_seed(n)
    assert torch.equal(y, dropout(x))
    kept = torch.stack(drawn).float()  # (60, 3, 7, 1001)
    deviation = math.sqrt(p * (1 - p) / kept.numel())
    assert abs(kept.mean().item() - (1 - p)) < 5 * deviation
    centred = kept.flatten(1) - (1 - p)
    beside = (centred[:, 1:] * centred[:, :-1]).mean().item()
    assert abs(beside) < 5 * p * (1 - p) / math.sqrt(kept.numel())
    assert abs((centred[1:] * centred[:-1]).mean().item()) < (
        5 * p * (1 - p) / math.sqrt(kept.numel()))
    assert torch.equal(dropout.eval()(x), x)
    assert torch.equal(ops.Dropout(0.0)(x), x)
    assert ops.Dropout(p)(x.bfloat16()).dtype == torch.bfloat16


def test_second_derivatives_are_refused_by_name_and_right_by_plain_formulas():
    """
    With plain formulas, the gradient of the squared length of the gradient agrees with a finite
    difference. The hand-written ops raise an error that names them.
    """
    model = build(**SMALL)
    x = torch.randint(model.args.vocab_size, (2, 6))

    def penalty():
        grads = torch.autograd.grad(model(x, x)[1], list(model.parameters()), create_graph=True)
        return sum(g.square().sum() for g in grads)

    for op, call in [
        ("RMSNorm", lambda x: ops.rms_norm(x, torch.ones(8), 1e-5)),
        ("SwiGLU", lambda x: ops.swiglu(x, x)),
        ("CrossEntropy", lambda x: ops.cross_entropy(
            x, classifier(torch.randn(5, 8)), torch.arange(3)))
    ]:
        z = torch.randn(3, 8, requires_grad=True)
        with pytest.raises(RuntimeError, match=f"^{op} of engine/ops.py has first derivatives only"
                                               ".*ops.plain_formulas"):
            torch.autograd.grad(call(z).sum(), z, create_graph=True)
        with ops.plain_formulas():
            y = call(z).sum()
        (dz,) = torch.autograd.grad(y, z, create_graph=True)
        assert torch.autograd.grad(dz.square().sum(), z)[0].isfinite().all()
    with pytest.raises(RuntimeError, match="of engine/ops.py has first derivatives only"):
        penalty()
    with ops.plain_formulas():
        ours = penalty()
        ours.backward()
    slopes = torch.cat([p.grad.flatten() for p in model.parameters()])
    step, moved = 1e-2 * slopes / slopes.norm(), []
    for sign in (1, -2):  # one step along the gradient, then to the same distance on the other side
        at = 0
        for p in model.parameters():
            p.data += sign * step[at:at + p.numel()].view_as(p)
            at += p.numel()
        with ops.plain_formulas():
            moved.append(penalty().item())
    assert (moved[0] - moved[1]) / 2e-2 == pytest.approx(slopes.norm().item(), rel=0.02)
    assert ops.written_out(x)
