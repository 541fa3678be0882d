"""
Suggest a replacement for an unknown setting, and the download command for a path that names a
repository of the Hugging Face Hub. Translate the settings of a run of an earlier version.
"""
import difflib
import re
from collections import Counter
from pathlib import Path

# Rows of "our setting (a note): names in nanoGPT, llama2.c, transformers and others". The first row
# whose setting the running program has is used: `input` is data in one program, source in another.
ROW = r"(\w+)(?: \((.*)\))?: (.*)"
OTHER_NAMES = [(names, ours, note) for ours, note, names in re.findall(ROW, """
learning_rate: lr max_lr peak_lr rate
embedding_lr_scale (times learning_rate): embedding_lr unembedding_lr table_rate
max_iters (which counts steps, not passes over the data): epochs num_epochs n_epochs
max_iters (which counts steps, not passes over the data): num_train_epochs
max_iters: steps max_steps num_steps n_steps train_steps iters num_iters num_iterations
max_iters (where the schedule always ends): lr_decay_iters lr_decay_steps
warmup_iters (in steps): warmup_ratio
warmup_iters: warmup_steps num_warmup_steps warmup
schedule (as in --schedule=constant): decay_lr
schedule: lr_scheduler_type lr_scheduler lr_schedule
optimizer: optim optimizer_type
beta1: adam_beta1
beta2: adam_beta2
momentum: muon_momentum mu
grad_clip: max_grad_norm grad_norm_clip clip_grad_norm clip
batch_size (of a forward pass): per_device_train_batch_size per_device_batch_size
batch_size (of a forward pass): device_batch_size micro_batch_size
gradient_accumulation_steps (of all processes): accumulate_grad_batches grad_accum
gradient_accumulation_steps (of all processes): grad_accum_steps accumulation_steps
dim: n_embd n_embed d_model embed_dim hidden_size width
n_layers: n_layer num_layers num_hidden_layers layers
n_heads: n_head num_heads num_attention_heads heads
n_kv_heads: num_key_value_heads num_kv_heads n_kv_head kv_heads
hidden_dim: intermediate_size ffn_dim d_ff ffn_hidden_size
max_seq_len (in tokens): block_size context context_length context_size ctx_len n_ctx seq_length
max_seq_len (in tokens): sequence_length max_position_embeddings max_length
tie_embeddings: tied tie_word_embeddings tied_embeddings weight_tying
lora_rank: lora lora_r lora_dim use_lora qlora peft use_peft adapter r
lora_targets: lora_target_modules target_modules lora_modules
dropout: attention_dropout hidden_dropout resid_pdrop
perplexity (with a text file): text text_file input input_file ppl
data: dataset dataset_name data_path data_dir data_file train_file train_data
data: input input_file text file
source: data dataset dataset_name data_path data_dir data_file input input_file text file
vocab_source: tokenizer tokenizer_name tokenizer_path tokenizer_model
val_fraction (between 0 and 1): validation_split_percentage val_split test_size
path: outfile output output_path output_file output_dir save_dir
out_dir: output_dir outdir output save_dir checkpoint_dir run_dir
eval_interval (in steps): eval_steps eval_every eval_freq val_interval
early_stop (in evaluations): patience early_stopping early_stopping_patience
eval_interval (as every evaluation saves): save_steps save_every save_interval
eval_interval (as every evaluation saves): checkpoint_interval ckpt_interval
log_extras (as in --log_extras=noise_scale): noise_scale
log_extras (as in --log_extras=gradients,parameters): wandb_watch
log_extras (as in --log_extras=tables,model): wandb_tables wandb_log_model
init_from (as in --init_from=force): force_resume
checks (as in --checks=-files): skip_bad
log_interval (in steps): logging_steps log_every log_freq
wandb_log (True or False): wandb use_wandb report_to
init_from (though the same command in the same out_dir resumes by itself): resume restore
init_from (though the same command in the same out_dir resumes by itself): resume_from_checkpoint
init_from (a run's folder): model model_name_or_path pretrained pretrained_model
init_from (a run's folder): load_from checkpoint ckpt ckpt_path
dtype: bf16 fp16 amp precision mixed_precision torch_dtype outtype quant quantize
device (auto, cpu, cuda, cuda:1 or mps): gpu cuda cpu use_cpu no_cuda use_cuda
activation_checkpointing: gradient_checkpointing
compile: torch_compile
fsdp: sharded fully_sharded
document_mask: within_documents
max_vocab_size: vocab_most
max_text_bytes: text_most
deterministic: full_determinism
seed: random_seed data_seed
prompt: start text input_text
temperature: temp
num_samples: num_return_sequences
max_new_tokens: max_length max_tokens num_tokens n_predict
out_dir (a run's folder or a model): model model_path checkpoint checkpoint_path ckpt
out_dir (a run's folder or a model): model_name_or_path filepath input
format (with v0, v1 or v2 for llama2.c's): version
workers: num_workers num_proc dataloader_num_workers
""")]

