from . import hub as hub
from . import huggingface_config as huggingface_config
from . import huggingface_layout as huggingface_layout
from . import peft as peft
from .peft import save_adapter as save_adapter
