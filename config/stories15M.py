# The TinyStories recipe: 15 million parameters, 9.2 of them in the embedding.
#   parameters: 32000 x 288 + 6 x (4 x 288 x 288 + 3 x 288 x 768) = 15.2M
#   tokens:     4 x 128 sequences x 256 = 131,072 a step, 100,000 steps = 13 billion
out_dir = "out/stories15M"
data = "tinystories"
vocab_size = 32000
dim = 288
n_layers = 6
n_heads = 6
max_seq_len = 256
batch_size = 128
gradient_accumulation_steps = 4
optimizer = "adamw"
schedule = "cosine"
learning_rate = 5e-4
max_iters = 100_000
warmup_iters = 1000
eval_interval = 2000
eval_iters = 1000
compile = True
