"""Steps of a training that do not count: the same train_step, at a rate and on a batch of the caller's."""

from engine.debug.instruments import UpdateNorms
from optim import SpikeDetector


def trial_steps(t, train_step):
    """
    Return take(step, rate, batch=None): train_step on the batch of `step`, or on (x, y) of one's own, at this rate; it
    returns the loss of the step as a float. No step is refused.
    """
    never, norms = SpikeDetector(0), UpdateNorms(t.model)

    def take(step, rate, batch=None):
        t.opt.set_rate(rate)
        x, y = batch or t.dataset.batch(step)
        return train_step(t, step, x, y, never, norms)[0].item()
    return take
