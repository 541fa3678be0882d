# The record on the built-in stories, one minute of training on two cores:
#   python train.py config/record.py
#   how to beat it: doc/record.md
#   text:       33 MB of stories, the same on every machine; with network access, --data=tinystories
#   parameters: 2 x (4 x 64 x 64 + 3 x 64 x 192) + 2 x 64 x 1536 vocabulary = 0.30M
#   tokens:     6 sequences x 192 = 1152 a step, as many steps as fit into a minute
out_dir = "out/record"
dim = 64
n_layers = 2
n_heads = 2
tie_embeddings = False       # untied embedding and classifier, both initialized from bigram counts
bigram_start = True
embedding_lr_scale = 2.0
max_seq_len = 192
batch_size = 6
max_minutes = 1.0            # the learning rate decays with the clock
max_iters = 1_000_000        # more than fit into a minute
eval_interval = 1_000_000    # only at the end
eval_iters = 500             # about half a million tokens
checks = "none"
