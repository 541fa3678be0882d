# nanoGPT's small CPU recipe, character by character: python train.py config/shakespeare.py --data=input.txt
#   parameters: 4 x (4 x 128 x 128 + 3 x 128 x 352) + vocabulary = 0.81M
#   tokens:     12 sequences x 64 = 768 a step, 2000 steps = 1.5 million, one and a half epochs
out_dir = "out/shakespeare"
vocab_source = "char"
dim = 128
n_layers = 4
n_heads = 4
max_seq_len = 64
batch_size = 12
max_iters = 2000
warmup_iters = 100
learning_rate = 2e-3
eval_interval = 500
eval_iters = 0               # the whole validation split
sample_prompt = "ROMEO:"
