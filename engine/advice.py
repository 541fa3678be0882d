"""What to write instead of a setting that a program here does not have, or of the name of something to download."""
import difflib
import re
from collections import Counter
from pathlib import Path

ELSEWHERE = [  # names of nanoGPT, llama2.c, transformers and their like; the knob here; what else is to be known
    ("lr max_lr peak_lr rate", "learning_rate", ""), ("embedding_lr unembedding_lr", "table_rate", "times learning_rate"),
    ("epochs num_epochs n_epochs num_train_epochs", "max_iters", "which counts steps, not passes over the data"),
    ("steps max_steps num_steps n_steps train_steps iters num_iters num_iterations", "max_iters", ""),
    ("lr_decay_iters lr_decay_steps", "max_iters", "where the schedule always ends"), ("warmup_ratio", "warmup_iters", "in steps"),
    ("warmup_steps num_warmup_steps warmup", "warmup_iters", ""), ("lr_scheduler_type lr_scheduler lr_schedule", "schedule", ""),
    ("optim optimizer_type", "optimizer", ""), ("adam_beta1", "beta1", ""), ("adam_beta2", "beta2", ""),
    ("muon_momentum mu", "momentum", ""), ("max_grad_norm grad_norm_clip clip_grad_norm clip", "grad_clip", ""),
    ("per_device_train_batch_size per_device_batch_size device_batch_size micro_batch_size", "batch_size", "of a forward pass"),
    ("accumulate_grad_batches grad_accum grad_accum_steps accumulation_steps", "gradient_accumulation_steps", "of all processes"),
    ("n_embd n_embed d_model embed_dim hidden_size width", "dim", ""),
    ("n_layer num_layers num_hidden_layers layers", "n_layers", ""), ("n_head num_heads num_attention_heads heads", "n_heads", ""),
    ("num_key_value_heads num_kv_heads n_kv_head kv_heads", "n_kv_heads", ""),
    ("intermediate_size ffn_dim d_ff ffn_hidden_size", "hidden_dim", ""),
    ("block_size context context_length context_size ctx_len n_ctx seq_length sequence_length max_position_embeddings "
     "max_length", "max_seq_len", "in tokens"),
    ("rms_norm_eps layer_norm_eps layer_norm_epsilon", "norm_eps", ""),
    ("tie_word_embeddings tie_embeddings tied_embeddings weight_tying", "tied", ""),
    ("attention_dropout hidden_dropout resid_pdrop", "dropout", ""),
    ("text text_file input input_file ppl", "perplexity", "with a text file"),
    ("dataset dataset_name data_path data_dir data_file train_file train_data input input_file text file", "data", ""),
    ("data dataset dataset_name data_path data_dir data_file input input_file text file", "source", ""),
    ("tokenizer tokenizer_name tokenizer_path tokenizer_model", "vocab_source", ""),
    ("validation_split_percentage val_split test_size", "val_fraction", "between 0 and 1"),
    ("outfile output output_path output_file output_dir save_dir", "path", ""),
    ("output_dir outdir output save_dir checkpoint_dir run_dir", "out_dir", ""),
    ("eval_steps eval_every eval_freq val_interval", "eval_interval", "in steps"),
    ("patience early_stopping early_stopping_patience", "early_stop", "in evaluations"),
    ("save_steps save_every save_interval checkpoint_interval ckpt_interval", "eval_interval", "as every evaluation saves"),
    ("save_total_limit", "keep_last", "beside the best, of which keep_best are kept"),
    ("logging_steps log_every log_freq", "log_interval", "in steps"), ("wandb use_wandb report_to", "wandb_log", "True or False"),
    ("resume_from_checkpoint resume restore", "init_from", "though the same command in the same out_dir resumes by itself"),
    ("model model_name_or_path pretrained pretrained_model load_from checkpoint ckpt ckpt_path", "init_from", "a run's folder"),
    ("bf16 fp16 amp precision mixed_precision torch_dtype outtype quant quantize", "dtype", ""),
    ("gpu cuda cpu use_cpu no_cuda use_cuda", "device", "auto, cpu, cuda, cuda:1 or mps"),
    ("gradient_checkpointing", "activation_checkpointing", ""), ("torch_compile", "compile", ""),
    ("fsdp", "sharded", "True or False"), ("full_determinism", "deterministic", ""), ("random_seed data_seed", "seed", ""),
    ("start text input_text", "prompt", ""), ("temp", "temperature", ""), ("num_return_sequences", "num_samples", ""),
    ("max_length max_tokens num_tokens n_predict", "max_new_tokens", ""),
    ("model model_path checkpoint checkpoint_path ckpt model_name_or_path filepath input", "out_dir", "a run's folder or a model"),
    ("version", "format", "with v0, v1 or v2 for llama2.c's"), ("num_workers num_proc dataloader_num_workers", "workers", ""),
]

