from . import config as config
from . import layout as layout
