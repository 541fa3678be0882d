# Tiny Shakespeare character by character: python train.py config/shakespeare.py
#   text:       1.1 MB, downloaded to cache/tinyshakespeare; --data=input.txt takes a copy of yours
#   parameters: 2 x (4 x 128 x 128 + 3 x 128 x 384 + 384 biases) and 2 x 68 x 128 of the vocabulary = 0.44M
#   tokens:     4 sequences x 256 = 1024 a step, 2700 steps = 2.8 million, 2.8 epochs
out_dir = "out/shakespeare"
data = "tinyshakespeare"
vocab_source = "char"
dim = 128
n_layers = 2                 # three have a lower loss after as many steps, and a higher one after the same time
n_heads = 4
hidden_dim = 384
tied = False                 # so few characters cost nothing twice, and each matrix learns its own task
max_seq_len = 256
qkv_bias = True              # so a head can look at a place, such as the character before, whatever stands there
rope_theta = 100.0           # of the usual 10000, many rotations hardly move within so short a context
batch_size = 4
max_iters = 2700
warmup_iters = 10
learning_rate = 7e-3
table_rate = 2.0
momentum = 0.9               # with each of three seeds better than 0.95, then with three blocks; steps are small
decay_fraction = 1.0
eval_interval = 1350
eval_iters = 0               # the whole validation split
sample_prompt = "ROMEO:"
