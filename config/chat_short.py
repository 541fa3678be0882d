# First half of `make chat`: the demo's model learns to answer questions about a few sentences.
#   text:       questions about the built-in stories, generated in a few seconds
#   parameters: those of out/demo, and two rows for the markers of a conversation
#   tokens:     6 sequences x 192 = 1152 a step, 1600 steps = 1.8 million, one epoch
out_dir = "out/chat_short"
init_from = "out/demo"
data = "questions:short:20000"
max_seq_len = 192            # the longest of these conversations fits
batch_size = 6
max_iters = 1600
learning_rate = 6e-3
embedding_lr_scale = 3.0     # the embedding learns most here
embedding_noise = 0.2        # words that no story repeats have nearly the same embedding: attention
                             # can find them only once something tells them apart
eval_interval = 1600
checks = "-leak"             # some short validation texts are also in the training split
sample_prompt = "Sue had a tiny goat named Pip. What was the goat called?"
