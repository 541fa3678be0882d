# Tiny Shakespeare character by character, to a validation loss below the 1.886 of nanoGPT's CPU
# recipe in seconds: python train.py config/shakespeare_short.py
#   text:       1.1 MB, downloaded to cache/tinyshakespeare; or --data=input.txt
#   parameters: 2 x 128 x 128 + 2 x 128 x 64 + 3 x 128 x 256 + 256 biases in one layer,
#               + 2 x 68 x 128 vocabulary = 0.17M
#   tokens:     16 sequences x 128 = 2048 a step, 115 steps = 0.24 million
out_dir = "out/shakespeare_short"
data = "tinyshakespeare"
vocab_source = "char"
dim = 128
n_layers = 1
n_heads = 8
n_kv_heads = 4
hidden_dim = 256
tie_embeddings = False       # untying adds few parameters here, and lets each table specialize
max_seq_len = 128
qkv_bias = True              # lets a head attend by position alone, such as to the last characters
rope_theta = 50.0            # with 10000, many pairs hardly rotate within such a short context
batch_size = 16
max_iters = 115
warmup_iters = 5
learning_rate = 2.2e-2
embedding_lr_scale = 1.5
momentum = 0.85              # below the usual 0.95, as steps are few and batches small
beta1 = 0.8
decay_fraction = 1.0
eval_interval = 115
eval_iters = 32              # 32,768 characters of each split, before the first step and at the end
sample_prompt = "ROMEO:"
