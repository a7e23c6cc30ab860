from . import config as config
from . import hub as hub
from . import layout as layout
from . import peft as peft
from .peft import save_adapter as save_adapter
