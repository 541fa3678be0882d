"""train.py's Config, for tests that call what works on it."""
import train
from configurator import freeze


def trainer_config(**values):
    """The settings as they stand in train.py, with these values, which count as given."""
    return freeze(vars(train), {name: getattr(train, name) for name in values}).changed(**values)
