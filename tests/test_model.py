"""Compare the Transformer with transformers' models, and check generation, sizes and FLOPs."""
import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from engine.training.costs import flops_per_token, num_params, parameters
from model import ModelArgs, Transformer, sample

SMALL = dict(dim=48, n_layers=3, n_heads=4, vocab_size=101, max_seq_len=64)
SHAPES = {
    "mha": SMALL,
    "gqa": SMALL | dict(n_kv_heads=2),
    "mqa": SMALL | dict(n_kv_heads=1),
    "untied": SMALL | dict(tied=False),
    "odd hidden": SMALL | dict(hidden_dim=101),
    "theta and eps": SMALL | dict(rope_theta=500000.0, norm_eps=1e-3),
    "scaling": SMALL | dict(rope_scaling=2.5),
    "head width": SMALL | dict(n_kv_heads=2, head_width=20),
    "biases": SMALL | dict(n_kv_heads=2, qkv_bias=True),
    "q and k normed": SMALL | dict(n_kv_heads=1, head_width=8, qk_norm=True),
}


def build(**sizes):
    """
    Return a model in evaluation mode in which every weight affects the output: the norms differ
    from 1, and the matrices are larger than at initialization.
    """
    torch.manual_seed(1)
    model = Transformer(ModelArgs(**sizes)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(1, 0.3) if p.dim() == 1 else p.normal_(0, 0.15)
    return model


def twin(model):
    """
    Return transformers' model with the same weights. A head of width Q stores its RoPE pairs as
    (i, i + Q/2) there, as (2i, 2i + 1) here.
    """
    a, theirs = model.args, {}
    half = torch.cat((torch.arange(0, a.head_dim, 2), torch.arange(1, a.head_dim, 2)))
    parts = {
        "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj", "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm", "tok_embeddings": "model.embed_tokens",
        "output": "lm_head", "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm"}
    for name, w in model.state_dict().items():
        if name.split(".")[-2] in ("wq", "wk", "q_norm", "k_norm"):
            w = torch.cat([head[half] for head in w.split(a.head_dim)])
        for ours, other in parts.items():
            name = name.replace(ours, other)
        theirs["model." + name if name.startswith(("layers.", "norm.")) else name] = w
    rope = {"rope_type": "default", "rope_theta": a.rope_theta}
    if a.rope_scaling != 1:
        rope = {"rope_type": "linear", "factor": a.rope_scaling, "rope_theta": a.rope_theta}
    config = (Qwen3Config if a.qk_norm else Qwen2Config if a.qkv_bias else LlamaConfig)(
        vocab_size=a.vocab_size, hidden_size=a.dim, intermediate_size=a.hidden_dim,
        num_hidden_layers=a.n_layers, num_attention_heads=a.n_heads,
        num_key_value_heads=a.n_kv_heads, head_dim=a.head_dim,
        max_position_embeddings=a.max_seq_len, rms_norm_eps=a.norm_eps, rope_parameters=rope,
        tie_word_embeddings=a.tied)
    llama = AutoModelForCausalLM.from_config(config).eval()
    llama.load_state_dict(theirs)
    return llama


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_loss_equal_transformers(shape):
    model = build(**SHAPES[shape])
    tokens = torch.randint(model.args.vocab_size, (2, model.args.max_seq_len + 1))
    x, y = tokens[:, :-1], tokens[:, 1:]
    with torch.no_grad():
        logits, loss = model(x, every=True)[0], model(x, y)[1]
        expected = twin(model)(x)
        nll = torch.nn.functional.cross_entropy(expected.logits.flatten(0, 1), y.flatten())
    assert (logits - expected.logits).abs().max() <= 1e-5 * expected.logits.abs().max()
    assert loss.item() == pytest.approx(nll.item(), rel=1e-6)


def test_gradients_equal_transformers():
    model = build(**SHAPES["gqa"])
    llama = twin(model)
    tokens = torch.randint(model.args.vocab_size, (2, 33))
    model(tokens[:, :-1], tokens[:, 1:])[1].backward()
    llama(tokens, labels=tokens).loss.backward()
    for ours, theirs in ((model.tok_embeddings, llama.model.embed_tokens),
                         (model.norm, llama.model.norm),
                         (model.layers[0].attention.wv, llama.model.layers[0].self_attn.v_proj),
                         (model.layers[1].feed_forward.w1, llama.model.layers[1].mlp.gate_proj)):
        g = theirs.weight.grad
        assert (ours.weight.grad - g).abs().max() <= 1e-5 * g.abs().max()


def test_targets_of_minus_one_do_not_count():
    model = build(**SMALL)
    x, y = torch.randint(101, (2, 2, 20))
    some = y.clone()
    some[:, 7:] = -1
    with torch.no_grad():
        logits, loss = model(x, every=True)[0], model(x, some)[1]
    kept = torch.nn.functional.cross_entropy(logits[:, :7].flatten(0, 1), y[:, :7].flatten())
    assert loss.item() == pytest.approx(kept.item(), rel=1e-6)


@pytest.mark.parametrize("shape", ["mha", "gqa", "scaling", "biases", "q and k normed"])
def test_cached_generation_equals_uncached(shape):
    model = build(**SHAPES[shape])
    tokens = torch.randint(101, (3, 5))
    expected = tokens
    with torch.no_grad():
        for _ in range(30):
            expected = torch.cat((expected, model(expected)[0][:, -1].argmax(-1, keepdim=True)),
                                 dim=1)
    assert model.generate(tokens, 30, temperature=0) == expected.tolist()


def test_cache_filled_in_pieces():
    model = build(**SHAPES["gqa"])
    x = torch.randint(101, (2, 24))
    with torch.no_grad():
        whole, cache = model(x, every=True)[0], model.new_cache(2, 24)
        for a, b in ((0, 1), (1, 9), (9, 10), (10, 24)):
            last = model(x[:, a:b], cache=cache)[0][:, -1]
            assert (last - whole[:, b - 1]).abs().max() <= 1e-5 * whole.abs().max()


def prompts_of(model, lengths):
    return [torch.randint(model.args.vocab_size, (n,)).tolist() for n in lengths]


@pytest.mark.parametrize(
    "shape", ["mha", "gqa", "scaling", "biases", "q and k normed", "llama 3 and yarn"])
def test_prompts_of_different_lengths_get_the_texts_that_they_get_alone(shape):
    """
    Greedy texts also equal those of transformers. With stop tokens, the texts end after different
    numbers of tokens.
    """
    factors = dict(n_kv_heads=2, rope_factors=(1.0, 1.5, 2.0, 4.0, 8.0, 8.0), rope_attention=1.1)
    model = build(**SMALL | factors if shape == "llama 3 and yarn" else SHAPES[shape])
    prompts = prompts_of(model, (5, 1, 17, 33, 2))
    free = model.generate(prompts, 30, temperature=0)
    assert [len(text) for text in free] == [35, 31, 47, 63, 32]
    if shape != "llama 3 and yarn":  # twin() does not support these RoPE factors
        expected = [twin(model).generate(torch.tensor([prompt]), do_sample=False,
                                         max_new_tokens=30, eos_token_id=None)
                    for prompt in prompts]
        assert free == [ids[0].tolist() for ids in expected]
    stop = free[2][17 + 6], free[4][2 + 11]
    ended = model.generate(prompts, 30, temperature=0, stop=stop)
    for prompt, text, whole in zip(prompts, ended, free):
        end = next((at for at in range(len(prompt), len(whole)) if whole[at] in stop),
                   len(whole) - 1)
        assert text == whole[:end + 1]
    assert len({len(text) - len(prompt) for prompt, text in zip(prompts, ended)}) > 1

    def draw(prompts, temperatures, seeds):
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        return model.generate(prompts, 30, temperatures, 0.9, stop, generators)

    temperatures, seeds = [0, 1.0, 0.7, 1.5, 0], range(5)
    drawn = draw(prompts, temperatures, seeds)
    assert drawn == [draw([p], t, [s])[0] for p, t, s in zip(prompts, temperatures, seeds)]
    assert drawn[0] == ended[0] and drawn[4] == ended[4] and drawn[1] != ended[1]
    assert draw(prompts[::-1], temperatures[::-1], seeds[::-1]) == drawn[::-1]


@pytest.mark.parametrize("context", [1, 3, 4, 16])
def test_prompts_of_different_lengths_slide_as_alone(context):
    """Each text slides when it fills the context; a prompt that exceeds it slides at once."""
    model = build(**SMALL | dict(max_seq_len=context))
    prompts = prompts_of(model, (1, 3, context, context + 1, 2 * context, 40))
    assert model.generate(prompts, 40, temperature=0) == [
        model.generate([p], 40, temperature=0)[0] for p in prompts]


def test_a_token_of_all_texts_takes_one_forward_pass():
    """
    Each prompt of several tokens takes one more pass, for all but its last token. A row whose text
    has ended is left out of the batch.
    """
    model = build(**SMALL)
    prompts = prompts_of(model, (5, 1, 17))
    free = model.generate(prompts, 20, temperature=0)
    seen = []
    hook = model.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
    assert model.generate(prompts, 20, temperature=0) == free
    assert seen == [(1, 4), (1, 16), *[(3, 1)] * 20]
    seen.clear()
    ended = model.generate(prompts, 20, temperature=0, stop=(free[0][5 + 3],))
    hook.remove()
    steps = [len(text) - len(prompt) for prompt, text in zip(prompts, ended)]
    assert seen[2:] == [(sum(n > step for n in steps), 1) for step in range(max(steps))]
    assert min(steps) <= 4


def test_generation_ends_at_a_stop_token_and_slides_over_long_texts():
    """
    When a text exceeds the context, 64 tokens here, the model sees the first token, the 31 latest,
    and up to 32 new ones until it slides again.
    """
    model = build(**SMALL)
    start = torch.randint(101, (2, 4))
    free = torch.tensor(model.generate(start, 150, temperature=0))
    for prompt, n in (free[:, :4], 4), (free[:, :90], 90):  # one prompt fits, the other is too long
        tokens, seen = prompt, prompt
        while n < 154:
            if seen.shape[1] > 64:
                seen = torch.cat((tokens[:, :1], tokens[:, -31:]), dim=1)
            with torch.no_grad():
                new = model(seen)[0][:, -1].argmax(-1, keepdim=True)
            tokens, seen, n = torch.cat((tokens, new), 1), torch.cat((seen, new), 1), n + 1
        assert model.generate(prompt, 154 - prompt.shape[1], temperature=0) == tokens.tolist()
    stop = free[0, 20].item()
    first = 4 + free[0, 4:].tolist().index(stop)
    assert (model.generate(start[:1], 1000, temperature=0, stop=(stop,))
            == free[:1, :first + 1].tolist())


def test_samples_are_reproducible_and_follow_the_seed():
    model = build(**SMALL)
    start = torch.randint(101, (1, 4))
    once, again, other = (model.generate(start, 40, generators=[torch.Generator().manual_seed(s)])
                          for s in (1, 1, 2))
    assert once == again != other


def test_top_p_and_temperature():
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log().repeat(20000, 1)
    generator = torch.Generator().manual_seed(0)

    def share(**how):
        return (torch.bincount(sample(logits, generator=generator, **how)[:, 0], minlength=4)
                / len(logits))

    assert torch.allclose(share(temperature=1.0, top_p=1.0), torch.tensor([0.15, 0.5, 0.05, 0.3]),
                          atol=0.02)
    assert torch.allclose(share(temperature=1.0, top_p=0.7), torch.tensor([0, 0.625, 0, 0.375]),
                          atol=0.02)
    assert torch.allclose(share(temperature=1.0, top_p=0.1), torch.tensor([0, 1.0, 0, 0]))
    sharp = torch.tensor([0.15, 0.5, 0.05, 0.3]) ** 2
    assert torch.allclose(share(temperature=0.5, top_p=1.0), sharp / sharp.sum(), atol=0.02)
    assert torch.equal(share(temperature=0, top_p=1.0), torch.tensor([0, 1.0, 0, 0]))


@pytest.mark.parametrize("shape", SHAPES)
def test_number_of_parameters(shape):
    model = build(**SHAPES[shape])
    a = model.args
    q_dim, kv_dim = a.head_dim * a.n_heads, a.head_dim * a.n_kv_heads
    layer = 2 * a.dim * q_dim + 2 * a.dim * kv_dim + 3 * a.dim * a.hidden_dim + 2 * a.dim
    layer += (2 * a.head_dim if a.qk_norm else 0) + (q_dim + 2 * kv_dim if a.qkv_bias else 0)
    expected = (1 if a.tied else 2) * a.vocab_size * a.dim + a.n_layers * layer + a.dim
    assert sum(p.numel() for p in model.parameters()) == expected == num_params(a)
    inside = {"attention": "attention.w", "feed-forward": "feed_forward", "norms": "norm",
              "embedding": "tok", "lm_head": "output"}
    for kind, name in inside.items():
        found = [p.numel() for n, p in model.named_parameters()
                 if (name in n and "bias" not in n) or (kind == "norms" and "bias" in n)]
        assert parameters(a)[kind] == sum(found), kind


def test_a_model_is_built_once_to_be_counted(monkeypatch):
    built, plain = [], ModelArgs.build
    monkeypatch.setattr(ModelArgs, "build",
                        lambda self, device: built.append(self.dim) or plain(self, device))
    for dim in 26, 26, 34, 26:  # sizes that no other test counts
        num_params(ModelArgs(dim=dim, n_heads=1))
    assert built == [26, 34]


@pytest.mark.parametrize("shape", ["mha", "gqa", "untied", "head width"])
def test_flops_per_token_against_a_count(shape):
    """
    PyTorch counts the matrix products alone. flops_per_token counts 6 FLOPs for every parameter,
    also for the norm weights, which are not part of a product; without these, the two are equal.
    """
    model = build(**SHAPES[shape])
    x = torch.randint(101, (2, model.args.max_seq_len))

    def addmm_(out, a, b, **_):  # FlopCounterMode has no formula for this operator
        return 2 * a[0] * a[1] * b[1]

    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(
            display=False, custom_mapping={torch.ops.aten.addmm_: addmm_}) as counter:
        model(x, x)[1].backward()
    norms = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert counter.get_total_flops() == x.numel() * (flops_per_token(model.args) - 6 * norms)

    targets = x.where(x % 2 == 0, -1)
    predicted = (targets >= 0).float().mean().item()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(
            display=False, custom_mapping={torch.ops.aten.addmm_: addmm_}) as counter:
        model(x, targets)[1].backward()
    assert counter.get_total_flops() == pytest.approx(
        x.numel() * (flops_per_token(model.args, predicted) - 6 * norms), rel=1e-5)


def test_initialisation():
    torch.manual_seed(0)
    model = Transformer(ModelArgs(dim=256, n_layers=8, n_heads=4, vocab_size=512, tied=False))
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert torch.equal(p, torch.ones_like(p))
        else:
            residual = name.endswith("w2.weight")
            assert p.std().item() == pytest.approx(
                0.02 / math.sqrt(16) if residual else 0.02, rel=0.02), name
            assert abs(p.mean().item()) < 1e-3, name
    tied = Transformer(ModelArgs(**SMALL))
    assert tied.output.weight is tied.tok_embeddings.weight
    for a in (layer.attention for layer in Transformer(ModelArgs(**SHAPES["gqa"])).layers):
        for head in range(4):  # each has width 12; two share a key/value head
            assert torch.equal(a.wo.weight[:, 12 * head:12 * head + 12].T,
                               a.wv.weight[head // 2 * 12:head // 2 * 12 + 12])


def test_dropout_acts_in_training_alone():
    model, x = build(**SMALL, dropout=0.5), torch.randint(101, (2, 20))
    plain = build(**SMALL)
    with torch.no_grad():
        assert torch.equal(model(x)[0], plain(x)[0])
        model.train()
        first, second = model(x)[0], model(x)[0]
    assert not torch.equal(first, second)
    plain.train()
    assert torch.equal(plain(x)[0], plain(x)[0])


def test_dropout_leaves_attention_its_fast_kernel():
    """
    The flash kernel cannot drop out attention weights; with plain products, a step of a small
    model on a CPU is a third slower.
    """
    model, x = build(**SMALL, dropout=0.5).train(), torch.randint(101, (2, 20))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        model(x, x)[1].backward()


def test_hidden_width_is_derived_as_llama2c_does():
    known = {288: 768, 512: 1376, 768: 2048}  # its published models, which have multiple_of=32
    assert {dim: ModelArgs(dim=dim).hidden_dim for dim in known} == known


@pytest.mark.parametrize("wrong, said", [
    (dict(n_layers=0), "n_layers is 0"),
    (dict(dim=-8), "dim is -8"),
    (dict(dim=50), "dim=50 over n_heads=4"),
    (dict(dim=20), "dim=20 over n_heads=4"),
    (dict(n_kv_heads=3), "n_heads=4 is not a multiple of n_kv_heads=3"),
    (dict(dropout=1.0), "dropout is 1.0"),
    (dict(dropout=-0.1), "dropout is -0.1"),
    (dict(rope_theta=0.0), "rope_theta"),
    (dict(rope_scaling=-1.0), "rope_scaling"),
    (dict(norm_eps=0.0), "norm_eps"),
    (dict(max_seq_len=0), "max_seq_len is 0"),
])
def test_impossible_sizes_are_named(wrong, said):
    assert said in ModelArgs(**(SMALL | wrong)).problem()


@pytest.mark.parametrize("shape", SHAPES)
def test_possible_sizes_have_no_problem(shape):
    assert ModelArgs(**SHAPES[shape]).problem() is None


def test_packed_documents_are_read_as_if_alone():
    """
    With bos_id set, the logits of documents in one row and the gradients of their sum equal those
    of each document alone. Recomputing activations changes no gradient.
    """
    torch.manual_seed(0)
    model = Transformer(
        ModelArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=50, max_seq_len=24))
    documents = [torch.cat((torch.tensor([1]), torch.randint(2, 50, (n,)))) for n in (7, 1, 12)]
    row = torch.cat(documents)[None]
    apart = torch.cat([model(d[None], every=True)[0] for d in documents], dim=1)
    assert not torch.allclose(model(row, every=True)[0], apart, atol=1e-3)
    model.bos_id = 1
    assert torch.allclose(model(row, every=True)[0], apart, atol=1e-5)
    target = torch.randn_like(apart)

    def gradients(logits):
        return torch.autograd.grad((logits * target).sum(), [*model.parameters()])
    for ours, alone in zip(gradients(model(row, every=True)[0]), gradients(apart)):
        assert torch.allclose(ours, alone, atol=1e-4)
    grads = []
    for recompute in (False, True):
        model.recompute = recompute
        model.zero_grad()
        model(row, row)[1].backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))
