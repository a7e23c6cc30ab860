from .directory import is_checkpoint as is_checkpoint
from .manager import Checkpoints as Checkpoints
from .reader import find_checkpoint as find_checkpoint
from .reader import latest_step as latest_step
from .reader import local_weights as local_weights
from .reader import local_workdir as local_workdir
from .restore import Restored as Restored
from .restore import read_weights as read_weights
