# 110 million parameters on TinyStories.
#   parameters: 32000 x 768 + 12 x (4 x 768 x 768 + 3 x 768 x 2048) = 109.5M
#   tokens:     32 x 16 sequences x 1024 = 524,288 a step, 50,000 steps = 26 billion
out_dir = "out/stories110M"
data = "tinystories"
vocab_size = 32000
dim = 768
n_layers = 12
n_heads = 12
max_seq_len = 1024
dropout = 0.1
batch_size = 16
gradient_accumulation_steps = 32
optimizer = "adamw"
schedule = "cosine"
learning_rate = 5e-4
max_iters = 50_000
warmup_iters = 1000
eval_interval = 1000
eval_iters = 500
compile = True
