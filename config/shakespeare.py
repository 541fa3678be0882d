# Tiny Shakespeare character by character: python train.py config/shakespeare.py
#   text:       1.1 MB, downloaded to cache/tinyshakespeare; --data=input.txt takes a copy of yours
#   parameters: 3 x (2 x 128 x 128 + 2 x 128 x 64 + 3 x 128 x 256 + 256 biases) and 2 x 68 x 128 of the vocabulary = 0.46M
#   tokens:     4 sequences x 256 = 1024 a step, 2400 steps = 2.5 million, 2.4 epochs
out_dir = "out/shakespeare"
data = "tinyshakespeare"
vocab_source = "char"
dim = 128
n_layers = 3
n_heads = 4
n_kv_heads = 2
hidden_dim = 256
tied = False                 # so few characters cost nothing twice, and each matrix learns its own task
max_seq_len = 256
qkv_bias = True              # so a head can look at a place, such as the character before, whatever stands there
rope_theta = 100.0           # of the usual 10000, many rotations hardly move within so short a context
batch_size = 4
max_iters = 2400
warmup_iters = 10
learning_rate = 7e-3
table_rate = 2.0
momentum = 0.9               # with each of three seeds better than 0.95; steps are small
decay_fraction = 1.0
eval_interval = 1200
eval_iters = 0               # the whole validation split
sample_prompt = "ROMEO:"
