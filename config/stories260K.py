# llama2.c's smallest TinyStories model: 260 thousand parameters, vocabulary 512.
#   parameters: 512 x 64 embedding + 5 x (64 x (64 + 32 + 32 + 64) attention
#               + 3 x 64 x 172 feed-forward) = 0.26M
#   tokens:     128 sequences x 512 = 65,536 a step, 100,000 steps = 6.6 billion
out_dir = "out/stories260K"
data = "tinystories"
vocab_size = 512
dim = 64
n_layers = 5
n_heads = 8
n_kv_heads = 4
multiple_of = 4              # hidden width 172
max_seq_len = 512
dropout = 0.05
batch_size = 128
optimizer = "adamw"
schedule = "cosine"
learning_rate = 1e-3
weight_decay = 0.01
beta2 = 0.99
max_iters = 100_000
warmup_iters = 1000
eval_interval = 2000
eval_iters = 1000
