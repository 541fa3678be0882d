# Tiny Shakespeare character by character: python train.py config/shakespeare.py
#   text:       1.1 MB, downloaded to cache/tinyshakespeare; or --data=input.txt
#   parameters: 2 x (4 x 128 x 128 + 3 x 128 x 384 + 384 biases) + 2 x 68 x 128 vocabulary = 0.44M
#   tokens:     4 sequences x 256 = 1024 a step, 2550 steps = 2.6 million, 2.6 epochs
out_dir = "out/shakespeare"
data = "tinyshakespeare"
vocab_source = "char"
dim = 128
n_layers = 2                 # 3: lower loss after equal steps, higher loss after equal time
n_heads = 4
hidden_dim = 384
tie_embeddings = False       # untying adds few parameters here, and lets each table specialize
max_seq_len = 256
first_seq_len = 64           # faster at first; the final loss is about the same
qkv_bias = True              # lets a head attend by position alone, such as to the last character
rope_theta = 100.0           # with 10000, many pairs hardly rotate within such a short context
batch_size = 4
max_iters = 2550
warmup_iters = 10
learning_rate = 7e-3
embedding_lr_scale = 2.0
momentum = 0.9               # better than 0.95 for three seeds, measured with 3 layers
decay_fraction = 1.0
eval_interval = 1275
eval_iters = 0               # the whole validation split
sample_prompt = "ROMEO:"
