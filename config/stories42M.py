# 42 million parameters on TinyStories.
#   parameters: 32000 x 512 + 8 x (4 x 512 x 512 + 3 x 512 x 1376) = 41.7M
#   tokens:     16 x 32 sequences x 1024 = 524,288 a step, 50,000 steps = 26 billion
out_dir = "out/stories42M"
data = "tinystories"
vocab_size = 32000
dim = 512
n_layers = 8
n_heads = 8
max_seq_len = 1024
dropout = 0.1
batch_size = 32
gradient_accumulation_steps = 16
optimizer = "adamw"
schedule = "cosine"
learning_rate = 5e-4
max_iters = 50_000
warmup_iters = 1000
eval_interval = 1000
eval_iters = 500
compile = True
