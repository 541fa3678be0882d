"""Training steps of the modes overfit and lr_find, which choose the learning rate of each."""
from engine.debug.instruments import UpdateNorms
from optim import SpikeDetector


def trial_steps(t, train_step):
    """
    Return take(step, rate), which takes training step number `step` at a learning rate and returns
    the loss as a float. Steps with a loss spike are taken; only a step whose loss or gradient norm
    is not finite is skipped.
    """
    spike_detector, update_norms = SpikeDetector(0), UpdateNorms(t.model)  # 0: no limit

    def take(step, rate):
        t.opt.set_rate(rate)
        x, y = t.dataset.batch(step)
        return train_step(t, step, x, y, spike_detector, update_norms)[0].item()
    return take
