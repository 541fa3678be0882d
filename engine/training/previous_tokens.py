"""
Initialize some attention heads of a new model so that each attends to a fixed, small distance: the
first to the previous token, the second to the token before that, and so on. Heads with random
weights attend to all positions alike, and need hundreds of steps to learn where to look; with these
heads, the model knows the order of the latest tokens from the start. doc/lab/own_text.md shows what
this gains. In trained models, such heads develop by themselves: https://arxiv.org/abs/2209.11895

A head attends to distance d if its query and its key are the same at all positions, and the query
is the key rotated back by d positions. RoPE then rotates each by its own position, so that their
product is largest at distance d. Positions before d have no such key, and attend to the others.

Shapes: T context, D model width, H query heads, K key/value heads, Q head width, N rows.
"""
import torch

from engine.training import distributed

MAX_HEADS = 4  # the more heads are initialized so, the fewer are free for other patterns
SCORE = 20.0   # attention score at a head's distance. All other distances together usually get 2 to
               # 20 % of the attention then. With 30 and a context of 32 they get so little that the
               # trainer warns of exploded scores.
RIDGE = 1e-3   # strength of the ridge in vector_of_product_one, relative to the mean square of a
               # column


def start_heads(model, rows_are_random):
    """
    Initialize heads in the first block of an untrained Transformer: half of them, but at least 2,
    at most MAX_HEADS, and no more than there are heads or earlier positions. In a model of fewer
    than four heads, none are initialized if the embedding was computed from counts (bigrams.py),
    because config/record.py, with two heads, learns less with them.

    A constant query and a constant key are added to what the random weights compute. They are
    biases if the model has them. Otherwise the weights compute them from what all normed rows of
    the embedding have in common. Rows that were drawn at random (`rows_are_random`) have nothing in
    common, so a constant vector is added to them first. A classifier that shares the table still
    predicts the same: the vector adds the same number to all logits of a position. Rows that were
    computed from the text have a constant part.
    """
    args, attention = model.args, model.layers[0].attention
    count = min(max(2, args.n_heads // 2), MAX_HEADS, args.n_heads, args.max_seq_len - 1)
    if count < 1 or (args.n_heads < 4 and not rows_are_random):
        return
    device = model.rope.device
    queries, key = queries_and_key(model.rope.cpu(), count)  # (count, Q), (Q,)
    # Groups of query heads share a key/value head. Initialize one head of each group, then the
    # second of each, and so on. The other heads of a group see the constant key too, which their
    # random queries hardly prefer at any distance.
    q = torch.zeros(args.n_heads, args.head_dim)
    k = torch.zeros(args.n_kv_heads, args.head_dim)
    group_size = args.n_heads // args.n_kv_heads
    for i, query in enumerate(queries):
        place_in_group, group = divmod(i, args.n_kv_heads)
        q[group * group_size + place_in_group] = query
        k[group] = key
    with torch.no_grad():
        if args.qkv_bias:
            attention.wq.bias += q.flatten().to(device)
            attention.wk.bias += k.flatten().to(device)
            return
        rows = model.tok_embeddings.weight  # (V, D)
        if rows_are_random:
            # Random signs, so that for AdamW all columns have the same scale. All processes draw
            # the same signs, as they drew the same rows: their generators have the same seed.
            rows += rows.square().mean().sqrt() * torch.randn(args.dim).sign().to(device)
        normed = model.layers[0].attention_norm(rows).float().cpu()
        vector = distributed.on_master(vector_of_product_one, normed)  # (D,)
        attention.wq.weight += torch.outer(q.flatten(), vector).to(device)
        attention.wk.weight += torch.outer(k.flatten(), vector).to(device)


def queries_and_key(rope, count):
    """
    Return the queries (count, Q) of heads that attend to the distances 1, 2, ..., count, and the
    key (Q,) that all of them share, before rotation. rope: (T, Q/2, 2), T > count, cosine and sine
    of position t times the angle of each pair of dimensions, fastest pair first.

    A head of distance d scores a key at distance d + x with SCORE times the mean of cos(x angle)
    over the n fastest pairs; the slower ones are 0. Slow pairs hardly tell near distances apart,
    and a few fast pairs alone repeat at far distances. So n is the number that gives a head of
    distance 1 the most attention at distance 1, over a full context.
    """
    n_pairs = rope.shape[1]
    cosines = (rope * rope[1]).sum(-1)  # (T, Q/2), cos((t - 1) angle) at distance t
    mean_cosines = cosines.cumsum(1) / torch.arange(1, n_pairs + 1)  # column n - 1: of the first n
    n = 1 + (SCORE * mean_cosines).softmax(0)[1].argmax().item()
    # Attention divides by sqrt(Q), so that SCORE = n * length^2 / sqrt(Q).
    length = (SCORE * (2 * n_pairs) ** 0.5 / n) ** 0.5  # of query and key, in each pair
    key, queries = torch.zeros(n_pairs, 2), torch.zeros(count, n_pairs, 2)
    key[:n, 0] = length
    rotated_back = rope[1:count + 1, :n] * torch.tensor([1.0, -1.0])  # cosine and sine of -d angle
    queries[:, :n] = length * rotated_back
    return queries.flatten(1), key.flatten()


def vector_of_product_one(rows):
    """
    Return the vector (D,) whose product with each of the rows (N, D) is nearly 1, by ridge
    regression.
    """
    moments = rows.T @ rows / len(rows)  # (D, D)
    moments += RIDGE * moments.diagonal().mean() * torch.eye(len(moments))
    return torch.linalg.solve(moments, rows.mean(0))
