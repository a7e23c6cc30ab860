from . import bit_layout as bit_layout
from . import config as config
from . import layout as layout
