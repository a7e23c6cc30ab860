from . import timm_bit_layout as timm_bit_layout
from . import timm_config as timm_config
from . import timm_layout as timm_layout
