"""Attention heads that begin by attending to a fixed distance, checked in transformers."""
import pytest
import torch

from engine.training import bigrams, previous_tokens
from model import ModelArgs
from tests.test_bigrams import markov_chain
from tests.test_model import twin
from tests.test_train import losses, ranks, run, weights

WIDE = dict(dim=128, n_layers=2, n_heads=4, vocab_size=300, max_seq_len=96)
# Name: (model sizes, distance of each head of the first block). None: the head stays random.
SHAPES = {"four heads": (WIDE, [1, 2, None, None]),
          "two heads": (WIDE | {"n_heads": 2}, [1, 2]),
          "one head": (WIDE | {"n_heads": 1}, [1]),
          "eight heads": (WIDE | {"n_heads": 8}, [1, 2, 3, 4, None, None, None, None]),
          "twelve heads": (WIDE | {"dim": 192, "n_heads": 12}, [1, 2, 3, 4, *8 * [None]]),
          "groups": (WIDE | {"n_heads": 6, "n_kv_heads": 3, "dim": 192},
                     [1, None, 2, None, 3, None]),
          "one head of keys": (WIDE | {"n_heads": 4, "n_kv_heads": 1}, [1, 2, None, None]),
          "biases": (WIDE | {"qkv_bias": True, "n_heads": 8, "n_kv_heads": 4, "rope_theta": 50.0},
                     [1, None, 2, None, 3, None, 4, None]),
          "a long context": (WIDE | {"max_seq_len": 512, "rope_theta": 5e5}, [1, 2, None, None]),
          "two tables": (WIDE | {"tied": False}, [1, 2, None, None])}


def attention_of(model, tokens):
    """Return the attention (H, T, S) of the first block in transformers, for tokens (T,)."""
    llama = twin(model)
    llama.set_attn_implementation("eager")
    with torch.no_grad():
        return llama(tokens[None], output_attentions=True).attentions[0][0]


def check(model, tokens, distances):
    """Check that each head with a distance attends to it, and each other head to many positions."""
    attention = attention_of(model, tokens)
    for head, distance in enumerate(distances):
        if distance:
            at_distance = attention[head].diagonal(-distance)
            assert at_distance.min() > 0.05 and at_distance.mean() > 0.65, (head, distance)
        else:
            assert attention[head, 50].max() < 0.15, head


@pytest.mark.parametrize("shape", SHAPES)
def test_heads_attend_to_their_distance(shape):
    sizes, distances = SHAPES[shape]
    torch.manual_seed(1)
    model = ModelArgs(**sizes).build()
    previous_tokens.start_heads(model, rows_are_random=True)
    check(model, torch.randint(300, (model.args.max_seq_len,)), distances)


def test_with_rows_that_begin_with_counts():
    tokens = markov_chain(300, 60_000)
    torch.manual_seed(1)
    model = ModelArgs(**WIDE, tied=False).build()
    bigrams.start_tables(model, tokens)
    rows = model.tok_embeddings.weight.clone()
    previous_tokens.start_heads(model, rows_are_random=False)
    assert torch.equal(model.tok_embeddings.weight, rows)
    check(model, torch.from_numpy(tokens[:96].astype(int)), [1, 2, None, None])


@pytest.mark.parametrize("n_heads", [1, 2, 3])
def test_few_heads_begin_at_random_beside_rows_that_begin_with_counts(n_heads):
    torch.manual_seed(1)
    model = ModelArgs(**WIDE | {"dim": 96, "n_heads": n_heads}, tied=False).build()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    previous_tokens.start_heads(model, rows_are_random=False)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_what_is_added_to_the_rows_of_a_shared_table_changes_no_probability():
    torch.manual_seed(1)
    model = ModelArgs(**WIDE).build()
    before = model.tok_embeddings.weight.detach().clone()
    previous_tokens.start_heads(model, rows_are_random=True)
    after, x = model.output.weight.detach(), torch.randn(10, 128)
    assert (after - before).norm() > before.norm() / 2
    assert torch.allclose((x @ before.T).softmax(1), (x @ after.T).softmax(1), atol=1e-6)


def test_a_context_of_one_token_and_of_two():
    """The weights stay random if the context has no earlier token, and change if it has one."""
    for context, begin in ((1, False), (2, True)):
        torch.manual_seed(1)
        model = ModelArgs(**WIDE | {"max_seq_len": context}).build()
        before = model.layers[0].attention.wq.weight.detach().clone()
        previous_tokens.start_heads(model, rows_are_random=True)
        assert torch.equal(before, model.layers[0].attention.wq.weight) != begin


def test_a_training_begins_so(tmp_path):
    """Two processes begin with the weights of one; a resumed run keeps its own weights."""
    text = " ".join(f"{n} and {n}, then {n * n}." for n in range(3000))
    (tmp_path / "my.txt").write_text(text)
    words = ["--data=my.txt", "--max_iters=4", "--eval_interval=2", "--eval_iters=0",
             "--schedule=constant"]
    assert run(tmp_path, *words, "--out_dir=one").returncode == 0
    for done in ranks(tmp_path, 2, *words, "--fsdp=True", "--out_dir=two"):
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path, "two")[0][1] == pytest.approx(losses(tmp_path, "one")[0][1], rel=1e-6)
    # The rows of a new table share half of their energy, those of a random table none.
    rows = weights(tmp_path, "one")["tok_embeddings.weight"]
    assert rows.mean(0).norm() > 0.4 * rows.norm() / len(rows) ** 0.5
    assert run(tmp_path, *words, "--max_iters=2", "--out_dir=cut").returncode == 0
    assert run(tmp_path, *words, "--out_dir=cut").returncode == 0
    assert losses(tmp_path, "cut")[4][1] == losses(tmp_path, "one")[4][1]
