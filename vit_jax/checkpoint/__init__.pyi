from .directory import is_checkpoint as is_checkpoint
from .manager import Checkpoints as Checkpoints
from .reader import (
    find_checkpoint as find_checkpoint,
    latest_step as latest_step,
    local_weights as local_weights,
    local_workdir as local_workdir,
    read_weights as read_weights,
)
from .restore import Restored as Restored
