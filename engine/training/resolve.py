"""
The settings of a training, resolved once, in the order in which one depends on the other: the folder, a checkpoint to
resume or a model to fine-tune, sizes from time or depth, what a mode fixes, the largest batch. train.py writes the result
into its globals, and nothing changes it afterwards.
"""
from engine.text.prepare import as_prepared, text_bytes
from engine.text.prepare import load as load_prepared
from engine.training import fit_batch, hardware, load, mode, plan, progress, resume
from engine.training.distributed import on_master
from engine.training.training import Resolved
from engine.training.validate import check_settings, checked_args, refuse_unseen


def resolve(config, device, prepare, build):
    """
    Return the Resolved of a command's Config. prepare: data.py's, which makes the folder of tokens; build: a costs.Build.
    Ends in one line where the settings can't train.
    """
    config, given, find_batch = fit_batch.first_guess(config)
    if mode.chosen(config) and not mode.temporary:
        config = config.changed(out_dir=on_master(mode.make_folder, config))

    # A run continues from its own checkpoint, starts from somebody's model, or from nothing.
    start, resuming = on_master(resume.find_start, config)
    changes, clock = [], progress.FRESH
    if resuming:
        taken, given, changes = resume.resume_settings(config, start, given)
        config = config.changed(**taken)
        check_settings(config)
    elif resume.fine_tuning(config):
        adopted = on_master(load.adopt, config, given)
        config, given = config.changed(**adopted), given | adopted.keys()
    amp_dtype = hardware.autocast_dtype(config.dtype, device)

    # Sizes: from the time budget and the text, as the prepared data has them, from the depth, as a mode needs them.
    if not resuming and plan.from_time(config, given):
        config, prepared, clock = plan_from_time(config, given, prepare, build, device, amp_dtype)
    else:
        prepared = load_data(config, prepare, device)
    explicit = {name for name, *_ in changes} if resuming else given
    config = config.changed(**as_prepared(config, explicit, prepared.meta))
    if config.depth:
        config = config.changed(**plan.derive_from_depth(config, given, prepared.meta["vocab_size"]))
    config = config.changed(**mode.own_settings(config))
    args = checked_args(config, build.model_args(config, prepared.meta["vocab_size"]), prepared)
    if find_batch and not resuming and not config.eval_only and not config.overfit:
        config = config.changed(**on_master(fit_batch.largest_batch, config, args, device, amp_dtype, build))
    return Resolved(config, start, resuming, changes, clock, amp_dtype, prepared, args)


def plan_from_time(config, given, prepare, build, device, amp_dtype):
    """
    Return (config, prepared tokens, clock) of a training whose sizes follow from the text, the machine and --minutes. The
    shape of the model decides the vocabulary, and the length of the training needs the tokens counted with it.
    """
    machine = build, device, amp_dtype
    size = on_master(text_bytes, config.data, config.cache, config.column)
    shape = on_master(plan.plan_shape, config, given, size, *machine)
    config = config.changed(**plan.values(shape))
    prepared = load_data(config, prepare, device)
    seconds, length = on_master(plan.plan_length, config, given, prepared.meta, *machine)
    config = config.changed(**plan.values(length))
    plan.show_plan(shape | length)
    return config, prepared, {"seconds": 0.0, "limit": 0.0, "end": seconds, "minutes": config.minutes}


def load_data(config, prepare, device):
    """Return the Prepared tokens of the settings, made by the master for all processes; ends where one does not see them."""
    c = config
    folder = on_master(prepare, c.data, c.vocab_source, c.vocab_size, c.val_fraction, c.cache, skip_bad=c.skip_bad,
                       column=c.column, vocab_most=c.vocab_most, text_most=c.text_most)
    refuse_unseen(folder, device)
    return load_prepared(folder)
