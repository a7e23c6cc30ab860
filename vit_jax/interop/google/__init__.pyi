from . import augreg as augreg
from . import catalog as catalog
from . import google_files as google_files
from .catalog import list_models as list_models