# Rows of (settings of other programs that have no counterpart here, a setting of ours, advice).
# Only those of our programs that have this setting print the advice.
NO_COUNTERPART = [
    ("lora_alpha use_rslora",
     "lora_rank", "adapters are scaled by 16 / lora_rank; learning_rate does the rest"),
    ("lora_dropout",
     "lora_rank", "--dropout applies to the whole model"),
    ("use_dora modules_to_save lora_bias",
     "lora_rank", "adapters and the rows of new tokens are trained, nothing else"),
    ("load_in_4bit load_in_8bit use_4bit use_8bit quantization_config quantization "
     "bnb_4bit_compute_dtype",
     "lora_rank", "LoRA keeps the 8 bits of a GGUF file in Q8_0, which export.py --dtype=q8_0 "
     "writes, and other types as dtype; without LoRA, weights are float32"),
    ("top_k",
     "top_p", "the number of tokens to choose from has no limit; --top_p limits their probability"),
    ("min_p typical_p repetition_penalty repeat_penalty presence_penalty frequency_penalty "
     "num_beams do_sample",
     "top_p", "only --temperature and --top_p exist; --temperature=0 takes the likeliest token"),
    ("messages chat conversations chat_template apply_chat_template packing prompt_column "
     "response_column",
     "init_from", "--data also reads conversations in .jsonl, such as examples/chats.jsonl"),
    ("num_experts n_experts moe n_experts_per_token num_experts_per_tok sliding_window",
     "init_from", "blocks are dense and attention reaches back over the whole context"),
    ("deepspeed deepspeed_config zero_stage",
     "init_from", "--fsdp=True under torchrun shards weights and optimizer"),
    ("keep_last keep_best save_total_limit",
     "always_save_checkpoint", "the newest and the best checkpoint are kept; "
     "--always_save_checkpoint=True keeps all"),
    ("rope_scaling rope_factors rope_attention qk_norm head_width head_dim norm_eps rms_norm_eps "
     "layer_norm_eps layer_norm_epsilon",
     "init_from", "--init_from keeps the model's values; ModelArgs in model.py has the defaults"),
    ("max_restarts",
     "supervise", "a supervised program is restarted at most 10 times"),
    ("max_skips",
     "spike_z", "after 10 skipped steps in a row the weights return to the last checkpoint"),
    ("wandb_group wandb_tags wandb_notes wandb_job_type",
     "wandb_log", "W&B's variables WANDB_RUN_GROUP, WANDB_TAGS, WANDB_NOTES and WANDB_JOB_TYPE set "
     "them"),
    ("flash flash_attention use_flash_attn attn_implementation",
     "init_from", "PyTorch chooses the fastest attention"),
]

# {name in earlier versions, or in ModelArgs: name of the setting}
RENAMED = {"patience": "early_stop", "tied": "tie_embeddings", "sharded": "fsdp",
           "within_documents": "document_mask", "vocab_most": "max_vocab_size",
           "text_most": "max_text_bytes", "table_rate": "embedding_lr_scale"}
# Settings of earlier versions that log_extras replaces, with their defaults.
OLD_EXTRAS = {"wandb_tables": True, "wandb_log_model": True, "wandb_watch": "off",
              "noise_scale": False}
OLD_WATCH = {"off": "", "all": "gradients,parameters"}


def renamed(stored):
    """
    Return the settings of a run, {name: value}, under the names of this version. Call it on all
    settings that an earlier version may have written. stored: may hold any JSON values.
    """
    found = {RENAMED.get(name, name): value for name, value in stored.items()}
    if found.pop("skip_bad", False) is True:
        found["checks"] = "-files"
    if found.pop("decay_lr", True) is False:
        found["schedule"] = "constant"
    old = {name: found.pop(name) for name in OLD_EXTRAS if name in found}
    if old and "log_extras" not in found:
        tables, model, watch, noise_scale = (OLD_EXTRAS | old).values()
        words = ["tables" * bool(tables), "model" * bool(model), OLD_WATCH.get(str(watch), watch),
                 "noise_scale" * (noise_scale is True)]
        found["log_extras"] = ",".join(str(word) for word in words if word)
    return found


def translate(key, known):
    """
    Return our counterpart of another program's setting, in words; "" if the key is unknown.
    known: names of the settings of the program that is running.
    """
    for names, ours, note in OTHER_NAMES:
        if key in names.split() and ours in known:
            return f"here it is {ours!r}" + (f", {note}" if note else "")
    for names, ours, note in NO_COUNTERPART:
        if key in names.split() and ours in known:
            return f"there is no such setting here: {note}"
    return ""


def misspelled(key, known):
    """
    Return [the known name that `key` misspells], or []. A typo omits, doubles or swaps letters, so
    that one name has all letters of the other. A wrong letter counts as a typo in long names only:
    top_k is not a typo of top_p.
    """
    def is_slip(name):
        have, want = Counter(key), Counter(name)
        likeness = difflib.SequenceMatcher(None, key, name).ratio()
        return likeness > 0.9 or (likeness > 0.75 and (have <= want or want <= have))

    return [name for name in difflib.get_close_matches(key, known, 9, 0.75) if is_slip(name)][:1]


def advice(key, known):
    """Return what to write instead of the unknown `key`, as the end of an error message."""
    if answer := translate(key.lower(), known):
        return answer
    words = set(key.split("_"))  # "scale" suggests every name that has this word
    near = misspelled(key, known) or [name for name in known if words <= set(name.split("_"))]
    return f"did you mean {' or '.join(map(repr, near))}?" if near else "--help lists all"


def hub(path, kind=""):
    """
    Return how to download a path that looks like owner/name or an address of the Hugging Face Hub,
    as the end of an error message; "" for other paths. kind: "dataset", or "" for a model.
    """
    # Path() turns // into /. If the parent folder exists, the path is local.
    site = r"(?P<site>(https?:/+)?(huggingface\.co|hf\.co)/(datasets/)?)?"
    found = re.fullmatch(site + r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(/tree/.*|/)?", str(path))
    if not found or not found["site"] and Path(str(path)).parent.exists():
        return ""
    name = found["name"]
    folder = name.split("/")[1]
    what = f" --repo-type={kind}" * bool(kind)
    return (f"; if it is on the Hugging Face Hub, download it first and give its folder, {folder}: "
            f"hf download {name}{what} --local-dir {folder} "
            "(the command comes with: pip install huggingface_hub)")
