# A loss of 1.87 on Tiny Shakespeare's characters as soon as may be: python train.py config/shakespeare_short.py
#   text:       1.1 MB, downloaded to cache/tinyshakespeare; --data=input.txt takes a copy of yours
#   parameters: 2 x (4 x 128 x 128 + 3 x 128 x 352) + vocabulary = 0.41M
#   tokens:     16 sequences x 64 = 1024 a step, 400 steps = 0.41 million
out_dir = "out/shakespeare_short"
data = "tinyshakespeare"
vocab_source = "char"
dim = 128
n_layers = 2
n_heads = 4
max_seq_len = 64
batch_size = 16
max_iters = 400
warmup_iters = 10
learning_rate = 8e-3
decay_fraction = 0.8
eval_interval = 400
eval_iters = 0               # the whole validation split
sample_prompt = "ROMEO:"
