"""
Resolve the settings of a training once, each after those that it depends on: the folder, the
checkpoint to resume or the model to fine-tune, the sizes derived from the time budget or the depth,
the settings that a mode fixes, and the largest batch. train.py writes the result into its globals,
and nothing changes it afterwards.
"""
from functools import partial

from configurator import fail
from engine.text import sample_prompts
from engine.text.prepare import as_prepared, text_bytes
from engine.text.prepare import load as load_prepared
from engine.training import fit_batch, hardware, load, lora, mode, plan, progress, resume
from engine.training.costs import TrialSetup
from engine.training.distributed import on_master, say
from engine.training.training import Resolved
from engine.training.validate import check_settings, checked_args, refuse_unseen


def resolve(config, device, prepare, build):
    """
    Return the Resolved settings of a command. config: its Config; prepare: data.prepare, which
    returns the folder of prepared tokens; build: a costs.Build. Ends the program with one line if
    the settings can't train.
    """
    if config.cuda_graphs and device.type != "cuda":
        fail(f"cuda_graphs is True on a device without them, {device.type}; expected "
             f"--device=cuda, or --cuda_graphs=False")
    config, given, find_batch = fit_batch.first_guess(config)
    if mode.chosen(config):
        config = config.changed(out_dir=on_master(mode.make_folder, config))

    # A run continues from its own checkpoint, starts from another model, or from new weights.
    start, resuming = on_master(resume.find_start, config)
    if config.embedding_noise and not start:
        fail(f"embedding_noise is {config.embedding_noise} without a model to fine-tune; add "
             f"--init_from=MODEL")
    if config.embedding_noise and config.lora_rank:
        fail("--embedding_noise and --lora_rank: expected one of them; LoRA leaves the embedding "
             "as it is")
    if config.bigram_start and start and not (resuming or config.eval_only):
        fail(f"bigram_start is True with a model to fine-tune, {start}, whose weights it "
             f"would replace; expected --bigram_start=False")
    changes, clock, imported, template = [], progress.NO_LIMIT, None, ""
    if resuming:
        taken, given, changes = resume.resume_settings(config, start, given)
        config = config.changed(**taken)
        check_settings(config)
        imported = on_master(load.stored_args, start)
    elif resume.is_fine_tuning(config):
        adopted, imported = on_master(load.adopt, config, given)
        config, given = config.changed(**adopted), given | adopted.keys()
    taken = on_master(load.teachers_vocabulary, config, given)
    config, given = config.changed(**taken), given | taken.keys()
    if start:
        template = on_master(load.chat_template, start)
    prepare = partial(prepare, chat_template=template)
    if imported:  # norms, head width and position scaling aren't settings: take the model's
        build = build._replace(model_args=partial(build.model_args, imported=imported))
    amp_dtype = hardware.use_dtype(config, device, config.dim)
    adapters = on_master(load.plan_lora, config, amp_dtype, start, resuming)
    # Normalize the names of the targets, so that a resumed run may be given Hugging Face's names.
    targets = lora.parse_targets(config.lora_targets)
    config = config.changed(lora_targets=lora.target_words(targets))
    setup = TrialSetup(build, device, amp_dtype, adapters)

    # Each of these overrides settings of the ones before: the time budget and the text, a folder of
    # prepared data, the depth, a mode.
    if not resuming and plan.derives_from_time(config, given):
        config, prepared, clock = plan_from_time(config, given, prepare, setup)
    else:
        prepared = load_data(config, prepare, device)
    # In a resumed run, `given` may also name the settings taken from the checkpoint.
    explicit = {name for name, *_ in changes} if resuming else given
    config = config.changed(**as_prepared(config, explicit, prepared.meta))
    vocab_size = prepared.meta["vocab_size"]
    if config.depth:
        config = config.changed(**plan.derive_from_depth(config, given, vocab_size))
    config = config.changed(**mode.own_settings(config))
    args = checked_args(config, build.model_args(config, vocab_size), prepared)
    if find_batch and not resuming and not config.eval_only and not config.overfit:
        config = config.changed(**on_master(fit_batch.largest_batch, config, args, setup))
    if config.sample_prompt == "auto":
        prompt = sample_prompts.choose(prepared, config.max_seq_len)
        config = config.changed(sample_prompt=prompt)
        if not config.eval_only:
            say(f"samples continue {prompt!r}; --sample_prompt sets other prompts")
    hardware.use_dtype(config, device, args.dim)  # the width is known now
    return Resolved(config, start, resuming, changes, clock, setup, prepared, args)


def plan_from_time(config, given, prepare, setup):
    """
    Return (config, prepared tokens, clock) of a training whose sizes are derived from the text, the
    machine and --minutes. The model's shape comes first, since it decides the vocabulary; the
    number of steps comes last, since it needs the text's number of tokens.
    """
    size = on_master(text_bytes, config.data, config.cache, config.column)
    vocabulary = on_master(plan.plan_characters, config, given, size)
    config = config.changed(**plan.values(vocabulary))
    shape = on_master(plan.plan_shape, config, given | vocabulary.keys(), size, setup) | vocabulary
    config = config.changed(**plan.values(shape))
    prepared = load_data(config, prepare, setup.device)
    context = plan.plan_context(config, given, prepared)
    shape, config = shape | context, config.changed(**plan.values(context))
    seconds, length = on_master(plan.plan_length, config, given, prepared.meta, setup)
    config = config.changed(**plan.values(length))
    plan.show_plan(shape | length)
    clock = {"seconds": 0.0, "limit": 0.0, "end": seconds, "minutes": config.minutes}
    return config, prepared, clock


def load_data(config, prepare, device):
    """
    Return the Prepared tokens of the settings, which the master prepares for all processes. Ends
    the program if a process does not see their folder.
    """
    folder = on_master(prepare, config.data, config.vocab_source, config.vocab_size,
                       config.val_fraction, config.cache,
                       skip_bad=resume.leaves_out(config.checks, "files"), column=config.column,
                       max_vocab_size=config.max_vocab_size, max_text_bytes=config.max_text_bytes)
    refuse_unseen(folder, device)
    return load_prepared(folder)
