# Tiny Shakespeare character by character: python train.py config/shakespeare.py
#   text:       1.1 MB, downloaded to cache/tinyshakespeare; --data=input.txt takes a copy of yours
#   parameters: 2 x (4 x 128 x 128 + 3 x 128 x 352) + vocabulary = 0.41M; two blocks cost half of four, and learn more in the time
#   tokens:     24 sequences x 64 = 1536 a step, 1900 steps = 2.9 million, three epochs
out_dir = "out/shakespeare"
data = "tinyshakespeare"
vocab_source = "char"
dim = 128
n_layers = 2
n_heads = 4
max_seq_len = 64
batch_size = 24
max_iters = 1900
warmup_iters = 10
learning_rate = 5e-3
decay_fraction = 0.8
eval_interval = 500
eval_iters = 0               # the whole validation split
sample_prompt = "ROMEO:"