ABSENT = [  # names without a counterpart; a knob of the programs that are asked for them; what is there instead
    ("lora lora_r lora_rank lora_alpha lora_dropout lora_target_modules use_lora qlora peft use_peft adapter",
     "init_from", "fine-tuning, --init_from=MODEL, trains all weights at a tenth of the learning rate"),
    ("load_in_4bit load_in_8bit use_4bit use_8bit quantization_config quantization bnb_4bit_compute_dtype",
     "init_from", "training has float32 weights; export.py --dtype=q8_0 quantizes the trained model"),
    ("top_k", "top_p", "the number of tokens to choose from has no limit; --top_p limits their probability"),
    ("min_p typical_p repetition_penalty repeat_penalty presence_penalty frequency_penalty num_beams do_sample",
     "top_p", "--temperature and --top_p decide alone; --temperature=0 takes the likeliest token"),
    ("messages chat conversations chat_template apply_chat_template packing prompt_column response_column",
     "init_from", "a training text is one string a document; write each conversation in it with its marks"),
    ("num_experts n_experts moe n_experts_per_token num_experts_per_tok sliding_window",
     "init_from", "blocks are dense and attention reaches back over the whole context"),
    ("deepspeed deepspeed_config zero_stage", "init_from", "--sharded=True under torchrun shards weights and optimizer"),
    ("flash flash_attention use_flash_attn attn_implementation", "init_from", "PyTorch chooses the fastest attention"),
]


def elsewhere(key, known):
    """What another program's setting of this name is here, in words; "" if it is not one of those that are known."""
    for names, ours, note in ELSEWHERE:
        if key in names.split() and ours in known:
            return f"here it is {ours!r}" + (f", {note}" if note else "")
    for names, ours, note in ABSENT:
        if key in names.split() and ours in known:
            return f"there is no such setting here: {note}"
    return ""


def slips(key, known):
    """
    The known name that `key` misspells, in a list: letters left out, doubled or swapped; or one wrong in a long name, as
    top_k is not top_p.
    """
    def slip(name):
        have, want = Counter(key), Counter(name)
        likeness = difflib.SequenceMatcher(None, key, name).ratio()
        return likeness > 0.9 or likeness > 0.75 and (have <= want or want <= have)

    return [name for name in difflib.get_close_matches(key, known, 9, 0.75) if slip(name)][:1]


def advice(key, known):
    """What to write instead of the unknown `key`: another program's name, a slip of the keys, or a part of a name."""
    if answer := elsewhere(key.lower(), known):
        return answer
    near = slips(key, known) or [name for name in known if set(key.split("_")) <= set(name.split("_"))]
    return f"did you mean {' or '.join(map(repr, near))}?" if near else "--help lists all"


def hub(path, kind=""):
    """
    How to download what owner/name or an address names on the Hugging Face Hub, as the end of a line; "" where a path is
    like neither. kind: "dataset", or "" for a model.
    """
    site = r"(?P<site>(https?:/+)?(huggingface\.co|hf\.co)/(datasets/)?)?"
    found = re.fullmatch(site + r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(/tree/.*|/)?", str(path))
    if not found or not found["site"] and Path(str(path)).parent.exists():
        return ""
    name = found["name"]
    folder = name.split("/")[1]
    what = f" --repo-type={kind}" * bool(kind)
    return (f"; if it is on the Hugging Face Hub, download it first and give its folder, {folder}: "
            f"hf download {name}{what} --local-dir {folder} (the command comes with: pip install huggingface_hub)")
