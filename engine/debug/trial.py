"""Training steps of the modes overfit and lr_find, at a learning rate that they choose."""
from engine.debug.instruments import UpdateNorms
from optim import SpikeDetector


def trial_steps(t, train_step):
    """
    Return take(step, rate), which takes step number `step` at a learning rate and returns the loss
    as a float. It skips no loss spikes.
    """
    spike_detector, update_norms = SpikeDetector(0), UpdateNorms(t.model)

    def take(step, rate):
        t.opt.set_rate(rate)
        x, y = t.dataset.batch(step)
        return train_step(t, step, x, y, spike_detector, update_norms)[0].item()
    return take
