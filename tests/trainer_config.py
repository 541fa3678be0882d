"""Build train.py's Config for tests of functions that take one."""
import train
from configurator import freeze


def trainer_config(**values):
    """Return the settings of train.py with `values`, which count as given by the user."""
    return freeze(vars(train), {name: getattr(train, name) for name in values}).changed(**values)
