# A run of a few seconds that shows whether everything works: python train.py config/debug.py
out_dir = "out/debug"
data = "stories:2000"
dim = 64
n_layers = 2
n_heads = 2
max_seq_len = 64
batch_size = 8
max_iters = 40
warmup_iters = 5
eval_interval = 20
eval_iters = 4
log_interval = 5
