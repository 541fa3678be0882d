# Second half of `make chat`: questions about whole stories too, after config/chat_short.py.
#   text:       questions about the built-in stories, half of them about one to three sentences
#   tokens:     4 sequences x 320 = 1280 a step, 3400 steps = 4.4 million, 1.9 epochs
out_dir = "out/chat"
init_from = "out/chat_short"
data = "questions:20000"
max_seq_len = 320            # the longest of these conversations fits
batch_size = 4
max_iters = 3400
learning_rate = 6e-3
decay_fraction = 0.9         # at a constant rate, answers about whole stories stay uncertain
eval_interval = 3400
checks = "-leak"             # some short validation texts are also in the training split
sample_prompt = "Sue had a tiny goat named Pip. What was the goat called?"
